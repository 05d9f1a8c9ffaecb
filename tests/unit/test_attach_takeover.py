"""What a job that is attached accepts as the state of another, and what it does with it."""

import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from megatron_noloco.attach import attach, job_state
from megatron_noloco.attach.attached import inner_state
from megatron_noloco.attach.job_state import JobState
from megatron_noloco.federation import takeover as taking
from megatron_noloco.federation.handover import Snapshot
from megatron_noloco.outer.weights import TorchWeights
from megatron_noloco.plans.topology import Topology
from megatron_noloco.settings import FederationSettings, NolocoSettings

RANKS, ELEMENTS = 8, 100  # of the replica; weights of each rank
TOPOLOGY = Topology(dp=RANKS, slot=1, slots=2)


class Gives:
    """A `Handover` that takes what one replica gives."""

    place = TOPOLOGY.place(0)

    def __init__(self, snapshot: Snapshot, step: int) -> None:
        self._snapshot, self._step = snapshot, step

    def steps(self) -> dict[int, int]:
        return {0: self._step}

    def ask(self, rank: int, seconds: float) -> tuple[int, bytes]:
        return 1, self._snapshot.description

    def wait_for(self, rank: int) -> None:
        pass

    def take(self, rank: int, tag: int, buffers: Sequence[Tensor]) -> None:
        for buffer, part in zip(buffers, self._snapshot.parts, strict=True):
            buffer.copy_(torch.tensor(part))


class Ranks:
    """What all ranks of the taker say, where the second one was offered another step at first."""

    def __init__(self, others: int) -> None:
        self._others = others

    def __call__(self, own: Any) -> list[Any]:
        if not isinstance(own, tuple) or not self._others:
            return [own, own]
        self._others -= 1
        return [own, ("", False, own[2] + 4)]


class Inner:
    """An inner optimizer of all weights of the replica, which loads weights as well."""

    def __init__(self, value: float, weight: Tensor) -> None:
        self.moments, self._weight = torch.full((2, RANKS * ELEMENTS), value), weight

    def state_dict(self) -> dict[str, Any]:
        return {"moments": self.moments, "masters": torch.full((ELEMENTS,), 7.0)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.moments = state["moments"]
        self._weight.copy_(state["masters"])


def rank(value: float) -> tuple[Any, Inner]:
    """The first rank of a replica: what is read of its outer optimizer, and its inner one."""
    weight = torch.full((ELEMENTS,), value)
    outer = SimpleNamespace(
        weights=TorchWeights([weight]),
        place=TOPOLOGY.place(0),
        state=lambda wait: {"slow_weights": torch.full((ELEMENTS,), value + 1)},
    )
    return outer, Inner(value, weight)


def taken(step: int, told: int, least: int = 1) -> tuple[dict[str, Tensor] | None, Any, Inner]:
    """Take the state of `step` from one that told another step before."""
    outer, inner = rank(0.0)
    giver, its_inner = rank(2.0)
    gives: Any = Gives(JobState(giver, its_inner, ()).copy(step)(), told)
    return JobState(outer, inner, ()).take_over(gives, least, 1.0), outer, inner


def test_the_inner_state_may_be_that_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with DistributedDataParallel: each rank exchanges a part of the weights, and steps with all of them."""
    monkeypatch.setattr(job_state, "_OTHER_BYTES", 4096)  # of names; the rest is a small part of a real state
    state, outer, inner = taken(step=20, told=20)
    assert state is not None
    assert int(state["local_steps_done"]) == 20
    assert (state["slow_weights"] == 3.0).all()
    assert (inner.moments == 2.0).all()
    assert (outer.weights.read() == 2.0).all(), "not what the inner optimizer loads"


def normalised(value: float, wrap: bool = False) -> nn.Module:
    """A module with running statistics, and with a buffer that no checkpoint has."""
    made = nn.Sequential(nn.BatchNorm1d(3))
    made.register_buffer("scratch", torch.full((2,), value), persistent=False)
    for buffer in (made[0].running_mean, made[0].running_var, made[0].num_batches_tracked):
        buffer.fill_(value)  # type: ignore[union-attr, operator]
    return torch.compile(made) if wrap else made  # type: ignore[return-value]


@pytest.mark.parametrize("wrap", [False, True])
def test_buffers_that_a_checkpoint_has_are_taken_over(wrap: bool) -> None:
    (giver, _), (outer, _), own = rank(2.0), rank(0.0), normalised(0.0)
    gives: Any = Gives(JobState(giver, None, [normalised(2.0, wrap)]).copy(20)(), 20)
    assert JobState(outer, None, [own]).take_over(gives, 1, 1.0) is not None
    assert {name: buffer.unique().tolist() for name, buffer in own.named_buffers()} == {
        "scratch": [0.0],
        "0.running_mean": [2.0],
        "0.running_var": [2.0],
        "0.num_batches_tracked": [2],
    }


def test_a_state_with_other_buffers_is_not_taken(recwarn: pytest.WarningsRecorder) -> None:
    (giver, _), (outer, _) = rank(2.0), rank(0.0)
    gives: Any = Gives(JobState(giver, None, [nn.BatchNorm1d(3)]).copy(20)(), 20)
    assert JobState(outer, None, [normalised(0.0)]).take_over(gives, 1, 1.0) is None
    (line,) = (str(one.message) for one in recwarn)
    assert line.endswith("its buffers are not those of this model")
    assert not outer.weights.read().any()


def test_a_state_that_is_not_far_enough_is_not_taken() -> None:
    """The giver was started anew, from an earlier step, after it was asked."""
    with pytest.warns(UserWarning, match="replica 0 was not taken over: it is at local step 10 by now"):
        state, outer, inner = taken(step=10, told=50, least=40)
    assert state is None
    assert not outer.weights.read().any()
    assert not inner.moments.any()


@pytest.mark.parametrize(("others", "steps"), [(1, [20]), (2, [])])
def test_a_giver_whose_ranks_gave_copies_of_different_steps_is_asked_again(
    others: int, steps: list[int], monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """Once: one rank of it had a copy that was made for another taker, which had expired at the other one."""
    monkeypatch.setattr(taking, "of_all_ranks", Ranks(others))
    state, _, _ = taken(step=20, told=20)
    assert [int(found["local_steps_done"]) for found in (state,) if found is not None] == steps
    told = [str(one.message) for one in recwarn]
    assert told == ["the state of replica 0 was not taken over: its ranks offer the steps [20, 24]"] * (
        others - 1
    )


def test_an_attach_that_fails_leaves_the_federation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the state of the inner optimizer that was taken does not fit."""
    monkeypatch.setattr(JobState, "take_over", Mock(side_effect=KeyError("moments")))
    monkeypatch.setattr("megatron_noloco.federation.membership.FIRST_SECONDS", 0.0)
    where = FederationSettings(slots=2, rendezvous=f"file://{tmp_path}", encryption="none")
    with pytest.raises(KeyError, match="moments"):
        attach(torch.nn.Linear(2, 2), NolocoSettings(deadline_seconds=0.1), federation=where, slot=0)
    assert "federation" not in {thread.name for thread in threading.enumerate()}


def test_states_of_other_parts_are_refused_in_one_line() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule: Any = torch.optim.lr_scheduler.ConstantLR(optimizer)
    given = inner_state([optimizer, schedule]).state_dict()
    inner_state((optimizer, schedule)).load_state_dict(given)
    with pytest.raises(ValueError, match="attach: inner has 1 parts here, and 2 where the state comes from"):
        inner_state(optimizer).load_state_dict(given)
    with pytest.raises(ValueError, match="attach: inner is a Linear; give its optimizer"):
        inner_state(model)
