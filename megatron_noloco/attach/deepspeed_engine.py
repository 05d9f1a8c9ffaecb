"""Rounds for a DeepSpeed engine that a loop trains; `engine.zero` knows where its fp32 weights lie."""

from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Any

import torch.distributed as dist

from megatron_noloco.attach.adapter import EngineAdapter
from megatron_noloco.attach.inner import check_modes
from megatron_noloco.attach.torch_module import ReplicatedWeights
from megatron_noloco.engine.zero import local_part, local_place, owned_weights, whole_weights
from megatron_noloco.errors import UserError
from megatron_noloco.plans.canonical import Matrix, Rectangle, blocks


def deepspeed_adapter(engine: Any) -> EngineAdapter:
    """Return the fp32 weights that this rank exchanges; with ZeRO 1 to 3, those that it owns.

    Raises UserError for weights on NVMe, for an optimizer without fp32 weights, as `check_modes` does, and for
    experts whose groups leave the replica.
    """
    check_modes(engine.optimizer)
    _check_experts(engine)
    adapter = partial(
        EngineAdapter,
        reduced_over=dist.get_process_group_ranks(engine.data_parallel_group),
        remedy=(
            "give deepspeed.initialize mpu=ReplicaGroups({replicas})",
            "give deepspeed.initialize no mpu",
        ),
        steps=lambda: int(engine.global_steps),
        modules=[engine.module],
        part_of=local_part,
        places_of=_places_of,
    )
    expert_groups = engine.expert_parallel_group.values() if engine.has_moe_layers else ()
    own_experts = any(dist.get_world_size(group) > 1 for group in expert_groups)  # under the same names
    owned = owned_weights(engine.optimizer)
    if owned is not None:
        pieces = None if own_experts else list(owned.pieces())
        return adapter(owned, owned.stepped, owned.view, pieces=pieces)
    if own_experts:
        raise UserError("attach: each rank has experts of its own; use zero_optimization.stage 1")
    exact, rounded, in_each = whole_weights(engine)
    group = engine.data_parallel_group if engine.dp_world_size > 1 else None
    weights = ReplicatedWeights(exact, group, rounded)
    pieces = weights.pieces(chain.from_iterable(in_each))
    view = partial(ReplicatedWeights, group=group)
    return adapter(weights, lambda: list(zip(exact, in_each, strict=True)), view, pieces=pieces)


def _check_experts(engine: Any) -> None:
    """DeepSpeed makes the groups of experts from all ranks of the job, also where it is given an mpu."""
    own = dist.get_process_group_ranks(engine.data_parallel_group)
    for groups in (engine.expert_data_parallel_group, engine.expert_parallel_group):
        for group in groups.values():
            ranks = dist.get_process_group_ranks(group)
            if engine.has_moe_layers and not set(ranks) <= set(own):
                raise UserError(
                    f"attach: a group of DeepSpeed's experts spans ranks {ranks}, the data-parallel group is "
                    f"{own}; with experts each replica has to be a job of its own (federation)"
                )


def _places_of(parameter: Any, matrix: Matrix) -> Iterator[Rectangle]:
    return (block.place for block in blocks(matrix, [matrix.whole], *local_place(parameter), own=0))
