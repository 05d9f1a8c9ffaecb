"""Rows in files, TensorBoard and Weights & Biases: readable also after a crash and from a diverged run."""

import errno
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron_noloco.monitor.evaluation import Evaluation, Losses
from megatron_noloco.monitor.writers import ReplicaFiles, WandbRun
from tests.kit.rows import ROUND, STEP


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line, parse_constant=_refuse) for line in path.read_text().splitlines()]


def _write_evaluations(folder: Path, start_step: int, steps: list[int], loss: float = 2.0) -> Path:
    files = ReplicaFiles(folder, tensorboard=False, start_step=start_step)
    for step in steps:
        files.write({"kind": "evaluation", "step": step, "validation/loss": loss})
    files.close()
    return folder / "metrics.jsonl"


def test_a_diverged_replica_leaves_json(tmp_path: Path) -> None:
    nan = math.nan
    files = ReplicaFiles(tmp_path, tensorboard=True, start_step=0)
    evaluation = Evaluation({0: nan, 1: 3.0}, nan, nan, {"a": Losses({0: math.inf, 1: 3.0}, nan)})
    files.write({"kind": "evaluation", "step": 5, **evaluation.numbers(0)})
    files.close()
    (row,) = _rows(tmp_path / "metrics.jsonl")
    assert row["validation/replica_losses"] == [None, 3.0]
    assert row["validation/mean_model_loss"] is None
    assert row["validation/replica_losses of a"] == [None, 3.0]


def test_resumed_run_keeps_rows_up_to_its_start(tmp_path: Path) -> None:
    _write_evaluations(tmp_path, 0, [10, 20, 30])
    path = _write_evaluations(tmp_path, 20, [30, 40], loss=1.0)
    assert [(row["kind"], row["step"], row.get("validation/loss")) for row in _rows(path)] == [
        ("evaluation", 10, 2.0),
        ("evaluation", 20, 2.0),
        ("start", 20, None),
        ("evaluation", 30, 1.0),
        ("evaluation", 40, 1.0),
    ]
    times = [row["unix_seconds"] for row in _rows(path)]
    assert times == sorted(times)


def test_a_run_resumed_before_its_first_row_drops_all(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _write_evaluations(tmp_path, 0, [10, 20])
    path = _write_evaluations(tmp_path, 5, [10])
    assert [(row["kind"], row["step"]) for row in _rows(path)] == [("start", 5), ("evaluation", 10)]
    assert capfd.readouterr().err == ""


def test_the_log_of_an_earlier_start_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in (1, 2, 3):
        path = _write_evaluations(tmp_path, 0, [10 * number])
    names = ("metrics.set_aside_1.jsonl", "metrics.set_aside_2.jsonl", path.name)
    assert [row["step"] for name in names for row in _rows(tmp_path / name)] == [10, 20, 30]
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"set aside: {path}, of an earlier start, is now metrics.set_aside_1.jsonl"
    assert second.endswith("metrics.set_aside_2.jsonl")


def test_run_of_another_step_keeps_no_rows(tmp_path: Path) -> None:
    _write_evaluations(tmp_path, 0, [10, 20, 30])
    files = ReplicaFiles(tmp_path, tensorboard=False, start_step=20, own=False)
    files.close()
    assert [row["step"] for row in _rows(tmp_path / "metrics.set_aside_1.jsonl")] == [10, 20, 30]
    assert [row["kind"] for row in _rows(tmp_path / "metrics.jsonl")] == ["start"]


def test_rows_that_a_crash_has_damaged_are_dropped(tmp_path: Path) -> None:
    path = _write_evaluations(tmp_path, 0, [10])
    damaged = [b"\0\0\0", b"\xff", b"7", b"[" * 100_000, b'{"kind": "evaluation"}', b'{"step": 20, "re']
    path.write_bytes(path.read_bytes() + b"\n".join(damaged))
    _write_evaluations(tmp_path, 20, [30])
    assert [row["step"] for row in _rows(path)] == [10, 20, 30], "20: the row of the start"
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


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


def test_tensorboard_has_every_number_once_under_its_name(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for start_step in (0, 10):  # a resumed run replaces what it does again
        files = ReplicaFiles(tmp_path, tensorboard=True, start_step=start_step)
        files.write(STEP | ROUND)
        files.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    expected = (STEP | ROUND).keys() - {"kind", "step", "replica", "round/partners"}
    assert set(events.Tags()["scalars"]) == expected
    (loss,) = events.Scalars("train/loss")
    assert (loss.step, loss.value) == (20, pytest.approx(2.34567))


class Wandb(ModuleType):
    """In place of the package, which need not be installed: keeps what it is given."""

    class errors:
        class Error(Exception): ...

    def __init__(self, refuses: str = "") -> None:
        super().__init__("wandb")
        self.begun: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.finished = 0
        self.refuses = refuses

    def _refuse(self, call: str) -> None:
        if self.refuses == call:
            raise self.errors.Error(f"no {call}\n(no-tty)")

    def init(self, **options: Any) -> "Wandb":
        self._refuse("init")
        self.begun.append(options)
        self.id = options["id"] or f"id{len(self.begun)}"
        return self

    def log(self, numbers: dict[str, Any], step: int) -> None:
        self._refuse("log")
        self.logged.append((step, numbers))

    def finish(self) -> None:
        self._refuse("finish")
        self.finished += 1


def test_wandb_has_single_numbers_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for start_step, own in ((0, True), (20, True), (20, False), (0, True)):
        run = WandbRun(tmp_path, start_step, own, name="replica_00", group="a")
        run.write({"kind": "step", "step": start_step + 8, "train/loss": 2.0, "round/partners": [1]})
        run.close()
    options = {"dir": str(tmp_path), "resume": "allow", "name": "replica_00", "group": "a"}
    assert wandb.begun == [options | {"id": continued} for continued in (None, "id1", None, None)]
    assert wandb.logged == [(step, {"train/loss": 2.0}) for step in (8, 28, 28, 8)]
    assert wandb.finished == 4


@pytest.mark.parametrize("call", ["init", "log", "finish"])
def test_what_wandb_refuses_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], call: str
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", Wandb(refuses=call))
    run = WandbRun(tmp_path, 0)
    run.write(STEP)
    run.write(STEP)
    run.close()
    line = f"{tmp_path}: wandb: no {call} (no-tty); training continues without it\n"
    assert capsys.readouterr().err == line
