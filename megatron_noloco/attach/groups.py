"""The data parallelism of one replica, in a job of several."""

from numbers import Integral

import torch.distributed as dist

from megatron_noloco.plans.topology import Topology


def cut_into(replicas: int) -> Topology:
    """The ranks of this job as blocks of consecutive ranks; raises ValueError where they do not divide."""
    if not dist.is_initialized():
        raise ValueError(
            "attach(replicas=...) needs torch.distributed.init_process_group, as ReplicaGroups does"
        )
    ranks = dist.get_world_size()
    if not isinstance(replicas, Integral) or replicas < 1 or ranks % replicas:
        raise ValueError(f"{ranks} ranks do not divide into {replicas} replicas")
    return Topology(replicas, dp=ranks // replicas)


class ReplicaGroups:
    """The `mpu` for `deepspeed.initialize`: data-parallel ranks are those of this rank's replica, and no others.

    The ranks of the job are cut into `replicas` blocks of consecutive ranks. All ranks make it at the same place,
    after torch.distributed has been initialised. For a model that is not split by tensor or pipeline parallelism.

    Raises ValueError where the ranks do not divide into so many replicas.
    """

    def __init__(self, replicas: int) -> None:
        topology, rank = cut_into(replicas), dist.get_rank()
        self._position, self._size = topology.position(rank), topology.replica_size
        blocks = topology.grid.reshape(replicas, -1).tolist()
        self._data_parallel = [dist.new_group(block) for block in blocks][self._position.replica]
        self._alone = [dist.new_group([other]) for other in range(topology.world_size)][rank]

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
