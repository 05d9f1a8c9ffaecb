"""The interface of a transport: point-to-point messages between flat buffers, with a deadline; no collectives.

flight = transport.post(sends, receives, tag)      # every chunk of every message is under way at once
for arrival in flight.arrivals(deadline_seconds):  # act on each chunk as it arrives
    ...
flight.finish(deadline_seconds)                    # from here on the send buffers may be reused

A caller that has something else to do meanwhile calls `flight.arrived()` now and then, until `flight.done()`, and
`flight.wait(deadline_seconds)` in between where it has not.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

EXCHANGE_TAGS = 384  # number of tags that belong to one exchange


@dataclass(frozen=True)
class Message:
    """One buffer to or from one rank: flat (one dimension), contiguous, without gradient, in host memory."""

    rank: int
    buffer: Tensor


class Arrival(NamedTuple):
    """A chunk that has arrived: elements start..stop of the buffer of receive number `message`."""

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


class Flight(Protocol):
    """The messages of one `post`, while they are under way."""

    @property
    def posted(self) -> float:
        """The time of the post, on the monotonic clock."""
        ...

    def arrivals(self, deadline_seconds: float) -> Iterator[Arrival]:
        """Yield each chunk of each receive once, in the order of arrival.

        Raises ExchangeTimeoutError with a rank whose chunk is missing `deadline_seconds` after `post`, and
        RankLostError for a chunk that will never arrive. The time the caller spends between chunks counts towards
        the deadline as well.
        """
        ...

    def finish(self, deadline_seconds: float) -> None:
        """Wait until the send buffers may be reused; deadline and error are those of `arrivals`."""
        ...

    def arrived(self) -> list[Arrival]:
        """Return the chunks that have arrived and were neither returned nor yielded by `arrivals` before.

        Never blocks. Where messages move only inside calls of a library, this makes such a call.
        """
        ...

    def done(self) -> bool:
        """Return whether `arrivals` has nothing left to yield and `finish` would return at once. Never blocks."""
        ...

    def wait(self, deadline_seconds: float) -> None:
        """Wait until `arrived` has something to return, or `done` holds; deadline and errors as in `arrivals`."""
        ...

    @property
    def wait_seconds(self) -> float:
        """Seconds spent waiting inside `arrivals`, `wait` and `finish` so far."""
        ...


class Transport(Protocol):
    """A rank's endpoint: two ranks that post matching messages under one tag exchange them.

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
