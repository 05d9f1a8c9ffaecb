"""What rank 0 shows a person: a banner, progress, and a closing table."""

import math
import os
import sys
from dataclasses import dataclass

from rich.console import Console as Terminal
from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from megatron_noloco.training.record import Evaluation, SaveReport, StepRecord, partner_text


@dataclass(frozen=True)
class RunFacts:
    """What the closing table compares the run's figures with."""

    unigram_entropy: float  # nats per token; nan where there is no validation
    synchronous_bytes_per_step: float  # a replica would send in a ring all-reduce of the gradients
    output_dir: str
    how_to_continue: str
    next_command: str


class Console:
    """A live progress bar on a terminal, Megatron's log lines anywhere else."""

    def __init__(self, mode: str, total_steps: int, start_step: int, facts: RunFacts) -> None:
        # OpenMPI gives every rank a terminal of its own, whatever mpirun's output goes to.
        seen = sys.stdout.isatty() and "OMPI_COMM_WORLD_RANK" not in os.environ
        bar = mode == "bar" or (mode == "auto" and seen)
        self.terminal = Terminal(force_terminal=bar, highlight=False, soft_wrap=not bar)
        self.facts = facts
        self.evaluation_result: Evaluation | None = None
        self.last_record: StepRecord | None = None
        self.start_step = start_step
        self.total_steps = total_steps
        self.steps_seconds = 0.0
        self._live: Live | None = None
        if bar:
            self._progress = Progress(
                TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
                BarColumn(),
                TextColumn("time left"),
                TimeRemainingColumn(),
            )
            self._task = self._progress.add_task("train", total=total_steps, completed=start_step)
            self._step_figures, self._round_figures = Text(), Text()
            # mpirun passes on whole lines only: the blank one pushes the last figures out
            shown = Group(self._progress, self._step_figures, self._round_figures, Text())
            self._live = Live(shown, console=self.terminal, refresh_per_second=2)

    def say(self, *lines: str) -> None:
        for line in lines:
            self.terminal.print(line, markup=False)

    def step(self, record: StepRecord) -> None:
        previous = self.last_record.step if self.last_record else self.start_step
        self.steps_seconds += record.seconds_per_step * (record.step - previous)
        self.last_record = record
        if self._live is None:
            self.say(record.line())
            return
        self._live.start()
        self._progress.update(self._task, completed=record.step)
        self._step_figures.plain = (
            f"loss {record.loss:.3f}  learning rate {record.learning_rate:.2e}  "
            f"{record.tokens_per_second:.0f} tokens/s"
        )
        if record.round is not None:
            exchange = record.round
            self._round_figures.plain = (
                f"round {exchange.index} {partner_text(exchange.partners)}  "
                f"exchange {1000 * exchange.exchange_seconds:.0f} ms (wait {1000 * exchange.wait_seconds:.0f})  "
                f"sent {record.sent_bytes / 1e6:.0f} MB  spread {exchange.spread:.1e}"
            )

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        self.evaluation_result = evaluation
        losses = " ".join(f"{loss:.4f}" for loss in evaluation.replica_losses)
        spread = "" if math.isnan(evaluation.spread) else f" | spread: {evaluation.spread:.3E}"
        mean = evaluation.mean_model_loss
        mean_model = "" if math.isnan(mean) else f"mean model: {mean:.4f}{spread} | "
        self.say(
            f" validation at iteration {step} | replicas: {losses} | {mean_model}"
            f"unigram: {self.facts.unigram_entropy:.4f} |",
            *(
                f"   {dataset.name} | replicas: {' '.join(f'{loss:.4f}' for loss in dataset.replica_losses)} |"
                for dataset in evaluation.datasets
            ),
        )

    def saved(self, report: SaveReport) -> None:
        self.say(f" checkpoint at iteration {report.step} | pause (ms): {1000 * report.pause_seconds:.1f} |")

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()

    def summary(self, done: int, stopped_by: str | None) -> None:
        """The closing table, and what to do next."""
        record, evaluation, facts = self.last_record, self.evaluation_result, self.facts
        if stopped_by is not None:
            self.say(
                f"stopped after iteration {done} ({stopped_by}); {facts.how_to_continue} continues from there"
            )
            return
        if record is None:
            self.say(
                f"nothing to do: iteration {self.start_step} of {self.total_steps} is already reached; "
                f"raise training.train_iters to go on, or remove {facts.output_dir} to start over"
            )
            return
        table = Table(title="What this run did", title_justify="left", show_header=False)
        if evaluation is not None:
            for replica, loss in enumerate(evaluation.replica_losses):
                table.add_row(f"validation loss, replica {replica}", f"{loss:.4f} nats per token")
            if len(evaluation.replica_losses) > 1 and not math.isnan(evaluation.mean_model_loss):
                table.add_row(
                    "validation loss, mean model", f"{evaluation.mean_model_loss:.4f} nats per token"
                )
        if not math.isnan(facts.unigram_entropy):
            table.add_row("unigram entropy of the corpus", f"{facts.unigram_entropy:.4f} nats per token")
        table.add_row("sent per replica, in exchanges", f"{record.sent_bytes / 1e6:.1f} MB")
        if record.hop_bytes:
            table.add_row("sent per replica, routed activations", f"{record.hop_bytes / 1e6:.1f} MB")
        synchronous = facts.synchronous_bytes_per_step * record.step
        sent = record.sent_bytes + record.hop_bytes
        if synchronous and sent:
            table.add_row(
                "an all-reduce of every step would have sent",
                f"{synchronous / 1e6:.1f} MB ({synchronous / sent:.1f} times as much)",
            )
        share = record.exchange_seconds / self.steps_seconds if self.steps_seconds else 0.0
        table.add_row("share of training time in exchanges", f"{100 * share:.1f} %")
        self.terminal.print(table)
        self.say(f"Files: {facts.output_dir} (one folder per replica)", f"Next:  {facts.next_command}")
