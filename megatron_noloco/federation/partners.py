"""Which other replica can be the partner in a round, and how long it is waited for."""

from collections import defaultdict, deque
from collections.abc import Collection
from enum import IntEnum

from megatron_noloco.federation.members import NO_PART, Members, Peer
from megatron_noloco.federation.mesh import Member
from megatron_noloco.federation.pairing import Candidates

_REMEMBERED = 8  # rounds with a partner, whose slowest says how long the next may take
_LONGER = 2.0  # times the slowest
_SILENT = "has not said how an earlier round has ended"


class Availability(IntEnum):
    """How available another replica is for a round."""

    AWAY = 0  # not there, not reached, avoided, not training, or too far behind
    BUSY = 1  # in a round with another replica, or past this round
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

    Args:
        shortest_seconds, longest_seconds: that a partner is waited for until it begins. Between these, twice the
            longest of the last eight waits for this partner; a missed deadline is a wait of its length.
        behind: rounds that a partner may be behind.
    """

    def __init__(
        self, members: Members, shortest_seconds: float, longest_seconds: float, behind: int
    ) -> None:
        self.longest_seconds = longest_seconds
        self.members, self._behind, self._shortest_seconds = members, behind, shortest_seconds
        self._waits = defaultdict[int, deque[float]](lambda: deque(maxlen=_REMEMBERED))
        self._avoided: dict[int, tuple[Member, int, str]] = {}  # until which round, why

    def seconds(self, slot: int) -> float:
        """Return for how many seconds a partner is waited for until it begins a round."""
        if not (waits := self._waits[slot]):
            return self.longest_seconds
        return min(self.longest_seconds, max(self._shortest_seconds, _LONGER * max(waits)))

    def record(self, slot: int, seconds: float) -> None:
        """Record how many seconds a partner was waited for, also where it missed the deadline."""
        self._waits[slot].append(seconds)

    def avoid(self, slot: int, rounds: int, why: str) -> None:
        """Treat a replica as away until it has begun so many more rounds, or was started anew."""
        if (peer := self.members.peer(slot)) is not None:
            self._avoided[slot] = peer.member, peer.status.begun + rounds, why

    def candidates(self, number: int, doubtful: Collection[int] = ()) -> tuple[Candidates, dict[int, str]]:
        """Return the other replicas as a round begins; and why each is not available, "" where it is.

        Args:
            doubtful: slots that have not said how an earlier round has ended.
        """
        members, peers = self.members, self.members.peers()
        standing = {slot: self._availability(slot, peer, number) for slot, peer in peers.items()}
        standing |= dict.fromkeys(peers.keys() & {*doubtful}, (Availability.AWAY, _SILENT))
        present, free, waiting = (
            {slot for slot, (found, _) in standing.items() if found >= least}
            for least in (Availability.BUSY, Availability.FREE, Availability.WAITING)
        )
        statuses = {slot: peer.status for slot, peer in peers.items()} | {members.slot: members.status}
        sites = {slot: status.site for slot, status in statuses.items()}
        hidden = {slot for slot, status in statuses.items() if status.hidden}
        known = Candidates({*statuses}, present, free, waiting, hidden, sites)
        return known, {slot: why for slot, (_, why) in standing.items()}

    def _availability(self, slot: int, peer: Peer, number: int) -> tuple[Availability, str]:
        if reason := self._why_away(slot, peer, number):
            return Availability.AWAY, reason
        open_from = peer.status.open_from(self.members.slot)
        if open_from > number:
            return Availability.BUSY, "is ahead" if peer.status.begun > number else NO_PART
        if not peer.reached:
            return Availability.BUSY, "cannot be reached"
        is_waiting = peer.status.begun >= number and open_from == number
        return (Availability.WAITING if is_waiting else Availability.FREE), ""

    def _why_away(self, slot: int, peer: Peer, number: int) -> str:
        status = peer.status
        if not peer.present:
            return "is not there"
        if status.phase != "training":
            return "recovers a state" if status.phase == "behind" else "is at its end"
        member, until, why = self._avoided.get(slot, (None, 0, ""))
        if member == peer.member and status.begun < until:
            return why
        # Compared with the round before: a replica near it does not skip ahead. A replica that has begun no round
        # may be about to recover a state.
        before = number - 1 if status.begun >= 0 else number
        return "is behind" if is_far_behind(status.begun, before, self._behind) else ""
