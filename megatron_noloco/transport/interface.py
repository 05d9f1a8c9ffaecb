"""The interface of a transport: point-to-point messages between flat buffers, with a deadline; no collectives.

flight = transport.post(sends, receives, tag)  # every chunk of every message is under way at once
while not flight.done():                       # then the send buffers may be reused
    for arrival in flight.arrived():           # act on each chunk that has arrived
        ...
    flight.wait(deadline_seconds)              # or compute, and call `arrived` now and then
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

EXCHANGE_TAGS = 384  # number of tags that belong to one exchange


@dataclass(frozen=True)
class Message:
    """Names a buffer to or from one rank: flat (one dimension), contiguous, without gradient, in host memory."""

    rank: int
    buffer: Tensor


class Arrival(NamedTuple):
    """Names a chunk that has arrived: elements start..stop of the buffer of receive number `message`."""

    message: int
    start: int
    stop: int


class ExchangeTimeoutError(TimeoutError):
    """Raised when a message has not arrived, or could not be delivered, in time; fields as in RankLostError."""

    why = "missed the deadline"

    def __init__(self, rank: int, tag: int, waited_seconds: float) -> None:
        super().__init__(f"no answer from rank {rank} (tag {tag}) after {waited_seconds:.1f} s")
        self.rank = rank
        self.tag = tag
        self.waited_seconds = waited_seconds


class RankLostError(ConnectionError):
    """Raised when a message to or from a rank will never arrive.

    Attributes:
        rank: the rank at the other end.
        why: what has become of it; continues "rank ...".
    """

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(f"rank {rank} {why}")
        self.rank = rank
        self.why = why


class Chunk(NamedTuple):
    """Holds a piece of a message: its `Arrival`, the rank at the other end, and its bytes."""

    arrival: Arrival
    rank: int
    data: Tensor  # uint8 view of the message's buffer


class Transfers:
    """Holds the chunks that a flight sends, or those that it receives; subclasses find out which have completed.

    Attributes:
        chunks: the chunks under way, by their `Arrival`, in the order of posting.
        posted: the time of the post, on the monotonic clock.
        timed_out: whether `next` has raised ExchangeTimeoutError; the caller then collects no more chunks.
    """

    def __init__(self, chunks: Sequence[Chunk], tag: int) -> None:
        self.chunks = {chunk.arrival: chunk for chunk in chunks}
        self.timed_out = False
        self._tag = tag
        self.posted = time.monotonic()

    def completed(self) -> list[Arrival]:
        """Return the chunks completed since the last call, and remove them from `chunks`; never blocks.

        Raises RankLostError when a chunk will never complete.
        """
        raise NotImplementedError

    def _wait(self, waited_seconds: float, left_seconds: float) -> None:
        """Block until a chunk may have completed, at most `left_seconds`."""
        raise NotImplementedError

    def next(self, deadline_seconds: float) -> list[Arrival]:
        """Wait until at least one chunk completes; then return what `completed` does.

        Raises ExchangeTimeoutError when `deadline_seconds` have passed since the post.
        """
        started = now = time.monotonic()
        while not (completed := self.completed()):
            left_seconds = self.posted + deadline_seconds - now
            if left_seconds <= 0:
                self.timed_out = True
                rank = next(iter(self.chunks.values())).rank
                raise ExchangeTimeoutError(rank, self._tag, now - self.posted)
            self._wait(now - started, left_seconds)
            now = time.monotonic()
        return completed


class Flight:
    """Follows the messages of one `post`, cut into chunks, while they are under way."""

    def __init__(self, received: Transfers, sent: Transfers) -> None:
        self._received = received
        self._sent = sent
        self._arrived: list[Arrival] = []  # found by `wait`

    @property
    def posted(self) -> float:
        """The time of the post, on the monotonic clock."""
        return self._received.posted

    def arrived(self) -> list[Arrival]:
        """Return the chunks that have arrived since the last call, each once, in the order of arrival.

        Never blocks. Where messages move only inside calls of a library, this makes such a call. Raises
        RankLostError for a chunk that will never arrive, as `done` and `wait` do.
        """
        found, self._arrived = self._arrived, []
        return found + self._received.completed()

    def done(self) -> bool:
        """Return whether `arrived` has nothing left to return and the send buffers may be reused; never blocks."""
        self._sent.completed()
        return not (self._arrived or self._received.chunks or self._sent.chunks)

    def wait(self, deadline_seconds: float) -> None:
        """Wait until `arrived` has something to return, or `done` holds.

        Raises ExchangeTimeoutError with a rank whose chunk is missing `deadline_seconds` after `post`, however the
        caller spent that time.
        """
        if self._arrived:
            return
        if self._received.chunks:
            self._arrived = self._received.next(deadline_seconds)
            return
        while self._sent.chunks:
            self._sent.next(deadline_seconds)

    def finish(self, deadline_seconds: float) -> list[Arrival]:
        """Wait until `done` holds; return what `arrived` would, of all chunks. Raises as `wait` does."""
        found = list[Arrival]()
        while not self.done():
            self.wait(deadline_seconds)
            found += self.arrived()
        return found


class Transport(Protocol):
    """Connects a rank to the others: two ranks that post matching messages under one tag exchange them.

    Messages between two ranks under one tag match in the order in which they were posted; both sides must
    give them equal length and dtype. `tag` is any non-negative integer; its value modulo the transport's own
    range must be distinct among flights that are under way together.
    """

    name: str
    connects_lazily: bool  # whether the first message between two ranks opens their connection

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def post(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Flight: ...
