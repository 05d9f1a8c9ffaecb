"""Watching a run: statistics gathered inside the replica, written by its last stage, shown by rank 0.

No message about statistics ever leaves a replica: TensorBoard overlays the replicas' runs.
"""

import math
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_noloco.config import RunConfig
from megatron_noloco.engine.replica import StepResult
from megatron_noloco.outer.optimizer import RoundReport
from megatron_noloco.pipeline.groups import Groups
from megatron_noloco.plans.samples import BatchPlan
from megatron_noloco.training.console import Console
from megatron_noloco.training.metrics import ReplicaFiles
from megatron_noloco.training.record import Evaluation, RoundRecord, SaveReport, StepRecord

# What ranks of one replica tell each other at a logged step, one float each.
_FIELDS = (
    "hop_wait", "exchange_total", "sent_total", "hop_total",
    "exchange", "wait", "sent", "squared_spread", "compared", "poisoned", "data_wait",
)  # fmt: skip

# What a checkpoint remembers of the last evaluation.
_EVALUATED = ("evaluated_step", "validation_loss", "mean_model_loss")


class Monitor:
    """Collects what each step and round report, and every `log_interval` steps makes one record of it."""

    def __init__(
        self,
        config: RunConfig,
        groups: Groups,
        plan: BatchPlan,
        console: Console | None,
        counters: dict[str, float],
    ) -> None:
        self.training = config.training
        self.seq_length = config.model.seq_length
        self.groups = groups
        self.plan = plan
        self.console = console
        at = groups.position
        self._files: ReplicaFiles | None = None
        if groups.last_stage and at.dp == 0 and at.tp == 0:
            folder = Path(config.training.output_dir) / f"replica_{at.replica:02d}"
            self._files = ReplicaFiles(folder, config.tensorboard.enabled, plan.start_step)
        # Since step 0, over resumes.
        self._exchange_total = counters.get("exchange_seconds", 0.0)
        self._sent_total = counters.get("sent_bytes", 0.0)
        self._hop_total = counters.get("hop_bytes", 0.0)
        self._evaluated = {name: counters[name] for name in _EVALUATED if name in counters}
        self._round: RoundReport | None = None
        self._begin_interval()

    def _begin_interval(self) -> None:
        self._interval_started = time.perf_counter()
        self._results: list[StepResult] = []
        self._data_wait = 0.0
        self._round = None

    def local_step(self, result: StepResult, data_wait_seconds: float) -> None:
        self._results.append(result)
        self._data_wait += data_wait_seconds
        self._hop_total += result.hop_bytes

    def round(self, report: RoundReport) -> None:
        self._round = report
        self._exchange_total += report.exchange.seconds
        self._sent_total += report.exchange.bytes_sent

    @property
    def counters(self) -> dict[str, float]:
        """What a checkpoint keeps of this rank's statistics."""
        return {
            "exchange_seconds": self._exchange_total,
            "sent_bytes": self._sent_total,
            "hop_bytes": self._hop_total,
            **self._evaluated,
        }

    def log_if_due(self, done: int) -> None:
        if done % self.training.log_interval == 0 or done == self.training.train_iters:
            self.log_rest(done)

    def log_rest(self, done: int) -> None:
        """Write a record of what was not logged yet, if anything; on all ranks of the replica alike."""
        if not self._results:
            return
        record = self._record(done)
        if self._files is not None:
            self._files.step(record)
        if self.console is not None:
            self.console.step(record)
        self._begin_interval()

    def evaluation(self, done: int, evaluation: Evaluation) -> None:
        replica = self.groups.position.replica
        figures = (float(done), evaluation.replica_losses[replica], evaluation.mean_model_loss)
        named = zip(_EVALUATED, figures, strict=True)
        self._evaluated = {name: figure for name, figure in named if not math.isnan(figure)}
        if self._files is not None:
            self._files.evaluation(done, replica, evaluation)
        if self.console is not None:
            self.console.evaluation(done, evaluation)
        self._interval_started = time.perf_counter()  # not the steps' time

    def saved(self, report: SaveReport) -> None:
        """A failed save is told by the rank it failed on: whoever reads the log must not miss it."""
        if report.error is not None:
            sys.stderr.write(
                f"rank {dist.get_rank()}: the checkpoint of step {report.step} failed, training goes on: "
                f"{report.error}\n"
            )
        elif self.console is not None:
            self.console.saved(report)
        self._interval_started = time.perf_counter()

    def close(self) -> None:
        if self._files is not None:
            self._files.close()
        if self.console is not None:
            self.console.close()

    def _record(self, done: int) -> StepRecord:
        ranks, losses, microbatches = self._gather()
        steps, last = len(self._results), self._results[-1]
        seconds = (time.perf_counter() - self._interval_started) / steps
        replica, total = self.groups.position.replica, sum(microbatches)
        booked = enumerate(zip(losses, microbatches, strict=True))
        return StepRecord(
            replica=replica,
            step=done,
            total_steps=self.training.train_iters,
            consumed_samples=self.plan.consumed(done),
            seconds_per_step=seconds,
            tokens_per_second=self.plan.replica_batch * self.seq_length / seconds,
            learning_rate=last.learning_rate,
            loss=sum(losses) / total,
            origin_losses={origin: (loss / count, int(count)) for origin, (loss, count) in booked if count},
            grad_norm=last.grad_norm,
            loss_scale=last.loss_scale,
            skipped_steps=sum(result.skipped for result in self._results),
            hop_wait_seconds=float(ranks["hop_wait"].mean()) / steps,
            data_wait_seconds=float(ranks["data_wait"].max()) / steps,
            routed_share=(total - microbatches[replica]) / total,
            sent_bytes=int(ranks["sent_total"].sum()),
            hop_bytes=int(ranks["hop_total"].sum()),
            exchange_seconds=float(ranks["exchange_total"].max()),
            round=self._round_record(ranks),
        )

    def _round_record(self, ranks: dict[str, torch.Tensor]) -> RoundRecord | None:
        if self._round is None:
            return None
        compared = float(ranks["compared"].sum())
        replica = self.groups.position.replica
        return RoundRecord(
            index=self._round.round_index,
            partners=[member for member in self._round.exchange.group if member != replica],
            exchange_seconds=float(ranks["exchange"].max()),
            wait_seconds=float(ranks["wait"].max()),
            sent_bytes=int(ranks["sent"].sum()),
            spread=math.sqrt(float(ranks["squared_spread"].sum()) / compared) if compared else math.nan,
            poisoned_elements=int(ranks["poisoned"].sum()),
        )

    def _gather(self) -> tuple[dict[str, torch.Tensor], list[float], list[float]]:
        """Every field's values over the ranks of this replica; and by origin, summed losses and microbatches."""
        own = dict.fromkeys(_FIELDS, 0.0)
        own["hop_wait"] = sum(result.hop_wait_seconds for result in self._results)
        own["exchange_total"], own["sent_total"] = self._exchange_total, self._sent_total
        own["hop_total"] = self._hop_total
        own["data_wait"] = self._data_wait
        if self._round is not None:
            exchange = self._round.exchange
            own["exchange"], own["wait"] = exchange.seconds, exchange.wait_seconds
            own["sent"], own["poisoned"] = exchange.bytes_sent, exchange.poisoned_elements
            own["compared"] = exchange.compared_elements
            if exchange.compared_elements:
                own["squared_spread"] = self._round.spread**2 * exchange.compared_elements
        by_origin = torch.zeros(2, self.groups.topology.replicas, dtype=torch.float64)  # sums, counts
        for result in self._results:
            for origin, loss in result.losses:
                by_origin[:, origin] += torch.tensor([float(loss), 1.0])
        fields = torch.tensor([own[field] for field in _FIELDS], dtype=torch.float64)
        mine = torch.cat([fields, by_origin.flatten()])
        table = [torch.empty_like(mine) for _ in range(self.groups.topology.replica_size)]
        dist.all_gather(table, mine, group=self.groups.replica)
        whole = torch.stack(table)
        losses, microbatches = whole[:, len(_FIELDS) :].sum(dim=0).view(2, -1).tolist()
        return dict(zip(_FIELDS, whole[:, : len(_FIELDS)].T, strict=True)), losses, microbatches
