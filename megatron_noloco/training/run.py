"""A run: its parts, and the loop."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from megatron_noloco.checkpoint.checkpointer import Checkpointer
from megatron_noloco.data.microbatches import StepLoader
from megatron_noloco.engine.replica import ReplicaEngine
from megatron_noloco.federation.membership import Membership
from megatron_noloco.job.activity import now
from megatron_noloco.job.stopping import Stopping
from megatron_noloco.monitor.monitor import Monitor
from megatron_noloco.outer import ExchangeReport, OuterOptimizer, Rounds
from megatron_noloco.outer.health import Health
from megatron_noloco.training.averaging import Choice, FinalAverage
from megatron_noloco.training.evaluator import Evaluator

_COMMIT_SECONDS = 10.0
_LOOK_SECONDS = 0.02


@dataclass(frozen=True)
class Schedule:
    """Decides after which local steps the run logs, evaluates and saves. It always does after the last one; an
    interval of 0 means: only then.

    `before` and `done` count the local steps before and after the last one. Steps that were left out lie between
    them; what was due after one of these is done now.
    """

    steps: int  # of the whole run
    log_interval: int
    save_interval: int
    evaluation_interval: int
    evaluates: bool = True

    def logs(self, before: int, done: int) -> bool:
        return self._due(before, done, self.log_interval)

    def evaluates_after(self, before: int, done: int) -> bool:
        return self.evaluates and self._due(before, done, self.evaluation_interval)

    def saves(self, before: int, done: int) -> bool:
        return self._due(before, done, self.save_interval)

    def _due(self, before: int, done: int, interval: int) -> bool:
        """Return whether an interval, or the run, has ended."""
        return done == self.steps or (interval > 0 and done // interval > before // interval)


@dataclass
class Run:
    """One rank's part of a run, as `build` puts it together."""

    schedule: Schedule
    start_step: int
    engine: ReplicaEngine
    outer: Rounds
    loader: StepLoader
    evaluator: Evaluator
    checkpointer: Checkpointer
    monitor: Monitor
    stopping: Stopping
    health: Health
    final_average: FinalAverage | None = None
    choices: Sequence[Choice] = ()  # of settings that the run has still to choose, one after the other
    membership: Membership | None = None  # of a federation
    takes_over: bool = False  # at the beginning, the state of a replica that is far ahead

    def train(self) -> bool:
        """Train to the end, or until asked to stop.

        Returns whether this rank's last checkpoint was written, and the last validation losses are finite.

        Raises PartnerLostError when a partner is gone or does not answer, NotFiniteError as `Health` does, and
        FolderLostError; the run can then be continued from its last checkpoint.
        """
        try:
            done, stopped = self._loop()
            self.outer.wait()  # a partner may still be waiting for our messages
        finally:
            self.loader.close()
            failed_save = self.checkpointer.close()
            if failed_save is None and sys.exception() is None:
                self._wait_for_commit()
            self.monitor.close()
        if failed_save is not None:
            sys.stderr.write(f"rank {dist.get_rank()}: the last checkpoint failed: {failed_save}\n")
        if self.membership is not None:
            self.membership.leave()
        saved = not self.checkpointer.last_save_failed
        unsaved = self.stopping.close(done, saved)
        reason, separate_jobs = self.stopping.reason if stopped else None, self.membership is not None
        self.monitor.summary(done, reason, unsaved, separate_jobs)
        diverged = self.monitor.evaluated.diverged if self.monitor.evaluated is not None else []
        if diverged and dist.get_rank() == 0:
            replicas = ", ".join(map(str, diverged))
            sys.stderr.write(
                f"the validation loss of replica {replicas} is not finite, so the model is of no use: lower the "
                "learning rate, and start anew or from an earlier checkpoint\n"
            )
        return saved and not diverged

    def _loop(self) -> tuple[int, bool]:
        """Run local steps; return how many are done since the beginning, and whether the run was asked to stop."""
        before = done = self.start_step
        if self.membership is not None:
            took = self.membership.begin(done, self.takes_over).took
            if took is not None:
                self.monitor.took(done, took.step, took.slot, str(took))
                before = done = took.step
        self.monitor.begin()
        while done < self.schedule.steps:
            if dist.get_rank() == 0:
                self.checkpointer.place.check()
            if self.stopping.before_step(done):
                if self.membership is not None and self.stopping.leaves:
                    done = self._exchange_once_more(self.membership, done)
                with now.doing(f"saving after local step {done}, at which it was asked to stop"):
                    self._leave(done)
                return done, True
            if self.stopping.saves_before_step(done) and self.checkpointer.saved_step != done:
                with now.doing(f"saving after local step {done}"):
                    self._save(done, last=False)
            before, step = done, self._next_step(done)
            if step >= self.schedule.steps:  # the state of a replica at its end was taken over
                done = step
                break
            done = step + 1
            started = time.perf_counter()
            with now.doing(f"computing local step {done}"):
                losses = self.engine.train_batch(*self.loader.step(step))
            self.health.after_step([loss.loss for loss in losses], self.engine.lost_step)
            if self.membership is not None and self.membership.sends_after(done):
                self.health.check()
            with now.doing(f"in the round after local step {done}"):
                self._round(done, time.perf_counter() - started)
            if done < self.schedule.steps:
                self._after_round(before, done)
        self.health.check_run()
        return done, not self._end(before, done)

    def _end(self, before: int, done: int) -> bool:
        """Average, evaluate and save after the last local step; return False where it was asked to stop meanwhile.

        A job of a federation that continues where it was at its end does so as well, if there are others.
        """
        reports = list[ExchangeReport]()
        if self.final_average is not None and (before < done or self.membership is not None):
            with now.doing(f"averaging after local step {done}"):
                self.monitor.rounds(self.outer.finish())
                if (
                    self.membership is not None  # it may wait long for the others, and be stopped meanwhile
                    and self.schedule.saves(before, done)
                    and self.checkpointer.saved_step != done
                ):
                    self._save(done)
                started = time.perf_counter()
                reports = self.final_average(done)
                if self.membership is not None and not reports:
                    self._leave(done)
                    return False
                seconds = time.perf_counter() - started
                self.monitor.averaged(reports, seconds, separate_jobs=self.membership is not None)
        if before < done or any(len(report.group) > 1 for report in reports):
            return self._after_round(before, done)
        return True

    def _after_round(self, before: int, done: int) -> bool:
        """Write, evaluate and save, as far as due; return False where it was asked to stop in an evaluation."""
        evaluated = True
        with now.doing(f"writing, evaluating or saving after local step {done}"):
            if self.schedule.logs(before, done):
                self.monitor.committed(self.checkpointer.newest_step)
                self.monitor.log(done)
            if self.schedule.evaluates_after(before, done):
                evaluated = self._evaluate(done)
            if self.schedule.saves(before, done):
                self._save(done, last=done == self.schedule.steps)
        return evaluated

    def _next_step(self, done: int) -> int:
        """Return the index of the next local step, from 0. In a federation some may be left out.

        A job of a federation that has asked for the present state is given it.
        """
        if self.membership is None:
            return done
        started = time.perf_counter()
        step, gave, took = self.membership.between_steps(done)
        if gave:
            self.monitor.gave(done, time.perf_counter() - started)
        if took is not None:
            self.monitor.took(done, took.step, took.slot, str(took))
        elif step > done:
            self.engine.skip(step - done)
            notable = step - done >= self.membership.noloco.local_steps
            self.monitor.skipped(done, step, notable)
        return step

    def _round(self, done: int, step_seconds: float) -> None:
        """Run or merge the round that is due, if any, and choose settings where the run does."""
        choice = self.choices[0] if self.choices else None
        if choice is not None and (chosen := choice.before_round(done, step_seconds)) is not None:
            self.monitor.chosen(choice.counter, chosen, choice.line(done))
            self.choices = self.choices[1:]
            choice = None
        reports = self.outer.after_local_step(done)
        if reports and self.membership is not None and self.membership.leading is not None:
            deadline = self.membership.leading.partners.deadline_seconds
            self.monitor.metrics.record("round/deadline_seconds", deadline)
        self.monitor.local_step(reports)
        if choice is not None:
            for report in reports:
                choice.after_round(report)

    def _evaluate(self, done: int) -> bool:
        """Return False where it was asked to stop meanwhile."""
        started = time.perf_counter()
        evaluation = self.evaluator.evaluate(done)
        if evaluation is not None:
            self.monitor.evaluation(done, evaluation, time.perf_counter() - started)
        return evaluation is not None

    def _exchange_once_more(self, membership: Membership, done: int) -> int:
        """Exchange before the next round is due; return after how many local steps a resume goes on."""
        if not isinstance(self.outer, OuterOptimizer):
            return done
        self.health.check()
        with now.doing(f"exchanging once more after local step {done}, at which it was asked to stop"):
            reports, step = membership.exchange_once_more(self.outer, done)
        self.monitor.rounds(reports)
        if step > done:
            self.engine.skip(step - done)
            self.monitor.left(done, step, reports[-1].exchange)
        return step

    def _leave(self, done: int) -> None:
        """Log and save what is not saved yet, because the run was asked to stop."""
        self.monitor.log(done)
        if self.checkpointer.saved_step != done:
            self._save(done)

    def _save(self, done: int, last: bool = True) -> None:
        """Save, unless the last local step was lost and more of them follow: ten would push out what is good."""
        if not (self.health.check() or last):
            return
        report = self.checkpointer.save(done, self.monitor.metrics.counters)
        self.monitor.saved(report.step, report.pause_seconds, report.error)
        self.monitor.committed(self.checkpointer.newest_step)

    def _wait_for_commit(self) -> None:
        """Wait a little until the other ranks have written the last checkpoint, whose row can be written then."""
        deadline = time.monotonic() + _COMMIT_SECONDS
        while not self.monitor.committed(self.checkpointer.newest_step) and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
