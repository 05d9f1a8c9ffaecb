"""Evaluation: the loss of every replica and of their mean model, on the same validation microbatches.

The one documented place where all replicas meet. Nothing here happens between evaluations; without the mean model
(`evaluation.mean_model` false) only losses are told, without evaluations (`evaluation.iters` 0) the replicas
never meet.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_noloco.data.microbatches import ValidationSource
from megatron_noloco.engine.replica import ReplicaEngine
from megatron_noloco.outer.averaging import GroupAveraging, MeanPiece
from megatron_noloco.outer.optimizer import OuterOptimizer
from megatron_noloco.plans.routing import Routing
from megatron_noloco.training.record import DatasetLosses, Evaluation

_LOSS_TAG, _WEIGHTS_TAG = 1, 2  # every rank is at the same step, and messages of one tag keep their order
_WHAT = "an evaluation"


class Evaluator:
    """Evaluates on straight routes: whole replicas, as they would be used."""

    def __init__(
        self,
        engine: ReplicaEngine,
        outer: OuterOptimizer | None,
        averaging: GroupAveraging,
        routing: Routing,
        sources: list[ValidationSource],
        mean_model: bool,
    ) -> None:
        """`mean_model` False: the replicas tell each other their losses, but no weights."""
        self.engine = engine
        self.outer = outer
        self.averaging = averaging
        self.routing = routing
        self.sources = sources
        self.mean_model = mean_model
        self.replicas = engine.groups.topology.replicas
        self.everyone = tuple(range(self.replicas))

    @torch.no_grad()
    def evaluate(self) -> Evaluation:
        """Measure every replica's fast weights, then the mean of all slow weights, and leave no trace.

        Every rank of every replica must call it after the same step. The mean of the weights arrives in pieces
        and overwrites the fast weights, which wait in memory that is free between rounds: no copy of the model
        is made (but one, of this rank's fp32 weights, under `noloco.method` "none", which has no such memory).
        """
        own_losses = self._losses()
        if self.replicas == 1:
            return self._evaluation([own_losses], own_losses, math.nan)
        by_replica = self._share(own_losses)
        if not self.mean_model:
            return self._evaluation(by_replica, [math.nan] * len(self.sources), math.nan)
        aside = self._master_weights_aside() if self.outer is None else self.outer.master_weights_aside()
        with aside as own:
            for piece in self.averaging.mean(own, self.everyone, _WEIGHTS_TAG, _WHAT):
                self._overwrite(piece)
            spread = self.averaging.report.standard_deviation
            self.engine.refresh_working_weights()
            mean_losses = self._losses()
        self.engine.refresh_working_weights()
        return self._evaluation(by_replica, mean_losses, spread)

    @contextmanager
    def _master_weights_aside(self) -> Iterator[Tensor]:
        """Without an outer optimizer there are only fast weights, and no memory to spare."""
        fast = torch.cat([master.cpu() for master in self.engine.master_weights])
        try:
            yield fast
        finally:
            self._overwrite(MeanPiece(0, len(fast), fast))

    def _overwrite(self, piece: MeanPiece) -> None:
        """The master weights that stand at the place of the piece."""
        begin = 0
        for master in self.engine.master_weights:
            start, stop = max(piece.start, begin), min(piece.stop, begin + master.numel())
            if start < stop:
                part = piece.mean[start - piece.start : stop - piece.start]
                master[start - begin : stop - begin].copy_(part)
            begin += master.numel()

    def _evaluation(
        self, by_replica: list[list[float]], mean_losses: list[float], spread: float
    ) -> Evaluation:
        """From losses per dataset, which a blend weighs."""
        weights = [source.weight for source in self.sources]

        def blended(losses: list[float]) -> float:
            return sum(weight * loss for weight, loss in zip(weights, losses, strict=True))

        datasets = [
            DatasetLosses(source.dataset.name, [losses[index] for losses in by_replica], mean_losses[index])
            for index, source in enumerate(self.sources)
        ]
        return Evaluation(
            [blended(losses) for losses in by_replica],
            blended(mean_losses),
            spread,
            datasets if len(datasets) > 1 else [],
        )

    def _share(self, own_losses: list[float]) -> list[list[float]]:
        """Everybody's losses: the mean over replicas of tables with one row filled in, times their number.

        A mean leaves out what is not finite; so a loss that is not travels as a zero, and a mark beside it.
        """
        own = torch.tensor(own_losses)
        table = torch.zeros(self.replicas, 2, len(own_losses))
        marked = torch.stack([torch.nan_to_num(own, 0.0, 0.0, 0.0), (~own.isfinite()).float()])
        table[self.engine.groups.position.replica] = marked * self.replicas
        table = self.averaging.whole_mean(table.flatten(), self.everyone, _LOSS_TAG, _WHAT).view_as(table)
        return table[:, 0].where(table[:, 1] < 0.5, math.nan).tolist()

    def _losses(self) -> list[float]:
        """The mean loss of this replica as it stands on each dataset, known to all its ranks."""
        return [self._loss(source) for source in self.sources]

    def _loss(self, source: ValidationSource) -> float:
        losses = self.engine.evaluate(
            lambda _, microbatch: source.microbatch(microbatch),
            self.routing.straight(),
            len(source),
        )
        total = torch.zeros(2, dtype=torch.float64)
        for _, loss in losses:
            total += torch.tensor([float(loss), 1.0], dtype=torch.float64)
        dist.all_reduce(total, group=self.engine.groups.replica)
        return float(total[0] / total[1])
