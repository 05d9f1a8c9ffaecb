"""What a run leaves to read: every replica's `metrics.jsonl`, and TensorBoard's events beside it."""

import dataclasses
import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from megatron_noloco.files import write_text
from megatron_noloco.training.record import Evaluation, StepRecord


class ReplicaFiles:
    """One replica's metrics: `metrics.jsonl`, and TensorBoard events beside it."""

    def __init__(self, folder: Path, tensorboard: bool, start_step: int) -> None:
        """Rows of steps after `start_step`, left by a run that went further, will be written again: drop them."""
        self._folder, self._told = folder, False
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        rows = path.read_text().splitlines(keepends=True) if path.exists() else []
        kept = [row for row in rows if _step_of(row) <= start_step]
        if kept != rows:
            write_text(path, "".join(kept))
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


def _step_of(row: str) -> float:
    """Later than any for a row that a crash has damaged."""
    try:
        return int(json.loads(row)["step"]) if row.endswith("\n") else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf


def _without_nan(value: Any) -> Any:
    """JSON has no NaN: it becomes null."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
