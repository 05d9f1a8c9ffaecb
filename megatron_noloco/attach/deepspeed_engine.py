"""The fp32 weights of a DeepSpeed engine that somebody else made, as the outer optimizer sees them.

Names of attributes are those of DeepSpeed 0.19.8, which has no others for them; tests say when that changes.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_noloco.engine.weights import MasterWeights
from megatron_noloco.outer.weights import Weights

# Of ZeRO 1 and 2; of ZeRO 1 in bf16 with gradients in fp32. `MasterWeights` has both.
_PARTITIONS = ("single_partition_of_fp32_groups", "fp32_groups_flat_partition")


def weights_of(engine: Any) -> Weights:
    """What this rank owns: with ZeRO 1 to 3 a part of the weights, with ZeRO 0 all of them.

    Args:
        engine: of `deepspeed.initialize`.

    Raises ValueError for weights that are kept elsewhere, such as on NVMe.
    """
    optimizer = engine.optimizer
    if getattr(optimizer, "swap_optimizer", False):
        raise ValueError("zero_optimization.offload_optimizer: weights on NVMe cannot be exchanged; use cpu")
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return Zero3Weights(optimizer)
    if any(hasattr(optimizer, name) for name in _PARTITIONS):
        return MasterWeights(optimizer)
    return WholeWeights(engine)


class Zero3Weights(Weights):
    """A part of each parameter, without the padding that the last ranks have: it means nothing."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._parts = list(self._without_padding())

    def _without_padding(self) -> Iterator[Tensor]:
        flat_and_parameters = zip(
            self._optimizer.fp32_partitioned_groups_flat, self._optimizer.fp16_groups, strict=True
        )
        for flat, parameters in flat_and_parameters:
            start = 0
            for parameter in parameters:
                length = parameter.ds_tensor.numel()
                left = parameter.ds_numel - length * dist.get_rank(parameter.ds_process_group)
                yield flat[start : start + max(0, min(length, left))]
                start += length

    def parts(self) -> Sequence[Tensor]:
        return [part.detach() for part in self._parts]

    def refresh(self) -> None:
        """Round to the working precision, and gather over the data-parallel ranks what is kept whole."""
        for group in range(len(self._optimizer.fp32_partitioned_groups_flat)):
            self._optimizer._reassign_or_swap_out_partitioned_parameters(group)
        if kept := self._optimizer.persistent_parameters:
            kept[0].partition(kept, has_been_updated=False)
            kept[0].all_gather(kept)


class WholeWeights(Weights):
    """With ZeRO 0: all weights, on every rank of a replica.

    Each of them exchanges all, so the bytes are those of ZeRO 1 times the data-parallel ranks.
    """

    def __init__(self, engine: Any) -> None:
        optimizer = engine.optimizer
        self._copied = engine.dp_world_size > 1
        self._rounded: list[tuple[Tensor, Tensor]] = []  # in bf16 and fp16: fp32, and what is computed with
        if hasattr(optimizer, "fp32_groups"):
            groups = zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True)
            self._rounded = [pair for exact, rounded in groups for pair in zip(exact, rounded, strict=True)]
            self._parts = [exact for exact, _ in self._rounded]
        else:
            self._parts = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
        if any(part.dtype != torch.float32 for part in self._parts):
            raise ValueError(
                f"the weights of {type(optimizer).__name__} are not in fp32; use zero_optimization.stage 1"
            )

    def parts(self) -> Sequence[Tensor]:
        return [part.detach().view(-1) for part in self._parts]

    def copied(self) -> Sequence[tuple[int, int]]:
        return [(0, self.length)] if self._copied else []

    @torch.no_grad()
    def refresh(self) -> None:
        """Round to the working precision."""
        for exact, rounded in self._rounded:
            rounded.copy_(exact)
