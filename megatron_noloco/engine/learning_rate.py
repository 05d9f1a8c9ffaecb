"""Schedules of the learning rate that DeepSpeed does not have: pure functions of the local steps done."""

import math
from collections.abc import Callable
from dataclasses import dataclass

DECAYS: dict[str, Callable[[float], float]] = {  # from 1 at x = 0 to 0 at x = 1
    "linear": lambda x: 1 - x,
    "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
    "1-sqrt": lambda x: 1 - math.sqrt(x),
}


@dataclass(frozen=True)
class WSD:
    """Linear warm-up, a stable phase, and a decay at the end (Hu et al., arXiv 2404.06395).

    The decay "1-sqrt" is that of Hägele et al., arXiv 2405.18392. With no stable phase this is Megatron's
    lr_decay_style "linear" or "cosine".

    Raises ValueError when warm-up and decay together are longer than the whole.
    """

    total_num_steps: int
    decay_num_steps: int  # the last of them, at least 1
    warmup_num_steps: int = 0  # the first of them
    decay_type: str = "linear"  # of DECAYS
    min_ratio: float = 0.0  # of the rate after `total_num_steps` to the peak

    def __post_init__(self) -> None:
        if self.stable_num_steps < 0:
            raise ValueError(
                f"warmup_num_steps {self.warmup_num_steps} + decay_num_steps {self.decay_num_steps} is more than "
                f"total_num_steps {self.total_num_steps}"
            )

    @property
    def stable_num_steps(self) -> int:
        return self.total_num_steps - self.warmup_num_steps - self.decay_num_steps

    def ratio(self, done: int) -> float:
        """Of the learning rate to its peak, in the local step that follows `done` others."""
        if done < self.warmup_num_steps:
            return (done + 1) / self.warmup_num_steps
        decayed = (done - self.total_num_steps + self.decay_num_steps) / self.decay_num_steps
        return 1 - (1 - self.min_ratio) * (1 - DECAYS[self.decay_type](min(max(decayed, 0.0), 1.0)))

    def __str__(self) -> str:
        return (
            f"{self.warmup_num_steps:,} local steps of warm-up, {self.stable_num_steps:,} stable, "
            f"{self.decay_num_steps:,} of decay ({self.decay_type}) to {self.min_ratio:g} of the peak"
        )


@dataclass(frozen=True)
class InverseSquareRoot:
    """Linear warm-up, then a decay with the square root of the local steps (Vaswani et al., arXiv 1706.03762).

    It has no end. Megatron calls it lr_decay_style "inverse-square-root".
    """

    warmup_num_steps: int
    min_ratio: float = 0.0  # to the peak, from which on the rate stays

    def ratio(self, done: int) -> float:
        """Of the learning rate to its peak, in the local step that follows `done` others."""
        step, warm_up = done + 1, max(1, self.warmup_num_steps)
        return step / warm_up if step < warm_up else max(self.min_ratio, math.sqrt(warm_up / step))

    def __str__(self) -> str:
        return (
            f"{self.warmup_num_steps:,} local steps of warm-up, then the inverse square root of the local steps, "
            f"at least {self.min_ratio:g} of the peak"
        )


# By scheduler.type; the fields are its params.
SCHEDULES: dict[str, type[WSD] | type[InverseSquareRoot]] = {
    "WSD": WSD,
    "InverseSquareRoot": InverseSquareRoot,
}
