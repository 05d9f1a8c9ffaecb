"""Who may be the partner in a round, and how long a partner is waited for."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_noloco.federation.links import PeerStatus
from megatron_noloco.federation.messages import Address, Status
from megatron_noloco.federation.partners import Availability, Partners

BEHIND = 3  # rounds that a partner may be behind
OWN = 9  # slot
SHORTEST, LONGEST = 10.0, 60.0
waits = st.floats(0.0, 100.0)


def partners(seen: dict[int, PeerStatus] | None = None, hidden: tuple[int, ...] = ()) -> Partners:
    """Return the partners of a replica that sees these others."""
    known = seen or {}
    addresses = {
        slot: Address("" if slot in hidden else f"tcp://h:{1 + slot}", 1, f"site{slot}", linked=[2, 5, OWN])
        for slot in [*known, OWN]
    }
    node: Any = SimpleNamespace(
        slot=OWN,
        seen=lambda: known,
        hidden=lambda: {*hidden},
        directory=SimpleNamespace(addresses=addresses),
    )
    return Partners(node, SHORTEST, LONGEST, BEHIND)


def there(begun: int, open_from: int | None = None, incarnation: int = 1, **status: Any) -> PeerStatus:
    return PeerStatus(incarnation, True, Status(begun=begun, open_from=open_from or begun + 1, **status))


@given(st.lists(waits, max_size=20), st.lists(waits, min_size=8, max_size=8))
def test_last_eight_waits_make_the_deadline(before: list[float], last: list[float]) -> None:
    long, short = partners(), partners()
    assert short.deadline_seconds == LONGEST, "before the first round"
    for seconds in before + last:
        long.record(seconds)
    for seconds in last:
        short.record(seconds)
    assert SHORTEST <= long.deadline_seconds == short.deadline_seconds <= LONGEST
    for seconds in last:
        short.record(seconds / 2)
    assert short.deadline_seconds <= long.deadline_seconds


@given(waits)
def test_a_partner_has_twice_the_wait_of_steady_rounds(seconds: float) -> None:
    own = partners()
    for _ in range(8):
        own.record(seconds)
    assert own.deadline_seconds == 2 * seconds or own.deadline_seconds in (SHORTEST, LONGEST)
    assert own.deadline_seconds >= min(seconds, LONGEST)
    for _ in range(7):
        own.record(0.0)
    assert own.deadline_seconds == max(SHORTEST, min(LONGEST, 2 * seconds)), "the slow one is the eighth"
    own.record(0.0)
    assert own.deadline_seconds == SHORTEST


def test_missed_deadlines_double_the_next_one_up_to_the_longest() -> None:
    """So that a partner which became slower is met again."""
    own, found = partners(), list[float]()
    for _ in range(8):
        own.record(0.0)
    for _ in range(4):
        found.append(own.deadline_seconds)
        own.record(found[-1])
    assert found == [10.0, 20.0, 40.0, 60.0]


@pytest.mark.parametrize(
    ("seen", "standing", "why"),
    [
        (PeerStatus(1, False, Status(begun=20)), Availability.AWAY, "is not there"),
        (there(20, phase="behind"), Availability.AWAY, "takes over a state"),
        (there(20, phase="ended"), Availability.AWAY, "is at its end"),
        (there(20, phase="left"), Availability.AWAY, "is at its end"),
        (there(15), Availability.AWAY, "is behind"),
        (there(16), Availability.FREE, ""),  # three rounds behind the round before
        (there(-1), Availability.AWAY, "is behind"),  # it may be about to take over a state
        (there(19), Availability.FREE, ""),
        (there(20, open_from=20), Availability.WAITING, ""),
        (there(20), Availability.BUSY, "has no part in this round"),
        (there(21), Availability.BUSY, "is ahead"),
        (there(21, open_from=20), Availability.WAITING, ""),  # round 20 is still under way, with this replica
    ],
)
def test_the_standing_of_another_replica(seen: PeerStatus, standing: Availability, why: str) -> None:
    own = partners({1: seen})
    known, reasons = own.candidates(20)
    assert reasons == {1: why}
    assert {
        Availability.WAITING: known.waiting,
        Availability.FREE: known.free - known.waiting,
        Availability.BUSY: known.present - known.free,
        Availability.AWAY: known.members - known.present - {OWN},
    }[standing] == {1}


@pytest.mark.parametrize("begun", [0, 1, 2])
def test_a_replica_that_begins_with_this_one_is_not_behind(begun: int) -> None:
    assert partners({1: there(-1)}).candidates(begun)[1] == {1: ""}


@given(st.integers(0, 50), st.integers(1, 10), st.integers(0, 12), st.integers(1, 2))
def test_replica_is_avoided_for_rounds_or_until_restart(
    begun: int, rounds: int, later: int, incarnation: int
) -> None:
    seen = {1: there(begun)}
    own = partners(seen)
    own.avoid(1, rounds, "sent absurd numbers")
    seen[1] = there(begun + later, incarnation=incarnation)
    is_avoided = incarnation == 1 and later < rounds
    assert own.candidates(begun + later + 1)[1] == {1: "sent absurd numbers" if is_avoided else ""}


def test_hidden_replicas_that_others_reach_are_elsewhere() -> None:
    own = partners({1: there(3), 2: PeerStatus()}, hidden=(2, OWN))
    known, _ = own.candidates(4)
    assert known.members == {1, 2, OWN}
    assert known.hidden == {2, OWN}
    assert known.elsewhere == {2}
    assert known.sites[1] == "site1"
