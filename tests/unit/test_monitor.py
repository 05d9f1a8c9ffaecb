"""What the loop knows about a run becomes rows: time, speed, late partners."""

from typing import Any

import pytest

from megatron_noloco.monitor import monitor
from megatron_noloco.monitor.metrics import Reduction
from megatron_noloco.monitor.monitor import Evaluation, LatePartners, Monitor, Throughput
from megatron_noloco.outer import ExchangeReport, RoundReport
from megatron_noloco.plans.samples import BatchPlan
from tests.harness import run_ranks
from tests.unit.rows import Rows, begin


class Clock:
    """In place of the module `time`."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now


def train(rank: int, world_size: int) -> Rows:
    """Four local steps of 2 seconds, of which three end with a round; an evaluation and two saves among them."""
    clock = Clock()
    monitor.time = clock  # type: ignore[assignment]  # in this process alone
    metrics, rows = begin()
    watched = Monitor(metrics, BatchPlan(2, 1, 1, 1), Throughput(10, 2, 1e12), None)
    for done, partner, wait in ((1, None, 0.0), (2, 1, 0.0), (3, 2, 0.0), (4, 3, 5.0)):
        clock.now += 2
        exchange = ExchangeReport((0, partner or 0), wait_seconds=wait, started=10.0 * done)
        watched.local_step([RoundReport(done, exchange, 0.0, 0.5)] if partner else [])
        if done == 1:
            clock.now += 30
            watched.evaluation(done, Evaluation([1.0, 1.0], 1.0, 0.0), 30.0)
        if done == 3:
            clock.now += 14
            watched.saved(done, 7.0, None)
            watched.saved(done, 7.0, "No space left on device")
    watched.log(4)
    return rows


def test_rows_of_a_run() -> None:
    """A local step has its own time and no more; a failed save has no row; a late partner is named."""
    (rows,) = run_ranks(1, train)
    evaluation, checkpoint, step = rows
    assert (evaluation["kind"], evaluation["time/evaluation_seconds"]) == ("evaluation", 30)
    assert (checkpoint["kind"], checkpoint["step"], checkpoint["time/save_seconds"]) == ("checkpoint", 3, 7)
    assert step["speed/seconds_per_step"] == 2
    assert step["time/exchange_seconds"] == 1.5 / 4
    assert step["total/pause_seconds"] == 1.5
    assert (step["late/partner"], step["late/seconds"]) == (3, 5.0)
    assert step["memory/peak_bytes"] > 0


def test_the_speed_of_a_step() -> None:
    """4 replicas, of which each takes half a second for 1000 tokens and 100 TFLOP on each of its ranks."""
    speeds = {
        "speed/seconds_per_step": 0.5,
        "speed/tokens_per_second": 2000.0,
        "speed/tokens_per_second_of_all": 8000.0,
        "speed/tflops_per_gpu": 200.0,
    }
    for peak_tflops, more in ((None, {}), (400.0, {"speed/mfu": 0.5})):
        numbers: dict[str, Any] = {}

        def record(
            name: str, value: Any, _: Reduction, weight: float = 1.0, numbers: dict[str, Any] = numbers
        ) -> None:
            numbers[name] = value

        Throughput(1000, 4, 1e14, peak_tflops).record(0.5, record)
        assert numbers == speeds | more


# Late partners

PHASE = 100.0  # seconds from one exchange to the next


def found(*rounds: tuple[int, float]) -> list[tuple[int, float] | None]:
    """Return what replica 0 finds after rounds with (partner, seconds of waiting)."""
    late = LatePartners(0)
    return [
        late.compare(ExchangeReport((0, partner), wait_seconds=wait, started=PHASE * index))
        for index, (partner, wait) in enumerate(rounds)
    ]


NOBODY: list[Any] = [None] * 6


@pytest.mark.parametrize(
    ("rounds", "late"),
    [
        ([(1, 1.0), (2, 3.0), (3, 50.0), (1, 1.0), (3, 52.0)], [None, None, (3, 48.0), None, (3, 50.0)]),
        # its own waits are not what it is compared with: else a slow partner of most rounds would be the rule
        ([(1, 1.0), (2, 1.0), *[(3, 50.0)] * 40], [None, None, *[(3, 49.0)] * 40]),
        # a tenth of the time between exchanges is notable
        ([(1, 2.0), (2, 2.0), (3, 11.9)], [None, None, None]),
        ([(1, 2.0), (2, 2.0), (3, 12.1)], [None, None, (3, pytest.approx(10.1))]),
        # where all are equally late, the network is slow
        ([(partner, 60.0) for partner in (1, 2, 3, 4, 1, 2)], NOBODY),
        # two other partners must be known
        ([(1, 0.0), (3, 90.0), (1, 0.0), (3, 90.0)], NOBODY[:4]),
    ],
    ids=["slow", "slow and frequent", "not notable", "notable", "slow network", "one other"],
)
def test_a_late_partner_is_named(rounds: list[tuple[int, float]], late: list[Any]) -> None:
    assert found(*rounds) == late


def test_partners_of_long_ago_are_forgotten() -> None:
    """Twenty partners with waits of their own numbers: the last 16 before the 21st are 5 to 20."""
    rounds = [(partner, float(partner)) for partner in range(1, 21)]
    assert found(*rounds, (99, 100.0))[-1] == (99, 100.0 - 12.5)


def test_a_skipped_round_and_a_larger_group_name_nobody() -> None:
    late = LatePartners(0)
    for index, group in enumerate([(0, 1), (0, 2), (0,), (0, 3, 4)]):
        report = ExchangeReport(group, wait_seconds=99.0 if len(group) > 2 else 0.0, started=PHASE * index)
        assert late.compare(report) is None


def test_a_clone_does_not_know_how_long_its_source_waited() -> None:
    """It merges the exchange that was under way when its source was saved."""
    late = LatePartners(4)
    assert late.compare(ExchangeReport((0, 2), wait_seconds=50.0, started=1.0)) is None
