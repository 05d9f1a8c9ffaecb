"""What the log, the bar and the closing table say about rows."""

import math
import re
from dataclasses import replace
from typing import Any

import pytest

from megatron_noloco.monitor.console import Console, RunFacts, log_lines
from megatron_noloco.monitor.evaluation import Evaluation, Losses
from megatron_noloco.monitor.figures import duration, megabytes
from tests.kit.golden import check
from tests.kit.rows import ROUND, STEP

PLAIN = (
    " iteration  20/200 | consumed samples: 640 | elapsed time per iteration (ms): 123.4 | "
    "throughput per GPU (TFLOP/s/GPU): 0.001235 | learning rate: 3.000E-03 | lm loss: 2.3457 | "
    "grad norm: 0.988 | tokens per second: 5186 | peak memory (GB): 0.41 |"
)
EXCHANGE = " exchange (ms): 12.3 wait (ms): 4.5 sent (MB): 1.48 |"
SPREAD = " spread: 1.230E-03 |"


def test_sizes_and_durations() -> None:
    sizes = [megabytes(size) for size in (0, 9_994_000, 10_000_000, 641_700_000)]
    assert sizes == ["0.00", "9.99", "10.0", "641.7"]
    assert [duration(seconds) for seconds in (0.4, 599, 600, 3600)] == ["0s", "599s", "10min", "1h 0min"]


FACTS = RunFacts(
    math.nan, "4 of 210", "an fp32 all-reduce", 0.0, "runs/a", "the same command", ("report runs/a",)
)
# What rows have more than STEP, then than STEP and ROUND
STEPS: list[dict[str, Any]] = [
    {},
    {"train/loss_scale": 65536.0, "train/skipped_steps": 2, "total/skipped_ahead": 3},
    {"routing/share": 0.75, "data/wait_seconds": 0.002},
    {"speed/tflops_per_gpu": 412.345, "speed/mfu": 0.4169, "speed/tokens_per_second_of_all": 20745.6},
]
ROUNDS: list[dict[str, Any]] = [
    {},
    {"round/partners": [], "round/spread": math.nan, "round/payload_error": math.nan},
    {"round/fragment": 2, "round/partners": [2, 3], "round/poisoned_elements": 16},
    {"round/payload_error": 0.0289, "round/resent_elements": 512},
]


def test_the_lines_of_a_log() -> None:
    """In tests/golden/log_lines.txt."""
    rows: dict[str, dict[str, Any]] = {f"step {more}": STEP | more for more in STEPS}
    rows |= {f"step with a round {more}": STEP | ROUND | more for more in ROUNDS}
    alone = {name: value for name, value in STEP.items() if not name.endswith("_of_all")}
    rows["step of a federation"] = alone
    rows["checkpoint"] = {"kind": "checkpoint", "step": 8, "time/save_seconds": 0.16541}
    datasets = {"a": Losses({0: 2.0, 1: 4.0}, math.nan), "b": Losses({0: 1.0, 1: 2.0}, math.nan)}
    for mean_model, spread in ((3.0, 0.25), (3.0, math.nan), (math.nan, math.nan)):
        numbers = Evaluation({0: 1.5, 1: 3.0}, mean_model, spread, datasets).numbers(0)
        row = {"kind": "evaluation", "step": 8, **numbers}
        rows[f"evaluation, mean model {mean_model}, spread {spread}"] = row
    facts = replace(FACTS, unigram_entropy=3.5)
    check("log_lines", ((name, "\n".join(log_lines(row, 200, facts))) for name, row in rows.items()))


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
