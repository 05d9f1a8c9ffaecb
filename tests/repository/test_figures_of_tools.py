"""What tools make of the numbers of a run."""

from pathlib import Path
from typing import Any

import pytest

from tests.kit.rows import write
from tools.efficiency import steps_that_count
from tools.time_to_loss import Moment, curve, seconds_to


@pytest.mark.parametrize(
    ("steps", "count"),
    [
        ([], 0),
        ([(5, None), (10, None), (15, None)], 15),
        ([(5, None), (10, 3), (15, None), (20, 5)], 15),  # three left out, and two
        ([(5, None), (10, None), (40, None), (45, None)], 20),  # away from 10 or later to 35 or later
        ([(5, None), (10, 4), (40, 2), (45, None)], 16),  # likewise, and counted from 0 again
        ([(100, None), (105, None), (110, None)], 15),  # it joined late
        ([(5, None), (10, None), (60, 49)], 11),  # all but one left out
    ],
)
def test_steps_that_count(steps: list[tuple[int, int | None]], count: int) -> None:
    rows: list[dict[str, Any]] = [
        {"kind": "step", "step": step} | ({} if total is None else {"total/skipped_ahead": total})
        for step, total in steps
    ]
    rows.append({"kind": "evaluation", "step": 1000})
    assert steps_that_count(rows) == count


# Seconds of training until a loss is reached


def steps(step: int, seconds: float) -> dict[str, Any]:
    return {"kind": "step", "step": step, "speed/seconds_per_step": seconds}


def evaluation(step: int, mean: float, own: float) -> dict[str, Any]:
    return {
        "kind": "evaluation",
        "step": step,
        "validation/mean_model_loss": mean,
        "validation/replica_losses": [own, 9.0],
    }


@pytest.mark.parametrize(("rounds", "losses"), [(True, [3.0, 2.0]), (False, [3.5, 2.5])])
def test_the_slowest_replica_sets_the_time(rounds: bool, losses: list[float], tmp_path: Path) -> None:
    """Log intervals of 4 and 6 local steps; what comes after an evaluation is not in its time."""
    first = steps(4, 1.0), evaluation(4, 3.0, 3.5), steps(10, 1.0), evaluation(10, 2.0, 2.5), steps(12, 5.0)
    write(tmp_path, "00", *first)
    write(tmp_path, "01", steps(4, 0.5), steps(10, 2.0), steps(12, 5.0))
    assert [moment.seconds for moment in curve(tmp_path, rounds)] == [4.0, 14.0]
    assert [moment.loss for moment in curve(tmp_path, rounds)] == losses


def test_loss_is_linear_between_evaluations() -> None:
    moments = [Moment(0, 0.0, 5.0), Moment(10, 10.0, 3.0), Moment(20, 30.0, 2.0)]
    assert seconds_to(moments, 2.5) == 20.0
    assert seconds_to(moments, 2.0) == 30.0
    assert seconds_to(moments, 1.9) is None
