"""How recorded numbers become rows; and rows that stay readable, also after a crash and from a diverged run."""

import errno
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_noloco.monitor.console import Console, RunFacts
from megatron_noloco.monitor.figures import checkpoint_line, log_line, validation_lines
from megatron_noloco.monitor.metrics import (
    LAST,
    LAST_MAX,
    LAST_SUM,
    MEAN,
    PER_STEP,
    RMS,
    SLOWEST,
    SUM,
    TOTAL,
    Metrics,
    Reduction,
)
from megatron_noloco.monitor.monitor import DatasetLosses, Evaluation
from megatron_noloco.monitor.writers import ReplicaFiles, WandbRun, chart_layout
from tests.harness import run_ranks


class Rows(list[dict[str, Any]]):
    """A writer that keeps what it is given."""

    def write(self, row: Mapping[str, Any]) -> None:
        self.append(dict(row))

    def close(self) -> None: ...


def begin(counters: Mapping[str, float] | None = None) -> tuple[Metrics, Rows]:
    rows = Rows()
    assert dist.group.WORLD is not None
    return Metrics(0, dist.group.WORLD, [rows], counters), rows


# Reductions: three ranks, an interval of two local steps

# What rank r records in step s.
VALUES = [[1.0, 10.0], [2.0, 20.0], [6.0, 60.0]]
REDUCED = {
    "LAST": (LAST, 60.0),
    "LAST_MAX": (LAST_MAX, 60.0),
    "LAST_SUM": (LAST_SUM, 90.0),
    "MEAN": (MEAN, 99 / 6),
    "SUM": (SUM, 99.0),
    "PER_STEP": (PER_STEP, 99 / 6),
    "SLOWEST": (SLOWEST, 33.0),
    "TOTAL": (TOTAL, 99.0),
    "RMS": (RMS, math.sqrt((10**2 + 20**2 + 60**2) / 3)),
}


def reduce_all(rank: int, world_size: int) -> dict[str, Any]:
    metrics, rows = begin()
    for value in VALUES[rank]:
        for name, (reduction, _) in REDUCED.items():
            metrics.record(name, value, reduction)
    metrics.write_steps(2, 2)
    return rows[0]


def test_every_reduction_over_steps_and_ranks() -> None:
    rows = run_ranks(3, reduce_all)
    assert rows[0] == rows[1] == rows[2]
    assert rows[0].pop("kind") == "step"
    assert (rows[0].pop("step"), rows[0].pop("replica")) == (2, 0)
    assert rows[0] == {name: pytest.approx(expected) for name, (_, expected) in REDUCED.items()}


def reduce_unevenly(rank: int, world_size: int) -> dict[str, Any]:
    """Ranks record different names, and a different number of times."""
    metrics, rows = begin()
    if rank == 1:
        metrics.record("losses", 1.0, MEAN)
    if rank == 2:
        for value in (5.0, 6.0, 7.0):
            metrics.record("losses", value, MEAN)
    metrics.record("spread", [math.nan, 3.0, 4.0][rank], RMS, [0, 1, 3][rank])
    metrics.record("skipped", math.nan, RMS, 0)
    metrics.record("partners", [rank], LAST)
    metrics.write_steps(1, 1)
    return rows[0]


def test_weights_and_ranks_that_record_nothing() -> None:
    for row in run_ranks(3, reduce_unevenly):
        assert row["losses"] == 19 / 4
        assert row["spread"] == math.sqrt((9 + 3 * 16) / 4)
        assert math.isnan(row["skipped"])
        assert row["partners"] == [2]


def intervals(rank: int, world_size: int) -> Rows:
    metrics, rows = begin()
    for step in (1, 2, 3, 4):
        metrics.record("every step", step, SUM)
        if step == 2:
            metrics.record("once", step, LAST)
        if step % 2 == 0:
            metrics.write_steps(step, 2)
    return rows


def test_a_row_is_about_its_own_interval() -> None:
    (rows,) = run_ranks(1, intervals)
    assert [row["every step"] for row in rows] == [3, 7]
    assert ["once" in row for row in rows] == [True, False]


def count_over_a_resume(rank: int, world_size: int) -> list[Any]:
    """Saved between two rows, and continued from there; the other counters are kept, too."""
    metrics, before = begin({"something else": 7.0})
    for step in (1, 2, 3):
        metrics.record("bytes", 10**rank, TOTAL)
        if step == 2:
            metrics.write_steps(step, 2)
    metrics.count("validation_loss", 1.5)
    metrics.count("something else", None)
    saved = json.loads(json.dumps(metrics.counters))
    resumed, after = begin(saved)
    resumed.record("bytes", 0, TOTAL)
    resumed.write_steps(4, 1)
    return [before[0]["bytes"], saved, after[0]["bytes"]]


def test_a_total_survives_a_resume() -> None:
    for rank, (before, saved, after) in enumerate(run_ranks(2, count_over_a_resume)):
        assert (before, after) == (22, 33)
        assert saved == {"bytes": 3 * 10**rank, "validation_loss": 1.5}


def record_tensors(rank: int, world_size: int) -> list[Any]:
    """Reading a tensor's value is what waits for a device."""
    reads: list[Tensor] = []
    for name in ("item", "__float__", "__int__", "__bool__", "tolist", "__format__"):
        original = getattr(Tensor, name)
        setattr(
            Tensor, name, lambda self, *args, original=original: reads.append(self) or original(self, *args)
        )
    metrics, rows = begin()
    for value in (1.0, 2.0, 6.0):
        for name, reduction in (("mean", MEAN), ("last", LAST), ("total", TOTAL), ("slowest", SLOWEST)):
            metrics.record(name, torch.tensor(value), reduction)
    while_recording = len(reads)
    metrics.write_steps(3, 3)
    return [while_recording, len(reads) > 0, rows[0], metrics.counters]


def test_tensors_are_not_read_before_a_row_is_written() -> None:
    ((while_recording, afterwards, row, counters),) = run_ranks(1, record_tensors)
    assert while_recording == 0
    assert afterwards
    assert [row[name] for name in ("mean", "last", "total", "slowest")] == [3.0, 6.0, 9.0, 3.0]
    assert counters == {"total": 9.0}


def record_differently(rank: int, world_size: int) -> str:
    metrics, _ = begin()
    metrics.record("loss", 1.0, MEAN)
    metrics.record("loss", 1.0, Reduction(MEAN.steps, MEAN.ranks))  # the same
    with pytest.raises(ValueError) as caught:
        metrics.record("loss", 1.0, SUM)
    return str(caught.value)


def test_a_name_has_one_reduction() -> None:
    (message,) = run_ranks(1, record_differently)
    assert message.startswith("metric 'loss' has two reductions: ")


# How they read

STEP = {
    "kind": "step",
    "step": 20,
    "replica": 0,
    "train/consumed_samples": 640,
    "speed/seconds_per_step": 0.1234,
    "speed/tokens_per_second": 5186.4,
    "speed/tokens_per_second_of_all": 5186.4,
    "speed/tflops_per_gpu": 0.00123456,
    "memory/peak_bytes": 412_000_000,
    "train/learning_rate": 0.003,
    "train/loss": 2.34567,
    "train/grad_norm": 0.98765,
    "train/loss_scale": 1.0,
    "train/skipped_steps": 0,
    "routing/share": 0.0,
    "routing/wait_seconds": 0.01,
    "data/wait_seconds": 0.001,
    "total/sent_bytes": 2_500_000,
}
ROUND = {
    "round/index": 1,
    "round/partners": [3],
    "round/exchange_seconds": 0.0123,
    "round/wait_seconds": 0.0045,
    "round/sent_bytes": 1_480_000,
    "round/spread": 0.00123,
    "round/poisoned_elements": 0,
    "round/payload_error": 0.0,
    "round/resent_elements": 0,
}
PLAIN = (
    " iteration  20/200 | consumed samples: 640 | elapsed time per iteration (ms): 123.4 | "
    "throughput per GPU (TFLOP/s/GPU): 0.001235 | tokens per second: 5186 | peak memory (GB): 0.41 | "
    "learning rate: 3.000E-03 | lm loss: 2.3457 | grad norm: 0.988 |"
)
EXCHANGE = " exchange (ms): 12.3 wait (ms): 4.5 sent (MB): 1.48 |"


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({}, ""),
        ({"train/loss_scale": 65536.0}, " loss scale: 65536 |"),
        ({"train/skipped_steps": 1}, " skipped iterations: 1 |"),
        (
            {"train/loss_scale": 65536.0, "train/skipped_steps": 2},
            " loss scale: 65536 | skipped iterations: 2 |",
        ),
        (
            {"routing/share": 0.75, "data/wait_seconds": 0.002},
            " routed: 75.0 % hop wait (ms): 10.0 | data wait (ms): 2.0 |",
        ),
        (ROUND, f" round 1 partner 3 |{EXCHANGE} spread: 1.230E-03 |"),
        (
            ROUND | {"late/partner": 2, "late/seconds": 0.0321},
            f" round 1 partner 3 |{EXCHANGE} late partner: 2 by (ms): 32.1 | spread: 1.230E-03 |",
        ),
        (ROUND | {"round/partners": [], "round/spread": math.nan}, f" round 1 skipped |{EXCHANGE}"),
        (ROUND | {"round/fragment": 2}, f" round 1 fragment 2 partner 3 |{EXCHANGE} spread: 1.230E-03 |"),
        (
            ROUND | {"round/partners": [2, 3], "round/poisoned_elements": 16},
            f" round 1 partners 2,3 |{EXCHANGE} spread: 1.230E-03 | poisoned elements: 16 |",
        ),
        (
            ROUND | {"round/payload_error": 0.0289, "round/resent_elements": 512},
            f" round 1 partner 3 |{EXCHANGE} spread: 1.230E-03 | payload error: 2.9E-02 |",
        ),
    ],
)
def test_the_log_line(more: dict[str, Any], text: str) -> None:
    assert log_line(STEP | more, 200) == PLAIN + text


def test_the_throughput_in_the_log_line() -> None:
    faster = {"speed/tflops_per_gpu": 412.345, "speed/mfu": 0.4169, "speed/tokens_per_second_of_all": 20745.6}
    assert (
        "| throughput per GPU (TFLOP/s/GPU): 412.3 | MFU: 41.7 % | tokens per second: 5186 (all replicas: 20746) |"
        in log_line(STEP | faster, 200)
    )


def test_the_bar_tells_the_time_left_where_a_row_takes_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console("bar", 100, 0, RunFacts(math.nan, 0.0, "runs/a", "the same command", "tensorboard"))
    minutes = iter((0, 5, 10))
    monkeypatch.setattr(console._progress, "get_time", lambda: 60.0 * next(minutes))
    monkeypatch.setattr(console._live, "start", lambda: None)
    for step in (10, 20, 30):
        console.write(STEP | {"step": step, "time/exchange_seconds": 0.0})
    (task,) = console._progress.tasks
    assert task.time_remaining == 35 * 60


def test_the_share_of_exchanges_is_that_of_this_process(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a resumed run, too, whose totals are those of the whole run."""
    console = Console("lines", 300, 100, RunFacts(math.nan, 0.0, "runs/a", "the same command", "tensorboard"))
    totals = {"total/routed_bytes": 0, "total/pause_seconds": 1e6}
    for step, seconds, exchange in ((200, 2.0, 0.5), (300, 1.0, 0.1)):
        console.write(
            STEP
            | totals
            | {"step": step, "speed/seconds_per_step": seconds, "time/exchange_seconds": exchange}
        )
    console.summary(300, None)
    assert "share of training time in exchanges │ 20.0 %" in capsys.readouterr().out


def test_the_line_of_a_checkpoint() -> None:
    row = {"kind": "checkpoint", "step": 8, "time/save_seconds": 0.16541}
    assert checkpoint_line(row) == " checkpoint at iteration 8 | pause (ms): 165.4 |"


def test_the_lines_of_an_evaluation() -> None:
    nan = math.nan
    datasets = [DatasetLosses("a", [2.0, 4.0], nan), DatasetLosses("b", [1.0, 2.0], nan)]
    for spread, mean_model, middle in (
        (0.25, 3.0, "mean model: 3.0000 | spread: 2.500E-01 | "),
        (nan, 3.0, "mean model: 3.0000 | "),
        (nan, nan, ""),
    ):
        evaluation = Evaluation([1.5, 3.0], mean_model, spread, datasets)
        assert validation_lines({"step": 8, **evaluation.numbers(0)}, 3.5) == [
            f" validation at iteration 8 | replicas: 1.5000 3.0000 | {middle}unigram: 3.5000 |",
            "   a | replicas: 2.0000 4.0000 |",
            "   b | replicas: 1.0000 2.0000 |",
        ]


# Files


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _rows(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=_refuse) for line in lines]


def _write_evaluations(folder: Path, start_step: int, steps: list[int], loss: float = 2.0) -> None:
    files = ReplicaFiles(folder, tensorboard=False, start_step=start_step)
    for step in steps:
        files.write({"kind": "evaluation", "step": step, "validation/loss": loss})
    files.close()


def test_a_diverged_replica_leaves_json(tmp_path: Path) -> None:
    nan = math.nan
    files = ReplicaFiles(tmp_path, tensorboard=True, start_step=0)
    evaluation = Evaluation([nan, 3.0], nan, nan, [DatasetLosses("a", [math.inf, 3.0], nan)])
    files.write({"kind": "evaluation", "step": 5, **evaluation.numbers(0)})
    files.close()
    (row,) = _rows(tmp_path)
    assert row["validation/replica_losses"] == [None, 3.0]
    assert row["validation/mean_model_loss"] is None
    assert row["validation/replica_losses of a"] == [None, 3.0]


def test_a_resumed_run_keeps_the_rows_up_to_its_start_and_continues(tmp_path: Path) -> None:
    _write_evaluations(tmp_path, 0, [10, 20, 30])
    _write_evaluations(tmp_path, 20, [30, 40], loss=1.0)
    assert [row["step"] for row in _rows(tmp_path)] == [10, 20, 30, 40]
    assert [row["validation/loss"] for row in _rows(tmp_path)] == [2.0, 2.0, 1.0, 1.0]


def test_the_log_of_an_earlier_start_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in (1, 2, 3):
        _write_evaluations(tmp_path, 0, [10 * number])
    assert [row["step"] for row in _rows(tmp_path)] == [30]
    assert [json.loads((tmp_path / f"metrics.set_aside_{n}.jsonl").read_text())["step"] for n in (1, 2)] == [
        10,
        20,
    ]
    path = tmp_path / "metrics.jsonl"
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"set aside: {path}, of an earlier start, is now metrics.set_aside_1.jsonl"
    assert second.endswith("metrics.set_aside_2.jsonl")


def test_rows_that_a_crash_has_damaged_are_dropped(tmp_path: Path) -> None:
    _write_evaluations(tmp_path, 0, [10])
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + "\0\0\0\n" + "7\n" + '{"kind": "evaluation"}\n' + '{"step": 20, "re')
    _write_evaluations(tmp_path, 20, [30])
    assert [row["step"] for row in _rows(tmp_path)] == [10, 30]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_tensorboard_has_every_number_under_its_name(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    files = ReplicaFiles(tmp_path, tensorboard=True, start_step=0)
    files.write(STEP | ROUND)
    files.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    expected = (STEP | ROUND).keys() - {"kind", "step", "replica", "round/partners"}
    assert set(events.Tags()["scalars"]) == expected
    (loss,) = events.Scalars("train/loss")
    assert (loss.step, loss.value) == (20, pytest.approx(2.34567))


def test_tensorboards_charts_have_all_replicas(tmp_path: Path) -> None:
    """As its plugin hands them to the browser; one of the two replicas was resumed."""
    from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
    from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
    from tensorboard.context import RequestContext
    from tensorboard.plugins.base_plugin import TBContext
    from tensorboard.plugins.custom_scalar.custom_scalars_plugin import CustomScalarsPlugin
    from tensorboard.plugins.scalar.scalars_plugin import ScalarsPlugin

    row = {"kind": "evaluation", "step": 20, "validation/loss": 2.0, "validation/loss of a": 1.0}
    for replica, start in (("replica_00", 0), ("replica_01", 0), ("replica_01", 10)):
        files = ReplicaFiles(tmp_path / replica, tensorboard=True, start_step=start)
        files.write(row)
        files.close()
    runs = EventMultiplexer().AddRunsFromDirectory(str(tmp_path)).Reload()
    context = TBContext(
        data_provider=MultiplexerDataProvider(runs, str(tmp_path)), plugin_name_to_instance={}
    )
    context.plugin_name_to_instance["scalars"] = ScalarsPlugin(context)
    plugin, request = CustomScalarsPlugin(context), RequestContext()

    shown = json.loads(plugin.layout_impl(request, ""))["category"]
    charts = {chart["title"]: chart["multiline"]["tag"] for section in shown for chart in section["chart"]}
    assert len(charts) == sum(len(section["chart"]) for section in shown), "none is there twice"
    assert [section["title"] for section in shown] == list(chart_layout())
    (own,) = charts["validation loss"]
    for replica in ("replica_00", "replica_01"):
        curves = plugin.scalars_impl(request, replica, own, "")["tag_to_events"]
        assert {tag: [(step, value) for _, step, value in points] for tag, points in curves.items()} == {
            "validation/loss": [(20, 2.0)]
        }


# Weights & Biases, with a stand-in for the package, which need not be installed


class Wandb(ModuleType):
    """What the writer uses of it; keeps what it is given."""

    class errors:
        class Error(Exception): ...

    def __init__(self, refuses: str = "") -> None:
        super().__init__("wandb")
        self.begun: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.finished = False
        self.refuses = refuses

    def init(self, **options: Any) -> "Wandb":
        if self.refuses == "init":
            raise self.errors.Error("api_key not configured\n(no-tty)")
        self.begun.append(options)
        self.id = options["id"] or f"id{len(self.begun)}"
        return self

    def log(self, numbers: dict[str, Any], step: int) -> None:
        if self.refuses == "log":
            raise self.errors.Error("too late")
        self.logged.append((step, numbers))

    def finish(self) -> None:
        if self.refuses == "finish":
            raise self.errors.Error("connection lost")
        self.finished = True


def stand_in(monkeypatch: pytest.MonkeyPatch, refuses: str = "") -> Wandb:
    wandb = Wandb(refuses)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    return wandb


def test_wandb_has_the_single_numbers_of_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = stand_in(monkeypatch)
    run = WandbRun(tmp_path, 0, name="replica_00", group="a")
    run.write({"kind": "step", "step": 8, "replica": 0, "train/loss": 2.0, "round/partners": [1]})
    run.close()
    (options,) = wandb.begun
    assert options == {
        "dir": str(tmp_path),
        "id": None,
        "resume": "allow",
        "name": "replica_00",
        "group": "a",
    }
    assert wandb.logged == [(8, {"train/loss": 2.0})]
    assert wandb.finished


def test_a_resumed_run_continues_its_run_of_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = stand_in(monkeypatch)
    for start_step in (0, 20, 0):
        WandbRun(tmp_path, start_step).close()
    assert [options["id"] for options in wandb.begun] == [None, "id1", None]


@pytest.mark.parametrize(
    ("refuses", "reason"),
    [
        ("init", "api_key not configured (no-tty)"),
        ("log", "too late"),
        ("finish", "connection lost"),
    ],
)
def test_what_wandb_refuses_does_not_end_the_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    refuses: str,
    reason: str,
) -> None:
    stand_in(monkeypatch, refuses)
    run = WandbRun(tmp_path, 0)
    run.write(STEP)
    run.write(STEP)
    run.close()
    assert capsys.readouterr().err == f"{tmp_path}: wandb: {reason}; training continues without it\n"


class FullDisk:
    def write(self, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    close = write


def test_a_full_disk_does_not_end_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ReplicaFiles(tmp_path, tensorboard=False, start_step=0)
    files._jsonl.close()
    files._jsonl = FullDisk()  # type: ignore[assignment]
    files.write(STEP)
    files.write(STEP)
    assert capsys.readouterr().err == (
        f"{tmp_path}: No space left on device; training continues without its log\n"
    )
