"""A local step whose numbers are not logged reads next to nothing of its tensors."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.kit.host_reads import HostReads
from tests.kit.ranks import run_ranks
from tests.kit.tiny import MUON, already_joined, build_run, tiny, write_config, write_text

# Who reads, and what.
NORM = "megatron_noloco.engine.gradients"  # the gradient's norm: whether it is finite, and to be clipped
BF16_NORM = "deepspeed.runtime.utils"  # the same in DeepSpeed's bf16 optimizer, one after the other
STEP_COUNT = "torch.optim.optimizer"  # its count of steps for each group, which lies in host memory
EXCHANGE = "megatron_noloco.outer.finite_mean"  # of messages: in host memory, too
GATHER = "torch.distributed.distributed_c10d"  # of objects, in host memory
HEALTH = "megatron_noloco.outer.health"  # before the last save
STEPS, ROUNDS = 5, {2, 4}


def reads(rank: int, world_size: int, config: str) -> list[Counter[str]]:
    """Of each local step of a run, with its round and its row of numbers."""
    already_joined()
    run = build_run(config)
    before_step = run.stopping.before_step
    with HostReads() as seen:

        def cut(done: int) -> bool:
            seen.cut()
            return before_step(done)

        run.stopping.before_step = cut  # type: ignore[method-assign]
        assert run.train()
    return seen.intervals[1:]


CASES: dict[str, tuple[dict[str, Any], int, dict[str, int]]] = {
    "fp32": ({}, 1, {NORM: 1, STEP_COUNT: 2}),
    "bf16": ({"bf16": {"enabled": True}}, 1, {BF16_NORM: 2, STEP_COUNT: 2}),
    "Muon": (MUON, 1, {NORM: 1, STEP_COUNT: 2}),
    "two replicas of two stages": (
        {"parallel": {"replicas": 2, "pipeline_model_parallel_size": 2}},
        4,
        {NORM: 1, STEP_COUNT: 2},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_a_step_reads(case: str, tmp_path: Path) -> None:
    changes, ranks, of_a_step = CASES[case]
    run = {
        "data": {"text": write_text(tmp_path)},
        "training": {"train_iters": STEPS, "log_interval": STEPS, "output_dir": str(tmp_path)},
    }
    config = write_config(tmp_path, tiny(changes, tiny(run)))
    for steps in run_ranks(ranks, reads, config, timeout=240):
        assert len(steps) == STEPS
        for step, found in enumerate(steps, 1):
            if step in ROUNDS:
                del found[EXCHANGE]
            if step < STEPS:
                assert found == of_a_step, f"step {step}"


def test_a_row_of_numbers_is_read_at_once(tmp_path: Path) -> None:
    """The row is about 5 steps of 4 microbatches, whose losses it has twice."""
    run = {
        "data": {"text": write_text(tmp_path)},
        "training": {"train_iters": STEPS, "log_interval": STEPS, "output_dir": str(tmp_path)},
    }
    (steps,) = run_ranks(1, reads, write_config(tmp_path, tiny(run)), timeout=240)
    *_, unlogged, logged = steps
    of_the_row = logged - unlogged
    del of_the_row[GATHER], of_the_row[HEALTH]
    assert of_the_row == {"megatron_noloco.monitor.metrics": 1}
