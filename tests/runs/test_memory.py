"""The memory of a rank with pipeline stages stays what it is: nothing is kept of the steps that are done."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.kit.ranks import run_mpi
from tests.kit.tiny import TINY, tiny, write_config, write_text

STAGED: dict[str, Any] = {
    "gradient_accumulation_steps": 2,
    "noloco": {"recipe": "paper", "local_steps": 1, "routing": "round"},
    "parallel": {"replicas": 2, "pipeline_model_parallel_size": 2},
    "training": {"log_interval": 10},
    "evaluation": {"iters": 1},
}


def measured(
    folder: Path, steps: int, every: int, changes: dict[str, Any], timeout: float, since: int = 0
) -> dict[str, Any]:
    """What memory_of_ranks.py says of a run that writes, evaluates and saves between any two of its looks."""
    where = {
        "data": {"text": write_text(folder)},
        "training": {"train_iters": steps, "output_dir": str(folder)},
        "evaluation": {"interval": every},
        "checkpoint": {"save_interval": every, "keep_last": 1},
    }
    config = write_config(folder, tiny(changes, tiny(where, tiny(STAGED, TINY))))
    options = ["--every", str(every), "--since", str(since)]
    finished = run_mpi(4, "tests.kit.memory_of_ranks", [config, *options], timeout)
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


def test_nothing_is_kept_of_a_step(tmp_path: Path) -> None:
    """Neither malloc's memory nor Python's blocks grow, but for the last 1,024 routes, 6 to 9 blocks each.

    With torch's flight recorder, which keeps the last 2,000 messages, a step costs 5 kB.
    """
    begin, end, every = 2, 5, 12
    for rank in measured(tmp_path, end * every + 1, every, {}, timeout=400)["ranks"]:
        steps = rank["steps"][end] - rank["steps"][begin]
        of_a_step = {name: (values[end] - values[begin]) / steps for name, values in rank.items()}
        assert of_a_step["allocated_bytes"] < 2_000
        assert of_a_step["python_blocks"] < 30


@pytest.mark.slow
def test_resident_memory_stays_flat(tmp_path: Path) -> None:
    """With activations that malloc keeps on its heap, where small blocks between them would spread them."""
    size = {"hidden_size": 128, "ffn_hidden_size": 384, "seq_length": 128}
    changes = {"train_micro_batch_size_per_gpu": 4, "model": size}
    found = measured(tmp_path, 600, 50, changes, timeout=3600, since=200)
    assert found["growth"] < 1.05
