"""The gradient's norm over a whole replica, which the host reads once in each local step.

Reading a number of a device waits for all that is queued there. DeepSpeed's ZeRO optimizer reads several: whether
some gradient is not finite (fp16), whether their norm is, and the same again before it clips each group. Here the
norm is read once, as a Python number, and answers all of these questions.
"""

from collections.abc import Sequence
from functools import partial

from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor


def read_norm_once(optimizer: DeepSpeedZeroOptimizer) -> None:
    """Replace what a step of this optimizer asks about its gradients."""
    optimizer.check_overflow = _leave_to_the_norm
    optimizer.scaled_global_norm = partial(_norm_of_all_groups, optimizer)
    optimizer.unscale_and_clip_grads = partial(_unscale_and_clip, optimizer)


def _leave_to_the_norm(partition_gradients: bool = True) -> None:
    """A gradient that is not finite has a norm that is not: the step asks for that, too."""


def _norm_of_all_groups(optimizer: DeepSpeedZeroOptimizer) -> float:
    """The norm of the gradients, times the loss scale, over the whole replica; below 0 where it is not finite.

    DeepSpeed sums group by group over the stages, which waits forever where two stages have different groups.
    """
    optimizer.scale_of_gradients = optimizer.loss_scale  # the step may raise it before it divides by it
    groups = range(len(optimizer.bit16_groups))
    gradients = [gradient for group in groups for gradient in optimizer.averaged_gradients[group]]
    parameters = [parameter for group in groups for parameter in optimizer.params_in_partition[group]]
    return float(optimizer.get_grad_norm_direct(gradients, parameters))


def _unscale_and_clip(optimizer: DeepSpeedZeroOptimizer, gradients: Sequence[Tensor], norm: float) -> None:
    """Divide by the loss scale, and where the norm is above `gradient_clipping`, by as much more (with DeepSpeed's
    1e-6) as it is."""
    factor = scale = optimizer.scale_of_gradients
    if optimizer.clip_grad > 0:
        factor *= max(1.0, (norm / scale + 1e-6) / optimizer.clip_grad)
    if factor != 1:
        for gradient in gradients:
            gradient.mul_(1 / factor)
