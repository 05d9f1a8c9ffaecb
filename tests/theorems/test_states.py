"""The state of another job: no number of it harms the job that takes it, and a refused state changes nothing."""

import json
import math
import warnings
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from megatron_noloco.attach.inner import Inner
from megatron_noloco.attach.job_state import JobState
from megatron_noloco.attach.torch_module import torch_engine
from megatron_noloco.federation.states import (
    MOST_STEPS,
    NotTakenError,
    State,
    check_numbers,
    check_step,
    read_facts,
)
from megatron_noloco.outer import rounds_from_lists, rounds_to_lists
from megatron_noloco.outer.finite_mean import MEASURED
from tests.kit.ranks import run_ranks
from tests.kit.states import WRONG, changed, leaves

NAMES = ["fast_weights", "slow_weights", "correction"]


class Job:
    """A model with AdamW, a schedule and buffers, and what is used of its outer optimizer."""

    def __init__(self, steps: int, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, **options)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 100)
        for _ in range(steps):
            self.local_step()
        engine = torch_engine(self.model)
        self.outer = Mock(state=lambda wait: {"slow_weights": torch.ones(engine.length)})
        self.state = JobState(engine, self.outer, Inner(engine, [self.optimizer, self.schedule]), {}, {})

    def local_step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.rand(4, 2)).square().sum().backward()
        self.optimizer.step()
        self.schedule.step()

    def take(self, given: State) -> None:
        names = list(given.vectors)
        vectors = self.state.allocate(given.facts, names)
        for name, vector in given.vectors.items():
            vectors[name].copy_(vector)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the inner optimizer begins anew
            self.state.load(given._replace(vectors=vectors))

    def content(self) -> list[Any]:
        """Return all that a state could change."""
        kept = [state[name] for state in self.optimizer.state.values() for name in sorted(state)]
        tensors = [*self.model.state_dict().values(), *kept]
        return [[one.tolist() for one in tensors], self.schedule.state_dict(), self.outer.restore.call_count]


@pytest.mark.parametrize("steps", [0, 3])
def test_no_number_of_a_state_harms_the_job_that_takes_it(steps: int) -> None:
    """Neither for an optimizer that keeps nothing yet."""
    given, refused = Job(5).state.copy(20), 0
    changes: list[Any] = [lambda at, name, value=value: at.update({name: value}) for value in WRONG]
    for path in [*leaves(given.facts), ("inner", "others"), ("engine", "loss_scale", "cur_scale")]:
        for change in [*changes, lambda at, name: at.pop(name, None)]:
            own = Job(steps)
            before = own.content()
            try:
                own.take(given._replace(facts=changed(given.facts, path, change)))
            except NotTakenError:
                assert own.content() == before
                refused += 1
            own.local_step()
            weights = torch.cat([one.flatten() for one in own.model.parameters()])
            assert weights.isfinite().all(), (path, change)
    assert refused > 50


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}])
def test_a_state_without_a_moment_begins_anew(options: Any) -> None:
    own, given = Job(0, **options), Job(5).state.copy(20)
    if not options:
        given.facts["inner"]["others"].pop("inner.exp_avg")
    with pytest.warns(UserWarning, match="begins anew: its (max_exp_avg_sq|exp_avg) is missing"):
        own.state.load(given)
    own.local_step()


def test_an_honest_state_is_taken() -> None:
    own, given = Job(0), Job(5)
    own.take(given.state.copy(20))
    own.outer.restore.assert_called_once()
    assert own.content()[:2] == given.content()[:2]


@pytest.mark.parametrize(
    ("name", "value"),
    [("fast_weights", math.nan), ("slow_weights", -math.inf), ("inner.exp_avg", math.inf),
     ("inner.exp_avg_sq", -1e-9), ("inner.exp_avg_sq", math.nan)],
)  # fmt: skip
def test_a_vector_that_is_no_vector_of_a_state(name: str, value: float) -> None:
    own, given = Job(3), Job(5).state.copy(20)
    before = own.content()
    given.vectors[name][3] = value
    with pytest.raises(NotTakenError, match=f"its {name} (is not finite|has negative numbers)"):
        own.take(given)
    assert own.content() == before


def part_with_nan(rank: int, world_size: int) -> str:
    facts = Job(1).state.copy(20).facts
    vectors = {name: torch.zeros(2) for name in NAMES[:2]}
    vectors["slow_weights"][0] = math.nan if rank else 0.0
    with pytest.raises(NotTakenError) as caught:
        check_numbers(State(20, facts, vectors))
    return str(caught.value)


def test_all_ranks_refuse_what_one_of_them_refuses() -> None:
    assert run_ranks(2, part_with_nan) == ["its slow_weights is not finite"] * 2


def test_the_step_of_a_state_is_one_of_the_run() -> None:
    check_step(7, 7, 7)
    check_step(MOST_STEPS, 1, None)
    for step, least, steps in ((6, 7, None), (101, 1, 100), (MOST_STEPS + 1, 0, None), (10**5000, 0, None)):
        with pytest.raises(NotTakenError):
            check_step(step, least, steps)
    own = Job(0)
    with pytest.raises(NotTakenError, match="beyond the last local step"):
        own.take(Job(1).state.copy(20)._replace(step=2**62))


def row(fragment: float, due: float = 22, group: tuple[float, ...] = (0, 1, -1)) -> list[float]:
    return [fragment, 4, due, *map(float, range(len(MEASURED))), *group]


def state_with(rounds: Any, step: int = 20) -> State:
    facts = Job(1).state.copy(step).facts | {"rounds": rounds}
    return State(step, json.loads(json.dumps(facts)), {name: torch.zeros(2) for name in NAMES})


def test_rounds_that_are_not_merged_are_taken() -> None:
    tensors = rounds_from_lists({"delayed_rounds": [row(0), row(1)], "delayed_with": [4, 2]})
    found = check_numbers(state_with(rounds_to_lists(tensors)))
    assert all(map(torch.equal, rounds_from_lists(found.rounds).values(), tensors.values()))


@pytest.mark.parametrize(
    ("rows", "schedule"),
    [
        ([], [4, 2]),
        ([["x"]], [4, 2]),
        ([row(0)], [10**400, 2]),
        ([row(0)], [4.0, 2]),
        ([row(0)], [4]),
        ([row(0)], [0, 2]),
        ([row(0), row(0)], [4, 2]),
        ([row(0), row(1)[:-1]], [4, 2]),
        ([row(2)], [4, 2]),
        ([row(0.5)], [4, 2]),
        ([row(-1)], [4, 2]),
        ([row(0, due=25)], [4, 2]),
        ([row(0, due=math.nan)], [4, 2]),
        ([row(0, due=10**400)], [4, 2]),
        ([row(0)[:9]], [4, 2]),
        ([row(0, group=(-1, -1))], [4, 2]),
        ([row(0, group=(0, 2**40))], [4, 2]),
        ([row(index) for index in range(5)], [4, 2]),
        (None, [4, 2]),
    ],
)
def test_rounds_that_no_state_has_are_refused(rows: Any, schedule: Any) -> None:
    with pytest.raises(NotTakenError):
        check_numbers(state_with({"delayed_rounds": rows, "delayed_with": schedule}))


def test_more_steps_skipped_than_taken_are_refused() -> None:
    facts = Job(1).state.copy(20).facts
    facts["engine"]["skipped_steps"] = 21
    with pytest.raises(NotTakenError, match="its skipped_steps are 21 of 20 steps"):
        read_facts(facts, NAMES[:2])


def test_deeply_nested_facts_are_refused() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(NotTakenError):
        read_facts({"optimizer": deep}, NAMES)


@pytest.mark.parametrize(
    "change",
    [{"step": 5}, {"last_epoch": math.nan}, {"last_epoch": 10**400}, {"base_lrs": []}, {"_last_lr": ["x"]},
     {"gamma": None}, {"base_lrs": 5}],
)  # fmt: skip
def test_a_schedule_takes_no_values_but_its_own(change: dict[str, Any]) -> None:
    own, given = Job(0), Job(5)
    state = given.schedule.state_dict() | change
    given.schedule.state_dict = lambda: state  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match="the inner optimizer begins anew: part 1 of inner begins anew"):
        own.state.load(given.state.copy(20))
    assert own.optimizer.state == {}
    own.local_step()


@pytest.mark.parametrize("change", [torch.ones(3), torch.full((2,), math.nan), "x", None])
def test_buffers_are_taken_all_or_none(change: Any) -> None:
    own, given = Job(1), Job(5)
    before = {name: one.clone() for name, one in own.model.named_buffers()}
    functions: Any = given.state._beside
    buffers = functions["the model's buffers"][0]
    given.state._beside = {"the model's buffers": (lambda: buffers() | {"0.1.running_var": change}, print)}
    with pytest.warns(UserWarning, match="the model's buffers begins anew: cannot load it: UserError"):
        own.state.load(given.state.copy(20))
    after: dict[str, Tensor] = dict(own.model.named_buffers())
    assert all(torch.equal(after[name], one) for name, one in before.items())
