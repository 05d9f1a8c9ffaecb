"""Reads and restores the state of a DeepSpeed engine: its master weights, and all else that training changes.

DeepSpeed's own savers begin and end with a barrier over all replicas, and write pickles that fit only ranks with
the same pipeline, tensor-parallel and data-parallel sizes. The state here is that of one rank: flat vectors in the
layout of `FlatPart`, and a few numbers that are the same on all ranks of a replica. Only `restore` communicates,
to refresh the working weights, which are the rounded master weights and not part of the state.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn

from megatron_noloco.outer.vectors import number_tensor
from megatron_noloco.outer.weights import Weights
from megatron_noloco.plans.canonical import Piece, in_turn, pieces_between

_FAST, _INNER = PREFIXES = ("fast_weights.", "inner.")  # of all tensors' names
# Of ZeRO 1 and 2; of ZeRO 1 in bf16 with gradients in fp32.
PARTITIONS = ("single_partition_of_fp32_groups", "fp32_groups_flat_partition")
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_LOSS_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")  # all else is configured


class MasterWeights(Weights):
    """Shows the outer optimizer the fp32 weights that this rank owns: 1/dp of those of its stage and tp rank.

    Args:
        optimizer: DeepSpeed's, with one of the `PARTITIONS`.
        copied: parameters that other stages or tensor-parallel ranks of the replica have as well.
    """

    def __init__(self, optimizer: Any, copied: Collection[nn.Parameter] = ()) -> None:
        self._optimizer = optimizer
        self._copied = set(copied)  # parameters compare by identity

    def copied(self) -> list[tuple[int, int]]:
        return [
            (own, own + end - begin)
            for parameter, begin, end, own in self.pieces()
            if parameter in self._copied and begin < end
        ]

    def pieces(self) -> Iterator[Piece]:
        """Yield where the parameters of the optimizer lie in the vector, if need be with nothing of them."""
        own = 0
        for part, pieces in zip(self.parts(), self.pieces_of_groups(), strict=True):
            yield from (piece._replace(own=own + piece.own) for piece in pieces)
            own += len(part)

    def pieces_of_groups(self) -> Iterator[list[Piece]]:
        """Yield where the parameters of each group lie in its partition."""
        owners = self._optimizer.real_dp_process_group  # of each group, the ranks that divide its weights
        for part, laid, ranks in zip(self.partitions, self._laid(), owners, strict=True):
            start = dist.get_rank(ranks) * len(part)
            yield list(pieces_between(laid, start, start + len(part)))

    def _laid(self) -> Iterator[Iterable[tuple[Any, int, int]]]:
        """Yield the parameters of each group, their lengths, and their places in the vector that ZeRO divides."""
        optimizer = self._optimizer
        if not hasattr(optimizer, "round_robin_bit16_groups"):
            for group in bit16_groups(optimizer):
                yield in_turn((one, one.numel()) for one in group)
            return
        # ZeRO 1 and 2, which may change their order and align them
        groups = zip(optimizer.round_robin_bit16_groups, optimizer.round_robin_bit16_offsets, strict=True)
        for group, places in groups:
            yield [(one, one.numel(), at) for one, at in zip(group, places, strict=True)]

    @property
    def partitions(self) -> list[Tensor]:
        """This rank's part of each group, as the optimizer steps it."""
        return next(getattr(self._optimizer, name) for name in PARTITIONS if hasattr(self._optimizer, name))

    def parts(self) -> list[Tensor]:
        return [part.detach() for part in self.partitions]

    def refresh(self) -> None:
        """Round the master weights to the working precision and gather them over the replica's dp ranks."""
        self._optimizer.update_lp_params()


def bit16_groups(optimizer: Any) -> list[list[nn.Parameter]]:
    """Return the parameters of each group, in their order in the flat partitions."""
    groups: list[list[nn.Parameter]] = getattr(optimizer, "bf16_groups", None) or optimizer.bit16_groups
    return groups


def tensors_of(engine: DeepSpeedEngine, weights: MasterWeights) -> dict[str, Tensor]:
    """Return tensors by name, not copied, for each group G of the inner optimizer.

    "fast_weights.G" are the master weights, "inner.NAME.G" a state of the inner optimizer: one number for each
    weight, shape [FlatPart.length], or one for the group, shape [], such as a count of steps.
    """
    inner = engine.optimizer.optimizer
    tensors = {}
    for index, (part, group) in enumerate(zip(weights.parts(), inner.param_groups, strict=True)):
        tensors[f"{_FAST}{index}"] = part
        (flat,) = group["params"]  # ZeRO's partition took the place of the parameters
        for name, value in inner.state.get(flat, {}).items():
            if value is not None:
                tensors[f"{_INNER}{name}.{index}"] = value if torch.is_tensor(value) else number_tensor(value)
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
    """Restore what `tensors_of` and `numbers_of` returned, and refresh the working weights over the dp ranks.

    Hyperparameters such as the learning rate come from this run's config. The inner optimizer keeps the given
    tensors without a copy.
    """
    state: dict[int, dict[str, Any]] = {}
    parts = weights.parts()
    for full_name, tensor in tensors:
        name, _, index = full_name.rpartition(".")
        if full_name.startswith(_FAST):
            parts[int(index)].copy_(tensor)
        else:  # DeepSpeed's kernels need integer counts as Python's integers
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
        engine.lr_scheduler.step(step)  # sets that step's rate by this run's schedule


def advance(engine: DeepSpeedEngine, steps: int) -> None:
    """Set counters and learning rate as if `steps` more local steps were done."""
    engine.global_steps += steps
    if engine.lr_scheduler is not None:
        engine.lr_scheduler.step(engine.lr_scheduler.last_batch_iteration + steps)


def _scaler(engine: DeepSpeedEngine) -> dict[str, Any]:
    """Return the attribute dictionary of the loss scaler, not a copy; {} where the scale never changes."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    return vars(scaler) if getattr(scaler, "dynamic", False) else {}
