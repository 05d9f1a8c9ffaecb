"""Whom a rank can meet in an exchange, and for how long it waits."""

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from megatron_noloco.federation.peer import Peer
from megatron_noloco.federation.service import HELLO_SECONDS, Service

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
class Patience:
    """For how long, and how many exchanges, a partner may be late.

    Attributes:
        behind: one that is so many exchanges behind is not met.
    """

    deadline: Deadline
    behind: int = 3


class Counterparts:
    """`transport.protocol.Partners` on the service of a rank.

    A partner is not met when it is not there, is over with the exchange, is too many exchanges behind, or has
    missed a deadline and begun no exchange since.

    Args:
        agree: over the ranks of this replica; None for a replica of one rank.
    """

    def __init__(
        self, service: Service, patience: Patience, agree: Callable[[bool], bool] | None = None
    ) -> None:
        self._service = service
        self._patience = patience
        self._agree = agree
        self._suspects: dict[int, tuple[int, int]] = {}  # what they had begun when they missed a deadline

    @property
    def deadline_seconds(self) -> float:
        return self._patience.deadline.seconds

    def begin(self, number: int, rank: int | None) -> str:
        self._service.do(partial(self._service.desk.begin, number))
        return "" if rank is None else self._why_not(self._service.desk.peers[rank], number)

    def end(self, number: int, void_below: int) -> None:
        self._service.do(partial(self._service.desk.end, number, void_below))

    def record(self, rank: int, seconds: float | None) -> None:
        if seconds is not None:
            self._patience.deadline.add(seconds)
        else:
            peer = self._service.desk.peers[rank]
            self._suspects[rank] = peer.epoch, peer.begun

    def agree(self, yes: bool) -> bool:
        return yes if self._agree is None else self._agree(yes)

    def _why_not(self, peer: Peer, number: int) -> str:
        if not peer.connected or time.monotonic() - peer.heard > _SILENCE_SECONDS:
            return "is not there"
        if self._suspects.get(peer.rank) == (peer.epoch, peer.begun):
            return "missed its last deadline"
        self._suspects.pop(peer.rank, None)
        if peer.over >= number:
            return "is ahead"
        return "is behind" if number - peer.begun > self._patience.behind else ""


def agreement_of_replica() -> Callable[[bool], bool] | None:
    """See `Counterparts`; over all ranks of this job, which is one replica. All of them call it."""
    if dist.get_world_size() == 1:
        return None
    group = dist.new_group(backend="gloo")

    def agree(yes: bool) -> bool:
        votes = torch.tensor([int(yes)])
        dist.all_reduce(votes, dist.ReduceOp.MIN, group)
        return bool(votes)

    return agree
