"""Replicas of slow machines: they take fewer local steps than the others in each round, or smaller batches."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_noloco.config import RunConfig


@dataclass(frozen=True)
class Slow:
    """The settings of the slow replicas.

    Attributes:
        replicas: so many, the first ones.
        steps: that each of them takes in a round; the last ones of the local phase are left out. 0: all.
        samples: that each of them reads in a local step. 0: as many as the others.
    """

    replicas: int = 1
    steps: int = 0
    samples: int = 0

    def check(self, config: RunConfig) -> None:
        """Raise ValueError where this is not simulated."""
        noloco = config.noloco
        if noloco.active_method != "noloco" or noloco.group_size != 2:
            raise ValueError("slow replicas are simulated with NoLoCo in pairs only")
        if noloco.overlap_steps or noloco.fragments > 1:
            raise ValueError("slow replicas are simulated without overlap and fragments only")
        if not 0 <= self.steps <= noloco.local_steps:
            raise ValueError(f"a slow replica takes 1 to noloco.local_steps {noloco.local_steps}, or 0: all")
        batch = config.microbatches * config.micro_batch_size
        if self.samples and (self.samples < 0 or batch % self.samples):
            raise ValueError(f"the samples of a slow replica must divide those of the others, {batch}")

    def resting(self, step: int, local_steps: int) -> int:
        """Return how many replicas leave out this local step, counted from 0."""
        return self.replicas if self.steps and step % local_steps >= self.steps else 0

    def read(self, samples: Tensor) -> Tensor:
        """Return the samples of all replicas, [R, B, length], with those that the slow ones do not read replaced.

        Each sample that they read is repeated: the mean loss is that of the smaller batch.
        """
        if not self.samples:
            return samples
        read = samples[: self.replicas, : self.samples].repeat(1, samples.shape[1] // self.samples, 1)
        return torch.cat([read, samples[self.replicas :]])
