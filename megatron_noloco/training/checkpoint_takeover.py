"""A job that starts takes the state of another replica, if that is far enough ahead, and continues from it."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch.distributed as dist
from torch import Tensor

from megatron_noloco.checkpoint import catalog
from megatron_noloco.checkpoint.catalog import Manifest
from megatron_noloco.checkpoint.checkpointer import Checkpointer
from megatron_noloco.checkpoint.offer import check_offer, newest_saved, receive
from megatron_noloco.checkpoint.restore import restore
from megatron_noloco.checkpoint.resume import Start, find_start
from megatron_noloco.checkpoint.run_settings import CheckpointSettings
from megatron_noloco.federation.handover import Handover, Snapshot
from megatron_noloco.federation.takeover import take_over
from megatron_noloco.job.agreement import wait_for_all
from megatron_noloco.model.architecture import Architecture
from megatron_noloco.plans.topology import Position, Topology


@dataclass(frozen=True)
class SavedState:
    """What the rank `at` has saved; implements `federation.handover.Saved`."""

    checkpoints: Path
    at: Position

    def step(self) -> int:
        found = newest_saved(self.checkpoints, self.at)
        return found[0].step if found else 0

    def read(self) -> Snapshot | None:
        found = newest_saved(self.checkpoints, self.at)
        if found is None:
            return None
        manifest, path = found
        parts = [np.fromfile(path.parent / name, np.uint8) for name in sorted(manifest.files)]
        return Snapshot(path.read_bytes(), parts)


def take_over_checkpoint(
    handover: Handover,
    settings: CheckpointSettings,
    topology: Topology,
    architecture: Architecture,
    own: Start,
    margin: int,
    seconds: float,
) -> Start:
    """Take a state, if there is one to take; return where to start, with notes. A collective of the job.

    Args:
        own: where the job starts otherwise.
        margin: local steps that the other must be ahead of that.
        seconds: for a rank that trains to come to the next boundary between two local steps.
    """
    if settings.load != "auto":
        return own
    start, notes = own, list[str]()
    writer = CheckpointWriter(settings, topology, architecture, notes.append)
    if line := _taken(handover, writer, own.step + margin + 1, seconds):
        before = f"; this job's own checkpoint was of step {own.step}, and the samples between are not read"
        notes.append(line + before * bool(own.step))
        start = find_start(settings, topology)
    return replace(start, notes=[*dict.fromkeys(own.notes + start.notes), *notes])


def take_over_between_steps(
    handover: Handover,
    checkpointer: Checkpointer,
    least: int,
    seconds: float,
    tell: Callable[[str], object],
) -> int | None:
    """Take a state that has done `least` local steps, and go on with it. A collective of the job.

    It is written as a checkpoint of this job, whatever `checkpoint.load` is. Counters and data stay the job's own.

    Args:
        seconds: for a rank that trains to come to the next boundary between two local steps.
        tell: is called with lines for the log.

    Returns its local steps; None where there is none to take.
    """
    engine, settings = checkpointer.engine, replace(checkpointer.settings, load="auto")
    topology, architecture = engine.groups.topology, engine.stage.architecture
    if problem := checkpointer.wait():  # both write into the same folder
        tell(f"the last checkpoint failed: {problem}")
    line = _taken(handover, CheckpointWriter(settings, topology, architecture, tell), least, seconds)
    start = find_start(settings, topology) if line else Start(None, [])
    if start.folder is None or start.step < least:
        return None
    restore(start.folder, start.manifests, engine, checkpointer.outer, settings)
    checkpointer.saved_step = start.step
    tell(f" {line} |")
    return start.step


def _taken(handover: Handover, writer: "CheckpointWriter", least: int, seconds: float) -> str:
    """Take a state, and return a line about it; "" where there is none to take."""
    found = take_over(handover, writer, least, seconds, writer.tell)
    if found is None:
        return ""
    (slot, took_seconds), manifest = found
    size = sum(record.bytes for record in manifest.files.values())
    return (
        f"taken over from replica {slot}: its state after local step {manifest.step}, {size / 1e6:.1f} MB for "
        f"this rank in {took_seconds:.1f} s"
    )


@dataclass(frozen=True)
class CheckpointWriter:
    """Writes the state of another replica as a checkpoint of this one; implements `federation.takeover.Taker`.

    Attributes:
        tell: is called with lines for the log.
    """

    settings: CheckpointSettings
    topology: Topology
    architecture: Architecture
    tell: Callable[[str], object]

    def check(self, slot: int, description: bytes) -> Manifest:
        own = self.topology.position(dist.get_rank())
        at = Position(slot, own.stage, own.dp, own.tp)
        return check_offer(description, at, self.topology, self.architecture, self.settings)

    def take(self, offer: Manifest, fill: Callable[[Sequence[Tensor]], None]) -> None:
        folder = catalog.step_folder(self.settings.folder, offer.step)
        if dist.get_rank() == 0 and folder.exists():  # of a save that was never completed, or damaged
            self.tell(f"set aside: {folder} is now {catalog.set_aside(folder).name}")
        wait_for_all()
        receive(self.settings.folder, offer, fill)

    def settle(self, offer: Manifest, whole: bool) -> None:
        if dist.get_rank() == 0:
            if not whole:
                folder = catalog.step_folder(self.settings.folder, offer.step)
                shutil.rmtree(folder, ignore_errors=True)
            catalog.write_latest(self.settings.folder)
        wait_for_all()
