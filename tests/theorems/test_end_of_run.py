"""Who is waited for at the end of a run, and who is not in the mean."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_noloco.federation.end_of_run import EndOfRun, _digest
from megatron_noloco.federation.members import Peer
from megatron_noloco.federation.mesh import Member
from megatron_noloco.federation.statuses import FinalStatus
from megatron_noloco.settings import FederationSettings, NolocoSettings
from tests.kit.peers import ENDED, LEFT, Others, peer_at


class AtTheEnd(Others):
    """What slot 0 sees of another in one look after the other, again and again."""

    def __init__(self, looks: list[tuple[int, bool]], slot: int = 1) -> None:
        super().__init__([])
        self._looks, self._slot = looks, slot

    def peers(self) -> dict[int, Peer]:
        begun, present = self._looks[round(self.at) % len(self._looks)]
        return {self._slot: peer_at(begun, present, self._slot, reaches=[0])}


def left_out(end: EndOfRun) -> dict[int, str]:
    assert end.attempt is not None
    return {slot: why for slot, why in end.why_not.items() if slot not in end.attempt.members}


def end_with(
    looks: list[tuple[int, bool]], deadline_seconds: float, behind: int = 4
) -> tuple[float, dict[int, str]]:
    """Return for how many looks, one a second, slot 0 waits at its end, and who is not in its mean."""
    there: Any = AtTheEnd(looks)
    noloco = NolocoSettings(local_steps=10, deadline_seconds=deadline_seconds)
    end = EndOfRun(there, noloco, FederationSettings(rounds_behind=behind), 30, 95)
    while (found := end.look()) is None:
        there.at += 1
        assert there.at < 1000
    assert found
    return there.at, left_out(end)


@given(st.lists(st.tuples(st.integers(-1, 5), st.booleans()), min_size=1, max_size=20), st.integers(1, 20))
def test_one_that_comes_and_goes_holds_no_other_up(looks: list[tuple[int, bool]], deadline: int) -> None:
    """Each round that it begins for the first time is worth two deadlines at most."""
    waited, without = end_with(looks, deadline)
    assert waited <= 2 * deadline * len({number for number, _ in looks})
    assert without.keys() == {1}


@pytest.mark.parametrize(
    ("looks", "waited", "without"),
    [
        ([(3, True)] * 5 + [(3, False)] * 2 + [(ENDED, True)], 7.0, {}),
        ([(3, True)] * 5 + [(3, False)] * 99, 11.0, {1: "is not there"}),
        ([(3, True)] * 99, 6.0, {1: "began no round for 6 s"}),
        ([(3, True)] * 3 + [(LEFT, False)] * 99, 3.0, {1: "has left"}),
        ([(3, False)] * 99, 0.0, {1: "is not there"}),  # it was lost before
    ],
)
def test_who_trains_or_is_lost_is_waited_for_once(
    looks: list[tuple[int, bool]], waited: float, without: dict[int, str]
) -> None:
    assert end_with(looks, 6.0) == (waited, without)


def ends(own: int, *peers: Peer, behind: int = 4) -> EndOfRun:
    """Return a replica in this slot, which has ended after round 2."""
    there: Any = Others([], own)
    there.peers = lambda: {peer.member.slot: peer for peer in peers}
    return EndOfRun(there, NolocoSettings(local_steps=10), FederationSettings(rounds_behind=behind), 30)


def test_a_higher_slot_waits_for_a_proposal_of_the_lowest() -> None:
    trains = peer_at(1, slot=3)
    assert ends(2, peer_at(2, slot=1, phase="ended"), trains).look() is None
    processes = _digest([Member(1, 1), Member(2, 1)])
    proposal = FinalStatus(attempt=1, members=[1, 2], parents=[-1, 1], processes=processes)
    assert ends(2, peer_at(2, slot=1, phase="ended", mean=proposal), trains).look() is True
    final = FinalStatus(attempt=1, final="1.1/1")
    assert ends(2, peer_at(2, slot=3, phase="ended", mean=final)).look() is False


def test_who_ended_far_behind_half_of_the_others_is_left_out() -> None:
    """A single member that claims to be far ahead puts nobody out."""

    def without(*rounds: int) -> set[int]:
        reaches = list(range(4))
        peers = [
            peer_at(number, slot=slot, phase="ended", reaches=reaches)
            for slot, number in enumerate(rounds, 1)
        ]
        end = ends(0, *peers, behind=2)
        return {*left_out(end)} if end.look() else {0}

    assert without(2) == set()
    assert without(5) == {0}, "it waits until the others have their model"
    assert without(9, 2) == set()
    assert without(9, 9) == {0}
    assert without(2, 2, -1) == {3}


def test_a_slot_whose_process_is_refused_is_not_there() -> None:
    """A later process of the lowest slot at its end differs from the others."""
    there: Any = Others([], 2)
    peers = {1: peer_at(2, slot=1), 3: peer_at(2, slot=3, phase="ended", reaches=[2])}
    there.peers = lambda: peers
    end = EndOfRun(there, NolocoSettings(local_steps=10, deadline_seconds=6.0), FederationSettings(), 30)
    assert end.look() is None
    del peers[1]
    assert end.look() is None
    there.at = 6.0
    assert end.look()
    assert left_out(end) == {1: "is not there"}
