"""The loop."""

from torch import Tensor

from megatron_noloco.config import RunConfig
from megatron_noloco.data.microbatches import MicrobatchSource
from megatron_noloco.engine.replica import ReplicaEngine
from megatron_noloco.model.pipeline import ReadMicrobatch
from megatron_noloco.outer.optimizer import OuterOptimizer
from megatron_noloco.plans.routing import Routing
from megatron_noloco.training.evaluate import Evaluator
from megatron_noloco.training.monitor import Monitor


class Trainer:
    """Counts steps, and decides what happens after each: a round, a log line, an evaluation.

    Args:
        outer: None when replicas never meet (method "none").
    """

    def __init__(
        self,
        config: RunConfig,
        engine: ReplicaEngine,
        outer: OuterOptimizer | None,
        routing: Routing,
        source: MicrobatchSource,
        evaluator: Evaluator,
        monitor: Monitor,
    ) -> None:
        self.config = config
        self.engine = engine
        self.outer = outer
        self.routing = routing
        self.source = source
        self.evaluator = evaluator
        self.monitor = monitor
        self.start_step = 0
        self.total_steps = config.training.train_iters
        self.local_steps = config.noloco.local_steps

    def train(self) -> None:
        for step in range(self.start_step, self.total_steps):
            round_index = step // self.local_steps
            routes = self.routing.routes(step, round_index)
            result = self.engine.train_batch(self._reader(step), routes)
            self.monitor.local_step(result)
            if self.outer is not None and (step + 1) % self.local_steps == 0:
                report = self.outer.run_round(round_index)
                self.engine.refresh_working_weights()
                self.monitor.round(report)
            self.monitor.log_if_due(step)
            self._evaluate_if_due(step)

    def _reader(self, step: int) -> ReadMicrobatch:
        """Reads (replica, microbatch) of this step for this rank's lane."""
        lane = self.engine.groups.position.lane

        def read(replica: int, microbatch: int) -> tuple[Tensor, Tensor]:
            return self.source.microbatch(step, replica, lane, microbatch)

        return read

    def _evaluate_if_due(self, step: int) -> None:
        interval = self.config.training.eval_interval
        last = step + 1 == self.total_steps
        if self.config.training.eval_iters and (last or (interval and (step + 1) % interval == 0)):
            self.monitor.evaluation(step, self.evaluator.evaluate())
