"""Where a replica of a federation goes on, and from what."""

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_noloco.training import federation
from megatron_noloco.training.federation import KeepingUp, UntrainedError, wait_for_others


class Others:
    """A transport whose counterparts have begun these exchanges."""

    def __init__(self, begun: list[int]) -> None:
        self.numbers = begun
        self.left_out: list[int] = []
        self.partners = SimpleNamespace(
            leave_out=self.left_out.append,
            agree=list,
        )

    def begun(self) -> list[int]:
        return self.numbers

    def wait_for(self, others: int, seconds: float) -> bool:
        return len(self.numbers) >= others


def keeping_up(
    monkeypatch: pytest.MonkeyPatch, begun: list[int], fragments: int = 1, local_steps: str = "all"
) -> tuple[KeepingUp, Others]:
    monkeypatch.setattr(federation.dist, "get_world_size", lambda: 1)
    config: Any = SimpleNamespace(
        noloco=SimpleNamespace(local_steps=10, fragments=fragments),
        training=SimpleNamespace(train_iters=95),
        federation=SimpleNamespace(rounds_behind=2, local_steps=local_steps),
    )
    others = Others(begun)
    return KeepingUp(others, config), others  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("begun", "step", "expected"),
    [
        ([], 20, 20),
        ([-1, -1], 20, 20),
        ([2, 2], 20, 20),  # they have come to the exchange after step 29, the last of the same phase
        ([2, 2], 10, 10),
        ([3, 3], 10, 39),
        ([3, 3], 11, 11),  # not within a phase
        ([7, 0, 0], 10, 10),  # one that is ahead does not decide
        ([7, 7, 0], 10, 79),
        ([50, 50], 10, 94),  # the last step is not left out
        ([0, 0], 90, 90),
    ],
)
def test_who_is_rounds_behind_half_of_the_others_goes_on_where_they_are(
    monkeypatch: pytest.MonkeyPatch, begun: list[int], step: int, expected: int
) -> None:
    assert keeping_up(monkeypatch, begun)[0].next_step(step) == expected


@pytest.mark.parametrize(
    ("begun", "step", "expected"),
    [
        ([], 22, 22),
        ([1, 1], 22, 22),
        ([2, 2], 20, 29),  # the last step before the exchange is taken
        ([2, 2], 26, 29),
        ([2, 2], 25, 25),  # it looks at every other step
        ([2, 2], 28, 28),  # less than a quarter of the 10 steps would be left out
        ([2, 1, 1], 22, 22),
        ([2, 2, 1], 22, 29),
        ([7, 7, 7], 22, 79),
    ],
)
def test_who_is_slow_leaves_out_steps_of_the_phase(
    monkeypatch: pytest.MonkeyPatch, begun: list[int], step: int, expected: int
) -> None:
    assert keeping_up(monkeypatch, begun, local_steps="auto")[0].next_step(step) == expected


def test_exchanges_of_fragments_are_counted_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert keeping_up(monkeypatch, [4 * 4 + 1], fragments=4)[0].next_step(10) == 44
    assert keeping_up(monkeypatch, [4 * 2 + 1], fragments=4, local_steps="auto")[0].next_step(20) == 24
    assert keeping_up(monkeypatch, [4 * 2], fragments=4, local_steps="auto")[0].next_step(21) == 21


def test_a_replica_tells_where_it_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    own, others = keeping_up(monkeypatch, [3])
    own.start(40)
    assert others.left_out == [3]
    own, others = keeping_up(monkeypatch, [])
    own.start(0)
    assert others.left_out == [-1]


def test_those_to_start_with_are_waited_for() -> None:
    config: Any = SimpleNamespace(
        federation=SimpleNamespace(start_with=3), noloco=SimpleNamespace(deadline_seconds=1.0)
    )
    assert wait_for_others(config, Others([-1, 4])) == []  # type: ignore[arg-type]
    assert wait_for_others(config, Others([4])) == [  # type: ignore[arg-type]
        "fewer replicas than federation.start_with are there; starting without"
    ]


def test_nobody_waits_in_an_exchange_that_was_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    own, others = keeping_up(monkeypatch, [0])
    own.start(10)
    others.numbers, others.left_out[:] = [7], []
    assert own.next_step(20) == 79
    assert others.left_out == [6], "it comes to exchange 7"


def test_new_weights_do_not_join_trained_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(federation, "_TRAINED_ROUNDS", 5)
    own, others = keeping_up(monkeypatch, [])
    own.start(0)
    assert own.next_step(10) == 10, "nobody is there"
    others.numbers = [7]
    with pytest.raises(UntrainedError, match="this replica has no checkpoint"):
        own.next_step(20)
    others.numbers = [4]
    assert own.next_step(20) == 49, "they have trained little"


@pytest.mark.parametrize("start", [0, 10])
def test_who_has_trained_with_the_others_or_before_may_fall_behind(
    monkeypatch: pytest.MonkeyPatch, start: int
) -> None:
    own, others = keeping_up(monkeypatch, [0])
    own.start(start)
    assert own.next_step(10) == 10
    others.numbers = [7]
    assert own.next_step(20) == 79
