"""The interface of a transport: point-to-point messages between flat buffers, with a deadline; no collectives.

flight = transport.post(sends, receives, tag)  # every message is under way at once
flight.wait(deadline_seconds)                  # or compute, and ask `flight.done()` now and then
"""

import queue
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

EXCHANGE_TAGS = 512  # number of tags that belong to one exchange
_MOST_BYTES = 2**31 - 1  # of a message: MPI counts in C ints


@dataclass(frozen=True)
class Message:
    """Names a buffer to or from one rank: flat (one dimension), contiguous, without gradient, in host memory."""

    rank: int
    buffer: Tensor


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


class Flight(ABC):
    """Follows the messages of one `post` while they are under way.

    Args:
        receives, sends: of the post.

    Attributes:
        posted: the time of the post, on the monotonic clock.
        under_way: the messages that have not come or gone, by their number; first those to be received.
    """

    def __init__(self, receives: Sequence[Message], sends: Sequence[Message], tag: int) -> None:
        self.under_way = dict(enumerate([*receives, *sends]))
        self.posted = time.monotonic()
        self._tag = tag

    def done(self) -> bool:
        """Return whether all is received, and the send buffers may be reused; never blocks.

        Where messages move only inside calls of a library, this makes such a call. Raises RankLostError for a
        message that will never arrive, as `wait` does.
        """
        self._move()
        return not self.under_way

    def wait(self, deadline_seconds: float) -> None:
        """Wait until `done` holds.

        Raises ExchangeTimeoutError with a rank whose message is missing `deadline_seconds` after `post`, however
        the caller spent that time.
        """
        started = now = time.monotonic()
        while not self.done():
            left_seconds = self.posted + deadline_seconds - now
            if left_seconds <= 0:
                rank = next(iter(self.under_way.values())).rank
                raise ExchangeTimeoutError(rank, self._tag, now - self.posted)
            self._block(now - started, left_seconds)
            now = time.monotonic()

    @abstractmethod
    def _move(self) -> None:
        """Take the messages that have come or gone out of `under_way`; never blocks. Raises RankLostError."""

    @abstractmethod
    def _block(self, waited_seconds: float, left_seconds: float) -> None:
        """Block until a message may have come or gone, at most `left_seconds`."""


class ReportedFlight(Flight):
    """Messages that other threads report.

    A message may still be reported after a time-out: the thread that reports it keeps its buffer alive.
    """

    def __init__(self, receives: Sequence[Message], sends: Sequence[Message], tag: int) -> None:
        super().__init__(receives, sends, tag)
        self._reports: queue.SimpleQueue[int | RankLostError] = queue.SimpleQueue()

    def report(self, outcome: int | RankLostError) -> None:
        """Report, from any thread, that the message of this number has come or gone, or that one never will."""
        self._reports.put(outcome)

    def _move(self) -> None:
        with suppress(queue.Empty):
            while self.under_way:
                self._take(self._reports.get_nowait())

    def _block(self, waited_seconds: float, left_seconds: float) -> None:
        with suppress(queue.Empty):
            self._take(self._reports.get(timeout=left_seconds))

    def _take(self, outcome: int | RankLostError) -> None:
        if isinstance(outcome, RankLostError):
            raise outcome
        del self.under_way[outcome]


def check_messages(messages: Sequence[Message], rank: int, world_size: int) -> None:
    """Raise ValueError for a message that no transport carries."""
    for message in messages:
        if message.rank == rank or not 0 <= message.rank < world_size:
            raise ValueError(f"rank {rank} of {world_size} cannot exchange messages with rank {message.rank}")
        buffer = message.buffer
        if (
            buffer.dim() != 1
            or not buffer.is_contiguous()
            or buffer.device.type != "cpu"
            or buffer.requires_grad
            or buffer.nbytes > _MOST_BYTES
        ):
            raise ValueError(
                f"the buffer to or from rank {message.rank} must be flat, contiguous, on the CPU, without "
                f"gradient and below 2 GiB, not shape {tuple(buffer.shape)}, strides {buffer.stride()}, of "
                f"{buffer.dtype}, on {buffer.device}, requires_grad={buffer.requires_grad}"
            )


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
