"""What DeepSpeed asks of a "model parallel unit", answered for one replica."""

import torch.distributed as dist

from megatron_noloco.pipeline.groups import Groups, ProcessGroup


class ReplicaMpu:
    """Makes the data-parallel ranks of this replica all the data parallelism that DeepSpeed knows.

    Thereby no gradient all-reduce, broadcast, overflow check or ZeRO partition reaches another replica. The
    model-parallel group holds the stages and tp ranks of one dp rank, over which DeepSpeed adds up the squared
    gradient norm; a parameter that all tp ranks hold in full (a norm) counts on tp rank 0 of its stage only.
    It must not offer `get_sequence_*` or `initialize_sequence_parallel`: DeepSpeed would switch to Ulysses.
    """

    def __init__(self, groups: Groups) -> None:
        self._groups = groups

    def get_data_parallel_group(self) -> ProcessGroup:
        return self._groups.dp

    def get_data_parallel_world_size(self) -> int:
        return self._groups.topology.dp

    def get_data_parallel_rank(self) -> int:
        return self._groups.position.dp

    def get_model_parallel_group(self) -> ProcessGroup:
        return self._groups.mp

    def get_model_parallel_world_size(self) -> int:
        return self._groups.topology.pp * self._groups.topology.tp

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank(self._groups.mp)

    def get_tensor_model_parallel_group(self) -> ProcessGroup:
        return self._groups.tp

    def get_tensor_model_parallel_world_size(self) -> int:
        return self._groups.topology.tp

    def get_tensor_model_parallel_rank(self) -> int:
        return self._groups.position.tp

    def get_pipeline_model_parallel_group(self) -> ProcessGroup:
        return self._groups.pp

    def get_pipeline_model_parallel_world_size(self) -> int:
        return self._groups.topology.pp

    def get_pipeline_model_parallel_rank(self) -> int:
        return self._groups.position.stage
