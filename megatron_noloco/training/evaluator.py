"""Measures the loss of every replica of this job and of the mean model, on the same validation microbatches.

In an evaluation all replicas of a job communicate. Without the mean model (`evaluation.mean_model` false) they
exchange losses only; without evaluations (`evaluation.iters` 0) nothing. In a federation each job evaluates its
own replica, and sends nothing.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import count

import torch
import torch.distributed as dist

from megatron_noloco.data.microbatches import Microbatch, ValidationSource
from megatron_noloco.engine.replica import ReplicaEngine
from megatron_noloco.job.activity import now
from megatron_noloco.monitor.monitor import DatasetLosses, Evaluation
from megatron_noloco.outer import Exchange, ExchangeReport, group_mean
from megatron_noloco.plans.routing import Routing

_FILLS = 4  # of the pipeline, between two looks whether to stop


class _StoppedError(Exception):
    """The job was asked to stop."""


class Evaluator:
    """Evaluates the replicas, each on its own stages: no microbatch is routed.

    Args:
        sources: the validation microbatches of each dataset.
        losses: carries the losses of the replicas of this job; None where it has one.
        mean_model: puts the mean model in place, see `outer.mean_model`; None: no weights are exchanged.

    Attributes:
        stops_before: see `Stopping.before_part`.
    """

    def __init__(
        self,
        engine: ReplicaEngine,
        routing: Routing,
        sources: list[ValidationSource],
        losses: Exchange | None,
        mean_model: Callable[[int], AbstractContextManager[ExchangeReport]] | None,
    ) -> None:
        self.engine = engine
        self.routing = routing
        self.sources = sources
        self.losses = losses
        self.mean_model = mean_model
        self.stops_before: Callable[[int, int], bool] = lambda done, part: False
        self._done, self._parts = 0, count()
        topology = engine.groups.topology
        self.replicas = topology.replicas  # of this job: one in a federation
        self.alone = topology.ensemble == 1  # a run of one replica, which is its own mean model

    @torch.no_grad()
    def evaluate(self, done: int) -> Evaluation | None:
        """Measure every replica's fast weights, then the mean of all slow weights; no weight is changed.

        All ranks of this job call it after the same local step, the `done`-th of the training.

        Returns None where the job was asked to stop meanwhile. Raises PartnerLostError when a replica of this job
        does not answer.
        """
        self._done, self._parts = done, count()
        try:
            return self._measure(done)
        except _StoppedError:
            return None

    def _measure(self, done: int) -> Evaluation:
        own_losses = self._losses()
        if self.alone:
            return self._evaluation([own_losses], own_losses, math.nan)
        self._begin_part()
        by_replica = [own_losses] if self.losses is None else self._exchanged(self.losses, own_losses, done)
        if self.mean_model is None:
            return self._evaluation(by_replica, [math.nan] * len(own_losses), math.nan)
        with self.mean_model(done) as report:
            mean_losses = self._losses()
        return self._evaluation(by_replica, mean_losses, report.standard_deviation)

    def _evaluation(
        self, by_replica: list[list[float]], mean_losses: list[float], spread: float
    ) -> Evaluation:
        """Build the result from losses per dataset, which are averaged in the proportions of the blend."""
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

    def _exchanged(self, exchange: Exchange, own_losses: list[float], done: int) -> list[list[float]]:
        """Return the losses of all replicas, by replica and dataset.

        An exchange takes a mean, so each replica fills in its own row of a table, times the number of replicas.
        The mean leaves out what is not finite: such a loss is sent as a zero, with a one beside it.
        """
        own = torch.tensor(own_losses)
        table = torch.zeros(self.replicas, 2, len(own_losses))
        marked = torch.stack([torch.nan_to_num(own, 0.0, 0.0, 0.0), (~own.isfinite()).float()])
        table[self.engine.groups.position.replica] = marked * self.replicas
        everyone = tuple(range(self.replicas))
        own, mean = table.flatten(), torch.empty(table.numel())
        table = group_mean(exchange, own, everyone, done, "an evaluation", out=mean).view_as(table)
        return table[:, 0].where(table[:, 1] < 0.5, math.nan).tolist()

    def _losses(self) -> list[float]:
        """Return this replica's mean loss per token on each dataset. A collective of the replica."""
        return [self._loss(source) for source in self.sources]

    def _loss(self, source: ValidationSource) -> float:
        total, stages = torch.zeros(2, dtype=torch.float64), self.engine.groups.topology.pp
        at_once = 1 if stages == 1 else _FILLS * stages
        for first in range(0, len(source), at_once):
            self._begin_part()

            def read(_: int, microbatch: int, first: int = first) -> Microbatch:
                return source.microbatch(first + microbatch)

            losses = self.engine.evaluate(read, self.routing.straight(), min(at_once, len(source) - first))
            for _, loss, tokens in losses:
                total += torch.tensor([float(loss) * int(tokens), int(tokens)], dtype=torch.float64)
        now.part("adding up the losses of the replica's ranks")
        dist.all_reduce(total, group=self.engine.groups.replica)
        return float(total[0] / total[1])

    def _begin_part(self) -> None:
        """Raise _StoppedError, on all ranks of the job before the same part, where it was asked to stop."""
        if self.stops_before(self._done, next(self._parts)):
            raise _StoppedError
