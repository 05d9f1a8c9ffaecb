"""From every layout to every other, and to more and fewer replicas: the losses are those without the change."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.integration.chaos import Run
from tests.integration.test_other_layout import (
    FP32_LOSS,
    SAVED,
    STEPS,
    Changes,
    launch,
    layout,
    ranks,
    saved_run,
)
from tests.integration.tiny import metrics

SIZES: dict[str, dict[str, int]] = {
    "one": {},
    "pp 2": {"pp": 2},
    "pp 4": {"pp": 4},
    "pp 2 x vpp 2": {"pp": 2, "vpp": 2},
    "tp 2": {"tp": 2},
    "dp 2": {"dp": 2},
    "tp 2 x pp 2": {"tp": 2, "pp": 2},
    "dp 2 x pp 2": {"dp": 2, "pp": 2},
    "dp 2 x tp 2": {"dp": 2, "tp": 2},
}
SMALL = [name for name in SIZES if ranks(layout(**SIZES[name], replicas=1)) <= 2]  # for four replicas
GRID = [
    (before, after, replicas)
    for replicas in ((2, 2), (2, 4), (4, 2))
    for before in (SIZES if replicas == (2, 2) else SMALL)
    for after in (SIZES if replicas == (2, 2) else SMALL)
    if before != after
]
QUICK = [("pp 4", "tp 2", (2, 2)), ("dp 2", "pp 2 x vpp 2", (2, 4))]

Losses = list[list[float]]  # of each replica, step by step; some begin later than others, or end before
Saved = Callable[[str, int], Run]  # by layout and number of replicas


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Runs that were stopped after a checkpoint, each made once."""

    @cache
    def saved(name: str, replicas: int) -> Run:
        return saved_run(tmp_path_factory.mktemp("saved"), [layout(**SIZES[name], replicas=replicas)])

    return saved


@pytest.fixture(scope="module")
def expected(saved: Saved, tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[int, int]], Losses]:
    """Of a run on one rank per replica: never interrupted, or only to change the number of replicas."""

    @cache
    def expected(replicas: tuple[int, int]) -> Losses:
        folder = tmp_path_factory.mktemp("expected")
        if replicas[0] == replicas[1]:
            return losses(saved_run(folder, [layout(replicas=replicas[0])], STEPS))
        return continued(saved("one", replicas[0]), layout(replicas=replicas[1]), folder / "run")

    return expected


def continued(run: Run, changes: Changes, folder: Path) -> Losses:
    run = run.copy(folder)
    run.change({**changes, "checkpoint": {"load": str(run.step_folder(SAVED))}})
    assert f"step {SAVED}, " in launch(run, ranks(changes), STEPS)
    return losses(run)


def losses(run: Run) -> Losses:
    return [[row["train/loss"] for row in rows] for rows in metrics(run.folder)]


@pytest.mark.parametrize(
    ("before", "after", "replicas"),
    [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow) for case in GRID],
    ids=lambda value: value if isinstance(value, str) else f"{value[0]} to {value[1]} replicas",
)
def test_the_losses_are_those_without_the_change(
    before: str,
    after: str,
    replicas: tuple[int, int],
    saved: Saved,
    expected: Callable[[tuple[int, int]], Losses],
    tmp_path: Path,
) -> None:
    found = continued(
        saved(before, replicas[0]), layout(**SIZES[after], replicas=replicas[1]), tmp_path / "run"
    )
    assert [len(rows) for rows in found] == [len(rows) for rows in expected(replicas)]
    assert sum(len(rows) == STEPS for rows in found) == min(replicas)
    for ours, theirs in zip(found, expected(replicas), strict=True):
        assert ours == pytest.approx(theirs, rel=0, abs=FP32_LOSS)
