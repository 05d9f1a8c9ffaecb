"""The fp32 weights of a DeepSpeed engine that somebody else's loop trains, for each ZeRO stage.

Uses attributes of DeepSpeed 0.19.8 that are not public; the tests fail when they change. Its public functions do
not serve here. `safe_get_full_fp32_param`, the only one for stages 1 and 2, sums each parameter over the ranks: it
took 129 ms where these partitions are read in 1.4 ms (two CPU ranks, 200 tensors with 6.6 M weights). In stage 3
`safe_get_local_fp32_param` took 3.4 ms instead of 2.5, and `safe_set_local_fp32_param` 3.6 ms instead of 3.3. The
first returns copies of weights that are offloaded, and the second leaves the weights in 16 bits as they are.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_noloco.engine.state import PARTITIONS, MasterWeights, bit16_groups
from megatron_noloco.errors import UserError
from megatron_noloco.outer.weights import TorchWeights, Weights
from megatron_noloco.plans.canonical import Piece, in_turn


def owned_weights(optimizer: Any) -> "Zero12Weights | Zero3Weights | None":
    """Return the fp32 weights that ZeRO 1 to 3 leave to this rank; None where each rank has all of them.

    Raises UserError for weights on NVMe.
    """
    if getattr(optimizer, "swap_optimizer", False):
        raise UserError("zero_optimization.offload_optimizer: weights on NVMe cannot be exchanged; use cpu")
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return Zero3Weights(optimizer)
    return Zero12Weights(optimizer) if any(hasattr(optimizer, name) for name in PARTITIONS) else None


def local_place(parameter: Any) -> tuple[int, int]:
    """Return which elements of a parameter `local_part` has: from where, and to where."""
    if not hasattr(parameter, "ds_tensor"):
        return 0, parameter.numel()
    length = parameter.ds_tensor.numel()
    first = length * dist.get_rank(parameter.ds_process_group)
    return first, first + _own_length(parameter, length)


def whole_weights(engine: Any) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]], list[list[Any]]]:
    """Return the fp32 weights of an engine without ZeRO, pairs of them and their copies in 16 bits, and for each
    weight the parameters in it.

    Raises UserError for an optimizer that keeps no weights in fp32.
    """
    optimizer, rounded = engine.optimizer, []
    if hasattr(optimizer, "fp32_groups_flat"):
        # Around FusedAdam, parameters are views of the flat 16-bit groups.
        rounded = list(zip(optimizer.fp32_groups_flat, optimizer.fp16_groups_flat, strict=True))
        exact = [weight for weight, _ in rounded]
        in_each = list(optimizer.fp16_groups)
    elif hasattr(optimizer, "fp32_groups"):  # in bf16 and fp16
        groups = zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True)
        rounded = [pair for exact, half in groups for pair in zip(exact, half, strict=True)]
        exact = [weight for weight, _ in rounded]
        in_each = [[half] for _, half in rounded]
    else:
        exact = [one for one in engine.module.parameters() if one.requires_grad]
        in_each = [[one] for one in exact]
    if any(weight.dtype != torch.float32 for weight in exact):
        raise UserError(
            f"the weights of {type(optimizer).__name__} are not in fp32; use zero_optimization.stage 1"
        )
    return exact, rounded, in_each


def steps_another(optimizer: Any) -> bool:
    """Return whether this is an optimizer of DeepSpeed's around another one, which steps its fp32 weights."""
    names = "fp32_partitioned_groups_flat", "refresh_fp32_params", "fp32_groups_flat", "fp32_groups"
    return any(hasattr(optimizer, name) for name in names)


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


def _without_padding(flats: Iterable[Tensor], groups: Iterable[list[Any]]) -> Iterator[Tensor]:
    for flat, parameters in zip(flats, groups, strict=True):
        start = 0
        for parameter in parameters:
            length = parameter.ds_tensor.numel()
            yield flat[start : start + _own_length(parameter, length)]
            start += length


class Zero12Weights(MasterWeights):
    """Shows the part of each flat group that this rank owns."""

    def stepped(self) -> list[tuple[Tensor, list[Any]]]:
        """Return what the optimizer inside ZeRO steps: flat tensors, each with the parameters in it."""
        return list(zip(self.partitions, bit16_groups(self._optimizer), strict=True))

    def view(self, tensors: Sequence[Tensor]) -> Weights:
        """Show tensors like those of `stepped` as a vector with the layout of these weights."""
        return TorchWeights(tensors)


class Zero3Weights(TorchWeights):
    """Shows the part of each parameter that this rank owns, without the padding of the last ranks."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        super().__init__(_without_padding(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups))

    def pieces(self) -> Iterator[Piece]:
        """Yield where the parameters of the optimizer lie in the vector; pieces count in this rank's part."""
        parameters = (one for group in self._optimizer.fp16_groups for one in group)
        lengths = ((one, _own_length(one, one.ds_tensor.numel())) for one in parameters)
        yield from (Piece(parameter, 0, length, own) for parameter, length, own in in_turn(lengths))

    def stepped(self) -> list[tuple[Tensor, list[Any]]]:
        """Return what the optimizer inside ZeRO steps: flat tensors, each with the parameters in it."""
        optimizer = self._optimizer
        return list(zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True))

    def view(self, tensors: Sequence[Tensor]) -> Weights:
        """Show tensors like those of `stepped` as a vector with the layout of these weights."""
        return TorchWeights(_without_padding(tensors, self._optimizer.fp16_groups))

    def refresh(self) -> None:
        """Round to the working precision, and gather the parameters that ZeRO keeps whole on every rank.

        On a GPU waits for the rounding: DeepSpeed gathers the others on a stream of its own, which does not.
        """
        for group in range(len(self._optimizer.fp32_partitioned_groups_flat)):
            self._optimizer._reassign_or_swap_out_partitioned_parameters(group)
        if kept := self._optimizer.persistent_parameters:
            kept[0].partition(kept, has_been_updated=False)
            kept[0].all_gather(kept)
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
