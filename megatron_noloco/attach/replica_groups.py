"""The ranks of this job: which of them are a replica, and the process groups that end at it."""

from numbers import Integral

import torch.distributed as dist

from megatron_noloco.attach.shards import Engine
from megatron_noloco.errors import UserError
from megatron_noloco.plans.topology import Topology


def check_reduced_over(engine: Engine, topology: Topology, rank: int) -> None:
    """Raise UserError where gradients are not reduced over exactly the ranks of this rank's replica."""
    if engine.reduced_over is None:
        if not topology.separate_jobs:
            raise UserError(
                "attach: with Megatron-core's optimizer each replica is a job of its own; give federation"
            )
        return
    own = replica_of(topology, rank)
    if sorted(engine.reduced_over) != own:
        remedy = engine.remedy[topology.separate_jobs].format(replicas=topology.replicas)
        raise UserError(
            f"rank {rank}: the gradient all-reduce of this model spans ranks {sorted(engine.reduced_over)}, its "
            f"replica is {own}; {remedy}"
        )


def replica_of(topology: Topology, rank: int) -> list[int]:
    """Return the ranks of this job that are the replica of a rank."""
    first = rank - rank % topology.replica_size
    return list(range(first, first + topology.replica_size))


def this_rank() -> int:
    """Return this process's rank in the job; 0 without torch.distributed."""
    return dist.get_rank() if dist.is_initialized() else 0


def topology_of(replicas: int) -> Topology:
    """Divide the ranks of this job into replicas, blocks of consecutive ranks.

    Raises UserError where the ranks do not divide, and without torch.distributed.
    """
    if not dist.is_initialized():
        raise UserError(
            "attach(replicas=...) needs torch.distributed.init_process_group, as ReplicaGroups does"
        )
    ranks = dist.get_world_size()
    if not isinstance(replicas, Integral) or replicas < 1 or ranks % replicas:
        raise UserError(f"{ranks} ranks do not divide into {replicas} replicas")
    return Topology(replicas, dp=ranks // replicas)


class ReplicaGroups:
    """Makes the `mpu` for `deepspeed.initialize`: data-parallel ranks are those of this rank's replica only.

    The ranks of the job are divided into `replicas` blocks of consecutive ranks. All ranks make it at the same
    place, after torch.distributed has been initialised. For models without tensor or pipeline parallelism.

    Raises UserError where the ranks do not divide.
    """

    def __init__(self, replicas: int) -> None:
        rank = this_rank()
        own = replica_of(topology_of(replicas), rank)
        self._data_parallel = dist.new_group(own, use_local_synchronization=True)
        self._alone = dist.new_group([rank], use_local_synchronization=True)

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._data_parallel

    def get_data_parallel_world_size(self) -> int:
        return self._data_parallel.size()

    def get_data_parallel_rank(self) -> int:
        return self._data_parallel.rank()

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self._alone

    def get_model_parallel_world_size(self) -> int:
        return 1

    def get_model_parallel_rank(self) -> int:
        return 0
