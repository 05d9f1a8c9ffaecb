"""Which other replica can be the partner in a round, and how long it is waited for."""

from collections import deque
from enum import IntEnum

from megatron_noloco.federation.links import NO_PART, PeerStatus
from megatron_noloco.federation.node import Node
from megatron_noloco.federation.pairing import Candidates

_REMEMBERED = 8  # rounds, whose slowest says how long the next may take
_LONGER = 2.0  # times the slowest


class Availability(IntEnum):
    """How available another replica is for a round."""

    AWAY = 0  # not there, avoided, not training, or too far behind
    BUSY = 1  # in a round with another replica, or past this one
    FREE = 2
    WAITING = 3  # has begun this round with this replica


def is_far_behind(begun: int, number: int, behind: int) -> bool:
    """Whether a replica is more than `behind` rounds behind.

    Args:
        begun: the round that it began last.
        number: that of the others.
    """
    return number - begun > behind


class Partners:
    """The replicas that may be partners. On the leader.

    A replica cannot be a partner where it is not there, does not train, is avoided, has another partner in the
    round or has ended it, or is too many rounds behind.

    Args:
        shortest_seconds, longest_seconds: that a partner is waited for. Between these, twice the longest of the
            last eight waits; a missed deadline is a wait of its length.
        behind: rounds that a partner may be behind.
    """

    def __init__(self, node: Node, shortest_seconds: float, longest_seconds: float, behind: int) -> None:
        self._node, self._behind = node, behind
        self._shortest_seconds, self._longest_seconds = shortest_seconds, longest_seconds
        self._waits = deque[float](maxlen=_REMEMBERED)
        self._avoided: dict[int, tuple[int, int, str]] = {}  # incarnation, until which round, why

    @property
    def deadline_seconds(self) -> float:
        """Seconds to wait for a partner."""
        if not self._waits:
            return self._longest_seconds
        return min(self._longest_seconds, max(self._shortest_seconds, _LONGER * max(self._waits)))

    def record(self, seconds: float) -> None:
        """Record how many seconds a partner was waited for, also where it missed the deadline."""
        self._waits.append(seconds)

    def avoid(self, slot: int, rounds: int, why: str) -> None:
        """Treat a replica as away until it has begun so many more rounds, or was started anew."""
        seen = self._node.seen()[slot]
        self._avoided[slot] = seen.incarnation, seen.status.begun + rounds, why

    def candidates(self, number: int) -> tuple[Candidates, dict[int, str]]:
        """Return the other replicas as a round begins; and why each is not available, "" where it is."""
        node, seen = self._node, self._node.seen()
        addresses = node.directory.addresses
        standing = {
            slot: self._availability(slot, seen.get(slot, PeerStatus()), number) for slot in addresses
        }
        del standing[node.slot]
        present, free, waiting = (
            {slot for slot, (found, _) in standing.items() if found >= least}
            for least in (Availability.BUSY, Availability.FREE, Availability.WAITING)
        )
        hidden = node.hidden()
        sees = {other for slot, one in seen.items() if one.present for other in addresses[slot].linked}
        sites = {slot: address.site for slot, address in addresses.items()}
        elsewhere = (sees & hidden) - {node.slot}
        known = Candidates({*addresses}, present, free, waiting, hidden, elsewhere, sites)
        return known, {slot: why for slot, (_, why) in standing.items()}

    def _availability(self, slot: int, seen: PeerStatus, number: int) -> tuple[Availability, str]:
        if reason := self._why_away(slot, seen, number):
            return Availability.AWAY, reason
        status = seen.status
        if status.open_from > number:
            return Availability.BUSY, "is ahead" if status.begun > number else NO_PART
        is_waiting = status.begun >= number and status.open_from == number
        return (Availability.WAITING if is_waiting else Availability.FREE), ""

    def _why_away(self, slot: int, seen: PeerStatus, number: int) -> str:
        status = seen.status
        if not seen.present:
            return "is not there"
        if status.phase != "training":
            return "takes over a state" if status.phase == "behind" else "is at its end"
        incarnation, until, why = self._avoided.get(slot, (0, 0, ""))
        if incarnation == seen.incarnation and status.begun < until:
            return why
        # Compared with the round before: a replica near it does not skip ahead. A replica that has begun no round
        # may be about to take over a state.
        before = number - 1 if status.begun >= 0 else number
        return "is behind" if is_far_behind(status.begun, before, self._behind) else ""
