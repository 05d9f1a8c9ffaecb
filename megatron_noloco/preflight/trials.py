"""The search of `tune`: short runs with other learning rates, each made once."""

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_noloco.config import RunConfig
from megatron_noloco.errors import UserError
from megatron_noloco.monitor.run_log import ReplicaLog
from megatron_noloco.monitor.writers import parsed
from megatron_noloco.preflight.search import SHORT_RUN_RATE_RATIO, best_factor, bracket
from megatron_noloco.preflight.short_run import PEAKS, shortened, train_in

_FRACTION = 10  # a short run has a tenth of the local steps
_FEWEST_STEPS, _FEWEST_ROUNDS = 20, 2  # of a short run; fewer say nothing
_FEW_STEPS = 100  # of a short run; fewer say little


@dataclass(frozen=True)
class Trials:
    """Makes runs, each once: their losses are in a file, and a run that was stopped continues.

    Attributes:
        config: of the long run.
        command: starts the trainer; the path of a config is appended.
        folder: of that file, and of the run under way.
        show: is given a line before a run and after it.

    Raises UserError for a run that cannot be shortened, or that the command would not start.
    """

    config: RunConfig
    command: Sequence[str]
    folder: Path
    show: Callable[[str], None]

    def __post_init__(self) -> None:
        if problems := list(self._problems()):
            raise UserError("\n".join(problems))

    def _problems(self) -> Iterator[str]:
        config = self.config
        if config.federation.exists:
            yield "federation: tune trains in one job; leave the block out, and give parallel.replicas"
        if not config.evaluation.iters:
            yield "evaluation.iters 0: tune compares losses of the validation split; give at least 1"
        if config.checkpoint.load not in ("auto", "none"):
            yield (
                f"checkpoint.load {config.checkpoint.load}: the runs of tune start anew; leave it out, or start "
                "from weights with training.pretrained"
            )
        if config.noloco.most_waiting is not None:
            yield (
                'noloco.local_steps "auto": the best learning rates depend on it, and each run of tune would '
                "choose anew; give the number that the log of a run shows"
            )
        fewest = max(_FEWEST_STEPS, _FEWEST_ROUNDS * config.noloco.local_steps * config.noloco.enabled)
        if self.steps < fewest:
            yield (
                f"training.train_iters {config.training.train_iters}: the runs of tune would have "
                f"{self.steps} local steps, and need {fewest}; give at least {_FRACTION * fewest}"
            )

    @property
    def steps(self) -> int:
        """Return the local steps of a short run."""
        return self.config.training.train_iters // _FRACTION

    def search(self) -> float:
        """Return the factor of the learning rates that is to be expected as the best one of the whole run.

        Raises UserError where all runs diverge, RuntimeError as `loss` does.
        """
        if self.steps < _FEW_STEPS:
            self.show(
                f"runs of {self.steps} local steps say little of a long run: tune with some thousand train_iters"
            )
        return best_factor(bracket(self.loss, SHORT_RUN_RATE_RATIO)) / SHORT_RUN_RATE_RATIO

    def block(self, factor: float) -> dict[str, Any]:
        """Return the blocks of the file that have learning rates, with these times `factor`, in three digits."""
        run = shortened(self.config, self.config.training.train_iters, factor)
        raw, rates = run.given(), {"optimizer": run.optimizer.rates}
        if run.scheduler is not None:
            peaks = ((name, getattr(run.scheduler.params, name, None)) for name in PEAKS)
            rates["scheduler"] = {name: peak for name, peak in peaks if peak is not None}
        return {
            name: raw[name]
            | {"params": raw[name]["params"] | {rate: float(f"{value:.3g}") for rate, value in found.items()}}
            for name, found in rates.items()
            if found
        }

    def loss(self, factor: float) -> float:
        """Return the mean model's loss at the end of a short run with the learning rates times `factor`.

        Nats per token of the validation split; infinity where it is not finite. Raises RuntimeError for a run
        that has ended early.
        """
        steps = self.steps
        config = shortened(self.config, steps, factor)
        name = hashlib.sha256(json.dumps(config.given(), sort_keys=True).encode()).hexdigest()[:16]
        rates = ", ".join(f"{name} {rate:.3g}" for name, rate in config.optimizer.rates.items())
        known, folder = self._known(), self.folder / name
        if name not in known:
            self.show(f"{steps:,} local steps, {rates}: under way, its log is {folder / 'log.txt'}")
            train_in(folder, config, self.command)
            known[name] = _last_loss(folder, steps)
            row = {"run": name, "steps": steps, "rates": rates, "loss": known[name]}
            with (self.folder / "losses.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
            shutil.rmtree(folder)
        loss = known[name]
        self.show(f"{steps:,} local steps, {rates}: " + ("diverged" if loss is None else f"loss {loss:.4f}"))
        return math.inf if loss is None else loss

    def _known(self) -> dict[str, float | None]:
        """Return the losses of finished runs by name, without a line that a crash has cut short."""
        path = self.folder / "losses.jsonl"
        lines = path.read_bytes().splitlines() if path.exists() else []
        return {row["run"]: row["loss"] for row in map(parsed, lines) if row is not None}


def _last_loss(folder: Path, steps: int) -> float | None:
    """Return the mean model's loss after the last step, None where it is not finite; raises RuntimeError."""
    log = ReplicaLog(folder / "replica_00")
    log.update()
    for row in log.rows_of("evaluation"):
        if row["step"] == steps:
            return row["validation/mean_model_loss"]
    raise RuntimeError(f"a short run has ended before its last local step; see {folder / 'log.txt'}")
