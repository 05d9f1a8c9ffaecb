"""Evaluation: the loss of every replica and of their mean model, on the same validation microbatches.

The one documented place where all replicas meet. Nothing here happens between evaluations; without evaluations
(`training.eval_iters` 0) the replicas never meet.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_noloco.data.microbatches import ValidationSource
from megatron_noloco.engine.replica import ReplicaEngine
from megatron_noloco.outer.averaging import GroupAveraging
from megatron_noloco.outer.optimizer import OuterOptimizer
from megatron_noloco.plans.routing import Routing
from megatron_noloco.training.record import Evaluation

_LOSS_TAG, _WEIGHTS_TAG = 1, 2  # every rank is at the same step, and messages of one tag keep their order


class Evaluator:
    """Evaluates on straight routes: whole replicas, as they would be used."""

    def __init__(
        self,
        engine: ReplicaEngine,
        outer: OuterOptimizer | None,
        averaging: GroupAveraging,
        routing: Routing,
        source: ValidationSource,
    ) -> None:
        self.engine = engine
        self.outer = outer
        self.averaging = averaging
        self.routing = routing
        self.source = source
        self.replicas = engine.groups.topology.replicas

    @torch.no_grad()
    def evaluate(self) -> Evaluation:
        """Measure every replica's fast weights, then the mean of all slow weights, and leave no trace.

        Every rank of every replica must call it after the same step. Needs one more copy of this rank's fp32
        weights while it runs.
        """
        own_loss = self._loss()
        if self.replicas == 1:
            return Evaluation([own_loss], own_loss, math.nan)
        everyone = tuple(range(self.replicas))
        replica_losses = self._share(own_loss)
        fast = [master.to("cpu", copy=True) for master in self.engine.master_weights]
        own = torch.cat(fast) if self.outer is None else self.outer.slow_weights.cpu()
        mean = self.averaging.whole_mean(own, everyone, _WEIGHTS_TAG)
        spread = self.averaging.report.standard_deviation
        mean_loss = self._loss_with(list(mean.split([part.numel() for part in fast])))
        self._write(fast)
        return Evaluation(replica_losses, mean_loss, spread)

    def _share(self, own_loss: float) -> list[float]:
        """Everybody's loss: the mean over replicas of one-hot vectors, times their number."""
        one_hot = torch.zeros(self.replicas)
        one_hot[self.engine.groups.position.replica] = own_loss * self.replicas
        everyone = tuple(range(self.replicas))
        return self.averaging.whole_mean(one_hot, everyone, _LOSS_TAG).tolist()

    def _loss_with(self, weights: list[Tensor]) -> float:
        self._write(weights)
        return self._loss()

    def _write(self, weights: list[Tensor]) -> None:
        for master, part in zip(self.engine.master_weights, weights, strict=True):
            master.copy_(part)
        self.engine.refresh_working_weights()

    def _loss(self) -> float:
        """The mean validation loss of this replica as it stands, known to all its ranks."""
        losses = self.engine.evaluate(
            lambda _, microbatch: self.source.microbatch(microbatch),
            self.routing.straight(),
            len(self.source),
        )
        total = torch.zeros(2, dtype=torch.float64)
        for _, loss in losses:
            total += torch.tensor([float(loss), 1.0], dtype=torch.float64)
        dist.all_reduce(total, group=self.engine.groups.replica)
        return float(total[0] / total[1])
