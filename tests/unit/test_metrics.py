"""The rows a replica leaves behind: readable by everybody, also after a crash and from a diverged run."""

import json
import math
from pathlib import Path
from typing import Any

from megatron_noloco.training.metrics import ReplicaFiles
from megatron_noloco.training.record import DatasetLosses, Evaluation


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _rows(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=_refuse) for line in lines]


def _write_evaluations(folder: Path, start_step: int, steps: list[int], loss: float = 2.0) -> None:
    files = ReplicaFiles(folder, tensorboard=False, start_step=start_step)
    for step in steps:
        files.evaluation(step, 0, Evaluation([loss, 3.0], loss, math.nan))
    files.close()


def test_a_diverged_replica_leaves_json(tmp_path: Path) -> None:
    nan = math.nan
    files = ReplicaFiles(tmp_path, tensorboard=True, start_step=0)
    files.evaluation(5, 0, Evaluation([nan, 3.0], nan, nan, [DatasetLosses("a", [math.inf, 3.0], nan)]))
    files.close()
    (row,) = _rows(tmp_path)
    assert row["replica_losses"] == [None, 3.0]
    assert row["mean_model_loss"] is None
    assert row["datasets"] == [{"name": "a", "replica_losses": [None, 3.0], "mean_model_loss": None}]


def test_a_resumed_run_keeps_the_rows_up_to_its_start_and_continues(tmp_path: Path) -> None:
    _write_evaluations(tmp_path, 0, [10, 20, 30])
    _write_evaluations(tmp_path, 20, [30, 40], loss=1.0)
    assert [row["step"] for row in _rows(tmp_path)] == [10, 20, 30, 40]
    assert [row["replica_losses"][0] for row in _rows(tmp_path)] == [2.0, 2.0, 1.0, 1.0]


def test_rows_that_a_crash_has_damaged_are_dropped(tmp_path: Path) -> None:
    _write_evaluations(tmp_path, 0, [10])
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + "\0\0\0\n" + "7\n" + '{"kind": "evaluation"}\n' + '{"step": 20, "re')
    _write_evaluations(tmp_path, 20, [30])
    assert [row["step"] for row in _rows(tmp_path)] == [10, 30]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]
