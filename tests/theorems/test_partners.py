"""Who may be the partner in a round, and how long a partner is waited for."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_noloco.federation.members import Peer
from megatron_noloco.federation.mesh import Member
from megatron_noloco.federation.partners import Availability, Partners
from megatron_noloco.federation.statuses import PeerStatus

BEHIND = 3  # rounds that a partner may be behind
OWN = 9  # slot
SHORTEST, LONGEST = 10.0, 60.0
waits = st.floats(0.0, 100.0)


def partners(peers: dict[int, Peer] | None = None, **status: Any) -> Partners:
    """Return the partners of a replica that sees these others."""
    known = peers or {}
    members: Any = SimpleNamespace(
        slot=OWN,
        status=PeerStatus(site="own", **status),
        peers=lambda: known,
        peer=known.get,
    )
    return Partners(members, SHORTEST, LONGEST, BEHIND)


def there(
    begun: int, incarnation: int = 1, present: bool = True, reached: bool = True, **status: Any
) -> Peer:
    return Peer(Member(1, incarnation), PeerStatus(begun=begun, **status), present, reached)


def in_round(number: int, begun: int, partner: int = OWN) -> Peer:
    """A replica with a round under way."""
    return there(begun, under_way=[number], partners={number: partner})


@given(st.lists(waits, max_size=20), st.lists(waits, min_size=8, max_size=8))
def test_last_eight_waits_make_the_deadline(before: list[float], last: list[float]) -> None:
    long, short = partners(), partners()
    assert short.seconds(1) == LONGEST, "before the first round"
    for seconds in before + last:
        long.record(1, seconds)
    for seconds in last:
        short.record(1, seconds)
    assert SHORTEST <= long.seconds(1) == short.seconds(1) <= LONGEST
    for seconds in last:
        short.record(1, seconds / 2)
    assert short.seconds(1) <= long.seconds(1)


@given(waits)
def test_a_partner_has_twice_the_wait_of_steady_rounds(seconds: float) -> None:
    own = partners()
    for _ in range(8):
        own.record(1, seconds)
    expected = max(SHORTEST, min(LONGEST, 2 * seconds))
    assert own.seconds(1) == expected >= min(seconds, LONGEST)
    for _ in range(7):
        own.record(1, 0.0)
    assert own.seconds(1) == expected, "the slow wait is the eighth"
    own.record(1, 0.0)
    assert own.seconds(1) == SHORTEST


def test_missed_deadlines_double_the_next_one_up_to_the_longest() -> None:
    """So that a partner which became slower is met again."""
    own, found = partners(), list[float]()
    for _ in range(8):
        own.record(1, 0.0)
    for _ in range(4):
        found.append(own.seconds(1))
        own.record(1, found[-1])
    assert found == [10.0, 20.0, 40.0, 60.0]


def test_a_slow_partner_delays_only_rounds_with_it() -> None:
    own = partners()
    for _ in range(8):
        own.record(1, LONGEST)
        own.record(2, 0.0)
    assert (own.seconds(1), own.seconds(2), own.seconds(3)) == (LONGEST, SHORTEST, LONGEST)


@pytest.mark.parametrize(
    ("peer", "availability", "why"),
    [
        (there(20, present=False), Availability.AWAY, "is not there"),
        (there(20, phase="behind"), Availability.AWAY, "recovers a state"),
        (there(20, phase="ended"), Availability.AWAY, "is at its end"),
        (there(20, phase="left"), Availability.AWAY, "is at its end"),
        (there(15), Availability.AWAY, "is behind"),
        (there(16), Availability.FREE, ""),  # three rounds behind the round before
        (there(-1), Availability.AWAY, "is behind"),  # it may be about to recover a state
        (there(19), Availability.FREE, ""),
        (there(19, reached=False), Availability.BUSY, "cannot be reached"),
        (in_round(19, 19, partner=2), Availability.FREE, ""),
        (in_round(20, 20), Availability.WAITING, ""),
        (in_round(20, 20, partner=2), Availability.BUSY, "has no part in this round"),
        (there(20), Availability.BUSY, "has no part in this round"),
        (there(21), Availability.BUSY, "is ahead"),
        (in_round(20, 21), Availability.WAITING, ""),  # round 20 is still under way, with this replica
    ],
)
def test_the_availability_of_another_replica(peer: Peer, availability: Availability, why: str) -> None:
    known, reasons = partners({1: peer}).candidates(20)
    assert reasons == {1: why}
    assert {
        Availability.WAITING: known.waiting,
        Availability.FREE: known.free - known.waiting,
        Availability.BUSY: known.present - known.free,
        Availability.AWAY: known.members - known.present - {OWN},
    }[availability] == {1}


@pytest.mark.parametrize("begun", [0, 1, 2])
def test_a_replica_that_begins_with_this_one_is_not_behind(begun: int) -> None:
    assert partners({1: there(-1)}).candidates(begun)[1] == {1: ""}


@given(st.integers(0, 50), st.integers(1, 10), st.integers(0, 12), st.integers(1, 2))
def test_replica_is_avoided_for_rounds_or_until_restart(
    begun: int, rounds: int, later: int, incarnation: int
) -> None:
    peers = {1: there(begun)}
    own = partners(peers)
    own.avoid(1, rounds, "sent absurd numbers")
    peers[1] = there(begun + later, incarnation)
    is_avoided = incarnation == 1 and later < rounds
    assert own.candidates(begun + later + 1)[1] == {1: "sent absurd numbers" if is_avoided else ""}


def test_candidates_have_sites_and_whom_nobody_can_dial() -> None:
    peers = {1: there(3, site="site1"), 2: there(3, reached=False, hidden=True)}
    known, _ = partners(peers, hidden=True).candidates(4)
    assert known.members == {1, 2, OWN}
    assert known.hidden == {2, OWN}
    assert known.present - known.free == {2}
    assert known.sites == {1: "site1", 2: "", OWN: "own"}
