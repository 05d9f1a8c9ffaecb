"""The rounds of a run: the outer optimizer, the final average, and the choice of the overlap."""

import math
import statistics
from collections import deque
from collections.abc import Callable

from megatron_noloco.config import RunConfig
from megatron_noloco.federation.membership import Membership
from megatron_noloco.job import agreement
from megatron_noloco.outer import (
    Apart,
    ExchangeReport,
    NoRounds,
    OuterOptimizer,
    RoundReport,
    Rounds,
    Weights,
)
from megatron_noloco.plans.topology import Place
from megatron_noloco.transport.interface import Transport

FinalAverage = Callable[[int], list[ExchangeReport]]
"""final_average(done): called on all ranks after the last local step; makes all replicas equal to their mean.

In a federation it returns no reports where the job was asked to stop while it waited for others.
"""

_MEASURED_ROUNDS = 2
_SUBJECT = "overlap/overlap_steps"


def build_outer(
    config: RunConfig, weights: Weights, transport: Transport | None, place: Place, apart: Apart | None = None
) -> Rounds:
    """Return the outer optimizer of this rank, or `NoRounds` where `noloco.enabled` is false.

    Args:
        apart: see `OuterOptimizer`.
    """
    if not config.noloco.enabled:
        return NoRounds(weights)
    return OuterOptimizer(weights, transport, place, config.noloco, config.training.seed, apart)


def build_final_average(
    config: RunConfig, outer: Rounds, membership: Membership | None = None
) -> FinalAverage | None:
    """Return the average that follows the last local step; None where the config asks for none."""
    if not config.noloco.final_average or isinstance(outer, NoRounds):
        return None
    if membership is not None:
        return lambda done: membership.average(outer, done)
    return outer.average_all


class OverlapChoice:
    """Chooses `OuterOptimizer.overlap_steps` where the setting is "auto": in three rounds training waits, and the
    fourth has the largest overlap that a rank has announced.

    After two rounds every rank announces the number of local steps that its longest exchange took, ceil(its
    seconds / median seconds of a local step), from 1 to `local_steps`; waiting for a late partner is included. The
    third gives all ranks time to announce; before the fourth each rank waits for announcements still missing.

    Rounds count as they end, whatever their index: a job of a federation leaves some out. Of several fragments the
    last one ends a round. Rounds in which a partner was missed do not count, nor does one that began before a
    resume. Both are alike on all ranks of a job.
    """

    def __init__(self, outer: OuterOptimizer) -> None:
        self.outer = outer
        self.local_steps = outer.settings.local_steps
        self._rounds = 0
        self._step_seconds = deque[float](maxlen=_MEASURED_ROUNDS * self.local_steps)
        self._exchange_seconds: list[float] = []

    def before_round(self, done: int, step_seconds: float) -> int | None:
        """Return d if it is decided now. Call it after each local step, before the outer optimizer."""
        if self._rounds < _MEASURED_ROUNDS:
            self._step_seconds.append(step_seconds)
        if self.outer.overlap_steps or done % self.local_steps or self._rounds <= _MEASURED_ROUNDS:
            return None
        self.outer.overlap_steps = max(agreement.announced(_SUBJECT))
        return self.outer.overlap_steps

    def after_round(self, report: RoundReport) -> None:
        """Measure the exchange of a round. Call it after each round of a fragment."""
        if report.exchange.missed or not report.exchange.seconds:
            return
        if self._rounds < _MEASURED_ROUNDS:
            self._exchange_seconds.append(report.exchange.seconds)
        if report.fragment == self.outer.settings.fragments - 1:
            self._rounds += 1
            if self._rounds == _MEASURED_ROUNDS:
                steps = math.ceil(max(self._exchange_seconds) / statistics.median(self._step_seconds))
                agreement.announce(_SUBJECT, min(max(1, steps), self.local_steps))
