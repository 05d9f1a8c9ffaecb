"""Shows a run on the terminal of rank 0: a banner, its progress, and a closing table."""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console as Terminal
from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from megatron_noloco.job.launcher import on_a_terminal
from megatron_noloco.monitor import figures
from megatron_noloco.monitor.evaluation import Evaluation
from megatron_noloco.monitor.numbers import Row, line_parts

# The period from which rich estimates the time left; its default of 30 s can be shorter than one row takes.
_SPEED_SECONDS = 86400.0


@dataclass(frozen=True)
class RunFacts:
    """Facts of a run, beside its numbers, that the closing table and the last lines show."""

    unigram_entropy: float  # nats per token; nan where there is no validation
    validated_on: str  # microbatches of the validation split: "4 of 210"
    all_reduce: str  # of the gradients, in the precision of the run: "an fp32 all-reduce"
    all_reduce_bytes: (
        float  # that a replica would send for the local steps of a round; 0: there is no other replica
    )
    output_dir: str
    how_to_continue: str
    next_commands: tuple[str, ...]


class Console:
    """Shows a live progress bar, or Megatron's log lines.

    Args:
        mode: "bar", "lines", or "auto": the bar on a terminal, lines anywhere else.
        total_steps: local steps of the run.
        start_step: local steps done before this process.
    """

    def __init__(self, mode: str, total_steps: int, start_step: int, facts: RunFacts) -> None:
        bar = mode == "bar" or (mode == "auto" and on_a_terminal(os.environ))
        self.terminal = Terminal(force_terminal=bar, highlight=False, emoji=False, soft_wrap=not bar)
        self.facts = facts
        self.last_steps: Row | None = None
        self.start_step = start_step
        self.total_steps = total_steps
        self.steps_seconds = self.pause_seconds = 0.0  # of this process
        self._live: Live | None = None
        if bar:
            self._progress = Progress(
                TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
                BarColumn(),
                TextColumn("time left"),
                TimeRemainingColumn(),
                speed_estimate_period=_SPEED_SECONDS,
            )
            self._task = self._progress.add_task("train", total=total_steps, completed=start_step)
            self._step_text, self._round_text = Text(), Text()
            # mpirun forwards complete lines only: the blank line makes it forward the line before
            display = Group(self._progress, self._step_text, self._round_text, Text())
            self._live = Live(display, console=self.terminal, refresh_per_second=2)

    def say(self, *lines: str) -> None:
        for line in lines:
            self.terminal.print(line, markup=False)

    def write(self, row: Row) -> None:
        """Show a row of rank 0's replica."""
        if row["kind"] == "step":
            previous = self.last_steps["step"] if self.last_steps else self.start_step
            steps = row["step"] - previous
            self.steps_seconds += row["speed/seconds_per_step"] * steps
            self.pause_seconds += row["time/exchange_seconds"] * steps
            self.last_steps = row
        if row["kind"] != "step" or self._live is None:
            self.say(*log_lines(row, self.total_steps, self.facts))
            return
        self._live.start()
        self._progress.update(self._task, completed=row["step"])
        self._step_text.plain = " | ".join(line_parts(row, of_round=False))
        if parts := line_parts(row, of_round=True):
            self._round_text.plain = " | ".join(parts)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()

    def summary(
        self,
        done: int,
        stopped_by: str | None,
        unsaved: str | None = None,
        evaluation: Evaluation | None = None,
    ) -> None:
        """Show the closing table and the next commands, or why the run has none; last, where the end is not saved.

        Args:
            stopped_by: why the run ends early; None where it does not.
            evaluation: the last one.
            unsaved: the ranks whose last checkpoint failed, in words; None where there is none.
        """
        facts = self.facts
        if stopped_by is not None:
            continues = f"; {facts.how_to_continue} continues from there" if unsaved is None else ""
            self.say(f"stopped after iteration {done} ({stopped_by}){continues}")
        elif self.last_steps is None and done > self.start_step:
            self.say(
                f"no local step was left: the state of another replica after iteration {done} was taken over"
            )
        elif self.last_steps is None:
            self.say(
                f"nothing to do: iteration {self.start_step} of {self.total_steps} is already reached; "
                f"raise training.train_iters to go on, or remove {facts.output_dir} to start over"
            )
        else:
            table = Table(title="What this run did", title_justify="left", show_header=False)
            for row in [*self._losses(evaluation), *self._costs(self.last_steps)]:
                table.add_row(*row)
            self.terminal.print(table)
            self.say(f"Files: {facts.output_dir} (one folder per replica)")
            if unsaved is None:
                self.say("Next:", *(f"  {command}" for command in facts.next_commands))
        if unsaved is not None:
            self.say(
                f"not saved: the checkpoint of iteration {done} failed on {unsaved}, and stderr says why; once "
                f"that is put right, {facts.how_to_continue} goes on from the last complete one"
            )

    def _losses(self, evaluation: Evaluation | None) -> Iterator[tuple[str, str]]:
        if evaluation is not None:
            for replica, loss in evaluation.replica_losses.items():
                yield f"validation loss, replica {replica}", f"{figures.loss(loss)} nats per token"
            if len(evaluation.replica_losses) > 1 and not math.isnan(evaluation.mean_model_loss):
                mean = figures.loss(evaluation.mean_model_loss)
                yield "validation loss, mean model", f"{mean} nats per token"
            yield "validated on", f"{self.facts.validated_on} microbatches"
        unigram = self.facts.unigram_entropy
        if not math.isnan(unigram):
            yield "unigram entropy of the corpus", f"{figures.loss(unigram)} nats per token"

    def _costs(self, row: Row) -> Iterator[tuple[str, str]]:
        exchanged, routed = row["total/sent_bytes"], row["total/routed_bytes"]
        if not self.facts.all_reduce_bytes:
            return
        yield "sent per replica, in exchanges", f"{figures.megabytes(exchanged)} MB"
        if routed:
            yield "sent per replica, routed activations", f"{figures.megabytes(routed)} MB"
        synchronous = self.facts.all_reduce_bytes * row.get("total/rounds", 0)
        if synchronous and exchanged:
            times = f"{synchronous / (exchanged + routed):.1f} times as much"
            yield (
                f"{self.facts.all_reduce} of every step would send",
                f"{figures.megabytes(synchronous)} MB ({times})",
            )
        share = self.pause_seconds / self.steps_seconds if self.steps_seconds else 0.0
        yield "share of training time in exchanges", figures.percent(share)


def log_lines(row: Row, total_steps: int, facts: RunFacts) -> list[str]:
    """Return the log lines of a row: Megatron's, with more numbers, for local steps; one line for other rows.

    An evaluation on a blend has a line for each dataset as well.
    """
    parts, step = line_parts(row), row["step"]
    if row["kind"] == "checkpoint":
        head = f" checkpoint at iteration {step}"
    elif row["kind"] == "evaluation":
        head = f" validation at iteration {step}"
        parts += f"unigram: {figures.loss(facts.unigram_entropy)}", f"microbatches: {facts.validated_on}"
    else:
        head = f" iteration {step:{len(str(total_steps))}d}/{total_steps}"
    of_datasets = (name.partition("/replica_losses of ")[2] for name in row)
    return [
        " | ".join([head, *parts]) + " |",
        *(
            f"   {dataset} | replicas: {figures.losses(row[f'validation/replica_losses of {dataset}'])} |"
            for dataset in filter(None, of_datasets)
        ),
    ]
