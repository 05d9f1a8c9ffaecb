"""Completes, measures and clips gradients between the backward pass and the step of the inner optimizer.

`PartialGradients` sums the gradients that the pipeline's schedule leaves partial; DeepSpeed reduces them over the
data-parallel ranks; then the norm over the whole replica is read once, and the gradients are clipped.

Reading a number from a device waits for all work that is queued there. DeepSpeed's ZeRO optimizer reads several in
each step: whether each gradient is finite (fp16), whether the norm is, and the norm again before it clips each
group. With `read_norm_once` it reads the norm once, as a Python number.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from megatron_noloco.model.stage import Stage
from megatron_noloco.pipeline.groups import Groups, ProcessGroup

_AT_ONCE = 1 << 24  # elements of a gradient whose norm is computed at a time

# Partial gradients


class PartialGradients:
    """Completes gradients like core's `finalize_model_grads`, which needs core's data-parallel wrapper.

    Args:
        optimizer: DeepSpeed's, which has the gradients.
        tied: this stage's copy of an embedding that the output layer on another stage shares; None without one.
    """

    def __init__(self, stage: Stage, groups: Groups, optimizer: Any, tied: nn.Parameter | None) -> None:
        self._groups = groups
        self._optimizer = optimizer
        self._tied = tied
        # Parameters that all tensor-parallel ranks have, each with the gradient of its own tokens or heads.
        own_tokens = stage.config.sequence_parallel
        self._partial = [
            parameter
            for row, parameter in stage.named_rows()
            if groups.tp.size() > 1 and row.tp_dim is None and (own_tokens or row.per_head)
        ]

    def complete(self) -> None:
        """Sum over a stage's tp ranks and between tied embeddings; all ranks of the replica call this."""
        if self._partial:
            _sum([self.gradient_of(parameter) for parameter in self._partial], self._groups.tp)
        if self._tied is not None and self._groups.tied_embedding is not None:
            _sum([self.gradient_of(self._tied)], self._groups.tied_embedding)

    def gradient_of(self, parameter: nn.Parameter) -> Tensor:
        """Return a view of a parameter's accumulated gradient; it is flat in DeepSpeed's bf16 optimizer."""
        if isinstance(self._optimizer, BF16_Optimizer):
            return self._fp32_gradients[parameter]
        gradient: Tensor = self._optimizer.get_gradient_for_reduction(parameter)
        return gradient

    @cached_property
    def _fp32_gradients(self) -> dict[nn.Parameter, Tensor]:
        """The tensor in which DeepSpeed's bf16 optimizer accumulates each parameter's gradient."""
        optimizer = self._optimizer
        groups = zip(optimizer.bf16_groups, optimizer.fp32_groups_gradients, strict=True)
        return {
            parameter: gradient
            for parameters, gradients in groups
            for parameter, gradient in zip(parameters, gradients, strict=True)
        }


def _sum(gradients: list[Tensor], group: ProcessGroup) -> None:
    flat = torch.cat([gradient.view(-1) for gradient in gradients])
    dist.all_reduce(flat, group=group)
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


# Norm and clipping


def read_norm_once(optimizer: DeepSpeedZeroOptimizer) -> None:
    """Replace the methods with which a step of this optimizer reads the device, by one read of the norm."""
    optimizer.check_overflow = _no_check
    optimizer.scaled_global_norm = partial(_norm_of_all_groups, optimizer)
    optimizer.unscale_and_clip_grads = partial(_unscale_and_clip, optimizer)


def _no_check(partition_gradients: bool = True) -> None:
    """Do nothing: gradients that are not finite have a norm that is not, which the step checks later."""


def _norm_of_all_groups(optimizer: DeepSpeedZeroOptimizer) -> float:
    """Return the norm of the gradients, times the loss scale, over the whole replica; negative if not finite.

    DeepSpeed itself sums group by group over the stages, which never ends where stages have different groups.
    """
    # Kept, since the step may raise `loss_scale` before `_unscale_and_clip` divides by it.
    optimizer.scale_of_gradients = optimizer.loss_scale
    groups = range(len(optimizer.bit16_groups))
    gradients = [gradient for group in groups for gradient in optimizer.averaged_gradients[group]]
    parameters = [parameter for group in groups for parameter in optimizer.params_in_partition[group]]
    return float(optimizer.get_grad_norm_direct(*in_pieces(gradients, parameters)))


def in_pieces(
    gradients: Iterable[Tensor], parameters: Iterable[nn.Parameter]
) -> tuple[list[Tensor], list[nn.Parameter]]:
    """Cut long gradients, of which DeepSpeed's norm makes copies in fp64, and name the parameter of each piece.

    Leaves out DeepSpeed's padding, which belongs to no parameter.
    """
    real = (gradient for gradient in gradients if not getattr(gradient, "_zero_padding", False))
    cut = [
        (piece, parameter)
        for gradient, parameter in zip(real, parameters, strict=False)
        for piece in ([gradient] if gradient.numel() <= _AT_ONCE else gradient.view(-1).split(_AT_ONCE))
    ]
    return [piece for piece, _ in cut], [parameter for _, parameter in cut]


def _unscale_and_clip(optimizer: DeepSpeedZeroOptimizer, gradients: Sequence[Tensor], norm: float) -> None:
    """Divide by the loss scale, and by norm / `gradient_clipping` (with DeepSpeed's 1e-6) if this is above 1."""
    factor = scale = optimizer.scale_of_gradients
    if optimizer.clip_grad > 0:
        factor *= max(1.0, (norm / scale + 1e-6) / optimizer.clip_grad)
    if factor != 1:
        for gradient in gradients:
            gradient.mul_(1 / factor)
