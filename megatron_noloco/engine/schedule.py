"""The schedule of the learning rate that a file names: DeepSpeed's, or one of ours in DeepSpeed's form."""

from collections.abc import Mapping
from typing import Any

from deepspeed.runtime import lr_schedules
from torch.optim import Optimizer

from megatron_noloco.engine.learning_rate import SCHEDULES, WSD, InverseSquareRoot


class RatioLR:
    """Scales the learning rate of every parameter group, so that their ratios stay.

    The methods and the attribute are those that DeepSpeed's engine and `engine.state` use of DeepSpeed's own
    schedules. The state is the number of local steps alone: a resumed run follows its own file.

    Attributes:
        last_batch_iteration: local steps done, less 1.
    """

    def __init__(self, optimizer: Optimizer, schedule: WSD | InverseSquareRoot) -> None:
        self._optimizer, self._schedule = optimizer, schedule
        self._peaks = [group["lr"] for group in optimizer.param_groups]
        self.last_batch_iteration = -2
        self.step()

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Set the rate of the step to come."""
        if last_batch_iteration is None:
            last_batch_iteration = self.last_batch_iteration + 1
        self.last_batch_iteration = last_batch_iteration
        ratio = self._schedule.ratio(last_batch_iteration + 1)
        for group, peak in zip(self._optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * ratio

    def get_last_lr(self) -> list[float]:
        return [group["lr"] for group in self._optimizer.param_groups]


def build_schedule(block: Mapping[str, Any], optimizer: Optimizer) -> Any:
    """The schedule of a file's block `scheduler`, which sets the rates of `optimizer`."""
    kind, params = block["type"], block.get("params", {})
    if kind in SCHEDULES:
        return RatioLR(optimizer, SCHEDULES[kind](**params))
    return getattr(lr_schedules, kind)(optimizer, **params)
