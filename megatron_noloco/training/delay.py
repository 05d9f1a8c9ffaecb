"""`noloco.overlap.delay_steps` "auto": how many local steps hide an exchange, the same number on all ranks."""

import math
import statistics
from collections import deque

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

    Rounds are counted as they end, whatever their number: a job of a federation leaves some out. There a round
    without a partner does not count, nor does one that began before a resume. The ranks of a job agree on both.
    """

    def __init__(self, outer: OuterOptimizer) -> None:
        self.outer = outer
        self.local_steps = outer.settings.local_steps
        self._rounds = 0
        self._step_seconds = deque[float](maxlen=_MEASURED_ROUNDS * self.local_steps)
        self._exchange_seconds: list[float] = []

    def before_round(self, done: int, step_seconds: float) -> int | None:
        """After each local step, before the outer optimizer knows of it; returns d where it is decided now."""
        if self._rounds < _MEASURED_ROUNDS:
            self._step_seconds.append(step_seconds)
        if self.outer.delay_steps or done % self.local_steps or self._rounds <= _MEASURED_ROUNDS:
            return None
        self.outer.delay_steps = agreement.largest_announced(_SUBJECT)
        return self.outer.delay_steps

    def after_round(self, report: RoundReport) -> None:
        """After each round of a fragment."""
        if report.exchange.missed or not report.exchange.seconds:
            return
        if self._rounds < _MEASURED_ROUNDS:
            self._exchange_seconds.append(report.exchange.seconds)
        if report.fragment == self.outer.settings.fragments - 1:
            self._rounds += 1
            if self._rounds == _MEASURED_ROUNDS:
                steps = math.ceil(max(self._exchange_seconds) / statistics.median(self._step_seconds))
                agreement.announce(_SUBJECT, min(max(1, steps), self.local_steps))
