"""Continuing with another number of replicas: from whom each replica of the new run takes its state."""

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from megatron_noloco.checkpoint.catalog import rank_name, replica_folder
from megatron_noloco.plans.topology import Position

FLAT_STATE = ("slow_weights", "outer_momentum")


def source_replica(replica: int, saved_replicas: int) -> int:
    """The saved replica that `replica` continues: itself, or when there are more now, one of the old in turn."""
    return replica % saved_replicas


def what_happened(saved_replicas: int, replicas: int, fold: bool) -> list[str]:
    """A line per replica that was cloned, dropped or folded; nothing when their number is the same."""
    cloned = [
        f"replica {replica} is new: a clone of replica {source_replica(replica, saved_replicas)}, "
        f"with data of its own from here on"
        for replica in range(saved_replicas, replicas)
    ]
    fate = "folded into the mean of those kept" if fold else "dropped"
    lost = [f"replica {replica} is {fate}" for replica in range(replicas, saved_replicas)]
    return cloned + lost


def shift_of_mean(folder: Path, at: Position, saved_replicas: int, replicas: int) -> dict[str, Tensor]:
    """What each kept replica must add so that the mean over those kept becomes the mean over all saved.

    Reads one saved replica's vectors at a time: two vectors of memory, however many replicas there were.
    """
    shifts = {}
    for name in FLAT_STATE:
        shift: Tensor | float = 0.0
        for replica in range(saved_replicas):
            weight = 1 / saved_replicas - (1 / replicas if replica < replicas else 0)
            shift = shift + weight * read_flat(folder, replica, at, name).double()
        assert isinstance(shift, Tensor)
        shifts[name] = shift.float()
    return shifts


def read_flat(folder: Path, replica: int, at: Position, name: str) -> Tensor:
    """One flat vector of a saved replica's rank at the same stage, dp and tp place; memory-mapped."""
    path = replica_folder(folder, replica) / f"{rank_name(at)}.safetensors"
    with safe_open(path, framework="pt") as file:
        return file.get_tensor(name) if name in file.keys() else torch.zeros(1)  # noqa: SIM118
