"""Whom a rank can meet in an exchange, and for how long it waits."""

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from megatron_noloco.federation.commit import Standing
from megatron_noloco.federation.peer import Peer
from megatron_noloco.federation.service import HELLO_SECONDS, Service

Agree = Callable[[Sequence[int]], list[int]]

_SILENCE_SECONDS = 20 * HELLO_SECONDS  # after which a rank counts as absent
_REMEMBERED = 32  # exchanges
_FEWEST = 4  # of them, to have a median
_DEVIATIONS = 8  # median absolute deviations beyond the median; a normal distribution's 5 sigma


class Deadline:
    """How long to wait for a partner: the median of past waits plus 8 median absolute deviations.

    Args:
        shortest, longest: seconds, between which it stays; before 4 exchanges it is the longest.
    """

    def __init__(self, shortest: float, longest: float) -> None:
        self._bounds = min(shortest, longest), longest
        self._waits: deque[float] = deque(maxlen=_REMEMBERED)

    def add(self, seconds: float) -> None:
        """An exchange that succeeded took so long."""
        self._waits.append(seconds)

    @property
    def seconds(self) -> float:
        shortest, longest = self._bounds
        if len(self._waits) < _FEWEST:
            return longest
        median = statistics.median(self._waits)
        deviation = statistics.median(abs(wait - median) for wait in self._waits)
        return min(longest, max(shortest, median + _DEVIATIONS * deviation))


@dataclass(frozen=True)
class _Avoided:
    """A counterpart that is not met until its process has begun an exchange so late."""

    epoch: int
    until: int
    why: str


@dataclass(frozen=True)
class Patience:
    """For how long, and how many exchanges, a partner may be late.

    Attributes:
        behind: one that is so many exchanges behind is not met.
    """

    deadline: Deadline
    behind: int = 3


class Counterparts:
    """`transport.protocol.Partners` on the service of a rank.

    A partner is not met when it is not there, is avoided, is over with the exchange or meets another rank in it,
    or is too many exchanges behind.

    Args:
        agree: over the ranks of this replica; None for a replica of one rank.
    """

    def __init__(self, service: Service, patience: Patience, agree: Agree | None = None) -> None:
        self._service = service
        self._patience = patience
        self._agree = agree
        self._avoided: dict[int, _Avoided] = {}

    @property
    def deadline_seconds(self) -> float:
        return self._patience.deadline.seconds

    def standing(self, number: int, rank: int) -> tuple[Standing, str]:
        peer = self._service.desk.peers[rank]
        reason = self._why_not(peer, number)
        if reason:
            return Standing.AWAY, reason
        if peer.open_from > number:
            return Standing.BUSY, "is ahead" if peer.begun > number else "is not free"
        waits = peer.begun >= number and peer.open_from == number
        return (Standing.WAITING if waits else Standing.FREE), ""

    def begin(self, number: int, rank: int | None) -> None:
        self._service.do(partial(self._service.desk.begin, number, rank))

    def end(self, number: int) -> None:
        self._service.do(partial(self._service.desk.end, number))

    def leave_out(self, number: int) -> None:
        """This rank does not come to the exchanges up to this one; those that it has begun go on."""
        self._service.do(partial(self._service.desk.leave_out, number))

    def record(self, seconds: float) -> None:
        self._patience.deadline.add(seconds)

    def avoid(self, rank: int, exchanges: int, why: str) -> None:
        peer = self._service.desk.peers[rank]
        self._avoided[rank] = _Avoided(peer.epoch, peer.begun + exchanges, why)

    def agree(self, votes: Sequence[int]) -> list[int]:
        return list(votes) if self._agree is None else self._agree(votes)

    def _why_not(self, peer: Peer, number: int) -> str:
        if not peer.connected or time.monotonic() - peer.heard > _SILENCE_SECONDS:
            return "is not there"
        avoided = self._avoided.get(peer.rank)
        if avoided is not None and avoided.epoch == peer.epoch and peer.begun < avoided.until:
            return avoided.why
        return "is behind" if number - peer.begun > self._patience.behind else ""


def agreement_of_replica() -> Agree | None:
    """See `Partners.agree`; over all ranks of this job, which is one replica. All of them call it."""
    if dist.get_world_size() == 1:
        return None
    group = dist.new_group(backend="gloo")

    def agree(votes: Sequence[int]) -> list[int]:
        smallest = torch.tensor(votes, dtype=torch.int64)
        dist.all_reduce(smallest, dist.ReduceOp.MIN, group)
        return smallest.tolist()

    return agree
