"""How an attached job joins others, what it accepts as the state of another, and what it does with it."""

import io
import json
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megatron_noloco.attach import attach, attached
from megatron_noloco.attach.adapter import EngineAdapter
from megatron_noloco.attach.inner import inner_state
from megatron_noloco.attach.job_state import JobState
from megatron_noloco.attach.other_state import fingerprints_of
from megatron_noloco.attach.torch_module import torch_adapter
from megatron_noloco.federation.federation_peers import FederationPeers
from megatron_noloco.federation.movement import alone
from megatron_noloco.federation.states import NotTakenError, State
from megatron_noloco.outer import ExchangeReport, RoundReport
from megatron_noloco.outer.weights import TorchWeights
from megatron_noloco.settings import FederationSettings, NolocoSettings

ELEMENTS = 100


class Inner:
    """An inner optimizer, which loads weights as well."""

    def __init__(self, value: float, weight: Tensor) -> None:
        self.moments, self._weight = torch.full((2, ELEMENTS), value), weight

    def state_dict(self) -> dict[str, Any]:
        return {"moments": self.moments, "masters": torch.full((ELEMENTS,), 7.0)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.moments = state["moments"]
        self._weight.copy_(state["masters"])


def job(value: float) -> tuple[Any, Inner]:
    """What is used of the outer optimizer of a job, and its inner one."""
    weight = torch.full((ELEMENTS,), value)
    outer = SimpleNamespace(
        weights=TorchWeights([weight]),
        state=lambda wait: {"slow_weights": torch.full((ELEMENTS,), value + 1)},
        restore=Mock(),
    )
    return outer, Inner(value, weight)


def keeper(outer: Any, inner: Inner | None = None, modules: Sequence[nn.Module] = ()) -> JobState:
    adapter = EngineAdapter(outer.weights, list, TorchWeights, None, ("", ""), modules=modules)
    return JobState(outer, alone(ELEMENTS), None if inner is None else inner_state(inner), adapter)


def take(own: JobState, given: State) -> None:
    vectors = own.room(given.facts, given.vectors)
    for name, vector in given.vectors.items():
        vectors[name].copy_(vector)
    own.use(given._replace(vectors=vectors))


def test_a_state_is_weights_and_those_of_both_optimizers() -> None:
    (outer, inner), (giver, its_inner) = job(0.0), job(2.0)
    own = keeper(outer, inner)
    take(own, keeper(giver, its_inner).copy(20))
    assert own.inner_from == 20
    (restored,) = outer.restore.call_args.args
    assert restored.keys() == {"slow_weights"}
    assert (restored["slow_weights"] == 3.0).all()
    assert (inner.moments == 2.0).all()
    assert (outer.weights.read() == 2.0).all(), "not what the inner optimizer loads"


def normalised(value: float, wrap: bool = False) -> nn.Module:
    """A module with running statistics, and with a buffer that no checkpoint has."""
    made = nn.Sequential(nn.BatchNorm1d(3))
    made.register_buffer("scratch", torch.full((2,), value), persistent=False)
    for buffer in (made[0].running_mean, made[0].running_var, made[0].num_batches_tracked):
        buffer.fill_(value)  # type: ignore[union-attr, operator]
    return torch.compile(made) if wrap else made  # type: ignore[return-value]


def test_a_taker_says_why_its_inner_optimizer_begins_anew() -> None:
    (outer, inner), (giver, _), weight = job(0.0), job(2.0), torch.zeros(ELEMENTS)
    with pytest.warns(UserWarning, match="begins anew: it was not given to attach there"):
        take(keeper(outer, inner), keeper(giver).copy(20))
    keeping = torch.optim.SGD([weight])
    keeping.state[weight]["kept"] = [1.0]
    adapter = EngineAdapter(giver.weights, lambda: [(weight, ())], TorchWeights, None, ("", ""))
    giver_state = JobState(giver, alone(ELEMENTS), inner_state(keeping), adapter)
    own = keeper(outer, inner)
    with pytest.warns(UserWarning, match='begins anew: SGD keeps "kept", a list, for each weight'):
        take(own, giver_state.copy(20))
    assert own.inner_from == -1
    assert (outer.weights.read() == 2.0).all()


@pytest.mark.parametrize("wrap", [False, True])
def test_buffers_that_a_checkpoint_has_are_taken_over(wrap: bool) -> None:
    (giver, _), (outer, _), own = job(2.0), job(0.0), normalised(0.0)
    take(keeper(outer, modules=[own]), keeper(giver, modules=[normalised(2.0, wrap)]).copy(20))
    assert {name: buffer.unique().tolist() for name, buffer in own.named_buffers()} == {
        "scratch": [0.0],
        "0.running_mean": [2.0],
        "0.running_var": [2.0],
        "0.num_batches_tracked": [2],
    }


def test_parts_of_a_model_that_have_the_same_names_are_all_compared() -> None:
    """As the chunks of a rank with virtual pipeline stages."""
    chunks = [nn.Linear(2, 2).requires_grad_(False) for _ in range(2)]
    adapter = torch_adapter(nn.Linear(2, 2))
    found = []
    for _ in range(2):
        found.append(fingerprints_of(replace(adapter, modules=chunks), None)["frozen weights"])
        chunks[0] = nn.Linear(2, 2).requires_grad_(False)
    assert found[0] != found[1]


def test_a_state_with_other_buffers_is_not_taken() -> None:
    (giver, _), (outer, _) = job(2.0), job(0.0)
    with pytest.raises(NotTakenError, match="its buffers are not those of this model"):
        take(keeper(outer, modules=[normalised(0.0)]), keeper(giver, modules=[nn.BatchNorm1d(3)]).copy(20))
    assert not outer.weights.read().any()


def test_what_is_no_state_is_refused() -> None:
    (outer, _), (giver, _) = job(0.0), job(2.0)
    own, given = keeper(outer), keeper(giver).copy(20)
    with pytest.raises(NotTakenError, match="its vectors weights are not those of a state"):
        own.room({}, ["weights"])
    with pytest.raises(NotTakenError, match="it is not a state: "):
        own.use(given._replace(rest=b"no state"))
    assert not outer.weights.read().any()


def test_an_attach_that_fails_leaves_the_federation_and_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after Ctrl-C while it waits for the state of another job."""
    monkeypatch.setattr("megatron_noloco.federation.membership.FIRST_SECONDS", 0.0)
    where = FederationSettings(rendezvous=f"file://{tmp_path}", encryption="none")
    model = nn.Linear(2, 2)
    begin = partial(attach, model, NolocoSettings(deadline_seconds=0.1), federation=where, slot=0)
    with monkeypatch.context() as failing:
        failing.setattr(FederationPeers, "begin", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            begin()
    assert "federation" not in {thread.name for thread in threading.enumerate()}
    model.load_state_dict(nn.Linear(2, 2).state_dict())
    begin().close()


def test_steps_that_are_left_out_make_a_job_no_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 steps in 8 seconds, with which it has come from local step 0 to 10."""
    clock, told = iter((0.0, 8.0)), list[dict[str, Any]]()
    monkeypatch.setattr(attached, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    thread: Any = SimpleNamespace(
        node=SimpleNamespace(slot=0), tell_row=lambda text: told.append(json.loads(text))
    )
    report = RoundReport(0, ExchangeReport((0, 1)), 0.5, 1.0)
    rows = attached.RoundRows(thread)
    for done, reports in ((1, []), (2, []), (9, []), (10, [report])):
        rows.after_step(done, reports)
    assert [(row["step"], row["speed/seconds_per_step"]) for row in told] == [(10, 2.0)]


def test_numbers_of_numpy_and_functions_of_the_program_void_no_state() -> None:
    """A loop's cosine is numpy's, as is what a LambdaLR then keeps; a group may have a function."""

    class Odd(torch.optim.lr_scheduler.LambdaLR):
        def state_dict(self) -> dict[str, Any]:
            return super().state_dict() | {"rule": len}

    def made(schedule: Any, rate: Any) -> tuple[Any, Any, JobState]:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        optimizer.param_groups[0]["rule"] = lambda name: "bias" in name
        schedule = schedule(optimizer, lambda step: np.float64(0.5) ** step)
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            schedule.step()
        adapter, outer = torch_adapter(model), job(0.0)[0]
        outer.weights, outer.state = adapter.weights, lambda wait: {"slow_weights": adapter.weights.read()}
        return optimizer, schedule, JobState(outer, alone(6), inner_state([optimizer, schedule]), adapter)

    _, _, giver = made(torch.optim.lr_scheduler.LambdaLR, np.float32(0.5))
    optimizer, schedule, own = made(torch.optim.lr_scheduler.LambdaLR, 0.1)
    take(own, giver.copy(7))
    assert own.inner_from == 7
    assert optimizer.param_groups[0]["lr"] == 0.0625
    assert type(optimizer.param_groups[0]["lr"]) is float
    assert optimizer.param_groups[0]["rule"]("bias")
    assert schedule.get_last_lr() == [0.0625]
    with pytest.warns(UserWarning, match="begins anew: Odd keeps more than numbers, text and tensors"):
        take(own, made(Odd, 0.1)[2].copy(9))


class Refuses(torch.optim.lr_scheduler.ConstantLR):
    """A schedule that cannot load what it is given."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("horizon")


@pytest.mark.parametrize(
    ("change", "schedule", "why"),
    [
        (lambda rest: rest.update(inner=[]), None, "its state cannot be read"),
        (lambda rest: rest["inner"].update(optimizers=["AdamW"]), None, "its state cannot be read"),
        (lambda rest: rest["inner"]["optimizers"][0].update(common={"step": "7"}), None, "its step cannot"),
        (lambda rest: rest["inner"]["optimizers"][0].update(named={"x": {"m": None}}), None, "its m cannot"),
        (lambda rest: None, Refuses, "Refuses cannot load its state: 'horizon'"),
    ],
)
def test_what_cannot_be_read_of_an_optimizer_costs_its_state_alone(
    change: Callable[[Any], object], schedule: Any, why: str
) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    adapter, outer = torch_adapter(model), job(0.0)[0]
    outer.weights, outer.state = adapter.weights, lambda wait: {"slow_weights": adapter.weights.read()}
    parts = [optimizer, (schedule or torch.optim.lr_scheduler.ConstantLR)(optimizer)]
    own = JobState(outer, alone(6), inner_state(parts), adapter)
    given = own.copy(3)
    rest = torch.load(io.BytesIO(given.rest), weights_only=True)
    change(rest)
    file = io.BytesIO()
    torch.save(rest, file)
    given = given._replace(rest=file.getvalue(), vectors=given.vectors | {"unknown": torch.ones(6)})
    before = [moment.clone() for moment in optimizer.state[model.weight].values()]
    given.vectors["inner.exp_avg"].fill_(9.0)
    with pytest.warns(UserWarning, match=f"the inner optimizer begins anew: {re.escape(why)}"):
        take(own, given)
    assert own.inner_from == -1
    outer.restore.assert_called_once()
    assert "unknown" not in outer.restore.call_args.args[0]
    assert all(map(torch.equal, before, optimizer.state[model.weight].values()))


def test_a_state_of_other_parts_begins_anew_in_one_line() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule: Any = torch.optim.lr_scheduler.ConstantLR(optimizer)
    adapter, outer = torch_adapter(model), job(0.0)[0]
    outer.weights, outer.state = adapter.weights, lambda wait: {"slow_weights": adapter.weights.read()}
    both, fewer = (
        JobState(outer, alone(6), inner_state(one), adapter) for one in ((optimizer, schedule), optimizer)
    )
    take(both, both.copy(3))
    assert both.inner_from == 3
    with pytest.warns(
        UserWarning,
        match="the inner optimizer begins anew: inner is SGD here, and SGD and 1 other objects where the state",
    ):
        take(fewer, both.copy(3))
    assert fewer.inner_from == -1
    for nothing in (model, iter([optimizer])):
        with pytest.raises(
            ValueError, match=r"attach: inner is a \w+; give the optimizer, or a list of objects"
        ):
            inner_state(nothing)  # type: ignore[arg-type]
