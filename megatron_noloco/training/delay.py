"""`noloco.overlap.delay_steps` "auto": how many local steps hide an exchange, the same number on all ranks."""

import math
import statistics

from megatron_noloco.job import agreement
from megatron_noloco.outer import OuterOptimizer, RoundReport

_MEASURED_ROUNDS = 2
_SUBJECT = "overlap/delay_steps"


class DelayChoice:
    """Sets `OuterOptimizer.delay_steps` before the fourth round of the process.

    Training waits for the exchanges of the first rounds. After two of them every rank announces the steps that the
    longest one took, ceil(seconds of the exchange / median seconds of a local step), from 1 to `local_steps`; the
    time a partner was late is a part of it. The third round gives everybody time to announce. Then all ranks take
    the largest number. A rank that has not come so far is waited for; it waits for none that is ahead.

    Args:
        rounds_before: rounds done before this process started.
    """

    def __init__(self, outer: OuterOptimizer, rounds_before: int) -> None:
        self.outer = outer
        self.local_steps = outer.settings.local_steps
        self._first_delayed = rounds_before + _MEASURED_ROUNDS + 1
        self._measured = range(rounds_before, rounds_before + _MEASURED_ROUNDS)
        self._step_seconds: list[float] = []
        self._exchange_seconds: list[float] = []

    def before_round(self, done: int, step_seconds: float) -> int | None:
        """After each local step, before the outer optimizer knows of it; returns d where it is decided now."""
        round_index = done // self.local_steps - 1
        if round_index < self._measured.stop:
            self._step_seconds.append(step_seconds)
        if done % self.local_steps or round_index != self._first_delayed:
            return None
        self.outer.delay_steps = agreement.largest_announced(_SUBJECT)
        return self.outer.delay_steps

    def after_round(self, report: RoundReport) -> None:
        """After each round of a fragment."""
        if report.round_index not in self._measured:
            return
        self._exchange_seconds.append(report.exchange.seconds)
        last = (self._measured.stop - 1, self.outer.settings.fragments - 1)
        if (report.round_index, report.fragment) == last:
            steps = math.ceil(max(self._exchange_seconds) / statistics.median(self._step_seconds))
            agreement.announce(_SUBJECT, min(max(1, steps), self.local_steps))
