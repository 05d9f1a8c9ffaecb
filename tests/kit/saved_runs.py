"""Runs of any layout, saved in the middle of a round."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_noloco.training import run as run_module
from tests.kit.disturbed import Outcome, Run, command
from tests.kit.tiny import (
    FAMILY_MODELS,
    sizes,
)

SAVED, STEPS = 5, 10
K = 3  # does not divide SAVED: the checkpoint lies in the middle of a round
EXPERTS = {"model": FAMILY_MODELS["mixtral"]}
LATE = {"noloco": {"overlap_steps": 3}}  # begun at 3, merged at 6
Changes = dict[str, Any]


def layout(pp: int = 1, tp: int = 1, dp: int = 1, vpp: int = 1, replicas: int = 2, **more: Any) -> Changes:
    """Changes of the tiny config; a replica has the same batch with every dp. `more` is for the block parallel."""
    return {
        "gradient_accumulation_steps": 4 // dp,
        "parallel": sizes(replicas=replicas, pp=pp, tp=tp, dp=dp, vpp=vpp, **more),
    }


def padded(multiple: int, changes: Changes) -> Changes:
    return {**changes, "model": {"make_vocab_size_divisible_by": multiple}}


def ranks(changes: Changes) -> int:
    parallel = changes["parallel"]
    return int(parallel["replicas"] * math.prod(parallel[name] for name in sizes(pp=1, tp=1, dp=1)))


def saved_run(folder: Path, changes: Sequence[Changes], steps: int = SAVED) -> Run:
    """Train, and save after SAVED steps. Routes are straight: random ones depend on the stages."""
    run = Run(folder, {"noloco": {"local_steps": K, "routing": "off"}})
    for change in ({"model": {"num_layers": 4}}, *changes):
        run.change(change)
    run.change({"training": {"train_iters": STEPS}, "checkpoint": {"save_interval": SAVED, "keep_last": 9}})
    launch(run, ranks(changes[-1]), steps)
    return run


def launch(run: Run, count: int, steps: int) -> str:
    """What rank 0 printed."""
    outcomes = run.launch(count, changes={"training": {"train_iters": steps}})
    assert [(outcome.code, outcome.err) for outcome in outcomes] == [(0, "")] * count
    return outcomes[0].out


def starts(rank: int, world_size: int, arguments: list[str]) -> Outcome:
    """The command, but the training ends where it starts."""
    run_module.Run._loop = lambda run: (run.start_step, False)  # type: ignore[method-assign]
    return command(rank, world_size, arguments)
