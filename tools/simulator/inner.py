"""Inner optimizers on stacks of replicas: AdamW as torch and DeepSpeed have it, Muon as DeepSpeed has it."""

from collections.abc import Iterable
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from megatron_noloco.engine.initialize import quiet
from megatron_noloco.engine.schedules import build_schedule


class StackedOptimizer:
    """AdamW (arXiv 1412.6980, 1711.05101) on all replicas at once, with bias correction; Muon for some matrices.

    Muon is that of Jordan et al. 2024, kellerjordan.github.io/posts/muon.

    Args:
        weights: fp32, shape [R, elements]; updated in place.
        params: of the optimizer, as in the JSON.
        decays: 1 for each weight to which weight decay applies, else 0; fp32, shape [elements].
        matrices: of each matrix that is orthogonalised on its own, the places of its elements, int64, shape
            [rows, columns]; none: AdamW alone.
    """

    def __init__(
        self, weights: Tensor, params: dict[str, Any], decays: Tensor, matrices: Iterable[Tensor] = ()
    ) -> None:
        self.weights, self.steps = weights, 0
        self._decays, self._eps = decays, params.get("eps", 1e-8)
        self._betas, self._momentum_beta = params.get("betas", (0.9, 0.999)), params.get("momentum", 0.0)
        self._first, self._second = torch.zeros_like(weights), torch.zeros_like(weights)
        by_shape = groupby(sorted(matrices, key=_shape), key=_shape)
        self._stacks = [torch.stack(list(same)) for _, same in by_shape]  # [matrices, rows, columns]
        self._momentum = [torch.zeros(len(weights), *stack.shape) for stack in self._stacks]
        self._newton_schulz = torch.bfloat16 if params.get("ns_method") == "standard" else torch.float32
        self._ratios = torch.ones(weights.shape[1])  # of each weight's learning rate to the scheduled one
        if self._stacks:
            self._ratios *= params["adam_lr"] / params["muon_lr"]
        for stack in self._stacks:
            self._ratios[stack] = 1.0

    def step(self, gradients: Tensor, learning_rate: float, weight_decay: float) -> None:
        """Decay the weights, then step; gradients [R, elements] may be overwritten."""
        self.steps += 1
        beta1, beta2 = self._betas
        self._first.lerp_(gradients, 1 - beta1)
        self._second.mul_(beta2).addcmul_(gradients, gradients, value=1 - beta2)
        denominator = (self._second.sqrt() / (1 - beta2**self.steps) ** 0.5).add_(self._eps)
        directions = self._first.div(denominator).div_(1 - beta1**self.steps)
        for stack, momentum in zip(self._stacks, self._momentum, strict=True):
            gradient = gradients[:, stack]
            momentum.lerp_(gradient, 1 - self._momentum_beta)
            rows, columns = stack.shape[1:]
            gradient.lerp_(momentum, self._momentum_beta)  # Nesterov's
            update = orthogonalised(gradient.to(self._newton_schulz)).float()
            directions[:, stack] = update * max(1.0, rows / columns) ** 0.5
        rates = self._ratios * learning_rate
        self.weights.mul_(1 - rates * self._decays * weight_decay).addcmul_(directions, rates, value=-1)

    def tensors(self) -> list[Tensor]:
        """Return the live weights and state, a row per replica."""
        return [self.weights, self._first, self._second, *self._momentum]


def orthogonalised(matrices: Tensor, steps: int = 5) -> Tensor:
    """Return about U V' of each matrix U S V', by quintic Newton-Schulz: singular values from 0.7 to 1.2.

    Args:
        matrices: shape [..., rows, columns].
    """
    a, b, c = 3.4445, -4.7750, 2.0315  # of Jordan et al.
    wide = matrices if matrices.shape[-2] <= matrices.shape[-1] else matrices.mT
    x = (wide / (wide.norm(dim=(-2, -1), keepdim=True) + 1e-7)).flatten(0, -3)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x.view(wide.shape)
    return x if wide is matrices else x.mT


def _shape(matrix: Tensor) -> tuple[int, ...]:
    return tuple(matrix.shape)


def clip(gradients: Tensor, largest: float) -> None:
    """Scale each replica's gradient, a row, to a norm of at most `largest`; 0 leaves it."""
    if largest:
        norms = gradients.norm(dim=1, keepdim=True)
        gradients.div_(((norms + 1e-6) / largest).clamp(min=1.0))


class LearningRate:
    """The learning rate of each local step, by the trainer's own schedules."""

    def __init__(self, ds_config: dict[str, Any]) -> None:
        params = ds_config["optimizer"].get("params", {})
        self._optimizer = torch.optim.SGD([torch.zeros(1)], lr=params.get("muon_lr", params.get("lr", 1e-3)))
        block = ds_config.get("scheduler")
        self._schedule = None
        if block is not None:
            with quiet():  # it warns of a first step that is none
                self._schedule = build_schedule(block, self._optimizer)

    def next(self) -> float:
        """Return the rate of the next step; to be called once per step."""
        rate = float(self._optimizer.param_groups[0]["lr"])
        if self._schedule is not None:
            self._schedule.step()
        return rate
