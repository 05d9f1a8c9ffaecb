"""Whom a rank can meet in an exchange, and for how long it waits."""

import statistics
import time
from collections import deque
from collections.abc import Callable

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


class Counterparts:
    """`transport.protocol.Partners` on the service of a rank.

    A partner is not met when it is not there, is over with the exchange, is more than one exchange behind, or has
    missed a deadline and begun no exchange since.

    Args:
        agree: over the ranks of this replica; None for a replica of one rank.
    """

    def __init__(
        self, service: Service, deadline: Deadline, agree: Callable[[bool], bool] | None = None
    ) -> None:
        self._service = service
        self._deadline = deadline
        self._agree = agree
        self._number = -1
        self._suspects: dict[int, tuple[int, int]] = {}  # what they had begun when they missed a deadline

    @property
    def deadline_seconds(self) -> float:
        return self._deadline.seconds

    def begin(self, rank: int, number: int) -> str:
        self._number = max(self._number, number)
        self._service.do(lambda: self._service.begin(number))
        return self._why_not(self._service.peers[rank], number)

    def end(self, rank: int, void_below: int, seconds: float | None) -> None:
        number = self._number
        self._service.do(lambda: self._service.end(number, void_below))
        if seconds is not None:
            self._deadline.add(seconds)
        else:
            peer = self._service.peers[rank]
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
        return "is behind" if peer.begun < number - 1 else ""


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
