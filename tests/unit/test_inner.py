"""Optimizers whose state holds weights, which rounds would not move."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron_noloco.attach import attach
from megatron_noloco.attach.inner import check_no_weights
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
        slots=2, rendezvous=f"file://{tmp_path}", listen="tcp://127.0.0.1:0", encryption="none"
    )
    noloco = attach(model, NolocoSettings(local_steps=2), federation=federation, slot=0, inner=optimizer)
    trained(optimizer, model)
    assert noloco.step() == []
    trained(optimizer, model)
    with pytest.raises(ValueError, match="keeps weights of its own"):
        noloco.step()
    noloco.close()
    noloco.close()  # does nothing
