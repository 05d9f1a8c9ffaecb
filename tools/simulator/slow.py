"""A replica that takes fewer local steps than the others in each round, as slow ones do in a federation."""

from dataclasses import dataclass

from megatron_noloco.config import RunConfig

REPLICA = 0  # the slow one


@dataclass(frozen=True)
class Slow:
    """The settings of the slow replica; raises ValueError where it is not simulated.

    Attributes:
        steps: that it takes in a round; the last ones of the local phase are left out.
    """

    config: RunConfig
    steps: int

    def __post_init__(self) -> None:
        noloco = self.config.noloco
        if noloco.active_method != "noloco" or noloco.group_size != 2:
            raise ValueError("a slow replica is simulated with NoLoCo in pairs only")
        if noloco.overlap_steps or noloco.fragments > 1:
            raise ValueError("a slow replica is simulated without overlap and fragments only")
        if not 0 < self.steps <= noloco.local_steps:
            raise ValueError(f"a slow replica takes from 1 to noloco.local_steps {noloco.local_steps}")

    def rests(self, step: int) -> bool:
        """Return whether it leaves out this local step, counted from 0."""
        return step % self.config.noloco.local_steps >= self.steps
