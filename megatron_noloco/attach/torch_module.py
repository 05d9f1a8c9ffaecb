"""Rounds for a torch module that a loop trains: alone, in DistributedDataParallel, or divided by fully_shard."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megatron_noloco.attach.adapter import EngineAdapter
from megatron_noloco.attach.replica_groups import this_rank
from megatron_noloco.attach.sharded_module import (
    ShardedWeights,
    is_divided,
    local_part,
    locally,
    places_of,
    reshard,
)
from megatron_noloco.errors import UserError
from megatron_noloco.outer import TorchWeights, Weights
from megatron_noloco.outer.weights import Joined, check_sound
from megatron_noloco.plans.canonical import Piece, in_turn, pieces_between

_REMEDIES = (
    "wrap the model in DistributedDataParallel, with "
    "process_group=ReplicaGroups({replicas}).get_data_parallel_group()",
    "wrap the model in DistributedDataParallel, without process_group",
)
_SHARDED_REMEDIES = (
    "give fully_shard the mesh of a replica, init_device_mesh(device, ({replicas}, ranks of a replica), "
    'mesh_dim_names=("replica", "shard"))["shard"]',
    "give fully_shard no mesh, or one of all ranks",
)


def torch_adapter(module: nn.Module) -> EngineAdapter:
    """Return the parameters of a module that are trained.

    Raises UserError for the flat parameters of FullyShardedDataParallel (FSDP1), and as `ShardedWeights` and
    `check_sound` do.
    """
    module = getattr(module, "_orig_mod", module)  # of torch.compile
    _check_wrappers(module)
    reshard(module)
    trained = {name: one for name, one in module.named_parameters() if one.requires_grad}
    weights: ReplicatedWeights | ShardedWeights
    view: Callable[[Sequence[Tensor]], Weights]
    if any(is_divided(parameter) for parameter in trained.values()):
        weights = ShardedWeights(module, trained)
        ranks, remedies = weights.ranks, _SHARDED_REMEDIES
        laid = in_turn((one, local_part(one).numel()) for one in trained.values())
        pieces = [Piece(one, 0, length, own) for one, length, own in laid]
        view = locally
    else:
        group = module.process_group if isinstance(module, DistributedDataParallel) else None
        for name, parameter in trained.items():
            check_sound(name, parameter)
        weights = ReplicatedWeights(list(trained.values()), group)
        ranks = [this_rank()] if group is None else dist.get_process_group_ranks(group)
        remedies = _REMEDIES
        pieces, view = weights.pieces(trained.values()), partial(ReplicatedWeights, group=group)
    return EngineAdapter(
        weights,
        lambda: [(one, [one]) for one in trained.values()],
        view,
        ranks,
        remedies,
        check_all=partial(_check_no_others, module, {id(parameter) for parameter in trained.values()}),
        modules=[module.module if isinstance(module, DistributedDataParallel) else module],
        part_of=local_part,
        places_of=places_of,
        pieces=pieces,
    )


class ReplicatedWeights(TorchWeights):
    """Shows weights of which all data-parallel ranks of a replica hold a copy; each rank exchanges a part.

    Rank d of D exchanges elements n d // D to n (d + 1) // D of n, and after a round the ranks broadcast their
    parts to each other. So each rank keeps 1 / D of the outer state.

    Args:
        tensors: floating, contiguous, in the same order on all ranks of the group.
        group: the ranks that hold copies; None: this rank alone.
        rounded: pairs of one of the tensors and its copy in the working precision, refreshed after a round.

    Raises UserError as `TorchWeights` does.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        group: dist.ProcessGroup | None = None,
        rounded: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> None:
        super().__init__(tensors)
        self._group = group
        self._ranks = [0] if group is None else dist.get_process_group_ranks(group)
        self._place = 0 if group is None else dist.get_rank(group)
        self._rounded = rounded

    def parts(self) -> list[Tensor]:
        return self._part(self._place)

    @torch.no_grad()
    def refresh(self) -> None:
        """Broadcast this rank's part and receive the others'. A collective of the replica."""
        if len(self._ranks) > 1:
            under_way = [
                dist.broadcast(piece, owner, self._group, async_op=True)
                for place, owner in enumerate(self._ranks)
                for piece in self._part(place)
            ]
            for one in under_way:
                one.wait()
        for exact, rounded in self._rounded:
            rounded.copy_(exact)

    def pieces(self, parameters: Iterable[Any]) -> list[Piece]:
        """Return what this rank exchanges of the parameters, which are as large as the tensors together."""
        laid = in_turn((one, one.numel()) for one in parameters)
        return list(pieces_between(laid, *self._bounds(self._place)))

    def _bounds(self, place: int) -> tuple[int, int]:
        """Return which elements the rank at this place of the group exchanges."""
        total, places = sum(tensor.numel() for tensor in super().parts()), len(self._ranks)
        return total * place // places, total * (place + 1) // places

    def _part(self, place: int) -> list[Tensor]:
        """Return views of the elements that the rank at this place of the group exchanges."""
        start, stop = self._bounds(place)
        return [view for view, _ in Joined(super().parts()).overlaps(start, stop - start)]


def _check_wrappers(module: nn.Module) -> None:
    for name, part in module.named_modules():
        # By its name, since importing FSDP takes a second.
        if any(cls.__name__ == "FullyShardedDataParallel" for cls in type(part).__mro__):
            raise UserError(
                "attach: the flat parameters of FullyShardedDataParallel are not supported; use fully_shard "
                "(FSDP2), or DeepSpeed's engine, whose ZeRO stages 1 to 3 divide the weights likewise"
            )
        if name and isinstance(part, DistributedDataParallel) and part.process_group.size() > 1:
            raise UserError(
                f"attach: the gradients of {name} are reduced by a DistributedDataParallel of its own; wrap the "
                "whole model instead"
            )


def _check_no_others(module: nn.Module, attached: set[int]) -> None:
    reshard(module)
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and id(parameter) not in attached:
            raise UserError(
                f"{name} is trained now, and was not when the model was attached: it would not be exchanged; call "
                "average() and close() before more is trained, and attach again after it"
            )
