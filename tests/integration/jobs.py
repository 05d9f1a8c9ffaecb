"""Jobs of a federation whose loops are somebody else's: each has a torch.distributed world of its own."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_noloco.settings import FederationSettings
from tests.harness import LAUNCH_VARIABLES, run_ranks

SECONDS = 60.0


def federation(folder: Path, slot: int, slots: int, **changes: Any) -> dict[str, Any]:
    """Return arguments of `attach` with which all jobs begin together, and none gives up before a test does."""
    settings = {
        "rendezvous": f"file://{folder}/rendezvous",
        "encryption": "none",
        "local_steps": "all",
        "listen": "tcp://127.0.0.1:0",
        "start_with": slots,
        "rounds_behind": 1000,
        "shortest_deadline_seconds": SECONDS,
    }
    return {"federation": FederationSettings(slots=slots, **(settings | changes)), "slot": slot}


def run_jobs(
    folder: Path, slots: int, ranks: int, function: Callable[..., Any], *args: Any, timeout: float = 120
) -> list[list[Any]]:
    """Results of `function(slot, rank, *args)` by slot and rank; a job of one rank has no torch.distributed."""

    def job(rank: int, world_size: int) -> Any:
        warnings.filterwarnings("error", "fewer jobs than")
        warnings.filterwarnings("error", "the replicas had equal weights")
        slot, rank = divmod(rank, ranks)
        dist.barrier()  # all have joined
        dist.destroy_process_group()
        if ranks > 1:
            store = dist.FileStore(str(folder / f"job_{slot}"), ranks)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        else:  # as a process that no launcher has started
            for name in LAUNCH_VARIABLES:
                del os.environ[name]
        return function(slot, rank, *args)

    found = run_ranks(slots * ranks, job, timeout=timeout)
    return [found[slot * ranks : (slot + 1) * ranks] for slot in range(slots)]
