"""How evenly the experts of a mixture are used: the auxiliary loss that core's routers keep for a log."""

from megatron.core.transformer.moe.moe_utils import (
    clear_aux_losses_tracker,
    get_moe_layer_wise_logging_tracker,
)
from torch import Tensor


def take_balance() -> Tensor | None:
    """The load-balancing loss, without its coefficient, since the last call; None if nothing is balanced.

    Added up over this rank's layers and microbatches, each of which adds 1 where all experts have equal shares
    (Fedus et al. 2021, arXiv 2101.03961, equation 4, over all choices of a token); only the part of this rank's
    tokens where tensor-parallel ranks share them. Core would all-reduce it for a log of its own.
    """
    kept = [entry["values"].sum() for entry in get_moe_layer_wise_logging_tracker().values()]
    clear_aux_losses_tracker()
    return sum(kept[1:], kept[0]) if kept else None
