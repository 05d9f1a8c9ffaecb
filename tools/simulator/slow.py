"""A replica that takes fewer local steps than the others in each round, as slow ones do in a federation."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron_noloco.config import RunConfig
from megatron_noloco.outer import OuterOptimizer, Rounds
from megatron_noloco.settings import grouping_of

REPLICA = 0  # the slow one


@dataclass(frozen=True)
class Slow:
    """The settings of the slow replica; raises ValueError where it is not simulated.

    Attributes:
        steps: that it takes in a round; the last ones of the local phase are left out.
        weighted: whether a pair weighs its outer gradients by their numbers of steps, m_i / (m_i + m_j), instead
            of by one half each. `rescale` does it before the round, whose vector is beta * Delta + gamma * phi.
    """

    config: RunConfig
    steps: int
    weighted: bool = False

    def __post_init__(self) -> None:
        noloco = self.config.noloco
        if noloco.active_method != "noloco" or noloco.group_size != 2:
            raise ValueError("a slow replica is simulated with NoLoCo in pairs only")
        if noloco.delay_steps or noloco.fragments > 1:
            raise ValueError("a slow replica is simulated without overlap and fragments only")
        if not 0 < self.steps <= noloco.local_steps:
            raise ValueError(f"a slow replica takes from 1 to noloco.local_steps {noloco.local_steps}")

    def rests(self, step: int) -> bool:
        """Return whether it leaves out this local step, counted from 0."""
        return step % self.config.noloco.local_steps >= self.steps

    def rescale(self, done: int, weights: Tensor, outers: Sequence[Rounds]) -> None:
        """Turn the pair's rows of weights, [R, elements], into phi + 2 w Delta before the round of step `done`."""
        whole = self.config.noloco.local_steps
        if not self.weighted or done % whole:
            return
        replicas = len(weights)
        group = grouping_of(self.config.noloco, replicas, self.config.training.seed).group(
            REPLICA, done // whole - 1
        )
        for member in group if len(group) == 2 else ():
            outer = outers[member]
            assert isinstance(outer, OuterOptimizer)
            share = (self.steps if member == REPLICA else whole) / (self.steps + whole)
            weights[member].sub_(outer.slow_weights).mul_(2 * share).add_(outer.slow_weights)
