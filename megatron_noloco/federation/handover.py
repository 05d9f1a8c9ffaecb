"""A job that has no checkpoint, or an old one, takes over the newest of another replica, rank by rank.

    taker: ASK, to all    giver: OFFER, its manifest    taker: WANT, for each file    giver: DATA

The giver opens the files when it offers them, so that all are of one step, and reads them chunk by chunk while
it trains. It closes them when they have arrived, or when the taker trains without them. The taker puts the files
in its own folder, and then continues from it as from any checkpoint (`checkpoint.handover`).
"""

import itertools
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_noloco.checkpoint import catalog
from megatron_noloco.checkpoint.catalog import DamagedCheckpointError, Manifest
from megatron_noloco.checkpoint.handover import check_offer, newest_saved, receive
from megatron_noloco.checkpoint.settings import CheckpointSettings
from megatron_noloco.federation.frames import DTYPE_CODES, HANDOVER_TAG, Send
from megatron_noloco.federation.transport import FederationTransport
from megatron_noloco.job.agreement import of_all_ranks, of_rank_0
from megatron_noloco.model.architecture import Architecture
from megatron_noloco.plans.topology import Position, Topology
from megatron_noloco.transport.protocol import ExchangeTimeoutError, Message

_LOOK_SECONDS = 0.02
_ATTEMPTS = 3  # a giver may go, or its ranks be in the middle of a save
_BETWEEN_SECONDS = 1.0
_ANSWER_SECONDS = 10.0
_SILENCE_SECONDS = 60.0  # after which a giver is given up

Find = Callable[[], tuple[bytes, Sequence[Path]] | None]
"""find(): what a rank can give: a description and the files that it is about. None: nothing. Raises OSError."""


class Handover:
    """Gives files to the counterparts of a rank that ask for them, and takes theirs.

    Args:
        find: called in a thread of its own, because it may wait for a disk.
    """

    def __init__(self, transport: FederationTransport, find: Find) -> None:
        self._transport = transport
        self._find = find
        self._tags = itertools.count(HANDOVER_TAG)
        self._protocol = transport.service.protocol
        self._answering: set[int] = set()
        self._answers = ThreadPoolExecutor(1, "handover")
        self._protocol.when_asked = self._asked

    def offers(self, seconds: float) -> tuple[int, dict[int, bytes]]:
        """Ask all counterparts that are connected; returns a tag for `take`, and their descriptions by rank.

        A counterpart that does not answer in time counts as one that has nothing.
        """
        tag, deadline = next(self._tags), time.monotonic() + seconds
        asked: set[int] = set()
        while time.monotonic() < deadline:
            present = set(self._transport.present())
            for rank in present - asked:
                self._transport.service.do(self._protocol.ask, rank, tag)
            asked |= present
            if all(self._answer(rank, tag) is not None for rank in present):
                break
            time.sleep(_LOOK_SECONDS)
        answers = {rank: self._answer(rank, tag) for rank in asked}
        return tag, {rank: answer for rank, answer in answers.items() if answer}

    def take(self, rank: int, tag: int, buffers: Sequence[Tensor], seconds: float) -> None:
        """Fill the buffers, uint8 and as long as the files, with what a counterpart has offered under the tag.

        Raises ConnectionError when it is lost, ExchangeTimeoutError when nothing has come for `seconds`.
        """
        flight = self._transport.post([], [Message(rank, buffer) for buffer in buffers], tag)
        came = time.monotonic()
        while not flight.done():
            if flight.arrived():
                came = time.monotonic()
            elif time.monotonic() - came > seconds:
                raise ExchangeTimeoutError(rank, tag, seconds)
            else:
                time.sleep(_LOOK_SECONDS)

    def _answer(self, rank: int, tag: int) -> bytes | None:
        """Return the description that a counterpart has sent under this tag; None: no answer yet."""
        offer = self._protocol.counterparts[rank].offer
        return offer[1] if offer is not None and offer[0] == tag else None

    def _asked(self, rank: int, tag: int) -> None:
        """Have an ASK answered; called by the thread of the service."""
        if rank not in self._answering:
            self._answering.add(rank)
            self._answers.submit(self._offer, rank, tag)

    def _offer(self, rank: int, tag: int) -> None:
        description, sends = b"", list[Send]()
        with ExitStack() as opened:
            try:
                found = self._find()
                if found is not None and len(found[0]) <= self._transport.chunk_bytes:
                    files = [opened.enter_context(path.open("rb")) for path in found[1]]
                    sends = [_send_of(file, tag, self._transport.chunk_bytes) for file in files]
                    description = found[0]
            except OSError:  # there is nothing to give
                sends = []
            else:
                opened.pop_all()
        self._answering.discard(rank)
        self._transport.service.do(self._protocol.offer, rank, tag, description, sends)


def _send_of(file: BinaryIO, tag: int, chunk_bytes: int) -> Send:
    """Make a message of an open file, which is closed when it has arrived, or never will."""

    def chunks() -> Iterator[np.ndarray]:
        """Yield the pieces; a disk that fails, or a closed file, ends them."""
        try:
            while chunk := file.read(chunk_bytes):
                yield np.frombuffer(chunk, np.uint8)
        except (OSError, ValueError):
            return

    length = file.seek(0, 2)
    file.seek(0)
    return Send(tag, length, DTYPE_CODES[torch.uint8], chunks, lambda failure: file.close())


@dataclass(frozen=True)
class Takeover:
    """Takes over the newest checkpoint of another replica at the start of a job, if it is far enough ahead.

    Attributes:
        margin: local steps that the other checkpoint must be ahead of this job's own.
    """

    transport: FederationTransport
    settings: CheckpointSettings
    topology: Topology
    architecture: Architecture
    margin: int

    def __call__(self) -> list[str]:
        """Offer this job's checkpoints from now on, and take a newer one. Collective over the ranks of the job.

        Returns lines for the log.
        """
        handover = Handover(self.transport, self._newest)
        if self.settings.load != "auto":
            return []
        own, notes, given_up = of_rank_0(catalog.newest_step(self.settings.folder)), list[str](), set[int]()
        for _ in range(_ATTEMPTS):
            tag, offered = handover.offers(_ANSWER_SECONDS)
            manifests: dict[int, Manifest] = {}  # by slot
            for rank, content in offered.items():
                at = self._at(rank // self.topology.replica_size)
                try:
                    if at.replica not in given_up:
                        manifests[at.replica] = check_offer(
                            content, at, self.topology, self.architecture, self.settings
                        )
                except DamagedCheckpointError as error:
                    notes.append(f"not taken over: {error}")
            found = of_all_ranks({slot: manifest.step for slot, manifest in manifests.items()})
            if not any(step > own + self.margin for steps in found for step in steps.values()):
                break
            slot = self._choose(found, own)
            if slot is not None:
                started = time.monotonic()
                notes += self._set_aside(manifests[slot].step)
                problem = self._take(handover, tag, manifests[slot])
                if not problem:
                    notes.append(_describe(manifests[slot], own, time.monotonic() - started))
                    break
                notes.append(f"the checkpoint of replica {slot} was not taken over: {problem}")
                given_up.add(slot)
            time.sleep(_BETWEEN_SECONDS)
        return notes

    def _newest(self) -> tuple[bytes, list[Path]] | None:
        return newest_saved(self.settings.folder, self._at(self.topology.slot))

    def _choose(self, found: list[dict[int, int]], own: int) -> int | None:
        """Return the slot that offers the newest step to all ranks; of several, the next one after this job's.

        Args:
            found: for each rank of the job, the step that each slot offers to it.
        """
        first, *others = found
        common = {slot: step for slot, step in first.items() if all(of.get(slot) == step for of in others)}
        ahead = [slot for slot, step in common.items() if step > own + self.margin]
        slots = self.topology.slots
        return min(ahead, key=lambda slot: (-common[slot], (slot - self.topology.slot) % slots), default=None)

    def _set_aside(self, step: int) -> list[str]:
        """Rename the folder of a save of this step that was never completed; rank 0 does it."""
        folder, lines = catalog.step_folder(self.settings.folder, step), list[str]()
        if dist.get_rank() == 0 and folder.exists():
            lines = [f"set aside: {folder} is now {catalog.set_aside(folder).name}"]
        dist.barrier()
        return lines

    def _take(self, handover: Handover, tag: int, manifest: Manifest) -> str:
        """Take the files of a manifest; returns the problem of the first rank that has one, or an empty string."""
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
        problem = next(filter(None, of_all_ranks(problem)), "")
        if dist.get_rank() == 0:
            if problem:
                folder = catalog.step_folder(self.settings.folder, manifest.step)
                shutil.rmtree(folder, ignore_errors=True)
            catalog.write_latest(self.settings.folder)
        dist.barrier()
        return problem

    def _at(self, replica: int) -> Position:
        """Return the position of this rank in another replica."""
        own = self.topology.position(dist.get_rank())
        return Position(replica, own.stage, own.dp, own.tp)


def _describe(manifest: Manifest, own: int, seconds: float) -> str:
    size = sum(record.bytes for record in manifest.files.values())
    before = f"; the own one was of step {own}, and the samples between are not read" if own else ""
    return (
        f"taken over from replica {manifest.position.replica}: its checkpoint of step {manifest.step}, "
        f"{size / 1e6:.1f} MB for this rank in {seconds:.1f} s{before}"
    )
