"""What the loop knows about a run becomes rows."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch.distributed as dist

from megatron_noloco.monitor import monitor
from megatron_noloco.monitor.metrics import Metrics
from megatron_noloco.monitor.monitor import Evaluation, Monitor, Throughput
from megatron_noloco.outer import ExchangeReport, RoundReport
from megatron_noloco.plans.samples import BatchPlan
from tests.harness import run_ranks


class Clock:
    """In place of the module `time`."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now


class Rows(list[dict[str, Any]]):
    """A writer that keeps what it is given."""

    def write(self, row: Mapping[str, Any]) -> None:
        self.append(dict(row))

    def close(self) -> None: ...


def begin() -> tuple[Monitor, Rows, Clock]:
    rows, clock = Rows(), Clock()
    monitor.time = clock  # type: ignore[assignment]  # in this process alone
    assert dist.group.WORLD is not None
    metrics = Metrics(0, dist.group.WORLD, [rows])
    return Monitor(metrics, BatchPlan(2, 1, 1, 1), Throughput(10, 2, 1e12), None), rows, clock


def report(index: int, pause_seconds: float) -> RoundReport:
    return RoundReport(index, ExchangeReport((0, 1)), 0.0, pause_seconds)


def train(rank: int, world_size: int) -> Rows:
    """Four local steps of 2 seconds, of which two end with a pause; an evaluation and a save among them."""
    watched, rows, clock = begin()
    for done in (1, 2, 3, 4):
        clock.now += 2
        watched.local_step([report(done // 2, 0.5)] if done % 2 == 0 else [])
        if done == 1:
            clock.now += 30
            watched.evaluation(done, Evaluation([1.0, 1.0], 1.0, 0.0), 30.0)
        if done == 3:
            clock.now += 7
            watched.saved(done, 7.0, None)
    watched.log(4)
    return rows


def test_a_step_has_its_own_time_and_no_more() -> None:
    (rows,) = run_ranks(1, train)
    evaluation, checkpoint, step = rows
    assert (evaluation["kind"], evaluation["time/evaluation_seconds"]) == ("evaluation", 30)
    assert (checkpoint["kind"], checkpoint["step"], checkpoint["time/save_seconds"]) == ("checkpoint", 3, 7)
    assert step["speed/seconds_per_step"] == 2
    assert step["time/exchange_seconds"] == 1 / 4
    assert step["total/pause_seconds"] == 1


def fail_to_save(rank: int, world_size: int) -> Rows:
    watched, rows, _ = begin()
    watched.saved(3, 7.0, "No space left on device")
    return rows


def test_a_failed_save_has_no_row() -> None:
    (rows,) = run_ranks(1, fail_to_save)
    assert rows == []


def meet(rank: int, world_size: int) -> Rows:
    watched, rows, clock = begin()
    for index, (partner, wait) in enumerate([(1, 0.0), (2, 0.0), (3, 5.0)]):
        exchange = ExchangeReport((0, partner), wait_seconds=wait, started=10.0 * index)
        watched.local_step([RoundReport(index, exchange, 0.0, wait)])
    clock.now += 30
    watched.log(3)
    return rows


def test_a_late_partner_is_in_the_row() -> None:
    (rows,) = run_ranks(1, meet)
    assert (rows[0]["late/partner"], rows[0]["late/seconds"]) == (3, 5.0)


@pytest.mark.parametrize("name", ["speed/seconds_per_step", "memory/peak_bytes"])
def test_what_every_row_has(name: str) -> None:
    (rows,) = run_ranks(1, train)
    assert rows[-1][name] > 0
