"""The loop."""

from megatron_noloco.checkpoint.checkpointer import Checkpointer
from megatron_noloco.config import RunConfig
from megatron_noloco.data.loader import StepLoader
from megatron_noloco.engine.replica import ReplicaEngine
from megatron_noloco.job.stopping import Stopping
from megatron_noloco.metrics import SLOWEST
from megatron_noloco.outer import Rounds
from megatron_noloco.training.evaluate import Evaluator
from megatron_noloco.training.monitor import Monitor


class Trainer:
    """Counts steps, and decides what happens after each: a round, a log line, an evaluation, a checkpoint."""

    def __init__(
        self,
        config: RunConfig,
        engine: ReplicaEngine,
        outer: Rounds,
        loader: StepLoader,
        start_step: int,
        evaluator: Evaluator,
        checkpointer: Checkpointer,
        stopping: Stopping,
        monitor: Monitor,
    ) -> None:
        self.training = config.training
        self.save_interval = config.checkpoint.save_interval
        self.evaluation = config.evaluation
        self.engine = engine
        self.outer = outer
        self.loader = loader
        self.start_step = start_step
        self.evaluator = evaluator
        self.checkpointer = checkpointer
        self.stopping = stopping
        self.monitor = monitor

    def train(self) -> int:
        """Train to the end, or until asked to stop; returns the steps done."""
        for step in range(self.start_step, self.training.train_iters):
            if self.stopping.before_step(step):
                self._leave(step)
                return step
            waited = self.loader.wait_seconds
            self.engine.train_batch(*self.loader.step(step))
            self.monitor.metrics.record("data/wait_seconds", self.loader.wait_seconds - waited, SLOWEST)
            self.monitor.local_step(self.outer.after_local_step(step + 1))
            if _due(step + 1, self.training.log_interval) or step + 1 == self.training.train_iters:
                self.monitor.log(step + 1)
            self._evaluate_if_due(step + 1)
            self._save_if_due(step + 1)
        return max(self.start_step, self.training.train_iters)

    def _leave(self, done: int) -> None:
        """Asked to stop: lose nothing."""
        self.monitor.log(done)
        if self.checkpointer.saved_step != done:
            self._save(done)

    def _evaluate_if_due(self, done: int) -> None:
        due = _due(done, self.evaluation.interval) or done == self.training.train_iters
        if self.evaluation.iters and due:
            self.monitor.evaluation(done, self.evaluator.evaluate(done))

    def _save_if_due(self, done: int) -> None:
        interval = self.save_interval
        if _due(done, interval) or (interval and done == self.training.train_iters):
            self._save(done)

    def _save(self, done: int) -> None:
        self.monitor.saved(self.checkpointer.save(done, self.monitor.metrics.counters))


def _due(done: int, interval: int) -> bool:
    return interval > 0 and done % interval == 0
