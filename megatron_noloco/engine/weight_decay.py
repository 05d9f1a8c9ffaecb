"""Schedules of the weight decay: a pure function of the local steps done."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

STYLES: dict[str, Callable[[float], float]] = {  # from 0 at x = 0 to 1 at x = 1
    "linear": lambda x: x,
    "cosine": lambda x: (1 - math.cos(math.pi * x)) / 2,
}


@dataclass(frozen=True)
class WeightDecay:
    """From one value to another, which then stays; Megatron's, and the fields have Megatron's names."""

    start_weight_decay: float
    end_weight_decay: float
    weight_decay_incr_style: str  # of STYLES
    weight_decay_incr_steps: int  # local steps, at least 1; in Megatron always those of the run

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> "WeightDecay | None":
        """The one in an optimizer's params; None where they have a constant `weight_decay`."""
        if "start_weight_decay" not in params:
            return None
        return cls(**{field.name: params[field.name] for field in fields(cls)})

    def at(self, done: int) -> float:
        """In the local step that follows `done` others."""
        share = STYLES[self.weight_decay_incr_style](min(done / self.weight_decay_incr_steps, 1.0))
        return self.start_weight_decay + share * (self.end_weight_decay - self.start_weight_decay)
