"""The fp32 weights of a DeepSpeed engine that somebody else made, whatever its ZeRO stage.

Names of attributes are those of DeepSpeed 0.19.8, which has no others for them; tests say when that changes.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_noloco.outer.weights import Weights

# Of ZeRO 1 and 2; of ZeRO 1 in bf16 with gradients in fp32.
_PARTITIONS = ("single_partition_of_fp32_groups", "fp32_groups_flat_partition")


class EngineWeights(Weights):
    """What this rank owns: with ZeRO 1 to 3 one part of each group of parameters, with ZeRO 0 all of them.

    With ZeRO 0 every rank of a replica exchanges all weights, so the bytes are those of ZeRO 1 times its
    data-parallel ranks.

    Args:
        engine: of `deepspeed.initialize`.

    Raises ValueError for weights that are kept elsewhere, such as on NVMe.
    """

    def __init__(self, engine: Any) -> None:
        self._optimizer = engine.optimizer
        self._whole = False  # whether each rank of the replica has all weights
        self._rounded: list[tuple[Tensor, Tensor]] = []  # fp32, and what is computed with
        if getattr(self._optimizer, "swap_optimizer", False):
            raise ValueError(
                "zero_optimization.offload_optimizer: weights on NVMe cannot be exchanged; use cpu"
            )
        for name in _PARTITIONS:
            if hasattr(self._optimizer, name):
                self._parts = list(getattr(self._optimizer, name))
                return
        if hasattr(self._optimizer, "fp32_partitioned_groups_flat"):  # ZeRO 3
            self._parts = list(_without_padding(self._optimizer))
            return
        self._whole = engine.dp_world_size > 1
        if hasattr(self._optimizer, "fp32_groups"):  # ZeRO 0 in bf16 and fp16
            groups = zip(self._optimizer.fp32_groups, self._optimizer.fp16_groups, strict=True)
            self._rounded = [pair for exact, rounded in groups for pair in zip(exact, rounded, strict=True)]
            self._parts = [exact for exact, _ in self._rounded]
        else:
            self._parts = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
        if any(part.dtype != torch.float32 for part in self._parts):
            raise ValueError(
                f"the weights of {type(self._optimizer).__name__} are not in fp32; use zero_optimization.stage 1"
            )

    def parts(self) -> Sequence[Tensor]:
        return [part.detach().view(-1) for part in self._parts]

    def copied(self) -> Sequence[tuple[int, int]]:
        return [(0, self.length)] if self._whole else []

    @torch.no_grad()
    def refresh(self) -> None:
        """Round to the working precision, and with ZeRO gather over the data-parallel ranks what is kept whole."""
        for exact, rounded in self._rounded:
            rounded.copy_(exact)
        if hasattr(self._optimizer, "update_lp_params"):
            self._optimizer.update_lp_params()
        elif hasattr(self._optimizer, "fp32_partitioned_groups_flat"):
            for group in range(len(self._optimizer.fp32_partitioned_groups_flat)):
                self._optimizer._reassign_or_swap_out_partitioned_parameters(group)
            if kept := self._optimizer.persistent_parameters:
                kept[0].partition(kept, has_been_updated=False)
                kept[0].all_gather(kept)


def _without_padding(optimizer: Any) -> Iterator[Tensor]:
    """This rank's part of each parameter; the last ranks have less of it, and padding that means nothing."""
    for flat, parameters in zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True):
        start = 0
        for parameter in parameters:
            length = parameter.ds_tensor.numel()
            left = parameter.ds_numel - length * dist.get_rank(parameter.ds_process_group)
            yield flat[start : start + max(0, min(length, left))]
            start += length
