"""The start of a job of a federation that has no checkpoint, or an old one: it takes over another replica's."""

import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist

from megatron_noloco.checkpoint import catalog
from megatron_noloco.checkpoint.catalog import DamagedCheckpointError, Manifest
from megatron_noloco.checkpoint.handover import accepted, newest_of_rank, receive
from megatron_noloco.checkpoint.settings import CheckpointSettings
from megatron_noloco.federation.handover import Gift, Handover
from megatron_noloco.federation.transport import FederationTransport
from megatron_noloco.job.agreement import of_all_ranks, of_rank_0
from megatron_noloco.model.architecture import Architecture
from megatron_noloco.plans.topology import Position, Topology

_ATTEMPTS = 3  # a giver may go, or its ranks be in the middle of a save
_BETWEEN_SECONDS = 1.0
_ANSWER_SECONDS = 10.0
_SILENCE_SECONDS = 60.0  # after which a giver is given up


@dataclass(frozen=True)
class Takeover:
    """Of a job; each of its ranks takes the files of its counterpart, at the same place in another replica.

    They come to lie in the job's own folder, from which it continues as it does from any checkpoint.

    Attributes:
        margin: local steps that another one's checkpoint must be beyond one's own to be taken over.
    """

    transport: FederationTransport
    settings: CheckpointSettings
    topology: Topology
    architecture: Architecture
    margin: int

    def __call__(self) -> list[str]:
        """Give from now on, and take what is newer. All ranks call it. Returns what a person should know."""
        handover = Handover(self.transport, self._gift)
        if self.settings.load != "auto":
            return []
        own, notes, given_up = of_rank_0(self._newest_step()), list[str](), set[int]()
        for _ in range(_ATTEMPTS):
            tag, offered = handover.offers(_ANSWER_SECONDS)
            manifests = {
                slot: manifest for slot, manifest in self._read(offered, notes) if slot not in given_up
            }
            found = of_all_ranks({slot: manifest.step for slot, manifest in manifests.items()})
            if not any(step > own + self.margin for steps in found for step in steps.values()):
                break
            slot = self._choose(found, own)
            if slot is not None:
                started = time.monotonic()
                notes += self._make_room(manifests[slot].step)
                problem = self._take(handover, tag, manifests[slot])
                if not problem:
                    seconds = time.monotonic() - started
                    notes.append(_told(manifests[slot], own, seconds))
                    break
                notes.append(f"the checkpoint of replica {slot} was not taken over: {problem}")
                given_up.add(slot)
            time.sleep(_BETWEEN_SECONDS)
        return notes

    def _gift(self) -> Gift | None:
        found = newest_of_rank(self.settings.folder, self._at(self.topology.slot))
        return None if found is None else Gift(*found)

    def _newest_step(self) -> int:
        complete = filter(catalog.is_complete, catalog.steps(self.settings.folder))
        return max((catalog.step_of(folder) or 0 for folder in complete), default=0)

    def _read(self, offered: Mapping[int, bytes], notes: list[str]) -> list[tuple[int, Manifest]]:
        """The slots that have something to give, each with its manifest."""
        readable = []
        for rank, content in offered.items():
            at = self._at(rank // self.topology.replica_size)
            try:
                manifest = accepted(content, at, self.topology, self.architecture, self.settings)
            except DamagedCheckpointError as error:
                notes.append(f"not taken over: {error}")
            else:
                readable.append((at.replica, manifest))
        return readable

    def _choose(self, found: list[dict[int, int]], own: int) -> int | None:
        """The slot that offers all ranks the same step, the newest; of several the next one after ours."""
        first, *others = found
        common = {slot: step for slot, step in first.items() if all(of.get(slot) == step for of in others)}
        ahead = [slot for slot, step in common.items() if step > own + self.margin]
        slots = self.topology.slots
        return min(ahead, key=lambda slot: (-common[slot], (slot - self.topology.slot) % slots), default=None)

    def _make_room(self, step: int) -> list[str]:
        """Rank 0 moves a save of this step out of the way, which was never completed."""
        folder, lines = catalog.step_folder(self.settings.folder, step), list[str]()
        if dist.get_rank() == 0 and folder.exists():
            lines = [f"set aside: {folder} is now {catalog.set_aside(folder).name}"]
        dist.barrier()
        return lines

    def _take(self, handover: Handover, tag: int, manifest: Manifest) -> str:
        """What went wrong on some rank; all have the same answer."""
        giver = self.topology.place(dist.get_rank()).rank_of(manifest.position.replica)
        problem = ""
        try:
            receive(
                self.settings.folder,
                manifest,
                lambda buffers: handover.take(giver, tag, buffers, _SILENCE_SECONDS),
            )
        except (OSError, DamagedCheckpointError) as error:
            problem = " ".join(str(error).split())
        problems = [text for text in of_all_ranks(problem) if text]
        if dist.get_rank() == 0:
            if problems:
                folder = catalog.step_folder(self.settings.folder, manifest.step)
                shutil.rmtree(folder, ignore_errors=True)
            catalog.name_latest(self.settings.folder)
        dist.barrier()
        return problems[0] if problems else ""

    def _at(self, replica: int) -> Position:
        """This rank's place in a replica."""
        own = self.topology.position(dist.get_rank())
        return Position(replica, own.stage, own.dp, own.tp)


def _told(manifest: Manifest, own: int, seconds: float) -> str:
    size = sum(record.bytes for record in manifest.files.values())
    before = f"; the own one was of step {own}, and the samples between are not read" if own else ""
    return (
        f"taken over from replica {manifest.position.replica}: its checkpoint of step {manifest.step}, "
        f"{size / 1e6:.1f} MB for this rank in {seconds:.1f} s{before}"
    )
