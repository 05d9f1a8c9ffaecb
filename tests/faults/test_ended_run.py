"""A job that comes back when the run has ended says so, and trains nothing unless it is asked to."""

import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_noloco.checkpoint import catalog
from megatron_noloco.checkpoint.ensemble import Ensemble
from megatron_noloco.federation import membership
from tests.kit.federation import Federation
from tests.kit.ranks import until
from tests.kit.tiny import at_steps, sizes, write_text

STEPS, SAVED = 8, 4


def hurries() -> None:
    """Wait for nobody at the start, or at the end."""
    membership.FIRST_SECONDS = membership.TOGETHER_SECONDS = 0.5


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_job_that_comes_too_late_says_so(tmp_path: Path, ranks: int) -> None:
    changes = {
        "data": {"text": write_text(tmp_path)},
        "noloco": {"final_average": True},
        "training": {"train_iters": STEPS},
        "checkpoint": {"save_interval": SAVED},
        "parallel": sizes(pp=ranks),
    }
    with Federation(tmp_path, changes) as federation:
        for replica in range(2):
            federation.start(replica, ranks, {"federation": {"start_with": 2}})
        federation.wait()
        folders = [tmp_path / f"replica_{replica:02d}" for replica in range(2)]
        last = [catalog.step_folder(folder / "checkpoints", STEPS) for folder in folders]
        assert [Ensemble.read([folder]).mean_of for folder in last] == [2, 2]

        checkpoints = folders[1] / "checkpoints"  # as of a job that was killed before its end
        shutil.rmtree(catalog.step_folder(checkpoints, STEPS))
        catalog.write_latest(checkpoints)
        rows = federation.rows(1)
        federation.start(1, ranks, disturb=hurries)
        federation.wait()
        step = catalog.step_folder(checkpoints, SAVED)
        assert (
            f"\nthe run has ended: {last[0]} is the model of 2 replicas; this replica would train alone from step "
            f"{SAVED}, to another model; to do so all the same, set checkpoint.load to {step}\n"
        ) in federation.log(1)
        assert federation.rows(1) == rows
        assert catalog.steps(checkpoints) == [step]

        federation.start(1, ranks, {"checkpoint": {"load": str(step)}}, hurries)
        federation.wait()
        assert f"continuing from {step}" in federation.log(1)
        assert catalog.steps(checkpoints)[0] == catalog.step_folder(checkpoints, STEPS)
        assert Ensemble.read([last[1]]).mean_of < 2, "it trained alone"


def holds_last_step(goes_on: Path) -> None:
    """Take the last local step when the file is there."""
    at_steps(lambda done: until(lambda: done < STEPS - 1 or goes_on.exists()))


def test_job_killed_at_its_end_saves_the_others_mean(tmp_path: Path) -> None:
    """It had saved its last step, not the mean; it comes back when the others have the mean without it."""
    goes_on = tmp_path / "goes_on"
    changes = {
        "data": {"text": write_text(tmp_path)},
        "noloco": {"final_average": True, "deadline_seconds": 2.0},
        "federation": {"start_with": 3, "shortest_deadline_seconds": 1.0},
        "training": {"train_iters": STEPS},
    }
    with Federation(tmp_path, changes) as federation:
        for replica in range(3):
            federation.start(replica, disturb=partial(holds_last_step, goes_on) if replica == 2 else hurries)
        federation.until_saved(1, STEPS)
        federation.kill(1)
        goes_on.touch()
        federation.until_log(0, "final average of replicas 0, 2 ")
        federation.start(1, disturb=hurries)
        federation.wait()
        assert federation.log(1).count(" recovered from replica ") == 1
        states = [slow_weights(federation.state(replica, STEPS)) for replica in range(3)]
        assert all(torch.equal(state, states[0]) for state in states)
        last = catalog.step_folder(tmp_path / "replica_01" / "checkpoints", STEPS)
        assert Ensemble.read([last]).mean_of == 3


def slow_weights(state: dict[str, Tensor]) -> Tensor:
    return torch.cat([state[name] for name in sorted(state) if " slow_weights" in name])
