"""Rounds for Megatron-core's distributed optimizer, in Megatron-LM's own loop or one like it.

Uses attributes of Megatron-core 0.16.1 that are not public; the tests fail when they change.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from megatron_noloco.attach.trained import Trained
from megatron_noloco.outer import Weights


def trained_by_megatron(optimizer: Any) -> Trained:
    """Return the weights of an optimizer that `get_megatron_optimizer` made with `use_distributed_optimizer`.

    The ranks of the job are one replica, whatever its parallel sizes.

    Raises ValueError for an optimizer that does not divide the weights, or keeps none in fp32.
    """
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    for one in chained:
        name = type(one).__name__
        if not hasattr(one, "shard_fp32_from_float16_groups") or one.ddp_config.use_megatron_fsdp:
            raise ValueError(
                f"attach: {name} is not supported; use --use-distributed-optimizer, without FSDP"
            )
        if any(shard is None for shard in _shards(one)):
            raise ValueError(
                f"attach: this {name} keeps no fp32 weights of its own; leave out "
                "--use-precision-aware-optimizer and --optimizer-cpu-offload"
            )
        if (
            one.config.overlap_param_gather_with_optimizer_step
            or one.config.reuse_grad_buf_for_mxfp8_param_ag
        ):
            raise ValueError(
                "attach: leave out --overlap-param-gather-with-optimizer-step and "
                "--reuse-grad-buf-for-mxfp8-param-ag: they gather weights before a round has moved them"
            )
    return Trained(DistributedOptimizerWeights(chained), None, ("", ""))


class DistributedOptimizerWeights(Weights):
    """The weights that this rank owns: 1/dp of those of its stage and tensor-parallel rank.

    Args:
        optimizers: `DistributedOptimizer`s with disjoint parameters.
    """

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._optimizers = optimizers
        self._shards = [shard for optimizer in optimizers for shard in _shards(optimizer)]
        self._chunks = list(dict.fromkeys(chunk for one in optimizers for chunk in one.model_chunks))

    def parts(self) -> list[Tensor]:
        return [shard.detach().view(-1) for shard in self._shards]

    def copied(self) -> list[tuple[int, int]]:
        tp, pp = self._chunks[0].tp_group.size(), self._chunks[0].pp_group.size()
        ranges, start = [], 0
        for shard in self._shards:
            stop = start + shard.numel()
            split = getattr(shard, "tensor_model_parallel", False)
            if (tp > 1 and not split) or (pp > 1 and getattr(shard, "shared", False)):
                ranges.append((start, stop))
            start = stop
        return ranges

    def refresh(self) -> None:
        """Round to the working precision, and gather over the data-parallel ranks as after a step."""
        for optimizer in self._optimizers:
            optimizer._copy_main_params_to_model_params()
        for chunk in self._chunks:
            if not chunk.ddp_config.overlap_param_gather:  # else the next forward pass gathers
                chunk.start_param_sync()


def _shards(optimizer: Any) -> Iterator[Any]:
    for groups in (optimizer.shard_fp32_from_float16_groups, optimizer.shard_fp32_groups):
        for group in groups:
            yield from group
