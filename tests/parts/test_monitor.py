"""What the loop knows about a run becomes rows: time and speed."""

from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from typing import Any

from megatron_noloco.monitor import monitor
from megatron_noloco.monitor.console import Console, RunFacts
from megatron_noloco.monitor.evaluation import Evaluation
from megatron_noloco.monitor.monitor import Monitor, Throughput
from megatron_noloco.outer import ExchangeReport, RoundReport
from megatron_noloco.outer.peers import Average, Boundary
from megatron_noloco.plans.sample_order import BatchPlan
from tests.kit.ranks import run_ranks
from tests.kit.rows import Rows, begin


class Clock:
    """In place of the module `time`."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now


def train(rank: int, world_size: int) -> Rows:
    """Four local steps of 2 seconds, of which three end with a round; an evaluation and two saves among them.

    The average at the end takes 4 seconds.
    """
    clock = Clock()
    monitor.time = clock  # type: ignore[assignment]  # in this process alone
    metrics, rows = begin()
    watched = Monitor(metrics, BatchPlan(2, 1, 1, 1), Throughput(10, 2, 1e12), None)
    clock.now += 60  # the engine is built, and a checkpoint read
    watched.begin()
    for done, partner, wait in ((1, None, 0.0), (2, 1, 0.0), (3, 2, 0.0), (4, 3, 5.0)):
        clock.now += 2
        exchange = ExchangeReport((0, partner or 0), wait_seconds=wait)
        watched.local_step([RoundReport(done, exchange, 0.0, 0.5)] if partner else [])
        if done == 1:
            clock.now += 30
            watched.evaluation(done, Evaluation({0: 1.0, 1: 1.0}, 1.0, 0.0), 30.0)
        if done == 3:
            clock.now += 14
            watched.saved(done, 7.0, None)
            assert not watched.committed(lambda: None), "another rank still writes"
            assert [row["kind"] for row in rows] == ["evaluation"]
            assert watched.committed(lambda: 3)
            watched.saved(done, 7.0, "No space left on device")
            assert watched.committed(lambda: 3)
    clock.now += 40  # of which 36 are spent waiting for others
    watched.averaged(Average([ExchangeReport((0, 1), seconds=4.0)], 40.0))
    watched.log(4)
    return rows


def test_rows_of_a_run() -> None:
    """A local step has its own time and no more; a failed save has no row."""
    (rows,) = run_ranks(1, train)
    evaluation, checkpoint, step = rows
    assert (evaluation["kind"], evaluation["time/evaluation_seconds"]) == ("evaluation", 30)
    assert (checkpoint["kind"], checkpoint["step"], checkpoint["time/save_seconds"]) == ("checkpoint", 3, 7)
    assert step["speed/seconds_per_step"] == 3
    assert step["time/exchange_seconds"] == 5.5 / 4
    assert step["total/pause_seconds"] == 5.5
    assert (step["round/partners"], step["round/wait_seconds"]) == ([3], 5.0)
    assert step["memory/peak_bytes"] > 0


def train_with_a_late_row(rank: int, world_size: int) -> Rows:
    metrics, rows = begin()
    watched = Monitor(metrics, BatchPlan(1, 1, 1, 1), Throughput(10, None, 1e12), None)
    for done, group in enumerate(((0, 1), (0,), (0, 1)), 1):
        exchange = ExchangeReport(group, missed="" if len(group) > 1 else "it is not there")
        watched.local_step([RoundReport(done, exchange, 0.0, 0.5)])
        watched.log(done)
    watched.local_step([])
    watched.log(4)
    return rows


def test_each_row_has_the_rounds_with_a_partner_so_far() -> None:
    """The summary at the end of a run is made of the last row, in which there may have been no round."""
    (rows,) = run_ranks(1, train_with_a_late_row)
    assert [row["total/rounds"] for row in rows] == [1, 1, 2, 2]


def train_alone(rank: int, world_size: int) -> Rows:
    metrics, rows = begin()
    watched = Monitor(metrics, BatchPlan(2, 1, 1, 1), Throughput(10, 1, 1e12), None)
    watched.local_step([RoundReport(0, ExchangeReport((0,)), 0.0, 0.5)])
    watched.log(1)
    return rows


def test_one_replica_has_no_rounds_in_its_rows() -> None:
    """Each would be a round that was skipped, with a spread that is not a number."""
    ((row,),) = run_ranks(1, train_alone)
    assert not [name for name in row if name.startswith("round/")]
    assert row["time/exchange_seconds"] == 0.5, "outer steps take time all the same"


def written(rank: int, world_size: int, act: Callable[[Monitor], object]) -> tuple[Rows, str]:
    """Return the rows and lines of a monitor that something is done with."""
    metrics, rows = begin()
    with redirect_stdout(StringIO()) as said:
        console = Console("lines", 10, 0, RunFacts(0.0, "", "", 0.0, "", "", ()))
        act(Monitor(metrics, BatchPlan(1, 1, 1, 1), Throughput(10, None, 1e12), console))
    return rows, said.getvalue()


def cross(watched: Monitor) -> None:
    """Come to a boundary at which a round ended early, and the steps up to the 9th were left out."""
    report = RoundReport(4, ExchangeReport((0, 1), bytes_sent=8, deadline_seconds=5.0), 0.5, 0.5)
    watched.boundary(Boundary(9, 2, [report], (" left |",), {"total/skipped_ahead": 2}))
    watched.local_step([])
    watched.log(10)


def test_a_row_has_what_happened_between_two_steps() -> None:
    (((row,), said),) = run_ranks(1, written, cross)
    assert said == " left |\n"
    assert (row["round/index"], row["round/deadline_seconds"]) == (4, 5.0)
    assert (row["total/skipped_ahead"], row["total/sent_bytes"]) == (2, 8)


def skip(watched: Monitor) -> None:
    for number, why in enumerate(("a", "a", "b", "b", "", "b")):
        exchange = ExchangeReport((0,) if why else (0, 1), missed=why)
        watched.local_step([RoundReport(number, exchange, 0.0, 0.5)])
    watched.log(6)


def test_rounds_skipped_in_a_row_for_one_reason_have_one_line() -> None:
    (((row,), said),) = run_ranks(1, written, skip)
    assert said == " round 0 skipped | a |\n round 2 skipped | b |\n round 5 skipped | b |\n"
    assert row["total/missed_rounds"] == 5


def test_the_speed_of_a_step() -> None:
    """4 replicas, of which each takes half a second for 1000 tokens and 100 TFLOP on each of its ranks.

    A job of a federation does not know how many others are there.
    """
    speeds = {
        "speed/seconds_per_step": 0.5,
        "speed/tokens_per_second": 2000.0,
        "speed/tokens_per_second_of_all": 8000.0,
        "speed/tflops_per_gpu": 200.0,
    }
    for peak_tflops, more in ((None, {}), (400.0, {"speed/mfu": 0.5})):
        numbers: dict[str, Any] = {}

        def record(name: str, value: Any, weight: float = 1.0, numbers: dict[str, Any] = numbers) -> None:
            numbers[name] = value

        Throughput(1000, 4, 1e14, peak_tflops).record(0.5, record)
        assert numbers == speeds | more
        del numbers["speed/tokens_per_second_of_all"]
        alone, numbers = numbers, {}
        Throughput(1000, None, 1e14, peak_tflops).record(0.5, partial(record, numbers=numbers))
        assert numbers == alone
