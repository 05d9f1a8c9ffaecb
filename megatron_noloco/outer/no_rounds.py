"""No rounds, behind the interface of the outer optimizer."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron_noloco.outer.optimizer import OuterOptimizer
from megatron_noloco.outer.round import RoundReport
from megatron_noloco.outer.weights import Weights


class NoRounds:
    """The outer optimizer of a replica that trains alone: it has fast weights only, and keeps no memory."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights

    def after_local_step(self, done: int) -> list[RoundReport]:
        """No round is ever due."""
        return []

    def progress(self) -> None:
        """Nothing is ever under way."""

    def land(self) -> None:
        """Likewise."""

    @contextmanager
    def evaluating(self) -> Iterator[Tensor]:
        """As in the outer optimizer; gives the fast weights, for which it makes a copy in host memory."""
        fast = torch.empty(self.weights.length, dtype=torch.float32)
        with self.weights.kept_in(fast):
            yield fast

    def state(self) -> dict[str, Tensor]:
        """The fast weights as "slow_weights", so that readers of checkpoints need not know the method."""
        return {"slow_weights": self.weights.read()}

    def restore(self, state: dict[str, Tensor], moved: bool = False) -> None:
        """As in the outer optimizer, the fast weights are not in it: restore them before.

        Rounds that were not merged yet are merged now.
        """
        if "correction" in state:
            self.weights.add(state["correction"])


Rounds = OuterOptimizer | NoRounds
"""What a training loop calls after each local step."""
