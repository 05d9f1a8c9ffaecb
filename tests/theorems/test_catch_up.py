"""Where a replica of a federation goes on, and from what."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_noloco.federation import catch_up as module
from megatron_noloco.federation.catch_up import CatchUp, UntrainedError
from megatron_noloco.federation.members import Peer
from megatron_noloco.federation.mesh import Member
from megatron_noloco.federation.partners import Availability, Partners
from megatron_noloco.federation.statuses import FinalStatus, PeerStatus, Phase
from megatron_noloco.plans.fragments import fragment_after, next_after
from megatron_noloco.settings import FederationSettings, NolocoSettings

ENDED, LEFT = -2, -3  # in place of the round that a replica has begun last


def peer_at(begun: int, present: bool = True, slot: int = 1, **status: Any) -> Peer:
    """A replica that has begun a round, is at its end or has left."""
    phase: Phase = {ENDED: "ended", LEFT: "left"}.get(begun, "training")  # type: ignore[assignment]
    status = {"phase": phase, "begun": max(begun, -1)} | status
    return Peer(Member(slot, 1), PeerStatus(**status), present, present)


class Others:
    """Stands for `Members`, where the others have begun these rounds."""

    slot = 0
    status = PeerStatus()

    def __init__(self, begun: list[int]) -> None:
        self.numbers, self.at, self.mesh = begun, 0.0, self
        self.told: list[tuple[Any, ...]] = []

    def clock(self) -> float:
        return self.at

    def check(self) -> None: ...

    def publish_reached(self) -> None: ...

    def go_on(self, *told: Any) -> None:
        self.told.append(told)

    def peers(self) -> dict[int, Peer]:
        return {slot: peer_at(begun, slot=slot) for slot, begun in enumerate(self.numbers, 1)}

    def present(self) -> dict[int, PeerStatus]:
        return {slot: peer.status for slot, peer in self.peers().items() if peer.present}


def catch_up(
    begun: list[int], fragments: int = 1, adapts: bool = False, steps: int | None = 95
) -> tuple[CatchUp, Others]:
    others: Any = Others(begun)
    noloco = NolocoSettings(local_steps=10, fragments=fragments, deadline_seconds=1.0)
    federation = FederationSettings(rounds_behind=2, skip_local_steps=adapts)
    return CatchUp(others, noloco, federation, steps), others


@pytest.mark.parametrize(
    ("begun", "step", "expected"),
    [
        ([], 20, 20),
        ([-1, -1], 20, 20),
        ([2, 2], 20, 20),  # they have come to the exchange after step 29, the last of the same phase
        ([2, 2], 10, 10),
        ([3, 3], 10, None),
        ([3, 3], 11, 11),  # not within a phase
        ([7, 0, 0], 10, 10),  # one that is ahead does not decide
        ([7, 7, 0], 10, None),
        ([50, 50], 10, None),
        ([50, 50], 80, 80),  # the others are at the last step, 95, whatever exchange they have begun
        ([0, 0], 90, 90),
    ],
)
def test_replica_far_behind_takes_over_state(begun: list[int], step: int, expected: int | None) -> None:
    assert catch_up(begun)[0].next_step(step) == expected


@pytest.mark.parametrize(
    ("begun", "step", "expected"),
    [
        ([], 22, 22),
        ([1, 1], 22, 22),
        ([2, 2], 20, 29),  # the last step before the exchange is taken
        ([2, 2], 26, 29),
        ([2, 2], 25, 29),  # it looks at every step
        ([2, 2], 28, 28),  # less than a quarter of the 10 steps would be left out
        ([2, 1, 1], 22, 22),
        ([2, 2, 1], 22, 29),
        ([3, 3, 3], 22, 39),
        ([4, 4, 4], 22, None),
        ([7, 7, 7], 22, None),
        ([50, 50], 80, 94),  # the last step is not left out
    ],
)
def test_a_slow_replica_leaves_out_steps_of_the_phase(
    begun: list[int], step: int, expected: int | None
) -> None:
    assert catch_up(begun, adapts=True)[0].next_step(step) == expected


def test_without_a_known_end_no_step_is_the_last() -> None:
    assert catch_up([50, 50], adapts=True, steps=None)[0].next_step(492) == 509


def test_exchanges_of_fragments_are_counted_one_by_one() -> None:
    assert catch_up([4 * 3 - 1], fragments=4)[0].next_step(10) == 10
    assert catch_up([4 * 3], fragments=4)[0].next_step(10) is None
    assert catch_up([4 * 2 + 1], fragments=4, adapts=True)[0].next_step(20) == 24
    assert catch_up([4 * 2], fragments=4, adapts=True)[0].next_step(21) == 21


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize(
    ("k", "fragments"), [(k, fragments) for k in (1, 3, 5, 10) for fragments in (1, 2, 5) if fragments <= k]
)
def test_a_replica_with_a_constant_lag_is_waited_for_or_goes_on(k: int, fragments: int, skips: bool) -> None:
    """Otherwise two of equal speed would never exchange again."""
    noloco = NolocoSettings(local_steps=k, fragments=fragments)
    federation = FederationSettings(skip_local_steps=skips)

    def last_exchange(done: int) -> int:
        round_index, fragment = next_after(done, k, fragments)
        return round_index * fragments + fragment - 1

    def is_waited_for(ahead: int, behind: int) -> bool:
        peer, members = peer_at(last_exchange(behind)), SimpleNamespace(slot=0)
        partners = Partners(members, 1.0, 1.0, federation.rounds_behind * fragments)  # type: ignore[arg-type]
        return partners._availability(1, peer, last_exchange(ahead))[0] != Availability.AWAY

    def goes_on(ahead: int, behind: int) -> bool:
        others: Any = Others([last_exchange(ahead)])
        return CatchUp(others, noloco, federation).next_step(behind) != behind

    for lag in range(6 * k + 1):
        moments = [(ahead, ahead - lag) for ahead in range(50 * k, 51 * k)]
        waits = any(is_waited_for(*at) for at in moments if fragment_after(at[0], k, fragments))
        assert waits or any(goes_on(*at) for at in moments), lag


@pytest.mark.parametrize(("done", "left_out"), [(40, 3), (0, -1)])
def test_a_replica_announces_where_it_begins_and_goes_on(done: int, left_out: int) -> None:
    """So that no other waits for it in an exchange that it skips."""
    own, others = catch_up([], adapts=True)
    own.start(done)
    assert others.told == [(left_out,)]
    others.numbers = [7]
    assert own.next_step(60) == 79
    assert others.told == [(left_out,), (6,)], "it takes part in exchange 7"
    others.numbers = [90]
    assert own.next_step(60) is None
    assert others.told == [(left_out,), (6,)], "nobody is to exchange with it before it has a state"


def test_replicas_at_their_end_are_at_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where that is not known, they are not followed. Those that have left are not there."""
    own, _ = catch_up([ENDED] * 2 + [3], adapts=True)
    assert own.next_step(80) == 94
    own, _ = catch_up([LEFT] * 2 + [7], adapts=True)
    assert own.next_step(60) == 79
    own, _ = catch_up([ENDED] * 2 + [7], adapts=True, steps=None)
    assert own.next_step(60) == 79


def test_new_weights_do_not_join_trained_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TRAINED_ROUNDS", 5)
    own, others = catch_up([])
    own.start(0)
    assert own.next_step(10) == 10, "there are no others"
    others.numbers = [7]
    for takes_over, advice in [
        (True, "start it again: it then"),
        (False, 'again with checkpoint.load "auto",'),
    ]:
        own.takes_over = takes_over
        with pytest.raises(UntrainedError, match=f"begins with fresh weights, .*{advice}"):
            own.next_step(20)
    others.numbers = [4]
    assert own.next_step(20) is None, "they have trained little, and it takes over what they have"


def test_new_weights_do_not_join_one_that_waits_at_its_end() -> None:
    """Where the last step is known, such a one counts as being there. One that has left is not waiting."""
    own, others = catch_up([ENDED, 0], steps=None)
    own.start(0)
    with pytest.raises(UntrainedError, match="another replica waits at its end"):
        own.next_step(10)
    others.numbers = [LEFT]
    assert own.next_step(10) == 10
    others.numbers = [0]
    assert own.next_step(20) == 20, "from here on it has trained as long as another"
    others.numbers = [ENDED]
    assert own.next_step(30) == 30


@pytest.mark.parametrize("start", [0, 10])
def test_a_replica_that_has_trained_may_fall_behind(start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the others, or before its start."""
    monkeypatch.setattr(module, "_TRAINED_ROUNDS", 5)
    own, others = catch_up([0])
    own.start(start)
    assert own.next_step(10) == 10
    others.numbers = [7]
    assert own.next_step(20) is None


def test_after_a_state_a_replica_leaves_out_steps_once() -> None:
    """While the state travelled the others went on. So a slow transfer is not followed by another, for ever."""
    own, others = catch_up([50, 50], steps=None)
    assert own.next_step(10) is None
    own.recovered(500)
    others.numbers = [60, 60]
    assert own.next_step(500) == 609, "the last step before the round that the others have begun"
    others.numbers = [90, 90]
    assert own.next_step(610) is None, "from then on it is behind as any other"


class AtTheEnd(Others):
    """What slot 0 sees of another in one look after the other, again and again."""

    def __init__(self, looks: list[tuple[int, bool]], slot: int = 1) -> None:
        super().__init__([])
        self._looks, self._slot = looks, slot

    def peers(self) -> dict[int, Peer]:
        return {self._slot: peer_at(*self._looks[round(self.at) % len(self._looks)], slot=self._slot)}


def end_with(
    looks: list[tuple[int, bool]], deadline_seconds: float, behind: int = 4
) -> tuple[float, dict[int, str]]:
    """Return for how many looks, one a second, slot 0 waits at its end, and who is not in its mean."""
    there: Any = AtTheEnd(looks)
    noloco = NolocoSettings(local_steps=10, deadline_seconds=deadline_seconds)
    waiting = CatchUp(there, noloco, FederationSettings(rounds_behind=behind), 95).at_end(30)
    while (end := waiting.look()) is None:
        there.at += 1
        assert there.at < 1000
    assert not end.is_final
    return there.at, dict(end.left_out)


@given(st.lists(st.tuples(st.integers(-1, 5), st.booleans()), min_size=1, max_size=20), st.integers(1, 20))
def test_one_that_comes_and_goes_holds_no_other_up(looks: list[tuple[int, bool]], deadline: int) -> None:
    """Each round that it begins for the first time is worth two deadlines at most."""
    waited, left_out = end_with(looks, deadline)
    assert waited <= 2 * deadline * len({number for number, _ in looks})
    assert left_out.keys() == {1}


@pytest.mark.parametrize(
    ("looks", "waited", "left_out"),
    [
        ([(3, True)] * 5 + [(3, False)] * 2 + [(ENDED, True)], 7.0, {}),
        ([(3, True)] * 5 + [(3, False)] * 99, 11.0, {1: "is not there"}),
        ([(3, True)] * 99, 6.0, {1: "began no round for 6 s"}),
        ([(3, True)] * 3 + [(LEFT, False)] * 99, 3.0, {1: "has left"}),
        ([(3, False)] * 99, 0.0, {1: "is not there"}),  # it was lost before
    ],
)
def test_who_trains_or_is_lost_is_waited_for_once(
    looks: list[tuple[int, bool]], waited: float, left_out: dict[int, str]
) -> None:
    assert end_with(looks, 6.0) == (waited, left_out)


def ends(own: int, *peers: Peer, behind: int = 4) -> Any:
    """Return what a replica in this slot, which has ended after round 2, learns in its first look."""
    there: Any = Others([])
    there.slot, there.peers = own, lambda: {peer.member.slot: peer for peer in peers}
    return (
        CatchUp(there, NolocoSettings(local_steps=10), FederationSettings(rounds_behind=behind))
        .at_end(30)
        .look()
    )


def test_a_higher_slot_waits_for_a_proposal_of_the_lowest() -> None:
    assert ends(2, peer_at(2, slot=1, phase="ended"), peer_at(1, slot=3)) is None
    proposed = ends(2, peer_at(2, slot=1, phase="ended", mean=FinalStatus(attempt=1)))
    assert (proposed.is_final, proposed.left_out) == (False, {})
    is_over = ends(2, peer_at(2, slot=3, phase="ended", mean=FinalStatus(attempt=1, final="1.1/1")))
    assert is_over.is_final


def test_who_ended_far_behind_half_of_the_others_is_left_out() -> None:
    """A single member that claims to be far ahead puts nobody out."""

    def left_out(*rounds: int) -> set[int]:
        peers = [peer_at(number, slot=slot, phase="ended") for slot, number in enumerate(rounds, 1)]
        end = ends(0, *peers, behind=2)
        return {0} if end is None else set(end.left_out)

    assert left_out(2) == set()
    assert left_out(5) == {0}, "it waits until the others have their model"
    assert left_out(9, 2) == set()
    assert left_out(9, 9) == {0}
    assert left_out(2, 2, -1) == {3}


def test_a_slot_whose_process_is_refused_is_not_there() -> None:
    """A later process of the lowest slot at its end differs from the others."""
    there: Any = Others([])
    there.slot = 2
    peers = {1: peer_at(2, slot=1), 3: peer_at(2, slot=3, phase="ended")}
    there.peers = lambda: peers
    noloco = NolocoSettings(local_steps=10, deadline_seconds=6.0)
    waiting = CatchUp(there, noloco, FederationSettings()).at_end(30)
    assert waiting.look() is None
    del peers[1]
    assert waiting.look() is None
    there.at = 6.0
    end = waiting.look()
    assert end is not None
    assert end.left_out == {1: "is not there"}
