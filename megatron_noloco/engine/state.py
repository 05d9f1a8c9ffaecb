"""The state of a DeepSpeed engine as tensors and numbers, taken and put back by one rank, without files.

DeepSpeed's own savers begin and end with a barrier over the whole world, that is over all replicas. They write
pickles, and these fit ranks with the same stages, tensor-parallel and data-parallel sizes only. Everything that
training has changed is here instead: flat vectors laid out as `FlatPart` says, and a few numbers that are the
same on all ranks of a replica. The working weights are not among them: they are the rounded master weights.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from megatron_noloco.engine.weights import MasterWeights

_FAST, _INNER = PREFIXES = ("fast_weights.", "inner.")  # of the names of all tensors here
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_LOSS_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")  # the rest is configured


def tensors_of(engine: DeepSpeedEngine, weights: MasterWeights) -> dict[str, Tensor]:
    """Live tensors by name, for each group G of the inner optimizer.

    "fast_weights.G", the master weights, and for whatever the inner optimizer keeps "inner.NAME.G": either one
    number for each weight, shape [FlatPart.length], or one for all of them, shape [], such as a count of steps.
    """
    inner = engine.optimizer.optimizer
    tensors = {}
    for index, (part, group) in enumerate(zip(weights.parts(), inner.param_groups, strict=True)):
        tensors[f"{_FAST}{index}"] = part
        (flat,) = group["params"]  # ZeRO's partition took the place of the parameters
        for name, value in inner.state.get(flat, {}).items():
            if value is not None:
                tensors[f"{_INNER}{name}.{index}"] = torch.as_tensor(value)
    return tensors


def numbers_of(engine: DeepSpeedEngine) -> dict[str, Any]:
    """Counters, the step of the learning-rate schedule (None without one) and a dynamic loss scale, for JSON."""
    scheduler = engine.lr_scheduler
    return {
        **{name: getattr(engine, name) for name in _COUNTERS},
        "schedule_step": None if scheduler is None else scheduler.last_batch_iteration,
        "loss_scale": {name: value for name, value in _scaler(engine).items() if name in _LOSS_SCALE},
    }


def restore(
    engine: DeepSpeedEngine,
    weights: MasterWeights,
    tensors: Iterable[tuple[str, Tensor]],
    numbers: Mapping[str, Any],
) -> None:
    """Put back what `tensors_of` and `numbers_of` gave; the working weights follow, over the replica's dp ranks.

    Hyperparameters, the learning rate among them, are those of this run's config. The inner optimizer keeps the
    tensors that it is given.
    """
    state: dict[int, dict[str, Any]] = {}
    parts = weights.parts()
    for full_name, tensor in tensors:
        name, _, index = full_name.rpartition(".")
        if full_name.startswith(_FAST):
            parts[int(index)].copy_(tensor)
        else:  # counts that are no floating tensors are Python's integers in DeepSpeed's kernels
            value = tensor if tensor.is_floating_point() else tensor.item()
            state.setdefault(int(index), {})[name.removeprefix(_INNER)] = value
    weights.refresh()
    inner = engine.optimizer.optimizer
    inner.load_state_dict({"state": state, "param_groups": inner.state_dict()["param_groups"]})
    for name in _COUNTERS:
        setattr(engine, name, numbers[name])
    _scaler(engine).update(numbers["loss_scale"])
    if engine.lr_scheduler is not None:
        step = numbers["schedule_step"]
        if step is None:
            step = engine.global_steps - engine.skipped_steps - 1
        engine.lr_scheduler.step(step)  # the rate of that step, by this schedule


def advance(engine: DeepSpeedEngine, steps: int) -> None:
    """The counters and the learning rate of so many local steps later."""
    engine.global_steps += steps
    if engine.lr_scheduler is not None:
        engine.lr_scheduler.step(engine.lr_scheduler.last_batch_iteration + steps)


def _scaler(engine: DeepSpeedEngine) -> dict[str, Any]:
    """The attributes of the loss scaler, live; nothing where the scale never changes."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    return vars(scaler) if getattr(scaler, "dynamic", False) else {}
