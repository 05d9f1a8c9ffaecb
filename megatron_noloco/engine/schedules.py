"""Defines schedules of learning rate and weight decay, as functions of the local steps done.

`config` uses this file, so it imports torch and DeepSpeed only where a schedule is built.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch.optim import Optimizer

DecayType = Literal["linear", "cosine", "1-sqrt"]
DECAYS: dict[DecayType, Callable[[float], float]] = {  # from 1 at x = 0 to 0 at x = 1
    "linear": lambda x: 1 - x,
    "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
    "1-sqrt": lambda x: 1 - math.sqrt(x),
}
DecayStyle = Literal["linear", "cosine"]
STYLES: dict[DecayStyle, Callable[[float], float]] = {  # from 0 at x = 0 to 1 at x = 1
    "linear": lambda x: x,
    "cosine": lambda x: (1 - math.cos(math.pi * x)) / 2,
}


@dataclass(frozen=True)
class WSD:
    """Linear warm-up, a stable phase, and a decay at the end (Hu et al., arXiv 2404.06395).

    The decay "1-sqrt" is that of Hägele et al., arXiv 2405.18392. Without a stable phase this is Megatron's
    lr_decay_style "linear" or "cosine".

    Raises ValueError when warm-up and decay together are longer than the run.
    """

    total_num_steps: int
    decay_num_steps: int  # at the end, at least 1
    warmup_num_steps: int = 0  # at the beginning
    decay_type: DecayType = "linear"
    min_ratio: float = 0.0  # ratio of the rate after `total_num_steps` to the peak

    def __post_init__(self) -> None:
        if self.stable_num_steps < 0:
            raise ValueError(
                f"warmup_num_steps {self.warmup_num_steps} + decay_num_steps {self.decay_num_steps} is more than "
                f"total_num_steps {self.total_num_steps}"
            )

    @property
    def stable_num_steps(self) -> int:
        """Number of local steps at the peak."""
        return self.total_num_steps - self.warmup_num_steps - self.decay_num_steps

    def ratio(self, done: int) -> float:
        """Return the ratio of the learning rate to its peak in the local step that follows `done` others."""
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

    The decay has no end. Megatron calls this schedule lr_decay_style "inverse-square-root".
    """

    warmup_num_steps: int
    min_ratio: float = 0.0  # ratio of the lowest rate to the peak

    def ratio(self, done: int) -> float:
        """Return the ratio of the learning rate to its peak in the local step that follows `done` others."""
        step, warm_up = done + 1, max(1, self.warmup_num_steps)
        return step / warm_up if step < warm_up else max(self.min_ratio, math.sqrt(warm_up / step))

    def __str__(self) -> str:
        return (
            f"{self.warmup_num_steps:,} local steps of warm-up, then the inverse square root of the local steps, "
            f"at least {self.min_ratio:g} of the peak"
        )


# By `scheduler.type`; the fields of a class are the `params`.
SCHEDULES: dict[str, type[WSD] | type[InverseSquareRoot]] = {
    "WSD": WSD,
    "InverseSquareRoot": InverseSquareRoot,
}


@dataclass(frozen=True)
class WeightDecay:
    """A weight decay that changes from one value to another, then stays; the fields have Megatron's names."""

    start_weight_decay: float
    end_weight_decay: float
    weight_decay_incr_style: DecayStyle
    weight_decay_incr_steps: int  # local steps, at least 1; in Megatron always the whole run

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> "WeightDecay | None":
        """Return the schedule in an optimizer's params; None where they have a constant `weight_decay`."""
        if "start_weight_decay" not in params:
            return None
        return cls(**{field.name: params[field.name] for field in fields(cls)})

    def at(self, done: int) -> float:
        """Return the weight decay of the local step that follows `done` others."""
        share = STYLES[self.weight_decay_incr_style](min(done / self.weight_decay_incr_steps, 1.0))
        return self.start_weight_decay + share * (self.end_weight_decay - self.start_weight_decay)


class RatioLR:
    """Scales the learning rates of all parameter groups by the ratio that a schedule gives.

    Has the methods and the attribute of DeepSpeed's schedules that its engine and `engine.state` use. The only
    state is the number of local steps, so that a resumed run follows its own config.

    Attributes:
        last_batch_iteration: local steps done, less 1.
    """

    def __init__(self, optimizer: "Optimizer", schedule: WSD | InverseSquareRoot) -> None:
        self._optimizer, self._schedule = optimizer, schedule
        self._peaks = [group["lr"] for group in optimizer.param_groups]
        self.last_batch_iteration = -2
        self.step()

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Set the learning rates of the next local step."""
        if last_batch_iteration is None:
            last_batch_iteration = self.last_batch_iteration + 1
        self.last_batch_iteration = last_batch_iteration
        ratio = self._schedule.ratio(last_batch_iteration + 1)
        for group, peak in zip(self._optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * ratio

    def get_last_lr(self) -> list[float]:
        """Return the learning rate of every parameter group."""
        return [group["lr"] for group in self._optimizer.param_groups]


def build_schedule(block: Mapping[str, Any], optimizer: "Optimizer") -> Any:
    """Return the schedule for the block `scheduler` of a config: one of `SCHEDULES`, or DeepSpeed's."""
    kind, params = block["type"], block.get("params", {})
    if kind in SCHEDULES:
        return RatioLR(optimizer, SCHEDULES[kind](**params))
    from deepspeed.runtime import lr_schedules

    return getattr(lr_schedules, kind)(optimizer, **params)
