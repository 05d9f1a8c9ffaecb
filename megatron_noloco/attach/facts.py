"""The numbers that states of attached jobs and of the trainer's have in common, in the form of the trainer.

A job of the trainer takes these and the vectors of an attached job, and leaves the rest. An attached job gets from
the trainer no state of a schedule, no settings of the optimizer, and no buffers, and keeps its own.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_noloco.attach.inner import PREFIX
from megatron_noloco.outer import rounds_to_lists

_KIND = "others"  # the trainer's name for groups that Muon does not train


def facts_for_trainer(
    done: int, outer: Mapping[str, Tensor], vectors: Collection[str], inner: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the numbers of a state after `done` local steps, for JSON.

    Args:
        outer: see `OuterOptimizer.state`.
        vectors: names of those of the inner optimizer.
        inner: see `InnerState.rest`; None: there is none.
    """
    optimizers: list[dict[str, Any]] = [] if inner is None else inner["optimizers"]
    entry: dict[str, int | float | None] = dict.fromkeys(vectors)
    for optimizer in optimizers:
        for name, value in optimizer["common"].items():
            if value is not None:
                entry[PREFIX + name] = value.item() if torch.is_tensor(value) else value
    return {
        "optimizer": " and ".join(one["kind"] for one in optimizers).lower(),
        "inner": {_KIND: entry},
        "engine": {"global_steps": done, "skipped_steps": 0, "schedule_step": None, "loss_scale": {}},
        "rounds": rounds_to_lists(outer),
    }


def rest_of_trainer(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of the trainer's state as what `JobState` reads of an attached job's."""
    kinds: Mapping[str, Mapping[str, float | None]] = facts["inner"]
    optimizers: list[dict[str, Any]] = [
        {
            "kind": facts["optimizer"] if len(kinds) == 1 else f"{facts['optimizer']} of {kind}",
            "groups": [],
            "common": {name.removeprefix(PREFIX): _number(value) for name, value in numbers.items()},
            "named": {},
        }
        for kind, numbers in kinds.items()
    ]
    return {"inner": {"optimizers": optimizers, "others": None}, "problem": "", "buffers": None}


def _number(value: float | None) -> Any:
    """Return a number as torch's optimizers keep it; DeepSpeed's kernels count in Python's integers."""
    return torch.tensor(value) if isinstance(value, float) else value
