"""What no integration test on a CPU can reach of a DeepSpeed engine: fp16, DeepSpeed's kernels."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # before deepspeed is imported: else it guesses, and says so

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.lr_schedules import WarmupLR
from torch import Tensor, nn

from megatron_noloco.config.optimizer_block import AdamOptimizer
from megatron_noloco.engine import state
from megatron_noloco.training.prepare import _check_kernel


class Kernel(torch.optim.Optimizer):
    """Keeps its count of steps as DeepSpeed's fused kernels do: as a Python integer."""

    def __init__(self, flat: Tensor) -> None:
        super().__init__([flat], {"lr": 0.5})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            kept = self.state[group["params"][0]]
            kept["step"] = kept.get("step", 0) + 1
            kept["exp_avg"] = torch.full((4,), float(kept["step"]))
            kept["unused"] = None


class Weights:
    """One group of four weights."""

    def __init__(self) -> None:
        self.flat = torch.zeros(4)
        self.refreshed = 0

    def parts(self) -> list[Tensor]:
        return [self.flat]

    def refresh(self) -> None:
        self.refreshed += 1


def engine_of(weights: Weights, scheduler: bool, scale: float = 2.0**16) -> Any:
    inner = Kernel(weights.flat)
    scaler = DynamicLossScaler(scale, 2.0, 5, 1.0, 2, False)
    return SimpleNamespace(
        optimizer=SimpleNamespace(optimizer=inner, loss_scaler=scaler),
        lr_scheduler=WarmupLR(inner, 0.0, 1.0, 10, "linear") if scheduler else None,
        global_steps=0,
        global_samples=0,
        skipped_steps=0,
    )


def saved(scheduler: bool) -> tuple[dict[str, Tensor], dict[str, Any], Any]:
    """State, and the engine it is of, after two steps and an overflow."""
    weights = Weights()
    engine = engine_of(weights, scheduler)
    for overflow in (False, True, False):
        engine.global_steps += 1
        engine.skipped_steps += overflow
        if not overflow:
            engine.optimizer.optimizer.step()
            if scheduler:
                engine.lr_scheduler.step()
    weights.flat.fill_(7.0)
    scaler = engine.optimizer.loss_scaler
    scaler.cur_scale, scaler.cur_iter, scaler.last_overflow_iter, scaler.cur_hysteresis = 2.0**15, 3, 1, 1
    tensors = {name: tensor.clone() for name, tensor in state.tensors_of(engine, weights).items()}  # type: ignore[arg-type]
    return tensors, json.loads(json.dumps(state.numbers_of(engine))), engine


def test_kernel_and_loss_scale_counters_are_restored() -> None:
    tensors, numbers, before = saved(scheduler=True)
    assert set(tensors) == {"fast_weights.0", "inner.step.0", "inner.exp_avg.0"}
    weights = Weights()
    engine = engine_of(weights, scheduler=True, scale=1.0)
    state.restore(engine, weights, tensors.items(), numbers)  # type: ignore[arg-type]
    assert torch.equal(weights.flat, torch.full((4,), 7.0))
    assert weights.refreshed == 1
    kept = engine.optimizer.optimizer.state[weights.flat]
    assert (kept["step"], type(kept["step"])) == (2, int)
    assert torch.equal(kept["exp_avg"], torch.full((4,), 2.0))
    assert vars(engine.optimizer.loss_scaler) == vars(before.optimizer.loss_scaler)
    assert (engine.global_steps, engine.skipped_steps) == (3, 1)
    assert engine.lr_scheduler.get_last_lr() == before.lr_scheduler.get_last_lr()


def test_new_schedule_starts_at_resumed_step() -> None:
    tensors, numbers, _ = saved(scheduler=False)
    *_, other = saved(scheduler=True)
    weights = Weights()
    engine = engine_of(weights, scheduler=True)
    state.restore(engine, weights, tensors.items(), numbers)  # type: ignore[arg-type]
    assert engine.lr_scheduler.get_last_lr() == other.lr_scheduler.get_last_lr()


def test_a_kernel_that_cannot_be_compiled_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    with pytest.raises(ValueError, match=r"^optimizer.params.torch_adam false: DeepSpeed compiles .*[^\n]*$"):
        _check_kernel(AdamOptimizer(type="AdamW", params={"torch_adam": False}))


@pytest.mark.parametrize("round_robin", [False, True])
def test_partitioned_weights_are_found_on_each_rank(
    round_robin: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of parameters of 3, 4 and 2 elements ZeRO divides 10 among two ranks, padding included."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: group)
    first, second, third = (nn.Parameter(torch.zeros(size)) for size in (3, 4, 2))
    found = []
    for rank in range(2):
        optimizer = SimpleNamespace(
            bit16_groups=[[first, second, third]],
            single_partition_of_fp32_groups=[torch.zeros(5)],
            real_dp_process_group=[rank],
        )
        if round_robin:  # the second parameter comes last
            optimizer.round_robin_bit16_groups = [[first, third, second]]
            optimizer.round_robin_bit16_offsets = [[0, 3, 5]]
        found.append(state.MasterWeights(optimizer, [second]).copied())
    assert found == ([[], [(0, 4)]] if round_robin else [[(3, 5)], [(0, 2)]])
