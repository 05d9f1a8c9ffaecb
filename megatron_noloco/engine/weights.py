"""DeepSpeed's master weights as the outer optimizer sees them."""

from typing import Any

from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import Tensor

from megatron_noloco.outer.weights import Weights


class MasterWeights(Weights):
    """The fp32 weights this rank owns: 1/dp of those of its stage and tensor-parallel rank.

    Args:
        optimizer: DeepSpeed's ZeRO stage 1 optimizer (`single_partition_of_fp32_groups`), or its BF16_Optimizer
            (`fp32_groups_flat_partition`).
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def parts(self) -> list[Tensor]:
        if isinstance(self._optimizer, BF16_Optimizer):
            return [part.detach() for part in self._optimizer.fp32_groups_flat_partition]
        return [part.detach() for part in self._optimizer.single_partition_of_fp32_groups]

    def refresh(self) -> None:
        """Round the master weights to the working precision and gather them over the replica's dp ranks."""
        self._optimizer.update_lp_params()
