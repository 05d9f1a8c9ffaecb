"""Settings of the outer optimizer that the first rounds of a run choose."""

import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from megatron_noloco.config import RunConfig
from megatron_noloco.job import agreement
from megatron_noloco.outer import NoRounds, OuterOptimizer, RoundReport, Rounds
from megatron_noloco.plans.fragments import fewest_steps


class Choice(ABC):
    """Chooses a setting of the outer optimizer by the first rounds, in which training waits.

    After `measured` rounds every rank announces the number that it would take; waiting for a late partner is
    included. Another round gives all ranks time to announce; before the one that follows, each rank waits for
    announcements still missing, and the largest number is in force.

    Rounds count as they end, whatever their index: a job of a federation leaves some out. Of several fragments the
    last one ends a round. Rounds in which a partner was missed do not count, nor does one that began before a
    resume. Both are alike on all ranks of a job.

    Attributes:
        counter: the chosen number, as checkpoints name it.
    """

    counter: str
    measured: int

    def __init__(self, outer: OuterOptimizer) -> None:
        self.outer = outer
        self._rounds = 0
        self._chosen = False
        self._step_seconds: list[float] = []
        self._exchange_seconds: list[float] = []

    @abstractmethod
    def wanted(self, step_seconds: float, exchange_seconds: Sequence[float]) -> int:
        """Return the number for this rank's median seconds of a local step, and those of all exchanges."""

    @abstractmethod
    def take(self, number: int) -> None:
        """Put a number in force that all ranks agree on."""

    @abstractmethod
    def line(self, done: int) -> str:
        """Say what is in force from local step `done` on."""

    def before_round(self, done: int, step_seconds: float) -> int | None:
        """Return the number if it is decided now. Call it after each local step, before the outer optimizer."""
        if self._rounds < self.measured:
            self._step_seconds.append(step_seconds)
        if self._chosen or done % self.outer.local_steps or self._rounds <= self.measured:
            return None
        self._chosen = True
        number = max(agreement.announced(self.counter))
        self.take(number)
        return number

    def after_round(self, report: RoundReport) -> None:
        """Measure the exchange of a round. Call it after each round of a fragment."""
        if report.exchange.missed or not report.exchange.seconds:
            return
        if self._rounds < self.measured:
            self._exchange_seconds.append(report.exchange.seconds)
        if report.fragment == self.outer.settings.fragments - 1:
            self._rounds += 1
            if self._rounds == self.measured:
                steps = self._step_seconds[-self.measured * self.outer.local_steps :]
                agreement.announce(
                    self.counter, self.wanted(statistics.median(steps), self._exchange_seconds)
                )


class LocalStepsChoice(Choice):
    """Chooses k: the smallest with which exchanges take at most the share `most_waiting` of the time.

    Medians of the rounds count, so that neither the first local step nor the opening of a connection does.

    Args:
        most: that k may be: those of the run.
    """

    counter = "local_steps"
    measured = 5

    def __init__(self, outer: OuterOptimizer, most_waiting: float, most: int) -> None:
        super().__init__(outer)
        self.most_waiting, self.most = most_waiting, most

    def wanted(self, step_seconds: float, exchange_seconds: Sequence[float]) -> int:
        seconds = self.outer.settings.fragments * statistics.median(exchange_seconds)
        least = max(self.outer.settings.fragments, self.outer.overlap_steps)
        return fewest_steps(seconds, step_seconds, self.most_waiting, least, self.most)

    def take(self, number: int) -> None:
        self.outer.local_steps = number

    def line(self, done: int) -> str:
        steps = "each local step" if self.outer.local_steps == 1 else f"{self.outer.local_steps} local steps"
        return f" local steps from iteration {done} on | a round follows {steps} |"


class OverlapChoice(Choice):
    """Chooses d: the number of local steps, from 1 to k, that the longest exchange takes."""

    counter = "delay_steps"
    measured = 2

    def wanted(self, step_seconds: float, exchange_seconds: Sequence[float]) -> int:
        return min(max(1, math.ceil(max(exchange_seconds) / step_seconds)), self.outer.local_steps)

    def take(self, number: int) -> None:
        self.outer.overlap_steps = min(number, self.outer.local_steps)

    def line(self, done: int) -> str:
        steps = "1 local step" if self.outer.overlap_steps == 1 else f"{self.outer.overlap_steps} local steps"
        return f" overlap from iteration {done} on | a round is merged {steps} after it began |"


def choices(config: RunConfig, outer: Rounds, counters: Mapping[str, float]) -> list[Choice]:
    """Return what chooses settings, one after the other; puts in force what the continued run has chosen.

    Args:
        counters: of the checkpoint that is continued.
    """
    if isinstance(outer, NoRounds):
        return []
    noloco, found = config.noloco, list[Choice]()
    if noloco.most_waiting is not None:
        found.append(LocalStepsChoice(outer, noloco.most_waiting, config.training.train_iters))
    if noloco.overlap_steps == "auto":
        found.append(OverlapChoice(outer))
    for choice in found:
        if choice.counter in counters:
            choice.take(int(counters[choice.counter]))
    return [choice for choice in found if choice.counter not in counters]
