"""How an attached job joins others, what it accepts as the state of another, and what it does with it."""

import io
import json
import math
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

from megatron_noloco.attach import attach, attached
from megatron_noloco.attach.first_state import fingerprints_of
from megatron_noloco.attach.inner import Inner
from megatron_noloco.attach.job_state import JobState
from megatron_noloco.attach.torch_module import Replicated, torch_engine
from megatron_noloco.federation.federation_peers import FederationPeers
from megatron_noloco.federation.states import NotTakenError, State
from megatron_noloco.outer import ExchangeReport, RoundReport
from megatron_noloco.outer.peers import Boundary
from megatron_noloco.plans.topology import Place
from megatron_noloco.settings import FederationSettings, NolocoSettings
from tests.kit.ranks import key_file


class Job:
    """A model with an engine of one rank, and what is used of its outer optimizer."""

    def __init__(self, value: float, *inner: Any, model: nn.Module | None = None, **registered: Any) -> None:
        self.model = nn.Linear(2, 2) if model is None else model
        self.engine = torch_engine(self.model)
        with self.engine.writing() as write:
            write(0, torch.full((self.engine.length,), value))
        self.outer: Any = SimpleNamespace(
            state=lambda wait: {"slow_weights": torch.full((self.engine.length,), value + 1)}, restore=Mock()
        )
        parts = Inner(self.engine, inner) if inner else None
        self.state = JobState(self.engine, self.outer, parts, registered, {})

    def take(self, given: State) -> None:
        vectors = self.state.allocate(given.facts, given.vectors)
        for name, vector in given.vectors.items():
            vectors[name].copy_(vector)
        self.state.load(given._replace(facts=json.loads(json.dumps(given.facts)), vectors=vectors))


def test_state_has_weights_outer_and_registered_parts() -> None:
    counts = [20]
    own = Job(0.0, counts=(lambda: 0, counts.append))
    own.take(Job(2.0, counts=(lambda: 7, print)).state.copy(20))
    (restored,) = own.outer.restore.call_args.args
    assert restored.keys() == {"slow_weights"}
    assert (restored["slow_weights"] == 3.0).all()
    assert (own.engine.read() == 2.0).all()
    assert counts == [20, 7]


def test_registered_function_cannot_replace_weights() -> None:
    """As a state with a copy of the model, such as an average of its weights."""
    own = Job(0.0)
    own = Job(0.0, model=own.model, copy=(dict, own.model.load_state_dict))
    giver = Job(2.0, copy=(Job(7.0).model.state_dict, print))
    own.take(giver.state.copy(20))
    assert (own.engine.read() == 2.0).all()


def normalised(value: float, wrap: bool = False) -> nn.Module:
    """A module with running statistics, and with a buffer that no checkpoint has."""
    made = nn.Sequential(nn.BatchNorm1d(3))
    made.register_buffer("scratch", torch.full((2,), value), persistent=False)
    for buffer in (made[0].running_mean, made[0].running_var, made[0].num_batches_tracked):
        buffer.fill_(value)  # type: ignore[union-attr, operator]
    return torch.compile(made) if wrap else made  # type: ignore[return-value]


def test_a_taker_says_why_its_inner_optimizer_begins_anew() -> None:
    model = nn.Linear(2, 2)
    own = Job(0.0, torch.optim.SGD(model.parameters()), model=model)
    with pytest.warns(UserWarning, match="begins anew: it was not given to attach there"):
        own.take(Job(2.0).state.copy(20))
    giver = nn.Linear(2, 2)
    keeping = torch.optim.SGD(giver.parameters())
    keeping.state[giver.weight]["kept"] = [1.0]
    with pytest.warns(UserWarning, match="begins anew: SGD keeps kept, which other jobs cannot take over"):
        own.take(Job(2.0, keeping, model=giver).state.copy(20))
    assert own.state.inner_from == -1
    assert (own.engine.read() == 2.0).all()


@pytest.mark.parametrize("wrap", [False, True])
def test_buffers_that_a_checkpoint_has_are_taken_over(wrap: bool) -> None:
    own = normalised(0.0)
    Job(0.0, model=own).take(Job(2.0, model=normalised(2.0, wrap)).state.copy(20))
    assert {name: buffer.unique().tolist() for name, buffer in own.named_buffers()} == {
        "scratch": [0.0],
        "0.running_mean": [2.0],
        "0.running_var": [2.0],
        "0.num_batches_tracked": [2],
    }


def test_model_parts_of_equal_names_are_all_compared() -> None:
    """As the chunks of a rank with virtual pipeline stages."""
    trained, second, found = nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False), []
    for first in (nn.Linear(2, 2), nn.Linear(2, 2)):
        chunks = [first.requires_grad_(False), second, trained]
        engine = Replicated(chunks, [(one, [one]) for one in trained.parameters()])
        found.append(fingerprints_of(engine)["frozen weights"])
    assert found[0] != found[1]


def test_other_buffers_are_left_out_of_a_state() -> None:
    own = Job(0.0, model=normalised(0.0))
    with pytest.warns(UserWarning, match="the model's buffers begins anew: cannot load it: UserError"):
        own.take(Job(2.0, model=nn.BatchNorm1d(3)).state.copy(20))
    assert (own.engine.read() == 2.0).all()


def test_what_is_no_state_is_refused() -> None:
    own, given = Job(0.0), Job(2.0).state.copy(20)
    with pytest.raises(NotTakenError, match="its vectors weights are not those of a state"):
        own.state.allocate(given.facts, ["weights"])
    with pytest.raises(NotTakenError, match="correction are not those of a state"):
        own.state.allocate(given.facts, [*given.vectors, "correction"])
    for wrong in ({}, given.facts | {"inner": {"others": []}}):
        with pytest.raises(NotTakenError, match="its numbers are not those of a state"):
            own.state.allocate(wrong, given.vectors)
    with pytest.raises(NotTakenError, match="it is not a state: "):
        own.state.load(given._replace(rest=b"no state"))
    assert not own.engine.read().any()


def test_failed_attach_leaves_federation_and_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after Ctrl-C while it waits for the state of another job."""
    monkeypatch.setattr("megatron_noloco.federation.membership.FIRST_SECONDS", 0.0)
    where = FederationSettings(rendezvous=f"file://{tmp_path}", key_file=key_file(tmp_path))
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
    monkeypatch.setattr(attached, "time", SimpleNamespace(monotonic=lambda: next(clock), time=lambda: 1.5))
    members: Any = SimpleNamespace(slot=0, publish_row=told.append)
    report = RoundReport(0, ExchangeReport((0, 1)), 0.5, 1.0)
    rows = attached.RoundRows(members)
    for done, reports in ((1, []), (2, []), (9, []), (10, [report])):
        rows.after_step(done, reports)
    assert [(row["step"], row["speed/seconds_per_step"]) for row in told] == [(10, 2.0)]


def test_a_schedule_that_another_job_gives_goes_on() -> None:
    """A loop's cosine is numpy's, as is what a LambdaLR then keeps; a group may have a function."""

    class Odd(torch.optim.lr_scheduler.LambdaLR):
        def state_dict(self) -> dict[str, Any]:
            return super().state_dict() | {"rule": len}

    def made(schedule: Any, rate: Any) -> tuple[Any, Any, Job]:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        optimizer.param_groups[0]["rule"] = lambda name: "bias" in name
        schedule = schedule(optimizer, lambda step: np.float64(0.5) ** step)
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            schedule.step()
        return optimizer, schedule, Job(0.0, optimizer, schedule, model=model)

    _, _, giver = made(torch.optim.lr_scheduler.LambdaLR, np.float32(0.5))
    optimizer, schedule, own = made(torch.optim.lr_scheduler.LambdaLR, 0.1)
    own.take(giver.state.copy(7))
    assert own.state.inner_from == 7
    assert optimizer.param_groups[0]["lr"] == 0.0625
    assert type(optimizer.param_groups[0]["lr"]) is float
    assert optimizer.param_groups[0]["rule"]("bias")
    assert schedule.get_last_lr() == [0.0625]
    line = "part 1 of inner begins anew: .* more than numbers, text and tensors"
    with pytest.warns(UserWarning, match=line):
        own.take(made(Odd, 0.1)[2].state.copy(9))
    assert own.state.inner_from == 7


class Refuses(torch.optim.lr_scheduler.ConstantLR):
    """A schedule that cannot load what it is given."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("horizon")


@pytest.mark.parametrize(
    ("change", "schedule", "why"),
    [
        (lambda inner: inner.pop("others"), None, "inner is adamw here, and adamw for "),
        (lambda inner: inner.update(settings={"0": 7}), None, "its state cannot be read"),
        (lambda inner: inner["others"].update({"inner.sum": 7.0}), None, "its sum cannot be read"),
        (lambda inner: inner["others"].pop("inner.step"), None, "its step is missing"),
        (
            lambda inner: inner.update(named={"x": {"inner.exp_inf": None}}),
            None,
            "its exp_inf cannot be read",
        ),
        (lambda inner: None, Refuses, "part 1 of inner begins anew: .*'horizon'"),
    ],
)
def test_unreadable_optimizer_field_costs_its_state_alone(
    change: Callable[[Any], object], schedule: Any, why: str
) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    own = Job(0.0, optimizer, (schedule or torch.optim.lr_scheduler.ConstantLR)(optimizer), model=model)
    given = own.state.copy(3)
    change(given.facts["inner"])
    given = given._replace(vectors=given.vectors | {"unknown": torch.ones(6)})
    before = [moment.clone() for moment in optimizer.state[model.weight].values()]
    given.vectors["inner.exp_avg"].fill_(9.0)
    with pytest.warns(UserWarning, match=f"the inner optimizer begins anew: {why}"):
        own.take(given)
    assert own.state.inner_from == -1
    own.outer.restore.assert_called_once()
    assert "unknown" not in own.outer.restore.call_args.args[0]
    assert all(map(torch.equal, before, optimizer.state[model.weight].values()))


def test_a_taker_with_other_groups_says_that_it_keeps_its_rates() -> None:
    own, given = (nn.Linear(2, 2) for _ in range(2))
    groups = [{"params": [own.weight], "lr": 0.1}, {"params": [own.bias], "lr": 0.2}]
    optimizer = torch.optim.SGD(groups)
    state = Job(2.0, torch.optim.SGD(given.parameters(), lr=0.5), model=given).state.copy(20)
    with pytest.warns(
        UserWarning, match="keeps its own learning rates: it has 2 groups .* here, and 1 where"
    ):
        Job(0.0, optimizer, model=own).take(state)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]


def test_the_round_of_a_leave_counts_as_met() -> None:
    """So `close` does not warn that this job trained alone."""
    own, alone = Job(0.0), RoundReport(0, ExchangeReport((0,)), math.nan, 1.0)
    met = RoundReport(1, ExchangeReport((0, 1)), 0.5, 1.0)
    own.outer.settings, own.outer.place = NolocoSettings(), Place(0, None)
    peers = Mock(rounds=lambda done: [alone], leave=lambda done: Boundary(done, rounds=[met]))
    peers.catch_up = Boundary
    noloco = attached.Attached(own.engine, 0, own.state, peers, None)
    noloco.step()
    assert noloco.leave() == [met]
    noloco.close(at_once=True)
    peers.summary.assert_called_once_with(1, 2)


def test_a_resume_continues_with_what_is_registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_noloco.federation.membership.FIRST_SECONDS", 0.0)
    model, counts = nn.Linear(2, 2), list[dict[str, Any]]()
    where = FederationSettings(rendezvous=f"file://{tmp_path}", key_file=key_file(tmp_path))
    registered = {"count": (lambda: {"seen": 7}, counts.append)}
    begin = partial(attach, model, NolocoSettings(), federation=where, slot=0, registered=registered)
    noloco = begin()
    file = io.BytesIO()
    torch.save({name: value.clone() for name, value in noloco.state_dict().items()}, file)
    noloco.close()
    assert counts == []
    file.seek(0)
    begin(state=torch.load(file, weights_only=True)).close()
    assert counts == [{"seen": 7}]


def test_a_resume_names_what_is_registered_on_one_side_only() -> None:
    outer: Any = SimpleNamespace(state=dict, restore=Mock())
    engine, first = Job(0.0).engine, {"weights": "00", "buffers": "00"}
    before, own = (JobState(engine, outer, None, {name: (int, print)}, first) for name in ("old", "new"))
    with pytest.warns(UserWarning, match="begins anew") as lines:
        assert own.restore(before.state_dict(3)) == 3
    assert [str(line.message) for line in lines] == [
        "new begins anew: it was not given to attach where the state comes from",
        "old begins anew: the state has it, but it is not registered",
    ]
    with pytest.warns(UserWarning, match="new begins anew: it was not given"):
        own.restore({"local_steps_done": torch.tensor(3)})


def test_a_registered_state_that_cannot_be_saved_is_named() -> None:
    outer: Any = SimpleNamespace(state=dict)
    more = {"data": (lambda: {len: len}, print)}
    own = JobState(Job(0.0).engine, outer, None, more, {"weights": "00", "buffers": "00"})
    line = "registered 'data': it is made of more than numbers, text and tensors"
    with pytest.raises(ValueError, match=line):
        own.state_dict(3)
