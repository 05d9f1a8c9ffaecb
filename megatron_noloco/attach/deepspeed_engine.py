"""Rounds for a DeepSpeed engine that a loop trains: the fp32 weights of each ZeRO stage.

Uses attributes of DeepSpeed 0.19.8 that are not public; the tests fail when they change.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_noloco.attach.inner import OwnPart, check_modes
from megatron_noloco.attach.torch_module import ReplicatedWeights, noticing_loads
from megatron_noloco.attach.trained import Stateful, Trained
from megatron_noloco.engine.state import MasterWeights
from megatron_noloco.outer.weights import Weights

# Of ZeRO 1 and 2; of ZeRO 1 in bf16 with gradients in fp32. `MasterWeights` reads both.
_PARTITIONS = ("single_partition_of_fp32_groups", "fp32_groups_flat_partition")


def trained_by_deepspeed(engine: Any) -> Trained:
    """Return the fp32 weights that this rank exchanges; with ZeRO 1 to 3, those that it owns.

    Warns where Muon optimizes none of the weights. Raises ValueError for weights on NVMe, for an optimizer without
    fp32 weights, as `check_modes` does, and for experts whose groups leave the replica.
    """
    check_muon(engine)
    check_modes(engine.optimizer)
    _check_experts(engine)
    return Trained(
        _weights_of(engine),
        dist.get_process_group_ranks(engine.data_parallel_group),
        ("give deepspeed.initialize mpu=ReplicaGroups({replicas})", "give deepspeed.initialize no mpu"),
        lambda: int(engine.global_steps),
        while_attached=partial(noticing_loads, engine.module),
        modules=[engine.module],
    )


def check_muon(engine: Any) -> None:
    """Warn where DeepSpeed's Muon optimizes none of the weights; DeepSpeed does not say that all have AdamW.

    It was so with ZeRO 3 and models built under `deepspeed.zero.Init`, see its pull request 8438.
    """
    trained = (parameter for parameter in engine.module.parameters() if parameter.requires_grad)
    if engine.optimizer_name() == "muon" and not any(getattr(one, "use_muon", False) for one in trained):
        warnings.warn(
            "DeepSpeed's Muon has no weight to optimize: use_muon is True for none that is trained, so that all "
            "have AdamW; it is for matrices whose names have no embed and no lm_head",
            stacklevel=5,
        )


def _check_experts(engine: Any) -> None:
    """DeepSpeed makes the groups of experts from all ranks of the job, also where it is given an mpu."""
    own = dist.get_process_group_ranks(engine.data_parallel_group)
    for groups in (engine.expert_data_parallel_group, engine.expert_parallel_group):
        for group in groups.values():
            ranks = dist.get_process_group_ranks(group)
            if engine.has_moe_layers and not set(ranks) <= set(own):
                raise ValueError(
                    f"attach: a group of DeepSpeed's experts spans ranks {ranks}, the data-parallel group is "
                    f"{own}; with experts each replica has to be a job of its own (federation)"
                )


def state_of_optimizer(optimizer: Any) -> Stateful:
    """Return what has this rank's state of DeepSpeed's optimizer, without the loss scale; others as they are."""
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return OwnPart([optimizer.optimizer], partial(_with_weights_of_zero_3, optimizer))
    if hasattr(optimizer, "refresh_fp32_params"):
        return OwnPart([optimizer.optimizer])
    schedule_or_of_torch: Stateful = optimizer
    return schedule_or_of_torch


@contextmanager
def _with_weights_of_zero_3(optimizer: Any) -> Iterator[None]:
    """ZeRO 3 gives its inner optimizer one flat group after the other, and none between two steps."""
    optimizer._set_fp32_optimizer_param_groups()
    try:
        yield
    finally:
        optimizer._clear_fp32_optimizer_param_groups()


def _weights_of(engine: Any) -> Weights:
    optimizer = engine.optimizer
    if getattr(optimizer, "swap_optimizer", False):
        raise ValueError("zero_optimization.offload_optimizer: weights on NVMe cannot be exchanged; use cpu")
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return Zero3Weights(optimizer)
    if any(hasattr(optimizer, name) for name in _PARTITIONS):
        return MasterWeights(optimizer)
    return _weights_of_zero_0(engine)


def _weights_of_zero_0(engine: Any) -> ReplicatedWeights:
    expert_groups = engine.expert_parallel_group.values() if engine.has_moe_layers else ()
    if any(dist.get_world_size(group) > 1 for group in expert_groups):
        raise ValueError("attach: each rank has experts of its own; use zero_optimization.stage 1")
    optimizer, rounded = engine.optimizer, []
    if hasattr(optimizer, "fp32_groups_flat"):
        # Around FusedAdam, parameters are views of the flat 16-bit groups.
        rounded = list(zip(optimizer.fp32_groups_flat, optimizer.fp16_groups_flat, strict=True))
        exact = [weight for weight, _ in rounded]
    elif hasattr(optimizer, "fp32_groups"):  # in bf16 and fp16
        groups = zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True)
        rounded = [pair for exact, half in groups for pair in zip(exact, half, strict=True)]
        exact = [weight for weight, _ in rounded]
    else:
        exact = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
    if any(weight.dtype != torch.float32 for weight in exact):
        raise ValueError(
            f"the weights of {type(optimizer).__name__} are not in fp32; use zero_optimization.stage 1"
        )
    return ReplicatedWeights(exact, engine.data_parallel_group if engine.dp_world_size > 1 else None, rounded)


class Zero3Weights(Weights):
    """The part of each parameter that this rank owns, without the padding of the last ranks."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._parts = list(self._without_padding())

    def _without_padding(self) -> Iterator[Tensor]:
        flat_and_parameters = zip(
            self._optimizer.fp32_partitioned_groups_flat, self._optimizer.fp16_groups, strict=True
        )
        for flat, parameters in flat_and_parameters:
            start = 0
            for parameter in parameters:
                length = parameter.ds_tensor.numel()
                left = parameter.ds_numel - length * dist.get_rank(parameter.ds_process_group)
                yield flat[start : start + max(0, min(length, left))]
                start += length

    def parts(self) -> Sequence[Tensor]:
        return [part.detach() for part in self._parts]

    def refresh(self) -> None:
        """Round to the working precision, and gather the parameters that ZeRO keeps whole on every rank."""
        for group in range(len(self._optimizer.fp32_partitioned_groups_flat)):
            self._optimizer._reassign_or_swap_out_partitioned_parameters(group)
        if kept := self._optimizer.persistent_parameters:
            kept[0].partition(kept, has_been_updated=False)
            kept[0].all_gather(kept)
