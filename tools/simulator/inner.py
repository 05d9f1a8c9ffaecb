"""Inner optimizers on stacks of replicas; AdamW as torch and DeepSpeed have it."""

from typing import Any

import torch
from deepspeed.runtime import lr_schedules
from torch import Tensor


class StackedAdamW:
    """AdamW with decoupled weight decay (Loshchilov & Hutter, arXiv 1711.05101), row by row.

    Args:
        weights: fp32, shape [R, elements]; updated in place.
        params: of the JSON's optimizer block.
    """

    def __init__(self, weights: Tensor, params: dict[str, Any]) -> None:
        self.weights = weights
        self.betas = params.get("betas", (0.9, 0.999))
        self.eps, self.weight_decay = params.get("eps", 1e-8), params.get("weight_decay", 0.0)
        self.first, self.second = torch.zeros_like(weights), torch.zeros_like(weights)
        self.steps = 0

    def step(self, gradients: Tensor, learning_rate: float) -> None:
        self.steps += 1
        beta1, beta2 = self.betas
        correction1, correction2 = 1 - beta1**self.steps, 1 - beta2**self.steps
        self.weights.mul_(1 - learning_rate * self.weight_decay)
        self.first.lerp_(gradients, 1 - beta1)
        self.second.mul_(beta2).addcmul_(gradients, gradients, value=1 - beta2)
        denominator = (self.second.sqrt() / correction2**0.5).add_(self.eps)
        self.weights.addcdiv_(self.first, denominator, value=-learning_rate / correction1)


def clip(gradients: Tensor, largest: float) -> Tensor:
    """Scale each replica's gradient, a row, to a norm of at most `largest`; returns the norms before, [R]."""
    norms = gradients.norm(dim=1)
    if largest:
        gradients.div_(((norms + 1e-6) / largest).clamp(min=1.0)[:, None])
    return norms


class LearningRate:
    """The learning rate of each local step, by DeepSpeed's own schedules."""

    def __init__(self, ds_config: dict[str, Any]) -> None:
        params = ds_config["optimizer"].get("params", {})
        self._optimizer = torch.optim.SGD([torch.zeros(1)], lr=params.get("lr", 1e-3))
        block = ds_config.get("scheduler")
        self._schedule = None
        if block is not None:
            self._schedule = getattr(lr_schedules, block["type"])(self._optimizer, **block.get("params", {}))

    def next(self) -> float:
        """Of the step to come; called once per step."""
        rate = float(self._optimizer.param_groups[0]["lr"])
        if self._schedule is not None:
            self._schedule.step()
        return rate
