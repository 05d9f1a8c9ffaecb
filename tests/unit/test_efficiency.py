"""Which local steps count."""

from typing import Any

import pytest

from tools.efficiency import steps_that_count


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
