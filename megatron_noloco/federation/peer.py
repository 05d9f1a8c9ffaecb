"""What a rank knows about its counterpart in another job, and the messages between the two.

A message moves when both ends have posted it: the receiver asks for it (WANT), and is sent its chunks (DATA). So
nothing arrives that has no place, and no memory is needed for what comes early.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from megatron_noloco.federation.connection import Chunks
from megatron_noloco.federation.frames import DTYPE_CODES, Frame, Kind, Member, checksum_of
from megatron_noloco.transport.chunks import Chunk, Landing, cut
from megatron_noloco.transport.protocol import Arrival, Message

MOST_WANTS = 1024  # of one rank, for messages that are not posted yet; more are dropped


class Told(Protocol):
    """Who is told what became of a message."""

    def report(self, outcome: Arrival | ConnectionError) -> None: ...


@dataclass
class Send:
    """A message to a rank.

    Attributes:
        length: bytes.
        dtype: its code.
        chunks: gives its pieces, uint8, in order; where they end too soon, the other side waits in vain.
        told: that it has arrived there, or never will.
    """

    tag: int
    length: int
    dtype: int
    chunks: Callable[[], Iterator[np.ndarray]]
    told: Told
    whole: Arrival

    @classmethod
    def of(cls, tag: int, message: Message, chunk_bytes: int, told: Told, whole: Arrival) -> "Send":
        """Of numbers in memory."""

        def chunks() -> Iterator[np.ndarray]:
            return (chunk.data.numpy() for chunk in cut([message], chunk_bytes))

        buffer = message.buffer
        return cls(tag, buffer.nbytes, DTYPE_CODES[buffer.dtype], chunks, told, whole)

    def frames(self, want: Frame, member: Member) -> Iterator[tuple[bytes, np.ndarray]]:
        """Header and numbers of each chunk."""
        offset = 0
        for data in self.chunks():
            frame = member.frame(Kind.DATA, to_epoch=want.epoch, tag=self.tag, number=want.number, offset=offset,
                                 length=len(data), dtype=self.dtype, checksum=checksum_of(data))  # fmt: skip
            yield frame.pack(), data
            offset += len(data)


@dataclass
class Receive:
    """A message from a rank, and how much of it is there. Chunks come in order."""

    rank: int
    tag: int
    message: Message
    chunks: list[Chunk]
    landing: Landing
    landed: int = 0  # chunks
    bytes_landed: int = 0

    @property
    def dtype(self) -> int:
        return DTYPE_CODES[self.message.buffer.dtype]

    def take(self, frame: Frame, data: np.ndarray) -> bool:
        """Put a chunk where it belongs; False, and nothing is done, where it does not fit or is damaged."""
        chunk = self.chunks[self.landed]
        place = chunk.data.numpy()
        expected = (self.rank, self.tag, self.dtype, self.bytes_landed, len(place), len(place))
        if (frame.sender, frame.tag, frame.dtype, frame.offset, frame.length, len(data)) != expected:
            return False
        if checksum_of(data) != frame.checksum:
            return False
        np.copyto(place, data)
        self.landed += 1
        self.bytes_landed += len(place)
        self.landing.report(chunk.arrival)
        return True

    @property
    def complete(self) -> bool:
        return self.landed == len(self.chunks)


class Way(Protocol):
    """The way to a rank of another job: what is needed of a `Link`."""

    def hello(self, frame: bytes) -> None: ...

    def control(self, *parts: bytes) -> None: ...

    def chunks(self, ticket: int, frames: Chunks) -> None: ...

    def drop(self, tickets: set[int]) -> None: ...


@dataclass
class Peer:
    """A rank of another job.

    Attributes:
        epoch: of its process; 0: never heard of.
        begun: the exchange it began last; -1: none.
        open_from: the first exchange in which it may meet this rank.
        heard: when, on the monotonic clock; -inf: never.
        connected: whether what we send can reach it.
        informed: the version of our directory that it was sent last; -1: none.
        offer: what it has answered to an ASK: its tag, and the description; None: nothing yet.
        posted: our messages that it has not asked for, oldest first, by tag.
        wants: what it has asked for and we have not posted, likewise.
        unconfirmed: our messages that are being sent or were, by its ticket.
    """

    rank: int
    epoch: int = 0
    begun: int = -1
    open_from: int = 0
    heard: float = float("-inf")
    connected: bool = False
    informed: int = -1
    offer: tuple[int, bytes] | None = None
    posted: defaultdict[int, deque[Send]] = field(default_factory=lambda: defaultdict(deque))
    wants: defaultdict[int, deque[Frame]] = field(default_factory=lambda: defaultdict(deque))
    unconfirmed: dict[int, Send] = field(default_factory=dict)

    def match(self, tag: int) -> Iterator[tuple[Send, Frame]]:
        """What both sides have posted under a tag, in the order in which they did."""
        posted, wants = self.posted[tag], self.wants[tag]
        while posted and wants:
            yield posted.popleft(), wants.popleft()
        if not posted:
            del self.posted[tag]
        if not wants:
            del self.wants[tag]

    def wants_waiting(self) -> int:
        return sum(map(len, self.wants.values()))

    def drop_sends(self, gone: Callable[[int], bool]) -> tuple[list[Send], set[int]]:
        """Forget our messages to it with tags that are `gone`, and its wants for such.

        Returns them, and the tickets of those that it has asked for.
        """
        dropped = [send for tag in filter(gone, list(self.posted)) for send in self.posted.pop(tag)]
        for tag in filter(gone, list(self.wants)):
            del self.wants[tag]
        tickets = {ticket for ticket, send in self.unconfirmed.items() if gone(send.tag)}
        return dropped + [self.unconfirmed.pop(ticket) for ticket in sorted(tickets)], tickets
