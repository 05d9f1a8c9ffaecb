"""Which other replica can be the partner in an exchange, and how long to wait for it."""

import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from megatron_noloco.federation.exchanges import TAKES_OVER, Seen, is_at_end
from megatron_noloco.federation.pairing import Others
from megatron_noloco.federation.service import Service

_REMEMBERED = 32  # exchanges
_FEWEST = 4  # of them, to have a median
_DEVIATIONS = 8  # median absolute deviations beyond the median; a normal distribution's 5 sigma


class Standing(IntEnum):
    """How available another replica is for an exchange."""

    AWAY = 0  # not connected, avoided, or too far behind
    BUSY = 1  # exchanges with another one, or is past this exchange
    FREE = 2
    WAITING = 3  # has begun this exchange with this replica


def is_far_behind(exchange: int, number: int, behind: int) -> bool:
    """Whether a replica is more than `behind` exchanges behind; one at its end is behind no other.

    Args:
        exchange: the one that it began last.
        number: that of the others.
    """
    return number - exchange > behind and not is_at_end(exchange)


@dataclass(frozen=True)
class Patience:
    """How late a partner may be.

    Attributes:
        shortest_seconds, longest_seconds: bounds of the deadline; the longest counts where they contradict.
        behind: a replica that was more exchanges than this behind the last one is not waited for.
    """

    shortest_seconds: float
    longest_seconds: float
    behind: int = 3

    def deadline_seconds(self, waits: Sequence[float], factor: float = 1.0) -> float:
        """Return `factor` times the median of past waits plus 8 median absolute deviations.

        With fewer than 4 waits it is the longest.
        """
        if len(waits) < _FEWEST:
            return self.longest_seconds
        median = statistics.median(waits)
        deviation = statistics.median(abs(wait - median) for wait in waits)
        usual = max(self.shortest_seconds, median + _DEVIATIONS * deviation)
        return min(self.longest_seconds, factor * usual)


class FederationPartners:
    """The replicas in other jobs, which come and go: which can be the partner, and how long to wait for it.

    An exchange has a number, the same for its members; the tags of its messages start at number * EXCHANGE_TAGS. A
    replica begins and ends its exchanges in ascending order.

    A replica cannot be a partner when it is not connected, takes over this one's state, is avoided, has ended
    the exchange or has another partner in it, or is too many exchanges behind.
    """

    def __init__(self, service: Service, patience: Patience) -> None:
        self._service = service
        self._peers = service.peers
        self._patience = patience
        self._waits = {across: deque[float](maxlen=_REMEMBERED) for across in (False, True)}
        self._factors = dict.fromkeys(self._waits, 1.0)  # of the deadlines, which double when they are missed
        self._across = False  # whether the partner of the exchange that began last is at another site
        self._avoided: dict[int, tuple[int, int, str]] = {}  # epoch of its process, until which exchange, why

    @property
    def deadline_seconds(self) -> float:
        """Seconds to wait for the partner in the exchange that began last, by those before over such a link."""
        if (left := self._peers.leaves_at - time.monotonic()) > 0:
            return left
        return self._patience.deadline_seconds(self._waits[self._across], self._factors[self._across])

    def leave_in(self, seconds: float) -> None:
        """Wait so long for the partner in the next exchange, although this job was asked to stop."""
        self._peers.leaves_at = time.monotonic() + seconds

    def record(self, seconds: float, slot: int) -> None:
        """Record how many seconds a successful exchange waited for this partner."""
        across = self._is_across(slot)
        if seconds <= self._patience.deadline_seconds(self._waits[across]):
            self._factors[across] = 1.0  # else links are slower than before, until past waits show that
        self._waits[across].append(seconds)

    def missed(self, slot: int) -> None:
        """Note that a replica missed the deadline, which doubles, and avoid it in the next exchange.

        With the same deadline no exchange would ever succeed again where links have become slower.
        """
        self._factors[self._is_across(slot)] *= 2
        self.avoid(slot, 1, "missed its last deadline")

    def stopped(self) -> bool:
        """Return whether this job was asked to stop, as far as is known: it then waits for nobody."""
        return self._peers.stopped()

    def standing(self, number: int, slot: int) -> tuple[Standing, str]:
        """Return how available a replica is for an exchange, and why if it is not."""
        self._service.check()
        seen = self._peers.others[slot].seen
        reason, state = self._why_away(slot, seen, number), seen.state
        if reason:
            return Standing.AWAY, reason
        if state.open_from > number:
            return Standing.BUSY, "is ahead" if state.begun > number else "is not free"
        waits = state.begun >= number and state.open_from == number
        return (Standing.WAITING if waits else Standing.FREE), ""

    def others(self, number: int) -> tuple[Others, dict[int, str]]:
        """Return the other replicas as an exchange begins; and why each is not available, "" where it is."""
        seen = {slot: self.standing(number, slot) for slot in self._peers.others}
        present, free, waiting = (
            {slot for slot, (standing, _) in seen.items() if standing >= least}
            for least in (Standing.BUSY, Standing.FREE, Standing.WAITING)
        )
        there = [peer.seen.state for peer in self._peers.others.values() if peer.seen.present]
        hidden = self.hidden()
        elsewhere = {slot for state in there for slot in state.sees} & hidden - {self._peers.member.slot}
        members = {self._peers.member.slot, *self._peers.directory.addresses}
        known = Others(members, present, free, waiting, hidden, elsewhere, self.sites())
        return known, {slot: why for slot, (_, why) in seen.items()}

    def hidden(self) -> set[int]:
        """Return the replicas that no other can connect to, as far as is known; this one may be among them."""
        return {slot for slot, address in self._peers.directory.addresses.items() if not address.endpoint}

    def sites(self) -> dict[int, str]:
        """Return the names of the sites of all replicas whose address is known, with this one's, by slot."""
        return {slot: address.site for slot, address in self._peers.directory.addresses.items()}

    def _is_across(self, slot: int) -> bool:
        sites = self.sites()
        return sites.get(slot) != sites.get(self._peers.member.slot)

    def _why_away(self, slot: int, seen: Seen, number: int) -> str:
        if not seen.present:
            return "is not there"
        begun = seen.state.begun
        if seen.state.takes_over:
            return TAKES_OVER
        epoch, until, why = self._avoided.get(slot, (-1, 0, ""))
        if epoch == seen.epoch and begun < until:
            return why
        # Compare with the exchange before: a replica near it does not skip ahead. A replica that has begun none
        # may be about to take over a state.
        before = number - 1 if begun >= 0 else number
        return "is behind" if is_far_behind(begun, before, self._patience.behind) else ""

    def avoid(self, slot: int, exchanges: int, why: str) -> None:
        """Treat a replica as away until it has begun so many more exchanges, or has restarted."""
        seen = self._peers.others[slot].seen
        self._avoided[slot] = seen.epoch, seen.state.begun + exchanges, why

    def begin(self, number: int, slot: int | None) -> None:
        """Announce that this replica begins an exchange with `slot`; None: that it skips it.

        Messages that other replicas have under way for this exchange fail with a WithdrawnError.
        """
        self._across = slot is not None and self._is_across(slot)
        self._service.do(self._peers.exchanges.begin, number, slot)

    def end(self, number: int, counts: bool = False) -> None:
        """Announce that the exchange is over; its messages still under way become void on both sides.

        Args:
            counts: whether this replica uses the mean. The partner's messages
                then do not fail with a WithdrawnError.
        """
        self._service.do(self._peers.exchanges.end, number, counts)

    def leave_out(self, number: int) -> None:
        """Tell the others that this replica skips the exchanges up to this one; those under way go on."""
        self._service.do(self._peers.exchanges.leave_out, number)
