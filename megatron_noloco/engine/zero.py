"""The fp32 weights of a DeepSpeed engine that somebody else's loop trains, for each ZeRO stage.

Uses attributes of DeepSpeed 0.19.8 that are not public; the tests fail when they change. Its public functions do
not serve here. `safe_get_full_fp32_param`, the only one for stages 1 and 2, sums each parameter over the ranks: it
took 129 ms where these partitions are read in 1.4 ms (two CPU ranks, 200 tensors with 6.6 M weights). In stage 3
`safe_get_local_fp32_param` took 3.4 ms instead of 2.5, and `safe_set_local_fp32_param` 3.6 ms instead of 3.3. The
first returns copies of weights that are offloaded, and the second leaves the weights in 16 bits as they are.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_noloco.engine.state import PARTITIONS, MasterWeights
from megatron_noloco.errors import UserError
from megatron_noloco.plans.canonical import Piece, in_turn

Flat = tuple[Tensor, list[Piece]]
"""What the optimizer steps, and which elements of parameters lie where in it; those of None are padding."""


def flats_of(optimizer: Any) -> list[Flat] | None:
    """Return the fp32 weights that ZeRO 1 to 3 leave to this rank; None where each rank has all of them.

    Raises UserError for weights on NVMe.
    """
    if getattr(optimizer, "swap_optimizer", False):
        raise UserError("zero_optimization.offload_optimizer: weights on NVMe cannot be exchanged; use cpu")
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        groups = zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True)
        return [(flat, list(_pieces_of_stage_3(group))) for flat, group in groups]
    if not any(hasattr(optimizer, name) for name in PARTITIONS):
        return None
    weights = MasterWeights(optimizer)
    groups = zip(weights.partitions, weights.pieces_of_groups(), strict=True)
    return [(flat, list(_with_padding(pieces, flat.numel()))) for flat, pieces in groups]


def _pieces_of_stage_3(group: Iterable[Any]) -> Iterator[Piece]:
    """Yield where parameters lie one after the other, each with padding on the last ranks."""
    for parameter, _, own in in_turn((one, one.ds_tensor.numel()) for one in group):
        yield Piece(parameter, *local_place(parameter), own)


def _with_padding(pieces: Iterable[Piece], length: int) -> Iterator[Piece]:
    """Yield pieces in their order, and between them what has no parameter, which rounds exchange as well."""
    at = 0
    for piece in (*sorted(pieces, key=lambda one: one.own), Piece(None, 0, 0, length)):
        if at < piece.own and (piece.begin < piece.end or piece.parameter is None):
            yield Piece(None, 0, piece.own - at, at)
        if piece.parameter is not None:
            yield piece
        at = max(at, piece.own + piece.end - piece.begin) if piece.begin < piece.end else at


def refresh(optimizer: Any) -> None:
    """Round what ZeRO 1 to 3 leave to this rank, and gather it. A collective of the replica.

    On a GPU, ZeRO 3 has to wait for the rounding: it gathers on a stream of its own, which does not.
    """
    if not hasattr(optimizer, "fp32_partitioned_groups_flat"):
        optimizer.update_lp_params()
        return
    for group in range(len(optimizer.fp32_partitioned_groups_flat)):
        optimizer._reassign_or_swap_out_partitioned_parameters(group)
    if kept := optimizer.persistent_parameters:  # whole on every rank; others are gathered when they are used
        kept[0].partition(kept, has_been_updated=False)
        kept[0].all_gather(kept)
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


def local_place(parameter: Any) -> tuple[int, int]:
    """Return which elements of a parameter `local_part` has: from where, and to where."""
    if not hasattr(parameter, "ds_tensor"):
        return 0, parameter.numel()
    length = parameter.ds_tensor.numel()
    first = length * dist.get_rank(parameter.ds_process_group)
    return first, first + _own_length(parameter, length)


def whole_weights(engine: Any) -> tuple[list[tuple[Tensor, list[Any]]], list[tuple[Tensor, Tensor]]]:
    """Return the fp32 weights of an engine without ZeRO, each with the parameters in it, and pairs of them and
    their copies in 16 bits.

    Raises UserError for an optimizer that keeps no weights in fp32.
    """
    optimizer, rounded = engine.optimizer, []
    if hasattr(optimizer, "fp32_groups_flat"):
        # Around FusedAdam, parameters are views of the flat 16-bit groups.
        rounded = list(zip(optimizer.fp32_groups_flat, optimizer.fp16_groups_flat, strict=True))
        stepped = [
            (flat, list(group))
            for flat, group in zip(optimizer.fp32_groups_flat, optimizer.fp16_groups, strict=True)
        ]
    elif hasattr(optimizer, "fp32_groups"):  # in bf16 and fp16
        groups = zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True)
        rounded = [pair for exact, half in groups for pair in zip(exact, half, strict=True)]
        stepped = [(exact, [half]) for exact, half in rounded]
    else:
        stepped = [(one, [one]) for one in engine.module.parameters() if one.requires_grad]
    if any(weight.dtype != torch.float32 for weight, _ in stepped):
        raise UserError(
            f"the weights of {type(optimizer).__name__} are not in fp32; use zero_optimization.stage 1"
        )
    return stepped, rounded


@contextmanager
def with_weights(optimizer: Any) -> Iterator[None]:
    """Give the optimizer inside ZeRO its parameters: ZeRO 3 takes them away between two steps."""
    if not hasattr(optimizer, "fp32_partitioned_groups_flat"):
        yield
        return
    optimizer._set_fp32_optimizer_param_groups()
    try:
        yield
    finally:
        optimizer._clear_fp32_optimizer_param_groups()


def local_part(parameter: Any) -> Tensor:
    """Return this rank's part of a parameter that ZeRO 3 divides, without padding; of any other the whole."""
    if not hasattr(parameter, "ds_tensor"):
        whole: Tensor = parameter
        return whole
    part: Tensor = parameter.ds_tensor
    return part[: _own_length(parameter, part.numel())]


def _own_length(parameter: Any, length: int) -> int:
    """Return how many of the `length` elements that a rank stores are not padding, which the last ranks have."""
    left: int = parameter.ds_numel - length * dist.get_rank(parameter.ds_process_group)
    return max(0, min(length, left))
