"""The search of `tune`: short runs with other learning rates, each made once."""

import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_noloco.config import RunConfig
from megatron_noloco.errors import UserError
from megatron_noloco.files import sha256_of
from megatron_noloco.monitor.numbers import Row
from megatron_noloco.monitor.run_log import ReplicaLog
from megatron_noloco.preflight.search import SHORT_RUN_RATE_RATIO, best_factor, bracket
from megatron_noloco.preflight.short_run import PEAKS, shortened, train_in

_FRACTION = 10  # a short run has a tenth of the local steps
_FEWEST_STEPS, _FEWEST_ROUNDS = 20, 2  # of a short run; fewer say nothing
_FEW_STEPS = 100  # of a short run; fewer say little


@dataclass(frozen=True)
class Trials:
    """Makes runs, each once: their logs stay, and a run that was stopped continues.

    Attributes:
        config: of the long run.
        command: starts the trainer; the path of a config is appended.
        folder: of the runs.
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
        """Return the blocks of the file that have learning rates, with these times `factor`."""
        run = shortened(self.config, self.config.training.train_iters, factor).given()
        has_rates = run.get("scheduler", {}).get("params", {}).keys() & {*PEAKS}
        return {name: run[name] for name in ("optimizer", *["scheduler"] * bool(has_rates))}

    def loss(self, factor: float) -> float:
        """Return the mean model's loss at the end of a short run with the learning rates times `factor`.

        Nats per token of the validation split; infinity where it is not finite. Raises RuntimeError for a run
        that has ended early.
        """
        steps = self.steps
        config = shortened(self.config, steps, factor)
        name = sha256_of(config.given())[:16]
        rates = ", ".join(f"{name} {rate:.3g}" for name, rate in config.optimizer.rates.items())
        folder = self.folder / name
        if not (row := _last_evaluation(folder, steps)):
            self.show(f"{steps:,} local steps, {rates}: under way, its log is {folder / 'log.txt'}")
            train_in(folder, config, self.command)
            if not (row := _last_evaluation(folder, steps)):
                raise RuntimeError(
                    f"a short run has ended before its last local step; see {folder / 'log.txt'}"
                )
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        loss = row["validation/mean_model_loss"]  # None where it is not finite
        self.show(f"{steps:,} local steps, {rates}: " + ("diverged" if loss is None else f"loss {loss:.4f}"))
        return math.inf if loss is None else loss


def _last_evaluation(folder: Path, steps: int) -> Row:
    """Return the row of the evaluation after the last step; an empty one for a run that has not ended."""
    log = ReplicaLog(folder / "replica_00", keeps_rows=False)
    log.update()
    row = log.newest("evaluation")
    return row if row.get("step") == steps else {}
