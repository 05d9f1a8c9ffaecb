"""Rounds for Megatron-core's optimizers that divide the weights, in Megatron-LM's own loop or one like it.

These are its `DistributedOptimizer`, which gives each data-parallel rank a part of every bucket, and its
`LayerWiseDistributedOptimizer` (Muon), which gives it whole parameters. Uses attributes of Megatron-core 0.16.1 to
0.19.2 that are not public; the tests fail when they change.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from megatron_noloco.attach.shards import Engine, Shard
from megatron_noloco.errors import UserError


class MegatronEngine(Engine):
    """The weights that this rank owns: about 1/dp of those of its stage and tensor-parallel rank.

    The ranks of the job are one replica, whatever its parallel sizes.

    Args:
        optimizer: that `get_megatron_optimizer` made.

    Raises UserError for an optimizer that does not divide the weights, or keeps none in fp32.
    """

    placed = False

    def __init__(self, optimizer: Any) -> None:
        self._optimizers = list(_dividing(optimizer))
        for one in self._optimizers:
            _check(one)
        owned = [weight for one in self._optimizers for weight in _owned(one)]
        chunks = list(dict.fromkeys(chunk for one in self._optimizers for chunk in one.model_chunks))
        copied = self._copied(chunks)
        super().__init__(chunks, (Shard("", one, 0, one.numel(), (), copied(one)) for one in owned))

    def _copied(self, chunks: Sequence[Any]) -> Callable[[Tensor], bool]:
        """Return what tells whether other stages or tensor-parallel ranks have a weight as well."""
        first = self._optimizers[0]
        groups = (
            (first.pg_collection.tp, first.pg_collection.pp)
            if _by_layers(first)
            else (chunks[0].tp_group, chunks[0].pp_group)
        )
        tp, pp = (group.size() > 1 for group in groups)
        return lambda weight: (
            (tp and not getattr(weight, "tensor_model_parallel", False))
            or (pp and getattr(weight, "shared", False))
        )

    def refresh(self) -> None:
        """Round to the working precision, and gather over the data-parallel ranks as after a step."""
        for optimizer in self._optimizers:
            for one in optimizer.chained_optimizers if _by_layers(optimizer) else [optimizer]:
                if hasattr(one, "_copy_main_params_to_model_params"):  # FP32Optimizer has no main weights
                    one._copy_main_params_to_model_params()
            if _by_layers(optimizer) and not getattr(optimizer, "use_buffer_param_sync", False):
                optimizer.allgather_params()
        for chunk in self.modules:
            config: Any = chunk.ddp_config
            if config.use_distributed_optimizer and not config.overlap_param_gather:
                chunk.start_param_sync()  # type: ignore[operator]  # else the next forward pass gathers


def _check(optimizer: Any) -> None:
    """Raise UserError for an optimizer whose weights cannot be exchanged."""
    name = type(optimizer).__name__
    if not (_by_layers(optimizer) or hasattr(optimizer, "shard_fp32_from_float16_groups")) or any(
        chunk.ddp_config.use_megatron_fsdp for chunk in optimizer.model_chunks
    ):
        raise UserError(
            f"attach: {name} is not supported; use --use-distributed-optimizer, or with Muon the layer-wise "
            "distributed optimizer, without FSDP"
        )
    if any(weight is None for weight in _owned(optimizer)):
        raise UserError(
            f"attach: this {name} keeps no fp32 weights of its own; leave out "
            "--use-precision-aware-optimizer and --optimizer-cpu-offload"
        )
    config = optimizer.config
    if config.overlap_param_gather_with_optimizer_step or config.reuse_grad_buf_for_mxfp8_param_ag:
        raise UserError(
            "attach: leave out --overlap-param-gather-with-optimizer-step and "
            "--reuse-grad-buf-for-mxfp8-param-ag: they gather weights before a round has moved them"
        )


def _dividing(optimizer: Any) -> Iterator[Any]:
    """Yield the optimizers in a chain that divide the weights among data-parallel ranks."""
    if _by_layers(optimizer) or not hasattr(optimizer, "chained_optimizers"):
        yield optimizer
    else:
        for one in optimizer.chained_optimizers:
            yield from _dividing(one)


def _by_layers(optimizer: Any) -> bool:
    """Return whether this is a LayerWiseDistributedOptimizer, whose optimizers have the parameters it owns."""
    return hasattr(optimizer, "allgather_params")


def _owned(optimizer: Any) -> Iterator[Any]:
    """Yield the fp32 weights that this rank owns; None where there are none in fp32."""
    if _by_layers(optimizer):
        for group in optimizer.param_groups:
            yield from group["params"]
        return
    for groups in (optimizer.shard_fp32_from_float16_groups, optimizer.shard_fp32_groups):
        for group in groups:
            yield from group
