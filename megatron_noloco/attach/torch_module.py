"""Rounds for a torch module that a loop trains: alone, in DistributedDataParallel, or divided by fully_shard.

What `fully_shard` (FSDP2) or tensor parallelism divides are DTensors. No rank gathers the model for a round: each
exchanges its own pieces. `fully_shard` keeps the parameters in the precision that they had before it, and its
`MixedPrecisionPolicy` rounds what it gathers for the forward pass.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megatron_noloco.attach.replica_groups import this_rank
from megatron_noloco.attach.shards import (
    Engine,
    Shard,
    cut,
    fully_sharded,
    is_divided,
    parameters_of,
    reshard,
    shard_of,
)
from megatron_noloco.errors import UserError
from megatron_noloco.outer.weights import Joined


def torch_engine(module: nn.Module) -> Engine:
    """Return the parameters of a module that are trained.

    Raises UserError for the flat parameters of FullyShardedDataParallel (FSDP1), and as the classes below do.
    """
    module = getattr(module, "_orig_mod", module)  # of torch.compile
    _check_wrappers(module)
    group: dist.ProcessGroup | None = None
    if isinstance(module, DistributedDataParallel):
        group, module = module.process_group, module.module
    reshard(module)
    trained = {name: one for name, one in parameters_of([module]).items() if one.requires_grad}
    if any(map(is_divided, trained.values())):
        return Sharded(module, trained)
    return Replicated([module], [(one, [one]) for one in trained.values()], group)


class Replicated(Engine):
    """Weights of which all data-parallel ranks of a replica hold a copy; each rank exchanges a part.

    Rank d of D exchanges elements n d // D to n (d + 1) // D of n, and after a round the ranks broadcast their
    parts to each other. So each rank keeps 1 / D of the outer state.

    Args:
        stepped: the tensors that the optimizer steps, each with the parameters in it; the same on all ranks.
        group: the ranks that hold copies; None: this rank alone.
        rounded: pairs of one of the tensors and its copy in the working precision, refreshed after a round.
    """

    remedy = (
        "wrap the model in DistributedDataParallel, with "
        "process_group=ReplicaGroups({replicas}).get_data_parallel_group()",
        "wrap the model in DistributedDataParallel, without process_group",
    )

    def __init__(
        self,
        modules: Sequence[nn.Module],
        stepped: Sequence[tuple[Tensor, Sequence[Any]]],
        group: dist.ProcessGroup | None = None,
        rounded: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> None:
        self._group, self._rounded = group, rounded
        self.reduced_over = [this_rank()] if group is None else dist.get_process_group_ranks(group)
        places, total = len(self.reduced_over), sum(tensor.numel() for tensor, _ in stepped)
        self._edges = [total * place // places for place in range(places + 1)]
        place = 0 if group is None else dist.get_rank(group)
        names = {id(one): name for name, one in parameters_of(modules).items()}
        super().__init__(modules, _between(stepped, names, *self._edges[place : place + 2]))

    @torch.no_grad()
    def refresh(self) -> None:
        self.share(self.stepped)
        for exact, rounded in self._rounded:
            rounded.copy_(exact)

    def share(self, tensors: Sequence[Tensor]) -> None:
        """Broadcast this rank's part and receive the others'."""
        assert self.reduced_over is not None
        if len(self.reduced_over) == 1:
            return
        whole = Joined([tensor.detach().view(-1) for tensor in tensors])
        under_way = [
            dist.broadcast(view, owner, self._group, async_op=True)
            for place, owner in enumerate(self.reduced_over)
            for view, _ in whole.overlaps(self._edges[place], self._edges[place + 1] - self._edges[place])
        ]
        for one in under_way:
            one.wait()


def _between(
    stepped: Sequence[tuple[Tensor, Sequence[Any]]], names: Mapping[int, str], start: int, stop: int
) -> Iterator[Shard]:
    """Yield the shards in elements start..stop of tensors that lie one after the other."""
    for tensor, parameters in stepped:
        own = 0
        for one in parameters:
            begin, end = (min(max(edge - own, 0), one.numel()) for edge in (start, stop))
            yield Shard(names[id(one)], tensor, own + begin, own + end, cut(one.shape, begin, end))
            own += one.numel()
        start, stop = start - own, stop - own


class Sharded(Engine):
    """This rank's pieces of parameters that are DTensors.

    Raises UserError for a parameter that is no DTensor.
    """

    remedy = (
        "give fully_shard the mesh of a replica, init_device_mesh(device, ({replicas}, ranks of a replica), "
        'mesh_dim_names=("replica", "shard"))["shard"]',
        "give fully_shard no mesh, or one of all ranks",
    )

    def __init__(self, module: nn.Module, trained: Mapping[str, Any]) -> None:
        for name, parameter in trained.items():
            if not is_divided(parameter):
                raise UserError(
                    f"attach: {name} is no DTensor, others are: its gradient would not be reduced; apply "
                    "fully_shard to the whole model, too"
                )
        meshes = (parameter.device_mesh.mesh.flatten().tolist() for parameter in trained.values())
        self.reduced_over = sorted(set(chain.from_iterable(meshes)))
        ranks = len(self.reduced_over)
        shards = (shard_of(name, one, _is_copied(one, ranks)) for name, one in trained.items())
        super().__init__([module], shards)

    def refresh(self) -> None:
        """Have the next forward pass gather the parameters anew, after what is queued here.

        It would not wait for this round where the loop has set an event of its own after its optimizer's step.
        """
        for module in self.modules:
            reshard(module)
            if torch.cuda.is_available():
                written = torch.cuda.current_stream().record_event()
                for part in fully_sharded(module):
                    part.set_post_optim_event(written)


def _is_copied(parameter: Any, ranks: int) -> bool:
    """Return whether a DTensor is replicated on an axis of its mesh, or lies on fewer ranks than others."""
    axes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    replicated = any(placement.is_replicate() and size > 1 for placement, size in axes)
    return replicated or parameter.device_mesh.size() < ranks


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
