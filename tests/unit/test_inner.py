"""The state of inner optimizers: one that holds weights, which rounds would not move, and what jobs give of it."""

import io
import re
from collections import Counter
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megatron_noloco.attach import attach
from megatron_noloco.attach.inner import check_no_weights, inner_state, with_plain_numbers
from megatron_noloco.attach.torch_module import torch_adapter
from megatron_noloco.federation import membership
from megatron_noloco.settings import FederationSettings, NolocoSettings


class Keeping(torch.optim.SGD):
    """Keeps a copy of the weights, or the gradients, in its state."""

    def __init__(self, parameters: Any, kept: Callable[[nn.Parameter], Any]) -> None:
        super().__init__(parameters, lr=0.01)
        self._kept = kept

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["kept"] = self._kept(parameter)
        return super().step(closure)


def trained(optimizer: Any, model: nn.Module) -> None:
    torch.manual_seed(0)
    optimizer.zero_grad()
    model(torch.rand(8, 3)).square().mean().backward()
    optimizer.step()


def test_only_what_is_near_to_the_weights_counts_as_weights() -> None:
    model = nn.Linear(3, 2)
    copying = Keeping(model.parameters(), lambda parameter: parameter.detach().bfloat16().double())
    collecting = Keeping(model.parameters(), lambda parameter: 0.1 * parameter.grad)
    adam = torch.optim.AdamW(model.parameters())
    for optimizer in (copying, collecting, adam):
        check_no_weights(optimizer)  # no step has been taken
        trained(optimizer, model)
    check_no_weights(collecting)
    check_no_weights(adam)
    with pytest.raises(ValueError, match=r'^attach: Keeping keeps weights of its own \(state "kept"\)'):
        check_no_weights(copying)


def test_an_optimizer_with_weights_is_refused_before_the_first_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "FIRST_SECONDS", 0.0)
    model = nn.Linear(3, 2)
    optimizer = Keeping(model.parameters(), lambda parameter: parameter.detach().clone())
    federation = FederationSettings(
        rendezvous=f"file://{tmp_path}", listen="tcp://127.0.0.1:0", encryption="none"
    )
    noloco = attach(model, NolocoSettings(local_steps=2), federation=federation, slot=0, inner=optimizer)
    trained(optimizer, model)
    assert noloco.step() == []
    trained(optimizer, model)
    with pytest.raises(ValueError, match="keeps weights of its own"):
        noloco.step()
    noloco.close()
    noloco.close()  # does nothing


class Factored(torch.optim.SGD):
    """Keeps what is neither like a weight nor a number."""

    kept: Any = None

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["kept"] = self.kept
        return super().step(closure)


def given(model: nn.Module, *inner: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    adapter = torch_adapter(model)
    state = inner_state(inner)
    return state.vectors(adapter), state.rest(adapter)


@pytest.mark.parametrize(
    ("kept", "what"),
    [
        (torch.zeros(3), 'keeps "kept", of shape [3] and torch.float32, for a weight of shape [2, 3]'),
        (torch.zeros(2, 3, dtype=torch.uint8), 'keeps "kept", of shape [2, 3] and torch.uint8, for a weight'),
        ([1.0], 'keeps "kept", a list, for each weight'),
    ],
)
def test_a_state_that_is_neither_like_a_weight_nor_a_number_is_named(kept: Any, what: str) -> None:
    model = nn.Linear(3, 2)
    optimizer = Factored(model.parameters(), lr=0.1)
    Factored.kept = kept
    trained(optimizer, model)
    with pytest.raises(ValueError, match="^" + re.escape(f"Factored {what}")):
        given(model, optimizer)


@pytest.mark.parametrize("kept", [3, 0.5, torch.tensor(7)])
def test_numbers_are_taken_as_they_were_kept(kept: Any) -> None:
    model = nn.Linear(3, 2)
    optimizer = Factored(model.parameters(), lr=0.1)
    Factored.kept = kept
    trained(optimizer, model)
    vectors, rest = given(model, optimizer)
    assert (vectors, rest["optimizers"][0]["common"]) == ({}, {"kept": kept})
    fresh, adapter = Factored(model.parameters(), lr=0.1), torch_adapter(model)
    inner_state(fresh).load(adapter, vectors, rest)
    assert [fresh.state[one]["kept"] for one in model.parameters()] == [kept, kept]


class Counted(int, Enum):
    ONE = 1


def test_a_state_has_plain_numbers_alone() -> None:
    """As torch.load takes them, in what keeps its type."""
    numbers = {"a": np.float32(0.5), np.int64(2): [np.bool_(True), True, (Counted.ONE, "text", None)]}
    found = with_plain_numbers({"numbers": numbers, "milestones": Counter(np.array([3, 3]))})
    assert repr(found) == repr(
        {
            "numbers": {"a": 0.5, 2: [True, True, (1, "text", None)]},
            "milestones": Counter({3: 2}),
        }
    )
    assert [type(one) for one in found["numbers"][2][2]] == [int, str, type(None)]


def test_two_optimizers_and_a_schedule_go_on_as_those_whose_state_they_have() -> None:
    """To the last bit; the weights of one of the optimizers have taken fewer steps than others."""
    models = [nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)) for _ in range(2)]
    parts = []
    for model in models:
        adam = torch.optim.AdamW(model[0].parameters(), lr=0.1)
        sgd = torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9)
        parts.append((adam, sgd, torch.optim.lr_scheduler.CosineAnnealingLR(adam, 9)))

    def step(index: int, frozen: bool = False) -> list[Tensor]:
        models[index][0].bias.requires_grad_(not frozen)
        for optimizer in parts[index][:2]:
            trained(optimizer, models[index])
        parts[index][2].step()
        return [one.detach().clone() for one in models[index].parameters()]

    for number in range(4):
        step(0, frozen=number < 2)
    vectors, rest = given(models[0], *parts[0])
    assert vectors.keys() == {"inner.exp_avg", "inner.exp_avg_sq", "inner.momentum_buffer"}
    assert rest["optimizers"][0]["named"].keys() == {"0.bias"}
    file = io.BytesIO()
    torch.save(rest, file)
    rest = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    models[1].load_state_dict(models[0].state_dict())
    adapter, state = torch_adapter(models[1]), inner_state(parts[1])
    state.load(adapter, vectors, rest)
    for _ in range(3):
        assert all(map(torch.equal, step(0), step(1)))
    fewer = inner_state(parts[1][0])
    with pytest.raises(
        ValueError, match="inner is AdamW here, and AdamW and SGD and 1 other objects where the state comes"
    ):
        fewer.load(adapter, vectors, rest)
