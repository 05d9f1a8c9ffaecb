"""Rounds for a DeepSpeed engine that a loop trains; `engine.zero` knows where its fp32 weights lie."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist

from megatron_noloco.attach.inner import check_modes
from megatron_noloco.attach.shards import Engine, Shard, cut, parameters_of, shapes_of
from megatron_noloco.attach.torch_module import Replicated
from megatron_noloco.engine import zero
from megatron_noloco.errors import UserError

_REMEDY = "give deepspeed.initialize mpu=ReplicaGroups({replicas})", "give deepspeed.initialize no mpu"


def deepspeed_engine(engine: Any) -> Engine:
    """Return the fp32 weights that this rank exchanges; with ZeRO 1 to 3, those that it owns.

    Raises UserError for weights on NVMe, for an optimizer without fp32 weights, as `check_modes` does, and for
    experts whose groups leave the replica.
    """
    check_modes(engine.optimizer)
    _check_experts(engine)
    expert_groups = engine.expert_parallel_group.values() if engine.has_moe_layers else ()
    own_experts = any(dist.get_world_size(group) > 1 for group in expert_groups)  # under the same names
    flats = zero.flats_of(engine.optimizer)
    made: Engine
    if flats is not None:
        made = Divided(engine, flats, placed=not own_experts)
    elif own_experts:
        raise UserError("attach: each rank has experts of its own; use zero_optimization.stage 1")
    else:
        group = engine.data_parallel_group if engine.dp_world_size > 1 else None
        stepped, rounded = zero.whole_weights(engine)
        made = Replicated([engine.module], stepped, group, rounded)
    made.remedy = _REMEDY
    made.steps = lambda: int(engine.global_steps)
    return made


class Divided(Engine):
    """The fp32 weights that ZeRO 1 to 3 leave to this rank.

    Args:
        placed: see `Engine`.
    """

    def __init__(self, engine: Any, flats: Sequence[zero.Flat], placed: bool) -> None:
        self._optimizer, self.placed = engine.optimizer, placed
        self.reduced_over = dist.get_process_group_ranks(engine.data_parallel_group)
        parameters = parameters_of([engine.module])
        names, shapes = {id(one): name for name, one in parameters.items()}, shapes_of(parameters)
        shards = []
        for flat, pieces in flats:
            for parameter, begin, end, own in pieces:
                name = "" if parameter is None else names[id(parameter)]
                places = cut(shapes[name], begin, end) if name else []
                shards.append(Shard(name, flat, own, own + end - begin, places))
        super().__init__([engine.module], shards)

    def refresh(self) -> None:
        zero.refresh(self._optimizer)

    def with_parameters(self) -> AbstractContextManager[None]:
        return zero.with_weights(self._optimizer)


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
