"""The state of a replica for one that has none, or an old one: the files of the newest checkpoint of another.

    taker: ASK, to all    giver: OFFER, a description of its files    taker: WANT, for each file    giver: DATA

The giver holds the files open from its offer on, so that all are of one state, and reads them chunk by chunk while
it trains. It closes them when they have arrived, or when who asked trains without them. This package does not know
what is in them.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_noloco.federation.frames import DTYPE_CODES, HANDOVER_TAG
from megatron_noloco.federation.peer import Send
from megatron_noloco.federation.transport import FederationTransport
from megatron_noloco.transport.protocol import Arrival, ExchangeTimeoutError, Message

_LOOK_SECONDS = 0.02


class Gift(NamedTuple):
    """What a rank can give; who takes it knows from the description how long the files are, in their order."""

    description: bytes
    files: Sequence[Path]


class Handover:
    """Of one rank, with its counterparts.

    Args:
        give: called whenever one asks, in a thread that may wait for a disk; None: there is nothing yet. Raises
            OSError.
    """

    def __init__(self, transport: FederationTransport, give: Callable[[], Gift | None]) -> None:
        self._transport = transport
        self._give = give
        self._tags = itertools.count(HANDOVER_TAG)
        self._desk = transport.service.desk
        self._answering: set[int] = set()
        self._answers = ThreadPoolExecutor(1, "handover")
        self._desk.when_asked = self._asked

    def offers(self, seconds: float) -> tuple[int, dict[int, bytes]]:
        """What the counterparts that are there can give, by rank; who does not answer in time has nothing.

        Returns the tag for `take` as well.
        """
        tag, deadline = next(self._tags), time.monotonic() + seconds
        asked: set[int] = set()
        while time.monotonic() < deadline:
            there = set(self._transport.present())
            for rank in there - asked:
                self._transport.service.do(partial(self._desk.ask, rank, tag))
            asked |= there
            if all(self._answer(rank, tag) is not None for rank in there):
                break
            time.sleep(_LOOK_SECONDS)
        answers = {rank: self._answer(rank, tag) for rank in asked}
        return tag, {rank: answer for rank, answer in answers.items() if answer}

    def take(self, rank: int, tag: int, buffers: Sequence[Tensor], seconds: float) -> None:
        """Fill the buffers, uint8 and as long as the files, with what a counterpart has offered under the tag.

        Raises ConnectionError when it is lost, ExchangeTimeoutError when nothing has come for so many seconds.
        """
        flight = self._transport.post([], [Message(rank, buffer) for buffer in buffers], tag)
        came = time.monotonic()
        while not flight.done():
            if flight.landed():
                came = time.monotonic()
            elif time.monotonic() - came > seconds:
                raise ExchangeTimeoutError(rank, tag, seconds)
            else:
                time.sleep(_LOOK_SECONDS)

    def _answer(self, rank: int, tag: int) -> bytes | None:
        """What a counterpart has offered under this tag; None: nothing yet."""
        offer = self._desk.peers[rank].offer
        return offer[1] if offer is not None and offer[0] == tag else None

    def _asked(self, rank: int, tag: int) -> None:
        """By the thread of the service."""
        if rank not in self._answering:
            self._answering.add(rank)
            self._answers.submit(self._offer, rank, tag)

    def _offer(self, rank: int, tag: int) -> None:
        description, sends = b"", list[Send]()
        with ExitStack() as opened:
            try:
                gift = self._give()
                if gift is not None and len(gift.description) <= self._transport.chunk_bytes:
                    files = [opened.enter_context(path.open("rb")) for path in gift.files]
                    sends = [_OpenFile(file, self._transport.chunk_bytes).send(tag) for file in files]
                    description = gift.description
            except OSError:  # there is nothing to give
                sends = []
            else:
                opened.pop_all()
        self._answering.discard(rank)
        self._transport.service.do(partial(self._desk.offer, rank, tag, description, sends))


class _OpenFile:
    """A file that is sent; it is closed when it has arrived, or never will."""

    def __init__(self, file: BinaryIO, chunk_bytes: int) -> None:
        self._file = file
        self._chunk_bytes = chunk_bytes

    def send(self, tag: int) -> Send:
        length = self._file.seek(0, 2)
        self._file.seek(0)
        whole = Arrival(0, 0, length)
        return Send(tag, length, DTYPE_CODES[torch.uint8], self._chunks, self, whole)

    def report(self, outcome: Arrival | ConnectionError) -> None:
        self._file.close()

    def _chunks(self) -> Iterator[np.ndarray]:
        """A disk that fails ends them; so does `report`."""
        try:
            while chunk := self._file.read(self._chunk_bytes):
                yield np.frombuffer(chunk, np.uint8)
        except (OSError, ValueError):
            return
