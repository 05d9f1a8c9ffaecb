"""Records the numbers of the training loop: speed, rounds, evaluations, saves."""

import math
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_noloco.files import outside
from megatron_noloco.monitor.console import Console
from megatron_noloco.monitor.evaluation import Evaluation
from megatron_noloco.monitor.metrics import Metrics, Record
from megatron_noloco.monitor.numbers import ONE_MODEL
from megatron_noloco.outer import RoundReport
from megatron_noloco.outer.peers import Average, Boundary
from megatron_noloco.plans.sample_order import BatchPlan


@dataclass(frozen=True)
class Throughput:
    """Holds the work of a local step, from which `record` computes speeds.

    Attributes:
        tokens: tokens in the batch of one replica.
        replicas: replicas of the run; None in a federation, whose jobs know neither their number nor their speed.
        flops_per_rank: floating-point operations for the batch of a replica (`training_flops`), per rank.
        peak_tflops: peak of a rank's device; None where it is not known.
    """

    tokens: int
    replicas: int | None
    flops_per_rank: float
    peak_tflops: float | None = None

    def record(self, seconds_per_step: float, record: Record) -> None:
        """Record the speed of an interval. Assumes that all replicas of a job run at this one's speed."""
        tokens_per_second = self.tokens / seconds_per_step
        tflops = self.flops_per_rank / seconds_per_step / 1e12
        record("speed/seconds_per_step", seconds_per_step)
        record("speed/tokens_per_second", tokens_per_second)
        if self.replicas is not None:
            record("speed/tokens_per_second_of_all", self.replicas * tokens_per_second)
        record("speed/tflops_per_gpu", tflops)
        if self.peak_tflops is not None:
            record("speed/mfu", tflops / self.peak_tflops)


def _peak_memory_bytes() -> int:
    """Return the peak of torch's allocated memory on a GPU, of the process's resident memory on a CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class Monitor:
    """Records what the loop reports, measures the time of local steps, and has rows written.

    Args:
        metrics: records this rank's numbers.
        throughput: the work of a local step.
        console: shows lines that are no rows, on rank 0; None on other ranks. Rows reach it through `metrics`.
        fragments: number of fragments; with several, the spread of each is recorded.

    Attributes:
        evaluated: the last evaluation.
        rounds_ended: rounds of this process; `rounds_met` of them had a partner.
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
        self.rounds_ended = self.rounds_met = 0
        self._missed = ""  # why the last round was skipped
        self._uncommitted = dict[int, float]()  # by step, the pause for the save
        self.evaluated: Evaluation | None = None
        self.begin()

    def begin(self) -> None:
        """Begin to measure local steps: building the engine, reading a checkpoint and joining are none."""
        self._interval_started = time.perf_counter()  # evaluations and saves add their time
        self._steps = 0

    def local_step(self, reports: list[RoundReport]) -> None:
        """Record a local step and the rounds that ended with it."""
        self._steps += 1
        self.rounds(reports)

    def rounds(self, reports: Sequence[RoundReport]) -> None:
        """Record rounds that have ended."""
        self._exchanged(
            sum(report.exchange.bytes_sent for report in reports),
            sum(report.pause_seconds for report in reports),
        )
        if self.throughput.replicas != 1:  # else no round has a partner
            self.metrics.record("total/rounds", 0)  # so that each row has the total
            for report in reports:
                self._round(report)

    def averaged(self, average: Average) -> None:
        """Record the mean of all replicas after the last round. To wait for the last replicas is no training."""
        in_exchanges = sum(report.seconds for report in average.reports)
        self._exchanged(sum(report.bytes_sent for report in average.reports), in_exchanges)
        self._interval_started += average.seconds - in_exchanges
        if average.replicas:
            self.metrics.record(ONE_MODEL, sorted(average.replicas))
        self.say(*average.lines)

    def boundary(self, boundary: Boundary) -> None:
        """Record what happened between two local steps."""
        if boundary.rounds:
            self.rounds(boundary.rounds)
        for name, value in boundary.numbers.items():
            self.metrics.record(name, value)
        self.say(*boundary.lines)

    def _exchanged(self, sent_bytes: int, pause_seconds: float) -> None:
        self.metrics.record("total/sent_bytes", sent_bytes)
        self.metrics.record("total/pause_seconds", pause_seconds)
        self.metrics.record("time/exchange_seconds", pause_seconds)

    def _round(self, report: RoundReport) -> None:
        record, exchange = self.metrics.record, report.exchange
        for name, value, weight in report.numbers(self.metrics.replica):
            record(name, value, weight)
        if self.fragments > 1:
            record("round/fragment", report.fragment)
            record(f"fragment/spread of {report.fragment}", report.spread, exchange.compared_elements)
        self.rounds_ended += 1
        if len(exchange.group) > 1:
            self.rounds_met += 1
            record("total/rounds", 1)
        if exchange.missed:
            record("total/missed_rounds", 1)
            if exchange.in_doubt:
                record("total/rounds_in_doubt", 1)
            if exchange.missed != self._missed:  # else each round of a job that is alone would have a line
                self.say(f" round {report.round_index} skipped | {outside(exchange.missed)} |")
        self._missed = exchange.missed

    def say(self, *lines: str) -> None:
        """Show lines that are no row of numbers."""
        if self.console is not None:
            self.console.say(*lines)

    def chosen(self, counter: str, value: int, line: str) -> None:
        """Record a setting that the run has chosen, also for checkpoints, and show it."""
        self.metrics.count(counter, value)
        self.say(line)

    def log(self, done: int) -> None:
        """Write a row about the local steps since the last row, if any; all ranks of a replica call it."""
        if not self._steps:
            return
        seconds = (time.perf_counter() - self._interval_started) / self._steps
        self.throughput.record(seconds, self.metrics.record)
        self.metrics.record("memory/peak_bytes", _peak_memory_bytes())
        self.metrics.record("train/consumed_samples", self.plan.consumed(done))  # by all replicas
        self.metrics.write_steps(done, self._steps)
        self.begin()

    def evaluation(self, done: int, evaluation: Evaluation, seconds: float) -> None:
        """Write the row of an evaluation that took `seconds`, and keep its losses for checkpoints."""
        self.evaluated = evaluation
        numbers = evaluation.numbers(self.metrics.replica)
        for name, value in (
            ("evaluated_step", float(done)),
            ("validation_loss", numbers["validation/loss"]),
            ("mean_model_loss", evaluation.mean_model_loss),
        ):
            self.metrics.count(name, None if math.isnan(value) else value)
        self.metrics.write("evaluation", done, numbers | {"time/evaluation_seconds": seconds})
        self._interval_started += seconds

    def saved(self, step: int, pause_seconds: float, error: str | None) -> None:
        """Note that this rank has saved, or write the reason why it could not, on stderr."""
        if error is not None:
            sys.stderr.write(
                f"rank {dist.get_rank()}: the checkpoint of step {step} failed, earlier ones are kept: {error}\n"
            )
        else:
            self._uncommitted[step] = pause_seconds
        self._interval_started += pause_seconds

    def committed(self, newest_step: Callable[[], int | None]) -> bool:
        """Write the row of the newest checkpoint once all ranks have written it; return whether no row is open."""
        if self._uncommitted and (step := newest_step()) in self._uncommitted:
            self.metrics.write("checkpoint", step, {"time/save_seconds": self._uncommitted[step]})
            self._uncommitted = {later: pause for later, pause in self._uncommitted.items() if later > step}
        return not self._uncommitted

    def summary(self, done: int, stopped_by: str | None, unsaved: int, of_peers: str = "") -> None:
        """Show the closing table.

        Args:
            stopped_by: why the run ends early; None where it does not.
            unsaved: ranks whose last checkpoint failed.
            of_peers: a line about the other replicas.
        """
        if self.console is not None:
            failed = f"{unsaved} of {dist.get_world_size()} ranks" if unsaved else None
            self.console.summary(done, stopped_by, failed, self.evaluated)
            self.say(*filter(None, [of_peers]))

    def close(self) -> None:
        self.metrics.close()
