"""Defines schedules of the learning rate, as functions of the local steps done.

`config` uses this file, so it imports torch and DeepSpeed only where a schedule is built.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from megatron_noloco.errors import UserError
from megatron_noloco.job.start_up import before_engines, quiet

if TYPE_CHECKING:
    from torch.optim import Optimizer

DecayType = Literal["linear", "cosine", "1-sqrt"]
DECAYS: dict[DecayType, Callable[[float], float]] = {  # from 1 at x = 0 to 0 at x = 1
    "linear": lambda x: 1 - x,
    "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
    "1-sqrt": lambda x: 1 - math.sqrt(x),
}


@dataclass(frozen=True)
class WSD:
    """Has a linear warm-up, a stable phase, and a decay at the end (Hu et al., arXiv 2404.06395).

    The decay "1-sqrt" is that of Hägele et al., arXiv 2405.18392. Without a stable phase this is Megatron's
    lr_decay_style "linear" or "cosine".

    Raises UserError when warm-up and decay together are longer than the run.
    """

    total_num_steps: int
    decay_num_steps: int  # at the end, at least 1
    warmup_num_steps: int = 0  # at the beginning
    decay_type: DecayType = "linear"
    min_ratio: float = 0.0  # ratio of the rate after `total_num_steps` to the peak

    def __post_init__(self) -> None:
        if self.stable_num_steps < 0:
            raise UserError(
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


class RatioLR:
    """Scales the learning rates of all parameter groups by the ratio that the schedule gives.

    Has the methods and the attribute of DeepSpeed's schedules that its engine and `engine.state` use. The only
    state is the number of local steps, so that a resumed run follows its own config.

    Attributes:
        last_batch_iteration: local steps done, less 1.
    """

    def __init__(self, optimizer: "Optimizer", schedule: WSD) -> None:
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
    """Return the schedule for the block `scheduler` of a config: `WSD`, or one of DeepSpeed's."""
    kind, params = block["type"], block.get("params", {})
    if kind == "WSD":
        return RatioLR(optimizer, WSD(**params))
    from deepspeed.runtime import lr_schedules  # takes seconds

    return getattr(lr_schedules, kind)(optimizer, **params)


def rates_in(
    block: Mapping[str, Any], peaks: Sequence[float], local_steps: Iterable[int]
) -> dict[int, list[float]]:
    """Return by local step, from 1, the rates that a schedule gives to parameter groups with the rates `peaks`.

    Runs the schedule that training runs, on an optimizer of its own.
    """
    import torch

    from megatron_noloco.outer.vectors import NOTHING

    before_engines()
    optimizer = torch.optim.SGD([{"params": [NOTHING.clone()], "lr": peak} for peak in peaks])
    with quiet():
        schedule = build_schedule(block, optimizer)
    rates = {}
    for local_step in sorted(local_steps):
        if local_step > 1:
            schedule.step(local_step - 2)  # what is called after the local step before
        rates[local_step] = list(schedule.get_last_lr())
    return rates
