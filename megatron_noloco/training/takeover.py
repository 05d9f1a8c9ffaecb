"""A job that starts takes the state of another replica, if that is far enough ahead, and continues from it."""

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch.distributed as dist

from megatron_noloco.checkpoint import catalog
from megatron_noloco.checkpoint.catalog import DamagedCheckpointError, Manifest
from megatron_noloco.checkpoint.handover import check_offer, newest_saved, receive
from megatron_noloco.checkpoint.settings import CheckpointSettings
from megatron_noloco.federation.handover import Handover, Snapshot, furthest
from megatron_noloco.job.agreement import of_all_ranks, of_rank_0
from megatron_noloco.model.architecture import Architecture
from megatron_noloco.plans.topology import Position, Topology

_ATTEMPTS = 3  # a giver may go
_BETWEEN_SECONDS = 1.0


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


@dataclass(frozen=True)
class Takeover:
    """Takes the state of another replica at the start of a job, and writes it as a checkpoint of this one.

    Attributes:
        margin: local steps that the other must be ahead of this job's own newest checkpoint.
        seconds: for a rank that trains to come to the next boundary between two local steps.
    """

    handover: Handover
    settings: CheckpointSettings
    topology: Topology
    architecture: Architecture
    margin: int
    seconds: float

    def __call__(self) -> list[str]:
        """Take a state, if there is one to take; return lines for the log. A collective of the job."""
        if self.settings.load != "auto":
            return []
        own, notes, given_up = of_rank_0(catalog.newest_step(self.settings.folder)), list[str](), set[int]()
        least = own + self.margin + 1
        for _ in range(_ATTEMPTS):
            steps = self.handover.steps() if dist.get_rank() == 0 else {}
            slot = of_rank_0(furthest(steps, self.topology, least, given_up))
            if slot is None:
                break
            started = time.monotonic()
            manifest, problem = self._take(slot, least, notes)
            if manifest is not None and not problem:
                notes.append(_describe(manifest, own, time.monotonic() - started))
                break
            notes.append(f"the state of replica {slot} was not taken over: {problem}")
            given_up.add(slot)
            time.sleep(_BETWEEN_SECONDS)
        return notes

    def _take(self, slot: int, least: int, notes: list[str]) -> tuple[Manifest | None, str]:
        """Take the state of a slot; return this rank's manifest, and the first problem of any rank."""
        own = self.topology.position(dist.get_rank())
        at = Position(slot, own.stage, own.dp, own.tp)
        giver = self.topology.place(dist.get_rank()).rank_of(slot)
        manifest, tag, problem = None, 0, ""
        try:
            tag, content = self.handover.ask(giver, self.seconds)
            manifest = check_offer(content, at, self.topology, self.architecture, self.settings)
        except (OSError, DamagedCheckpointError) as error:
            problem = _in_a_line(error)
        steps = of_all_ranks((problem, manifest.step if manifest else 0))
        problem = next((text for text, _ in steps if text), "")
        if not problem and len(set(steps)) > 1:
            problem = f"its ranks offer the steps {sorted({step for _, step in steps})}"
        if manifest is not None and not problem and manifest.step < least:
            problem = f"it is at local step {manifest.step} by now, as it was started anew"
        if problem or manifest is None:
            return None, problem
        notes += self._set_aside(manifest.step)
        try:
            receive(self.settings.folder, manifest, lambda buffers: self.handover.take(giver, tag, buffers))
        except (OSError, DamagedCheckpointError) as error:
            problem = _in_a_line(error)
        problem = next(filter(None, of_all_ranks(problem)), "")
        if dist.get_rank() == 0:
            if problem:
                folder = catalog.step_folder(self.settings.folder, manifest.step)
                shutil.rmtree(folder, ignore_errors=True)
            catalog.write_latest(self.settings.folder)
        dist.barrier()
        return manifest, problem

    def _set_aside(self, step: int) -> list[str]:
        """Rename the folder of a save of this step that was never completed; rank 0 does it."""
        folder, lines = catalog.step_folder(self.settings.folder, step), list[str]()
        if dist.get_rank() == 0 and folder.exists():
            lines = [f"set aside: {folder} is now {catalog.set_aside(folder).name}"]
        dist.barrier()
        return lines


def _in_a_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _describe(manifest: Manifest, own: int, seconds: float) -> str:
    size = sum(record.bytes for record in manifest.files.values())
    before = f"; the own one was of step {own}, and the samples between are not read" if own else ""
    return (
        f"taken over from replica {manifest.position.replica}: its state after local step {manifest.step}, "
        f"{size / 1e6:.1f} MB for this rank in {seconds:.1f} s{before}"
    )
