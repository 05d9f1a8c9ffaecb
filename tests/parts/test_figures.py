"""What the log, the bar and the closing table say about rows."""

import math
import re
from dataclasses import replace
from typing import Any

import pytest

from megatron_noloco.monitor.console import Console, RunFacts, log_lines
from megatron_noloco.monitor.evaluation import Evaluation, Losses
from megatron_noloco.monitor.figures import duration, megabytes
from tests.kit.rows import ROUND, STEP

PLAIN = (
    " iteration  20/200 | consumed samples: 640 | elapsed time per iteration (ms): 123.4 | "
    "throughput per GPU (TFLOP/s/GPU): 0.001235 | learning rate: 3.000E-03 | lm loss: 2.3457 | "
    "grad norm: 0.988 | tokens per second: 5186 | peak memory (GB): 0.41 |"
)
EXCHANGE = " exchange (ms): 12.3 wait (ms): 4.5 sent (MB): 1.48 |"
SPREAD = " spread: 1.230E-03 |"


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({}, ""),
        (
            {"train/loss_scale": 65536.0, "train/skipped_steps": 2, "total/skipped_ahead": 3},
            " loss scale: 65536 | skipped iterations: 2 | iterations left out: 3 |",
        ),
        (
            {"routing/share": 0.75, "data/wait_seconds": 0.002},
            " routed: 75.0 % hop wait (ms): 10.0 | data wait (ms): 2.0 |",
        ),
        (ROUND, f" round 1 partner 3 |{EXCHANGE}{SPREAD}"),
        (
            ROUND | {"round/partners": [], "round/spread": math.nan, "round/payload_error": math.nan},
            f" round 1 skipped |{EXCHANGE}",
        ),
        (
            ROUND | {"round/fragment": 2, "round/partners": [2, 3], "round/poisoned_elements": 16},
            f" round 1 fragment 2 partners 2,3 |{EXCHANGE}{SPREAD} poisoned elements: 16 |",
        ),
        (
            ROUND | {"round/payload_error": 0.0289, "round/resent_elements": 512},
            f" round 1 partner 3 |{EXCHANGE}{SPREAD} payload error: 2.9E-02 |",
        ),
    ],
)
def test_the_log_line(more: dict[str, Any], text: str) -> None:
    assert log_lines(STEP | more, 200, FACTS) == [PLAIN + text]


def test_the_throughput_in_the_log_line() -> None:
    faster = {"speed/tflops_per_gpu": 412.345, "speed/mfu": 0.4169, "speed/tokens_per_second_of_all": 20745.6}
    (line,) = log_lines(STEP | faster, 200, FACTS)
    assert "| throughput per GPU (TFLOP/s/GPU): 412.3 |" in line
    assert "| tokens per second: 5186 (all replicas: 20746) | MFU: 41.7 % |" in line
    of_a_federation = {name: value for name, value in STEP.items() if not name.endswith("_of_all")}
    assert "| tokens per second: 5186 |" in log_lines(of_a_federation, 200, FACTS)[0]


def test_sizes_and_durations() -> None:
    sizes = [megabytes(size) for size in (0, 9_994_000, 10_000_000, 641_700_000)]
    assert sizes == ["0.00", "9.99", "10.0", "641.7"]
    assert [duration(seconds) for seconds in (0.4, 599, 600, 3600)] == ["0s", "599s", "10min", "1h 0min"]


def test_the_line_of_a_checkpoint() -> None:
    row = {"kind": "checkpoint", "step": 8, "time/save_seconds": 0.16541}
    (line,) = log_lines(row, 200, replace(FACTS, unigram_entropy=3.5))
    assert line == " checkpoint at iteration 8 | pause (ms): 165.4 |"


@pytest.mark.parametrize(
    ("mean_model", "spread", "middle"),
    [
        (3.0, 0.25, "mean model: 3.0000 | spread: 2.500E-01 | "),
        (3.0, math.nan, "mean model: 3.0000 | "),
        (math.nan, math.nan, ""),
    ],
)
def test_the_lines_of_an_evaluation(mean_model: float, spread: float, middle: str) -> None:
    datasets = {"a": Losses({0: 2.0, 1: 4.0}, math.nan), "b": Losses({0: 1.0, 1: 2.0}, math.nan)}
    evaluation = Evaluation({0: 1.5, 1: 3.0}, mean_model, spread, datasets)
    end = "unigram: 3.5000 | microbatches: 4 of 210 |"
    row = {"kind": "evaluation", "step": 8, **evaluation.numbers(0)}
    assert log_lines(row, 200, replace(FACTS, unigram_entropy=3.5)) == [
        f" validation at iteration 8 | replicas: 1.5000 3.0000 | {middle}{end}",
        "   a | replicas: 2.0000 4.0000 |",
        "   b | replicas: 1.0000 2.0000 |",
    ]


FACTS = RunFacts(
    math.nan, "4 of 210", "an fp32 all-reduce", 0.0, "runs/a", "the same command", ("report runs/a",)
)


def test_the_bar_tells_the_time_left_where_a_row_takes_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console("bar", 100, 0, FACTS)
    minutes = iter((0, 5, 10))
    monkeypatch.setattr(console._progress, "get_time", lambda: 60.0 * next(minutes))
    monkeypatch.setattr(console._live, "start", lambda: None)
    for step in (10, 20, 30):
        console.write(STEP | (ROUND if step == 20 else {}) | {"step": step, "time/exchange_seconds": 0.0})
    (task,) = console._progress.tasks
    assert task.time_remaining == 35 * 60
    assert f"| {console._step_text} |" in PLAIN, "below it is the log line"
    assert f" {console._round_text} |" == f" round 1 partner 3 |{EXCHANGE}{SPREAD}", "of the last round"


def test_the_last_line_of_a_run_whose_end_is_not_saved_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console("lines", 300, 0, FACTS)
    console.write(STEP | {"step": 200, "time/exchange_seconds": 0.0})
    console.summary(200, "SIGTERM", "2 of 4 ranks")
    first, last = capsys.readouterr().out.splitlines()[-2:]
    assert first == "stopped after iteration 200 (SIGTERM)"
    line = "not saved: the checkpoint of iteration 200 failed on 2 of 4 ranks, and stderr says why"
    assert last.startswith(line)


def test_a_line_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    line = "join at tcp://[2001:db8:a:b::1]:29500 | /data/a:x:b | [bold]"
    Console("lines", 1, 0, FACTS).say(line)
    assert capsys.readouterr().out == f"{line}\n"


def test_the_share_of_exchanges_is_that_of_this_process(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a resumed run, too, whose totals are those of the whole run."""
    console = Console("lines", 300, 100, replace(FACTS, all_reduce_bytes=1.0))
    totals = {"total/routed_bytes": 0, "total/pause_seconds": 1e6}
    for step, seconds, exchange in ((200, 2.0, 0.5), (300, 1.0, 0.1)):
        times = {"speed/seconds_per_step": seconds, "time/exchange_seconds": exchange}
        console.write(STEP | totals | times | {"step": step})
    console.summary(300, None, evaluation=Evaluation({0: 1.5}, math.nan, math.nan))
    out = capsys.readouterr().out
    assert re.search(
        "validation loss, replica 0 .* 1.5000 nats per token.*\n.* validated on +│ 4 of 210 microbatches", out
    )
    assert re.search("share of training time in exchanges +│ 20.0 %", out)


def test_an_all_reduce_is_compared_with_all_that_was_sent(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With exchanges and routed activations together: 5 rounds with a partner, each of 12 MB, over 10 + 20 MB."""
    monkeypatch.setenv("COLUMNS", "120")
    console = Console("lines", 10, 0, replace(FACTS, all_reduce="a bf16 all-reduce", all_reduce_bytes=12e6))
    totals = {"total/rounds": 5, "total/sent_bytes": 10_000_000, "total/routed_bytes": 20_000_000}
    console.write(STEP | totals | {"step": 10, "time/exchange_seconds": 0.0})
    console.summary(10, None)
    out = capsys.readouterr().out
    assert re.search("a bf16 all-reduce of every step would send .* 60.0 MB .2.0 times as much", out)
