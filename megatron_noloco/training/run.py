"""A run: its parts, and the loop."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist

from megatron_noloco.checkpoint.catalog import MEAN_OF_REPLICAS
from megatron_noloco.checkpoint.checkpointer import Checkpointer
from megatron_noloco.data.microbatches import Loader
from megatron_noloco.engine.replica import ReplicaEngine
from megatron_noloco.job.activity import now
from megatron_noloco.job.stopping import Stopping
from megatron_noloco.monitor.monitor import Monitor
from megatron_noloco.outer.health import Health
from megatron_noloco.outer.peers import Average, Boundary, Peers
from megatron_noloco.training.choices import Choice
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
    averages: bool = False  # the replicas, after the last local step

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
    peers: Peers
    loader: Loader
    evaluator: Evaluator
    checkpointer: Checkpointer
    monitor: Monitor
    stopping: Stopping
    health: Health
    choices: Sequence[Choice] = ()  # of settings that the run has still to choose, one after the other
    takes_over: bool = False  # at the beginning, the state of a replica that is far ahead

    def train(self) -> bool:
        """Train to the end, or until asked to stop.

        Returns whether this rank's last checkpoint was written, and the last validation losses are finite.

        Raises PartnerLostError when a partner is gone or does not answer, NotFiniteError as `Health` does, and
        FolderLostError; the run can then be continued from its last checkpoint.
        """
        try:
            done, stopped = self._loop()
            self.peers.outer.wait()  # a partner may still be waiting for our messages
        finally:
            self.loader.close()
            failed_save = self.checkpointer.close()
            if failed_save is None and sys.exception() is None:
                self._wait_for_commit()
            self.monitor.close()
        if failed_save is not None:
            sys.stderr.write(f"rank {dist.get_rank()}: the last checkpoint failed: {failed_save}\n")
        if self.schedule.averages and not stopped:
            self.peers.stay(done)
        self.peers.close(at_once=False)
        saved = not self.checkpointer.last_save_failed
        unsaved = self.stopping.close(done, saved)
        monitor, reason = self.monitor, self.stopping.reason if stopped else None
        monitor.summary(done, reason, unsaved, self.peers.summary(monitor.rounds_met, monitor.rounds_ended))
        diverged = monitor.evaluated.diverged if monitor.evaluated is not None else []
        if diverged and dist.get_rank() == 0:
            replicas = ", ".join(map(str, diverged))
            sys.stderr.write(
                f"the validation loss of replica {replicas} is not finite, so the model is of no use: lower the "
                "learning rate, and start anew or from an earlier checkpoint\n"
            )
        return saved and not diverged

    def _loop(self) -> tuple[int, bool]:
        """Run local steps; return how many are done since the beginning, and whether the run was asked to stop."""
        before = done = self._cross(self.peers.begin(self.start_step, self.takes_over))
        self.monitor.begin()
        while done < self.schedule.steps:
            if dist.get_rank() == 0:
                self.checkpointer.place.check()
            if self.stopping.before_step(done):
                return self._stop(done, leaves=self.stopping.leaves), True
            if self.stopping.saves_before_step(done):
                with now.doing(f"saving after local step {done}"):
                    self._save_once(done, last=False)
            before, step = done, self._cross(self.peers.catch_up(done))
            if step >= self.schedule.steps:  # the state of a replica at its end was taken over
                done = step
                break
            done = step + 1
            started = time.perf_counter()
            with now.doing(f"computing local step {done}"):
                losses = self.engine.train_batch(*self.loader.step(step))
            self.health.after_step([loss.loss for loss in losses], self.engine.lost_step)
            with now.doing(f"in the round after local step {done}"):
                self._round(done, time.perf_counter() - started)
            if done < self.schedule.steps:
                self._after_round(before, done)
        self.health.check_run()
        return done, not self._end(before, done)

    def _cross(self, boundary: Boundary) -> int:
        """Note what happened between two local steps; return the index of the next one, from 0."""
        if boundary.left_out:
            self.engine.skip(boundary.left_out)
        self.monitor.boundary(boundary)
        return boundary.step

    def _end(self, before: int, done: int) -> bool:
        """Average, evaluate and save after the last local step; return False if asked to stop meanwhile."""
        average, trained = Average(), before < done
        if self.schedule.averages:
            with now.doing(f"averaging after local step {done}"):
                self.monitor.rounds(self.peers.outer.finish())
                saves = partial(self._save_once, done) if self.schedule.saves(before, done) else lambda: None
                average = self.peers.average(done, trained, saves)
                if average.stopped:
                    self._stop(done)
                    return False
                self.monitor.averaged(average)
                self.monitor.metrics.count(MEAN_OF_REPLICAS, len(average.replicas) or None)
        if trained or len(average.replicas) > 1:
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

    def _round(self, done: int, step_seconds: float) -> None:
        """Run or merge the round that is due, if any, and choose settings where the run does."""
        choice = self.choices[0] if self.choices else None
        if choice is not None and (chosen := choice.before_round(done, step_seconds)) is not None:
            self.monitor.chosen(choice.counter, chosen, choice.line(done))
            self.choices = self.choices[1:]
            choice = None
        reports = self.peers.rounds(done)
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

    def _stop(self, done: int, leaves: bool = False) -> int:
        """Log and save what is not saved yet; return after how many local steps a resume goes on.

        Args:
            leaves: whether this job gives the others what it has learned since its last round.
        """
        if leaves:
            with now.doing(f"exchanging once more after local step {done}, at which it was asked to stop"):
                done = self._cross(self.peers.leave(done))
        with now.doing(f"saving after local step {done}, at which it was asked to stop"):
            self.monitor.log(done)
            self._save_once(done)
        return done

    def _save_once(self, done: int, last: bool = True) -> None:
        if self.checkpointer.saved_step != done:
            self._save(done, last)

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
