"""Measures the loss of every replica of this job and of the mean model, on the same validation microbatches.

The data-parallel ranks of a replica divide its microbatches; for the mean model all replicas of the job do.

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
from torch import Tensor

from megatron_noloco.data.microbatches import Microbatch, ValidationSource
from megatron_noloco.engine.replica import ReplicaEngine
from megatron_noloco.job.activity import now
from megatron_noloco.monitor.evaluation import Evaluation, Losses
from megatron_noloco.outer import Exchange, ExchangeReport, group_mean
from megatron_noloco.plans.routing import Routing

_FILLS = 4  # of the pipeline, between two looks whether to stop


class _StoppedError(Exception):
    """The job was asked to stop."""


class Evaluator:
    """Evaluates the replicas, each on its own stages: no microbatch is routed.

    Args:
        sources: the validation microbatches of each dataset.
        losses: carry the losses of the replicas of this job, and of the mean model; None where it has one replica.
        mean_model: puts the mean model in place, see `outer.mean_model`; None: no weights are exchanged.

    Attributes:
        stops_before: see `Stopping.before_part`.
    """

    def __init__(
        self,
        engine: ReplicaEngine,
        routing: Routing,
        sources: list[ValidationSource],
        losses: tuple[Exchange, Exchange] | None,
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
        self.alone = topology.total_replicas == 1  # a run of one replica, which is its own mean model

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
        own_losses = [loss for loss, _ in self._losses()]
        if self.alone:
            return self._evaluation([own_losses], own_losses, math.nan)
        self._begin_part()
        by_replica = [own_losses]
        if self.losses is not None:
            by_replica = self._exchanged(self.losses[0], own_losses, done).tolist()
        if self.mean_model is None or self.losses is None:
            return self._evaluation(by_replica, [math.nan] * len(own_losses), math.nan)
        with self.mean_model(done) as report:
            shares = self._losses(self.engine.groups.position.replica, self.replicas)
        losses, tokens = zip(*shares, strict=True)
        table = self._exchanged(self.losses[1], [*losses, *tokens], done).double()
        losses, tokens = table.split(len(shares), dim=1)
        mean_losses = (losses * tokens).sum(0) / tokens.sum(0)
        return self._evaluation(by_replica, mean_losses.tolist(), report.standard_deviation)

    def _evaluation(
        self, by_replica: list[list[float]], mean_losses: list[float], spread: float
    ) -> Evaluation:
        """Build the result from losses per dataset, which are averaged in the proportions of the blend."""
        weights = [source.weight for source in self.sources]

        def blended(losses: list[float]) -> float:
            return sum(weight * loss for weight, loss in zip(weights, losses, strict=True))

        replicas = dict(zip(self.engine.groups.topology.numbers, by_replica, strict=True))
        datasets = {
            source.dataset.name: Losses(
                {replica: losses[index] for replica, losses in replicas.items()}, mean_losses[index]
            )
            for index, source in enumerate(self.sources)
        }
        return Evaluation(
            {replica: blended(losses) for replica, losses in replicas.items()},
            blended(mean_losses),
            spread,
            datasets if len(datasets) > 1 else {},
        )

    def _exchanged(self, exchange: Exchange, own_numbers: list[float], number: int) -> Tensor:
        """Return the numbers of all replicas in fp32, shape [replicas, numbers].

        An exchange takes a mean, so each replica fills in its own row of a table, times the number of replicas.
        The mean leaves out what is not finite: such a number is sent as a zero, with a one beside it.
        """
        own = torch.tensor(own_numbers)
        table = torch.zeros(self.replicas, 2, len(own_numbers))
        marked = torch.stack([torch.nan_to_num(own, 0.0, 0.0, 0.0), (~own.isfinite()).float()])
        table[self.engine.groups.position.replica] = marked * self.replicas
        everyone = tuple(range(self.replicas))
        own, mean = table.flatten(), torch.empty(table.numel())
        table = group_mean(exchange, own, everyone, number, "an evaluation", out=mean).view_as(table)
        return table[:, 0].where(table[:, 1] < 0.5, math.nan)

    def _losses(self, share: int = 0, shares: int = 1) -> list[tuple[float, float]]:
        """Return this replica's mean loss per token on each dataset, and the tokens. A collective of the replica.

        Args:
            share: of the microbatches, of so many that all replicas measure.
        """
        return [self._loss(source, share, shares) for source in self.sources]

    def _loss(self, source: ValidationSource, share: int, shares: int) -> tuple[float, float]:
        topology, position = self.engine.groups.topology, self.engine.groups.position
        total = torch.zeros(2, dtype=torch.float64)
        at_once = 1 if topology.pp == 1 else _FILLS * topology.pp
        ranks, own = shares * topology.dp, share * topology.dp + position.dp
        multiple = topology.microbatches_at_once
        # All ranks compute as many, since ranks of other experts and stages wait for them.
        count = -(-len(source) // (ranks * multiple)) * multiple
        for first in range(0, count, at_once):
            self._begin_part()

            def read(_: int, microbatch: int, first: int = first) -> Microbatch:
                return source.microbatch(min((first + microbatch) * ranks + own, len(source) - 1))

            losses = self.engine.evaluate(read, self.routing.straight(), min(at_once, count - first))
            for place, (_, loss, tokens) in enumerate(losses, first):
                if place * ranks + own < len(source):  # else it is computed for the sake of the others
                    total += torch.tensor([float(loss) * int(tokens), int(tokens)], dtype=torch.float64)
        now.part("adding up the losses of the replica's ranks")
        dist.all_reduce(total, group=self.engine.groups.replica)
        loss, tokens = total.tolist()
        if not tokens and shares > 1:
            return 0.0, 0.0
        copies = topology.tp  # of the last stage
        return loss / tokens if tokens else math.nan, tokens / copies

    def _begin_part(self) -> None:
        """Raise _StoppedError, on all ranks of the job before the same part, where it was asked to stop."""
        if self.stops_before(self._done, next(self._parts)):
            raise _StoppedError
