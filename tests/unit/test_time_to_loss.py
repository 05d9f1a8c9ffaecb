"""Seconds of training until a loss is reached, from the metrics of a run."""

import json
from pathlib import Path
from typing import Any

import pytest

from tools.time_to_loss import Moment, curve, seconds_to


def steps(step: int, seconds: float) -> dict[str, Any]:
    return {"kind": "step", "step": step, "speed/seconds_per_step": seconds}


def evaluation(step: int, mean: float, own: float) -> dict[str, Any]:
    return {
        "kind": "evaluation",
        "step": step,
        "validation/mean_model_loss": mean,
        "validation/replica_losses": [own, 9.0],
    }


def write(run: Path, *replicas: list[dict[str, Any]]) -> Path:
    for replica, rows in enumerate(replicas):
        folder = run / f"replica_{replica:02d}"
        folder.mkdir()
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


@pytest.mark.parametrize(("rounds", "losses"), [(True, [3.0, 2.0]), (False, [3.5, 2.5])])
def test_the_slowest_replica_sets_the_time(rounds: bool, losses: list[float], tmp_path: Path) -> None:
    """Log intervals of 4 and 6 local steps; what comes after an evaluation is not in its time."""
    run = write(
        tmp_path,
        [steps(4, 1.0), evaluation(4, 3.0, 3.5), steps(10, 1.0), evaluation(10, 2.0, 2.5), steps(12, 5.0)],
        [steps(4, 0.5), steps(10, 2.0), steps(12, 5.0)],
    )
    assert [moment.seconds for moment in curve(run, rounds)] == [4.0, 14.0]
    assert [moment.loss for moment in curve(run, rounds)] == losses


def test_between_two_evaluations_the_loss_falls_in_a_straight_line() -> None:
    moments = [Moment(0, 0.0, 5.0), Moment(10, 10.0, 3.0), Moment(20, 30.0, 2.0)]
    assert seconds_to(moments, 2.5) == 20.0
    assert seconds_to(moments, 2.0) == 30.0
    assert seconds_to(moments, 1.9) is None
