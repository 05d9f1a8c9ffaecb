"""The engine on a GPU against plain torch on it, and what a local step waits for."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_noloco.engine.replica import ReplicaEngine
from megatron_noloco.plans.routing import Routing
from tests.gpu.training import LOCAL, STEPS, trained
from tests.kit.tiny import MUON, build, microbatch, tiny

pytestmark = pytest.mark.gpu

BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}  # dynamic
OVERFLOWING = {"fp16": {"enabled": True, "initial_scale_power": 32, "hysteresis": 1}}


def plain_torch(changes: dict[str, Any], scale: float = 1.0) -> tuple[list[float], dict[str, Tensor]]:
    """The same model with autograd, torch's clipping and torch's AdamW on fp32 master weights."""
    config, groups, stage = build(tiny(changes, tiny(LOCAL)), 1)
    chunk = stage.chunks[0].cuda()
    named = {row.name: parameter for row, parameter in stage.named_rows()}
    masters = {name: parameter.detach().float().clone() for name, parameter in named.items()}
    decays = [master for master in masters.values() if master.dim() > 1]
    others = [master for master in masters.values() if master.dim() == 1]
    given = config.as_deepspeed()["optimizer"]["params"]
    params = {name: given[name] for name in ("lr", "betas", "eps", "weight_decay")}
    grouped: list[dict[str, Any]] = [{"params": decays}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(grouped, **params)
    losses = []
    for step in range(STEPS):
        losses.append(0.0)
        for master in masters.values():
            master.grad = torch.zeros_like(master)
        for index in range(config.microbatches):
            tokens, labels, _ = microbatch(config, groups, step, 0, index)
            loss = chunk(tokens.cuda(), None, None, labels=labels.cuda()).float().mean()
            losses[-1] += float(loss) / config.microbatches
            (loss * scale / config.microbatches).backward()
            if config.precision != "fp16":  # there DeepSpeed has autograd add up, in fp16
                _move_gradients(named, masters)
        if config.precision == "fp16":
            _move_gradients(named, masters)
        for master in masters.values():
            master.grad.div_(scale)  # type: ignore[union-attr]
        torch.nn.utils.clip_grad_norm_(masters.values(), config.as_deepspeed()["gradient_clipping"])
        optimizer.step()
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.copy_(masters[name])
    return losses, {name: parameter.detach().float() for name, parameter in named.items()}


def _move_gradients(parameters: dict[str, Any], masters: dict[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        masters[name].grad.add_(parameter.grad.float())  # type: ignore[union-attr]
        parameter.grad = None


@pytest.mark.parametrize(
    ("changes", "scale", "tolerance"),
    [({}, 1.0, 1e-5), (BF16, 1.0, 0.02), (FP16, 256.0, 0.005)],
    ids=["fp32", "bf16", "fp16"],
)
def test_equals_plain_torch(changes: dict[str, Any], scale: float, tolerance: float) -> None:
    losses, _, weights = trained(changes)
    expected_losses, expected = plain_torch(changes, scale)
    assert losses[-1] < losses[0] - 0.3, "it learns"
    assert losses == pytest.approx(expected_losses, abs=tolerance)
    for name, weight in expected.items():
        assert float((weights[name] - weight).abs().max()) < tolerance, name


def test_a_dynamic_scale_goes_down_where_fp16_overflows() -> None:
    _, recorded, _ = trained(OVERFLOWING, steps=30)
    skipped = int(sum(recorded["train/skipped_steps"]))
    assert 0 < skipped < 30
    assert recorded["train/loss_scale"][-1] == pytest.approx(2.0 ** (32 - skipped))
    assert recorded["train/skipped_steps"][-1] == 0, "it ends where nothing overflows"


@pytest.mark.parametrize(
    ("changes", "waits"), [({}, 3), (BF16, 4), (FP16, 3), (MUON, 3)], ids=["fp32", "bf16", "fp16", "Muon"]
)
def test_what_a_local_step_waits_for(changes: dict[str, Any], waits: int) -> None:
    """The norm of the gradients; before it a copy and a read, to mark one that is not finite; in DeepSpeed's bf16
    optimizer whether it is to be clipped."""
    config, groups, stage = build(tiny(changes, tiny(LOCAL)), 1)
    values: list[Any] = []
    engine = ReplicaEngine(stage, groups, config.as_deepspeed(), lambda name, value, *_: values.append(value))
    routes = Routing(1, config.microbatches, 0, "off").straight()
    read = [microbatch(config, groups, 0, 0, index) for index in range(config.microbatches)]
    pinned = [(tokens.pin_memory(), labels.pin_memory(), None) for tokens, labels, _ in read]
    for _ in range(3):
        engine.train_batch(lambda replica, index: pinned[index], routes)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            engine.train_batch(lambda replica, index: pinned[index], routes)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    places = [
        f"{warning.filename}:{warning.lineno}"
        for warning in found
        if "called a synchronizing CUDA operation" in str(warning.message)
    ]
    assert len(places) == waits, places
