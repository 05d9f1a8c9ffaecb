"""How the numbers that ranks record become rows."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_noloco.monitor.metrics import Metrics
from megatron_noloco.monitor.numbers import TABLE
from megatron_noloco.monitor.reductions import (
    LAST,
    LAST_MAX,
    LAST_SUM,
    MEAN,
    MEAN_SUM,
    PER_STEP,
    RMS,
    SLOWEST,
    SUM,
    SUM_MAX,
    TOTAL,
    TOTAL_MAX,
)
from tests.kit.ranks import run_ranks
from tests.kit.rows import begin

# What rank r records in step s of an interval of two local steps.
VALUES = [[1.0, 10.0], [2.0, 20.0], [6.0, 60.0]]
REDUCED = {
    LAST: 60.0,
    LAST_MAX: 60.0,
    LAST_SUM: 90.0,
    MEAN: 99 / 6,
    MEAN_SUM: 99 / 2,
    SUM: 99.0,
    SUM_MAX: 66.0,
    PER_STEP: 99 / 6,
    SLOWEST: 33.0,
    TOTAL: 99.0,
    TOTAL_MAX: 66.0,
    RMS: math.sqrt((10**2 + 20**2 + 60**2) / 3),
}
NAMES = {number.reduction: number.name for number in TABLE.values()}  # of each reduction, one number


def test_each_reduction_is_checked() -> None:
    assert NAMES.keys() - {None} == REDUCED.keys()


def record_two_intervals(rank: int, world_size: int) -> list[dict[str, Any]]:
    """In the second, ranks record different names, and a different number of times."""
    metrics, rows = begin()
    for value in VALUES[rank]:
        for reduction in REDUCED:
            metrics.record(NAMES[reduction], value)
    metrics.write_steps(2, 2)
    for value in ([], [1.0], [5.0, 6.0, 7.0])[rank]:
        metrics.record("train/loss", value)
    metrics.record("fragment/spread of 1", [math.nan, 3.0, 4.0][rank], [0, 1, 3][rank])
    metrics.record("fragment/spread of 2", math.nan, 0)
    metrics.record("round/partners", [rank])
    metrics.write_steps(3, 1)
    return rows


def test_reductions_over_steps_and_ranks() -> None:
    """A row is about its own interval; weights, and ranks without a value, count as they should."""
    by_rank = run_ranks(3, record_two_intervals)
    for full, uneven in by_rank:
        expected = {NAMES[reduction]: pytest.approx(value) for reduction, value in REDUCED.items()}
        assert full == {"kind": "step", "step": 2, "replica": 0, **expected}
        spreads = {f"fragment/spread of {fragment}" for fragment in (1, 2)}
        assert uneven.keys() == {"kind", "step", "replica", "train/loss", "round/partners", *spreads}
        assert uneven["train/loss"] == 19 / 4
        assert uneven["fragment/spread of 1"] == math.sqrt((9 + 3 * 16) / 4)
        assert math.isnan(uneven["fragment/spread of 2"])
        assert uneven["round/partners"] == [2]


def count_over_a_resume(rank: int, world_size: int) -> list[Any]:
    """Saved between two rows, and continued from there; the other counters are kept, too."""
    metrics, before = begin({"something else": 7.0})
    for step in (1, 2, 3):
        metrics.record("total/sent_bytes", 10**rank)
        if step == 2:
            metrics.write_steps(step, 2)
    metrics.count("validation_loss", 1.5)
    metrics.count("something else", None)
    saved = json.loads(json.dumps(metrics.counters))
    resumed, after = begin(saved)
    resumed.record("total/sent_bytes", 0)
    resumed.write_steps(4, 1)
    return [before[0]["total/sent_bytes"], saved, after[0]["total/sent_bytes"]]


def test_a_total_survives_a_resume() -> None:
    for rank, (before, saved, after) in enumerate(run_ranks(2, count_over_a_resume)):
        assert (before, after) == (22, 33)
        assert saved == {"total/sent_bytes": 3 * 10**rank, "validation_loss": 1.5}


@contextmanager
def counted_reads() -> Iterator[list[Tensor]]:
    """Reading a tensor's value is what waits for a device."""
    reads: list[Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("item", "__float__", "__int__", "__bool__", "tolist", "__format__"):
            original = getattr(Tensor, name)
            patch.setattr(
                Tensor,
                name,
                lambda self, *args, original=original: reads.append(self) or original(self, *args),
            )
        yield reads


def record_tensors(rank: int, world_size: int) -> list[Any]:
    metrics, rows = begin()
    with counted_reads() as reads:
        for value in (1.0, 2.0, 6.0):
            for reduction in (MEAN, LAST, TOTAL, SLOWEST):
                metrics.record(NAMES[reduction], torch.tensor(value))
        while_recording = len(reads)
        metrics.write_steps(3, 3)
    return [while_recording, len(reads), rows[0], metrics.counters]


def test_tensors_are_not_read_before_a_row_is_written() -> None:
    ((while_recording, afterwards, row, counters),) = run_ranks(1, record_tensors)
    assert while_recording == 0 < afterwards
    assert [row[NAMES[reduction]] for reduction in (MEAN, LAST, TOTAL, SLOWEST)] == [3.0, 6.0, 9.0, 3.0]
    assert counters == {NAMES[TOTAL]: 9.0}


def test_a_number_that_the_table_has_not_is_refused() -> None:
    metrics = Metrics(0, None)  # type: ignore[arg-type]  # a group is for rows only
    for name in ("train/los", "train/loss of 1", "validation/loss"):
        with pytest.raises(ValueError, match=f"the number '{name}' "):
            metrics.record(name, 1.0)
