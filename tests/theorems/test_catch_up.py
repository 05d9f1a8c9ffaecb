"""Where a replica of a federation goes on, and from what."""

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_noloco.federation import catch_up as module
from megatron_noloco.federation.catch_up import CatchUp, UntrainedError
from megatron_noloco.federation.partners import Availability, Partners
from megatron_noloco.plans.fragments import fragment_after, next_after
from megatron_noloco.settings import FederationSettings, NolocoSettings
from tests.kit.peers import ENDED, LEFT, Others, peer_at


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
