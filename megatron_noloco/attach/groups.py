"""The data parallelism of one replica, in a job of several."""

import torch.distributed as dist


class ReplicaGroups:
    """The `mpu` for `deepspeed.initialize`: data-parallel ranks are those of this rank's replica, and no others.

    The ranks of the job are cut into `replicas` blocks of consecutive ranks. All ranks make it at the same place,
    after torch.distributed has been initialised. For a model that is not split by tensor or pipeline parallelism.

    Raises ValueError where the ranks do not divide into so many replicas.
    """

    def __init__(self, replicas: int) -> None:
        ranks = dist.get_world_size()
        if replicas < 1 or ranks % replicas:
            raise ValueError(f"{ranks} ranks do not divide into {replicas} replicas")
        self._size, rank = ranks // replicas, dist.get_rank()
        blocks = [list(range(first, first + self._size)) for first in range(0, ranks, self._size)]
        self._data_parallel = [dist.new_group(block) for block in blocks][rank // self._size]
        self._alone = [dist.new_group([other]) for other in range(ranks)][rank]

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._data_parallel

    def get_data_parallel_world_size(self) -> int:
        return self._size

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank() % self._size

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self._alone

    def get_model_parallel_world_size(self) -> int:
        return 1

    def get_model_parallel_rank(self) -> int:
        return 0
