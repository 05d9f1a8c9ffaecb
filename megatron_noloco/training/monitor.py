"""Watching a run: statistics gathered inside the replica, written by its last stage, shown by rank 0.

No message about statistics ever leaves a replica: TensorBoard overlays the replicas' runs.
"""

import dataclasses
import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

from megatron_noloco.config import RunConfig
from megatron_noloco.engine.replica import StepResult
from megatron_noloco.model.groups import Groups
from megatron_noloco.outer.optimizer import RoundReport
from megatron_noloco.plans.samples import BatchPlan
from megatron_noloco.training.console import Console
from megatron_noloco.training.record import Evaluation, RoundRecord, SaveReport, StepRecord

# What ranks of one replica tell each other at a logged step, one float each.
_FIELDS = (
    "loss_sum", "loss_count", "routed", "hop_wait", "exchange_total", "sent_total", "hop_total",
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
        if groups.last_stage and at.lane == 0 and at.shard == 0:
            folder = Path(config.training.output_dir) / f"replica_{at.replica:02d}"
            self._files = ReplicaFiles(folder, config.training.tensorboard, plan.start_step)
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
        ranks = self._gather()
        steps, last = len(self._results), self._results[-1]
        seconds = (time.perf_counter() - self._interval_started) / steps
        losses = float(ranks["loss_count"].sum())
        return StepRecord(
            replica=self.groups.position.replica,
            step=done,
            total_steps=self.training.train_iters,
            consumed_samples=self.plan.consumed(done),
            seconds_per_step=seconds,
            tokens_per_second=self.plan.replica_batch * self.seq_length / seconds,
            learning_rate=last.learning_rate,
            loss=float(ranks["loss_sum"].sum()) / losses,
            grad_norm=last.grad_norm,
            loss_scale=last.loss_scale,
            skipped_steps=sum(result.skipped for result in self._results),
            hop_wait_seconds=float(ranks["hop_wait"].mean()) / steps,
            data_wait_seconds=float(ranks["data_wait"].max()) / steps,
            routed_share=float(ranks["routed"].sum()) / losses,
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

    def _gather(self) -> dict[str, torch.Tensor]:
        """Every field's values over the ranks of this replica."""
        losses = [loss for result in self._results for loss in result.losses]
        replica = self.groups.position.replica
        own = dict.fromkeys(_FIELDS, 0.0)
        own["loss_sum"] = sum(float(loss.loss) for loss in losses)
        own["loss_count"] = len(losses)
        own["routed"] = sum(loss.origin != replica for loss in losses)
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
        mine = torch.tensor([own[field] for field in _FIELDS], dtype=torch.float64)
        size = self.groups.topology.replica_size
        table = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(table, mine, group=self.groups.replica)
        return dict(zip(_FIELDS, torch.stack(table).T, strict=True))


class ReplicaFiles:
    """One replica's metrics: `metrics.jsonl`, and TensorBoard events beside it."""

    def __init__(self, folder: Path, tensorboard: bool, start_step: int) -> None:
        """Rows of steps after `start_step`, left by a run that went further, will be written again: drop them."""
        self._folder, self._told = folder, False
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        kept = [row for row in _complete_rows(path) if json.loads(row)["step"] <= start_step]
        path.write_text("".join(kept))
        self._jsonl: TextIO = path.open("a", buffering=1)
        self._board: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # slow to import: only where it is used

            self._board = SummaryWriter(str(folder), purge_step=start_step + 1)

    def step(self, record: StepRecord) -> None:
        self._write({"kind": "step", **dataclasses.asdict(record)})
        scalars = {
            "train/loss": record.loss,
            "train/learning_rate": record.learning_rate,
            "train/grad_norm": record.grad_norm,
            "train/loss_scale": record.loss_scale,
            "speed/tokens_per_second": record.tokens_per_second,
            "speed/seconds_per_step": record.seconds_per_step,
            "routing/hop_wait_seconds": record.hop_wait_seconds,
            "train/data_wait_seconds": record.data_wait_seconds,
            "routing/routed_share": record.routed_share,
            "routing/sent_bytes": record.hop_bytes,
        }
        if record.round is not None:
            scalars |= {
                "round/exchange_seconds": record.round.exchange_seconds,
                "round/wait_seconds": record.round.wait_seconds,
                "round/sent_bytes": record.round.sent_bytes,
                "round/spread": record.round.spread,
            }
        self._scalars(scalars, record.step)

    def evaluation(self, step: int, replica: int, evaluation: Evaluation) -> None:
        self._write(
            {"kind": "evaluation", "step": step, "replica": replica, **dataclasses.asdict(evaluation)}
        )
        own = evaluation.replica_losses[replica]
        scalars = {"validation/loss": own, "validation/perplexity": math.exp(min(own, 700.0))}
        if not math.isnan(evaluation.mean_model_loss):
            scalars["validation/mean_model_loss"] = evaluation.mean_model_loss
        for dataset in evaluation.datasets:
            scalars[f"validation/loss of {dataset.name}"] = dataset.replica_losses[replica]
        self._scalars(scalars, step)

    def close(self) -> None:
        with self._training_goes_on():
            self._jsonl.close()
            if self._board is not None:
                self._board.close()

    def _write(self, row: dict[str, Any]) -> None:
        with self._training_goes_on():
            self._jsonl.write(json.dumps(_without_nan(row)) + "\n")

    def _scalars(self, scalars: dict[str, float], step: int) -> None:
        if self._board is not None:
            with self._training_goes_on():
                for name, value in scalars.items():
                    self._board.add_scalar(name, value, step)

    @contextmanager
    def _training_goes_on(self) -> Iterator[None]:
        """A disk without room for a line of the log must not end the run; it is told once."""
        try:
            yield
        except OSError as error:
            if not self._told:
                sys.stderr.write(
                    f"{self._folder}: {error.strerror or error}; training goes on without its log\n"
                )
            self._told = True


def _complete_rows(path: Path) -> list[str]:
    """The lines of a file that may not exist, and whose last line a crash may have cut."""
    rows = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [row for row in rows if row.endswith("}\n")]


def _without_nan(value: Any) -> Any:
    """JSON has no NaN: it becomes null."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
