"""DeepSpeed's master weights as the outer optimizer sees them."""

from collections.abc import Collection
from typing import Any

from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import Tensor, nn

from megatron_noloco.outer.weights import Weights


class MasterWeights(Weights):
    """The fp32 weights this rank owns: 1/dp of those of its stage and tensor-parallel rank.

    Args:
        optimizer: DeepSpeed's of ZeRO stages 1 and 2 (`single_partition_of_fp32_groups`), or its BF16_Optimizer
            (`fp32_groups_flat_partition`).
        dp_rank: of this rank.
        copied: parameters that other stages or tensor-parallel ranks of the replica hold as well.
    """

    def __init__(self, optimizer: Any, dp_rank: int = 0, copied: Collection[nn.Parameter] = ()) -> None:
        self._optimizer = optimizer
        self._dp_rank = dp_rank
        self._copied = set(copied)  # parameters compare by identity

    def copied(self) -> list[tuple[int, int]]:
        ranges, before = [], 0
        for parameters, part in zip(bit16_groups(self._optimizer), self.parts(), strict=True):
            place = before - self._dp_rank * len(part)  # of the group's first parameter in our vector
            for parameter in parameters:
                start, place = place, place + parameter.numel()
                first, last = max(start, before), min(place, before + len(part))
                if parameter in self._copied and first < last:
                    ranges.append((first, last))
            before += len(part)
        return ranges

    def parts(self) -> list[Tensor]:
        if isinstance(self._optimizer, BF16_Optimizer):
            return [part.detach() for part in self._optimizer.fp32_groups_flat_partition]
        return [part.detach() for part in self._optimizer.single_partition_of_fp32_groups]

    def refresh(self) -> None:
        """Round the master weights to the working precision and gather them over the replica's dp ranks."""
        self._optimizer.update_lp_params()


def bit16_groups(optimizer: Any) -> list[list[nn.Parameter]]:
    """The parameters in the order in which the flat partitions hold them, by parameter group."""
    groups: list[list[nn.Parameter]] = getattr(optimizer, "bf16_groups", None) or optimizer.bit16_groups
    return groups
