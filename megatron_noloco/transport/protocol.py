"""What a transport is: point-to-point messages of flat host buffers, with a deadline. Never a collective.

flight = transport.post(sends, receives, tag)      # every chunk of every message is under way at once
for arrival in flight.arrivals(deadline_seconds):  # act on each chunk as it lands
    ...
flight.finish(deadline_seconds)                    # from here on the send buffers may be reused

Whoever has something else to do meanwhile asks now and then for `flight.landed()`, until `flight.done()`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

from torch import Tensor

EXCHANGE_TAGS = 384  # tags of one exchange


@dataclass(frozen=True)
class Message:
    """One buffer to or from one rank: flat (one dimension), contiguous, without gradient.

    In host memory, or on this rank's accelerator where the transport has `device_buffers`.
    """

    rank: int
    buffer: Tensor


class Arrival(NamedTuple):
    """A chunk that has landed: elements start..stop of the buffer of receive number `message`."""

    message: int
    start: int
    stop: int


class ExchangeTimeoutError(TimeoutError):
    """A message did not arrive, or could not be delivered, in time."""

    def __init__(self, rank: int, tag: int, waited_seconds: float) -> None:
        super().__init__(f"no answer from rank {rank} (tag {tag}) after {waited_seconds:.1f} s")
        self.rank = rank
        self.tag = tag
        self.waited_seconds = waited_seconds


class WithdrawnError(ConnectionError):
    """The other side has said that it no longer takes part in this exchange."""


class Flight(Protocol):
    """Messages under way."""

    def arrivals(self, deadline_seconds: float) -> Iterator[Arrival]:
        """Yield every chunk of every receive, once each, in the order they land.

        Raises ExchangeTimeoutError naming a rank still owed when `deadline_seconds` have passed since `post`.
        The time the caller spends between chunks counts towards the deadline as well.
        """
        ...

    def finish(self, deadline_seconds: float) -> None:
        """Return once the send buffers may be reused; same deadline, same error."""
        ...

    def landed(self) -> list[Arrival]:
        """The chunks that `arrivals` would yield without waiting; it does not yield them again.

        Never blocks. Where messages move only inside the library's calls, this is such a call.
        """
        ...

    def done(self) -> bool:
        """Whether `arrivals` has nothing left to yield and `finish` would return at once. Never blocks."""
        ...

    @property
    def wait_seconds(self) -> float:
        """Time spent idle inside `arrivals` and `finish` so far."""
        ...


class Standing(IntEnum):
    """Of a counterpart in an exchange; the votes of the ranks of a replica, of which the smallest counts."""

    AWAY = 0  # cannot be met
    BUSY = 1  # has come to this exchange to meet another rank, or is beyond it
    FREE = 2
    WAITING = 3  # has come to this exchange to meet this rank


class Partners(Protocol):
    """Counterparts in other jobs, which come and go on their own: whom one can meet, and for how long to wait.

    An exchange has a number, the same for its members, and its messages have the tags from number * EXCHANGE_TAGS
    on. A rank begins and ends its exchanges in ascending order.
    """

    @property
    def deadline_seconds(self) -> float:
        """How long to wait for a partner in the next exchange."""
        ...

    def standing(self, number: int, rank: int) -> tuple[Standing, str]:
        """How it stands with a counterpart in an exchange; for one that cannot be met with the reason."""
        ...

    def begin(self, number: int, rank: int | None) -> None:
        """This rank comes to an exchange with `rank` (None: with nobody), which the others learn.

        What they have under way with this rank in this exchange fails with a WithdrawnError.
        """
        ...

    def end(self, number: int) -> None:
        """The exchange is over. Messages of it that are still under way are void, on both sides."""
        ...

    def record(self, seconds: float) -> None:
        """An exchange has succeeded; so long its partner was waited for."""
        ...

    def avoid(self, rank: int, exchanges: int, why: str) -> None:
        """Do not meet this one until it has begun so many exchanges more, or is another process."""
        ...

    def agree(self, votes: Sequence[int]) -> list[int]:
        """The smallest vote of all ranks of this replica, place by place; all of them call it alike."""
        ...


class Transport(Protocol):
    """A rank's door to other ranks. Two ranks that post matching messages under one tag exchange them.

    Messages between two ranks under one tag match in the order in which they were posted; both sides must give
    them equal length and dtype. `tag` is any non-negative integer; only its value modulo a
    transport's own range must be distinct among flights that are in the air together.
    """

    name: str
    device_buffers: bool  # whether messages may lie in accelerator memory
    connects_lazily: bool  # whether the first message between two ranks opens their connection
    progress: str  # what moves messages while this rank computes, in words

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def partners(self) -> Partners | None:
        """None where all ranks are of one job, and end together."""
        ...

    def post(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Flight: ...
