"""Adapters of training engines: the weights of a rank, and the ranks over which their gradients are reduced."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from numbers import Integral
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist
from torch import Tensor, nn

from megatron_noloco.outer import Weights
from megatron_noloco.plans.canonical import Block, Matrix
from megatron_noloco.plans.topology import Topology


class Stateful(Protocol):
    """Has a state that goes with the weights: the inner optimizer, a schedule."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class Piece(NamedTuple):
    """Elements begin..end of this rank's part of a parameter, which lie at `own` in its vector of weights."""

    parameter: Any
    begin: int
    end: int
    own: int


class Stepped(NamedTuple):
    """What the inner optimizer steps.

    Attributes:
        tensors: each with the parameters that lie in it; without any where ranks of all jobs are the same.
        view: view(tensors) shows tensors like these, in their order, as a vector with the layout of the weights.
    """

    tensors: Sequence[tuple[Tensor, Sequence[Any]]]
    view: Callable[[Sequence[Tensor]], Weights]


def in_turn(parts: Iterable[tuple[Any, int]]) -> list[Piece]:
    """Return the pieces of a vector that has these parts of parameters, each with its length, in turn."""
    parts = list(parts)
    starts = accumulate((length for _, length in parts), initial=0)
    return [Piece(parameter, 0, length, own) for (parameter, length), own in zip(parts, starts, strict=False)]


def all_of(parameter: Any, matrix: Matrix) -> list[Block]:
    """Return where the part of a rank that has all of a parameter lies."""
    return [Block(0, matrix, *matrix.whole)]


@dataclass(frozen=True)
class EngineAdapter:
    """Shows `attach` what an engine trains on this rank; made by a file of its own for each kind of engine.

    Attributes:
        weights: of this rank.
        reduced_over: ranks of this job over which gradients are reduced; None where the loop cannot be asked.
        remedy: what to change where these are not the ranks of the replica: where the job holds all replicas, and
            where it is one replica.
        steps: returns how many steps the optimizer has taken; None where each call of `Attached.step` follows one.
        check_all: raises ValueError where the loop trains more than `weights`.
        while_attached: a context in which its argument is called where weights are about to be loaded.
        modules: that have the weights, as the loop made them: without DistributedDataParallel and the like.
        part_of: returns this rank's part of a parameter of the modules, frozen or not.
        places_of: places_of(parameter, matrix) returns where this part lies in the parameter; `own` counts in it.
        pieces: what `weights` consists of, padding left out. Every parameter that any rank of the replica
            exchanges is named, if need be with nothing of it. None: ranks are the same in all jobs, and a rank
            exchanges with the rank at its place of another one.
        stepped: what the inner optimizer steps; called where its state is given or taken.
    """

    weights: Weights
    stepped: Callable[[], Stepped]
    reduced_over: Sequence[int] | None
    remedy: tuple[str, str]
    steps: Callable[[], int] | None = None
    check_all: Callable[[], None] = lambda: None
    while_attached: Callable[[Callable[[], None]], AbstractContextManager[None]] = lambda _: nullcontext()
    modules: Sequence[nn.Module] = ()
    part_of: Callable[[Any], Tensor] = lambda parameter: parameter
    places_of: Callable[[Any, Matrix], Sequence[Block]] = all_of
    pieces: Sequence[Piece] | None = None


def check_reduced_over(adapter: EngineAdapter, topology: Topology, rank: int) -> None:
    """Raise ValueError where gradients are not reduced over exactly the ranks of this rank's replica."""
    if adapter.reduced_over is None:
        if not topology.slots:
            raise ValueError(
                "attach: with Megatron-core's optimizer each replica is a job of its own; give federation"
            )
        return
    own = topology.grid[topology.position(rank).replica - topology.slot].ravel().tolist()
    if sorted(adapter.reduced_over) != own:
        remedy = adapter.remedy[bool(topology.slots)].format(replicas=topology.replicas)
        raise ValueError(
            f"rank {rank}: the gradient all-reduce of this model spans ranks {sorted(adapter.reduced_over)}, its "
            f"replica is {own}; {remedy}"
        )


def this_rank() -> int:
    """Return this process's rank in the job; 0 without torch.distributed."""
    return dist.get_rank() if dist.is_initialized() else 0


def topology_of(replicas: int) -> Topology:
    """Divide the ranks of this job into replicas, blocks of consecutive ranks.

    Raises ValueError where the ranks do not divide, and without torch.distributed.
    """
    if not dist.is_initialized():
        raise ValueError(
            "attach(replicas=...) needs torch.distributed.init_process_group, as ReplicaGroups does"
        )
    ranks = dist.get_world_size()
    if not isinstance(replicas, Integral) or replicas < 1 or ranks % replicas:
        raise ValueError(f"{ranks} ranks do not divide into {replicas} replicas")
    return Topology(replicas, dp=ranks // replicas)


class ReplicaGroups:
    """Makes the `mpu` for `deepspeed.initialize`: data-parallel ranks are those of this rank's replica only.

    The ranks of the job are divided into `replicas` blocks of consecutive ranks. All ranks make it at the same
    place, after torch.distributed has been initialised. For models without tensor or pipeline parallelism.

    Raises ValueError where the ranks do not divide.
    """

    def __init__(self, replicas: int) -> None:
        topology, rank = topology_of(replicas), dist.get_rank()
        self._position, self._size = topology.position(rank), topology.replica_size
        block = topology.grid[self._position.replica].ravel().tolist()
        self._data_parallel = dist.new_group(block, use_local_synchronization=True)
        self._alone = dist.new_group([rank], use_local_synchronization=True)

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._data_parallel

    def get_data_parallel_world_size(self) -> int:
        return self._size

    def get_data_parallel_rank(self) -> int:
        return self._position.dp

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self._alone

    def get_model_parallel_world_size(self) -> int:
        return 1

    def get_model_parallel_rank(self) -> int:
        return 0
