"""What happens to the gradients of a replica between the backward pass and the step of the inner optimizer.

Gradients that the pipeline's schedule leaves partial are summed; DeepSpeed reduces them over the data-parallel
ranks; then the norm over the whole replica is read, once, and they are clipped.

Reading a number of a device waits for all that is queued there. DeepSpeed's ZeRO optimizer reads several in each
step: whether some gradient is not finite (fp16), whether their norm is, and the same again before it clips each
group. `read_norm_once` has it read the norm as a Python number, which answers all of these questions.
"""

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from megatron_noloco.model.stage import Stage
from megatron_noloco.pipeline.groups import Groups, ProcessGroup

# Partial gradients


class PartialGradients:
    """Completes gradients, as core's `finalize_model_grads` does, which wants core's data-parallel wrapper.

    Args:
        optimizer: DeepSpeed's, which holds the gradients.
        tied: this stage's copy of an embedding that the output layer on another stage shares; None without one.
    """

    def __init__(self, stage: Stage, groups: Groups, optimizer: Any, tied: nn.Parameter | None) -> None:
        self._groups = groups
        self._optimizer = optimizer
        self._tied = tied
        every = stage.config.sequence_parallel
        # What all tensor-parallel ranks have, with gradients of their own tokens or their own heads.
        self._partial = [
            parameter
            for row, parameter in stage.named_rows()
            if groups.tp.size() > 1 and row.tp_dim is None and (every or row.per_head)
        ]

    def complete(self) -> None:
        """Sum over a stage's tp ranks and between tied embeddings; all ranks of the replica call it."""
        if self._partial:
            _sum([self.of(parameter) for parameter in self._partial], self._groups.tp)
        if self._tied is not None and self._groups.tied_embedding is not None:
            _sum([self.of(self._tied)], self._groups.tied_embedding)

    def of(self, parameter: nn.Parameter) -> Tensor:
        """Return the accumulated gradient of a parameter, live; flat in DeepSpeed's bf16 optimizer."""
        if isinstance(self._optimizer, BF16_Optimizer):
            return self._fp32_gradients[parameter]
        gradient: Tensor = self._optimizer.get_gradient_for_reduction(parameter)
        return gradient

    @cached_property
    def _fp32_gradients(self) -> dict[nn.Parameter, Tensor]:
        """Where DeepSpeed's bf16 optimizer accumulates each parameter's gradient."""
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
    """Replace the methods by which a step of this optimizer reads numbers of its gradients."""
    optimizer.check_overflow = _leave_to_the_norm
    optimizer.scaled_global_norm = partial(_norm_of_all_groups, optimizer)
    optimizer.unscale_and_clip_grads = partial(_unscale_and_clip, optimizer)


def _leave_to_the_norm(partition_gradients: bool = True) -> None:
    """Do nothing: a gradient that is not finite has a norm that is not, and the step checks that, too."""


def _norm_of_all_groups(optimizer: DeepSpeedZeroOptimizer) -> float:
    """Return the norm of the gradients, times the loss scale, over the whole replica; below 0 if it is not finite.

    DeepSpeed sums group by group over the stages, which waits forever where two stages have different groups.
    """
    optimizer.scale_of_gradients = optimizer.loss_scale  # the step may raise it before it divides by it
    groups = range(len(optimizer.bit16_groups))
    gradients = [gradient for group in groups for gradient in optimizer.averaged_gradients[group]]
    parameters = [parameter for group in groups for parameter in optimizer.params_in_partition[group]]
    return float(optimizer.get_grad_norm_direct(gradients, parameters))


def _unscale_and_clip(optimizer: DeepSpeedZeroOptimizer, gradients: Sequence[Tensor], norm: float) -> None:
    """Divide by the loss scale, and by norm / `gradient_clipping` (with DeepSpeed's 1e-6) if that is above 1."""
    factor = scale = optimizer.scale_of_gradients
    if optimizer.clip_grad > 0:
        factor *= max(1.0, (norm / scale + 1e-6) / optimizer.clip_grad)
    if factor != 1:
        for gradient in gradients:
            gradient.mul_(1 / factor)
