"""What the loop itself knows about a run: speed, rounds, evaluations, saves; and when rows are written."""

import math
import sys
import time
from collections.abc import Sequence

import torch.distributed as dist

from megatron_noloco.monitor import LAST, LAST_MAX, LAST_SUM, PER_STEP, RMS, TOTAL, Metrics, Reduction
from megatron_noloco.monitor.console import Console
from megatron_noloco.monitor.late import LatePartners
from megatron_noloco.monitor.record import Evaluation
from megatron_noloco.monitor.reduction import largest, last
from megatron_noloco.monitor.throughput import Throughput, peak_memory_bytes
from megatron_noloco.outer import ExchangeReport, RoundReport
from megatron_noloco.plans.samples import BatchPlan

DELAY_STEPS = "delay_steps"  # the counter that keeps what the run chose in its checkpoints
PAUSES = MISSED = Reduction(last, largest, per="run")


class Monitor:
    """Between the loop and what is written about it.

    Args:
        metrics: where this rank's numbers go.
        throughput: what the time of a local step is divided into.
        console: on rank 0, which shows what is no row; rows reach it through `metrics`.
        fragments: whose rounds are reported one by one.
    """

    def __init__(
        self,
        metrics: Metrics,
        plan: BatchPlan,
        throughput: Throughput,
        console: Console | None,
        fragments: int = 1,
    ) -> None:
        self.metrics = metrics
        self.plan = plan
        self.fragments = fragments
        self.throughput = throughput
        self.console = console
        self._late = LatePartners(metrics.replica)
        self._begin_interval()

    def _begin_interval(self) -> None:
        self._interval_started = time.perf_counter()  # later by what was not the steps' time
        self._steps = 0

    def local_step(self, reports: list[RoundReport]) -> None:
        """After each local step; `reports` are those of the rounds that ended with it."""
        self._steps += 1
        sent_bytes = sum(report.exchange.bytes_sent for report in reports)
        pause_seconds = sum(report.pause_seconds for report in reports)
        self.metrics.record("total/sent_bytes", sent_bytes, TOTAL)
        self.metrics.record("total/pause_seconds", pause_seconds, PAUSES)
        self.metrics.record("time/exchange_seconds", pause_seconds, PER_STEP)
        for report in reports:
            self._round(report)

    def _round(self, report: RoundReport) -> None:
        record, exchange = self.metrics.record, report.exchange
        record("round/index", report.round_index, LAST)
        if self.fragments > 1:
            record("round/fragment", report.fragment, LAST)
            record(f"fragment/spread of {report.fragment}", report.spread, RMS, exchange.compared_elements)
        record("round/partners", [other for other in exchange.group if other != self.metrics.replica], LAST)
        record("round/exchange_seconds", exchange.seconds, LAST_MAX)
        record("round/wait_seconds", exchange.wait_seconds, LAST_MAX)
        record("round/pause_seconds", report.pause_seconds, LAST_MAX)
        record("round/sent_bytes", exchange.bytes_sent, LAST_SUM)
        record("round/spread", report.spread, RMS, exchange.compared_elements)
        record("round/poisoned_elements", exchange.poisoned_elements, LAST_SUM)
        record("round/payload_error", exchange.payload_error, RMS, exchange.squared_deviation)
        record("round/resent_elements", exchange.resent_elements, LAST_SUM)
        if exchange.missed:
            record("total/missed_rounds", 1, MISSED)
            if exchange.in_doubt:
                record("total/rounds_in_doubt", 1, MISSED)
            self.say(f" round {report.round_index} bye | {exchange.missed} |")
        late = self._late.notice(exchange)
        if late is not None:
            partner, seconds = late
            record("late/partner", partner, LAST)
            record("late/seconds", seconds, LAST)

    def averaged(self, reports: Sequence[ExchangeReport]) -> None:
        """After the last local step and its round: the exchanges that made all replicas equal."""
        self.metrics.record("total/sent_bytes", sum(report.bytes_sent for report in reports), TOTAL)
        pause_seconds = sum(report.seconds for report in reports)
        self.metrics.record("total/pause_seconds", pause_seconds, PAUSES)
        self.metrics.record("time/exchange_seconds", pause_seconds, PER_STEP)

    def skipped(self, done: int, step: int, notable: bool) -> None:
        """Local steps that are left out: the other replicas are beyond them. `notable`: a line says so at once."""
        self.metrics.record("total/skipped_ahead", step - done, MISSED)
        if notable:
            self.say(
                f" going on at iteration {step + 1}: the others are there | left out: {done + 1} to {step} |"
            )

    def say(self, line: str) -> None:
        """Show a line that is no row of numbers."""
        if self.console is not None:
            self.console.say(line)

    def delay_chosen(self, done: int, delay_steps: int) -> None:
        """From the round after step `done` on, rounds are merged so many local steps after they began."""
        self.metrics.count(DELAY_STEPS, delay_steps)
        steps = "1 local step" if delay_steps == 1 else f"{delay_steps} local steps"
        self.say(f" overlap from iteration {done} on | a round is merged {steps} after it began |")

    def log(self, done: int) -> None:
        """Write a row about the steps that none was written about yet, if any; on all ranks of a replica alike."""
        if not self._steps:
            return
        seconds = (time.perf_counter() - self._interval_started) / self._steps
        self.throughput.record(seconds, self.metrics.record)
        self.metrics.record("memory/peak_bytes", peak_memory_bytes(), LAST_MAX)
        self.metrics.record("train/consumed_samples", self.plan.consumed(done), LAST)  # by all replicas
        self.metrics.write_steps(done, self._steps)
        self._begin_interval()

    def evaluation(self, done: int, evaluation: Evaluation, seconds: float) -> None:
        """After an evaluation that took so long."""
        place = 0 if len(evaluation.replica_losses) == 1 else self.metrics.replica
        own = evaluation.replica_losses[place]
        for name, figure in (
            ("evaluated_step", float(done)),
            ("validation_loss", own),
            ("mean_model_loss", evaluation.mean_model_loss),
        ):
            self.metrics.count(name, None if math.isnan(figure) else figure)
        numbers = evaluation.numbers(place) | {"time/evaluation_seconds": seconds}
        self.metrics.write("evaluation", done, numbers)
        self._interval_started += seconds

    def saved(self, step: int, pause_seconds: float, error: str | None) -> None:
        """After a save; one that failed is reported by the rank on which it failed."""
        if error is not None:
            sys.stderr.write(
                f"rank {dist.get_rank()}: the checkpoint of step {step} failed, training continues: {error}\n"
            )
        else:
            self.metrics.write("checkpoint", step, {"time/save_seconds": pause_seconds})
        self._interval_started += pause_seconds

    def summary(self, done: int, stopped_by: str | None) -> None:
        """The closing table; `stopped_by` says why a run ends early."""
        if self.console is not None:
            self.console.summary(done, stopped_by)

    def close(self) -> None:
        self.metrics.close()
