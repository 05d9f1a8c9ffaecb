"""The state of a DeepSpeed engine: its master weights, and everything else that training changes.

DeepSpeed's own savers begin and end with a barrier over the whole world, that is over all replicas. They write
pickles, which only fit ranks with the same stages, tensor-parallel and data-parallel sizes. Here one rank takes
its state and puts it back without files and, until the working weights are refreshed, without other ranks: flat
vectors laid out as `FlatPart` says, and a few numbers that are the same on all ranks of a replica. The working
weights are not saved: they are the rounded master weights.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn

from megatron_noloco.outer.weights import Weights

_FAST, _INNER = PREFIXES = ("fast_weights.", "inner.")  # of the names of all tensors here
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_LOSS_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")  # the rest is configured


class MasterWeights(Weights):
    """The fp32 weights that this rank owns, for the outer optimizer: 1/dp of those of its stage and tp rank.

    Args:
        optimizer: DeepSpeed's of ZeRO stages 1 and 2 (`single_partition_of_fp32_groups`), or its BF16_Optimizer
            (`fp32_groups_flat_partition`).
        dp_rank: of this rank.
        copied: parameters that other stages or tensor-parallel ranks of the replica hold as well.
    """

    def __init__(self, optimizer: Any, dp_rank: int = 0, copied: Collection[nn.Parameter] = ()) -> None:
        self._optimizer = optimizer
        self._dp_rank = dp_rank
        self._copied = set(copied)  # parameters compare by identity

    def copied(self) -> list[tuple[int, int]]:
        ranges, before = [], 0
        for parameters, part in zip(bit16_groups(self._optimizer), self.parts(), strict=True):
            place = before - self._dp_rank * len(part)  # of the group's first parameter in our vector
            for parameter in parameters:
                start, place = place, place + parameter.numel()
                first, last = max(start, before), min(place, before + len(part))
                if parameter in self._copied and first < last:
                    ranges.append((first, last))
            before += len(part)
        return ranges

    def parts(self) -> list[Tensor]:
        if isinstance(self._optimizer, BF16_Optimizer):
            return [part.detach() for part in self._optimizer.fp32_groups_flat_partition]
        return [part.detach() for part in self._optimizer.single_partition_of_fp32_groups]

    def refresh(self) -> None:
        """Round the master weights to the working precision and gather them over the replica's dp ranks."""
        self._optimizer.update_lp_params()


def bit16_groups(optimizer: Any) -> list[list[nn.Parameter]]:
    """Return the parameters of each group, in the order in which the flat partitions hold them."""
    groups: list[list[nn.Parameter]] = getattr(optimizer, "bf16_groups", None) or optimizer.bit16_groups
    return groups


def tensors_of(engine: DeepSpeedEngine, weights: MasterWeights) -> dict[str, Tensor]:
    """Return live tensors by name, for each group G of the inner optimizer.

    "fast_weights.G" are the master weights, and "inner.NAME.G" is each thing the inner optimizer keeps: either one
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
    """Return counters, the schedule's step (None without a schedule) and a dynamic loss scale, for JSON."""
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
    """Put back what `tensors_of` and `numbers_of` returned, and refresh the working weights over the dp ranks.

    Hyperparameters such as the learning rate come from this run's config. The inner optimizer keeps the
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
    """Set counters and learning rate to those of `steps` local steps later."""
    engine.global_steps += steps
    if engine.lr_scheduler is not None:
        engine.lr_scheduler.step(engine.lr_scheduler.last_batch_iteration + steps)


def _scaler(engine: DeepSpeedEngine) -> dict[str, Any]:
    """Return the attributes of the loss scaler, live; empty where the scale never changes."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    return vars(scaler) if getattr(scaler, "dynamic", False) else {}
