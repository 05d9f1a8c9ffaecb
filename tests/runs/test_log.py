"""What a whole run writes about itself: speed, time, memory, checkpoints; and the same to Weights & Biases."""

import json
import math
import os
import shlex
import sys
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from megatron_noloco.cli.main import main
from tests.kit.disturbed import command
from tests.kit.ranks import call, run_ranks
from tests.kit.tiny import (
    already_joined,
    build_run,
    metrics,
    run_whole,
    tiny,
    write_config,
    write_text,
)

NEXT = ("report", "generate", "export")
# In place of the package: a run keeps what it is given, and writes it down when it is finished.
WANDB = """
import json, pathlib

class errors:
    class Error(Exception): ...

class Run:
    id = "a"
    def __init__(self, options):
        self.file, self.kept = pathlib.Path(options["dir"]) / "wandb.json", [options]
    def log(self, numbers, step):
        self.kept.append([step, numbers])
    def finish(self):
        self.file.write_text(json.dumps(self.kept))

def init(**options):
    return Run(options)
"""


def run_with(rank: int, world_size: int, config: str, packages: str) -> None:
    sys.path.insert(0, packages)
    run_whole(rank, world_size, config)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run of two replicas of two stages, 6 local steps, a row for every 2."""
    folder = tmp_path_factory.mktemp("log")
    (folder / "wandb.py").write_text(WANDB)
    changes = {
        "parallel": {"replicas": 2, "pipeline_model_parallel_size": 2},
        "data": {"text": write_text(folder)},
        "training": {"log_interval": 2, "output_dir": str(folder / "run"), "peak_tflops": 4.0},
        "evaluation": {"interval": 3, "iters": 2},
        "checkpoint": {"save_interval": 3},
        "wandb": {"enabled": True, "team": "us"},
    }
    run_ranks(4, run_with, write_config(folder, tiny(changes)), str(folder))
    return folder / "run"


def test_every_row_has_speed_time_and_memory(folder: Path) -> None:
    for row in [row for replica in metrics(folder) for row in replica]:
        assert 0 < row["speed/tflops_per_gpu"] == pytest.approx(4 * row["speed/mfu"])
        assert row["speed/tokens_per_second_of_all"] == pytest.approx(2 * row["speed/tokens_per_second"])
        phases = [row[f"time/{phase}_seconds"] for phase in ("forward_backward", "optimizer", "exchange")]
        assert min(phases) > 0  # local_steps is 2: a round in every row
        assert sum(phases) < row["speed/seconds_per_step"]
        assert row["memory/peak_bytes"] > 2**20


def test_evaluations_and_checkpoints_have_rows_of_their_own(folder: Path) -> None:
    for kind, seconds in (("evaluation", "time/evaluation_seconds"), ("checkpoint", "time/save_seconds")):
        for rows in metrics(folder, kind):
            assert [row["step"] for row in rows] == [3, 6]
            assert all(row[seconds] > 0 for row in rows)


def test_what_the_run_is_can_be_read_beside_its_numbers(folder: Path) -> None:
    facts = json.loads((folder / "run.json").read_text())
    assert (facts["steps"], facts["replicas"]) == (6, 2)
    assert facts["synchronous_bytes_per_step"] == 4 * facts["parameters"], (
        "a pair's ring: 2 * 1/2 vectors of fp32"
    )
    assert facts["config"]["noloco"]["local_steps"] == 2


def test_every_replica_has_a_run_of_wandb(folder: Path) -> None:
    for replica in range(2):
        path = folder / f"replica_{replica:02d}"
        options, *logged = json.loads((path / "wandb.json").read_text())
        name, group, team = options["name"], options["group"], options["entity"]
        assert (name, group, team) == (path.name, "run", "us")
        assert options["config"]["training"]["train_iters"] == 6
        rows: list[dict[str, Any]] = [
            json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()
        ]
        assert [step for step, _ in logged] == [row["step"] for row in rows]
        assert [numbers.get("train/loss") for _, numbers in logged] == [row.get("train/loss") for row in rows]


def without_console(rank: int, world_size: int, config: str) -> tuple[int, str]:
    """Exit code and stderr of a run whose log lies on a full disk."""
    already_joined()
    with open("/dev/full", "w") as log, redirect_stdout(log), redirect_stderr(StringIO()) as said:
        return main(["train", config]), said.getvalue()


def test_a_run_outlives_its_console(tmp_path: Path) -> None:
    raw = tiny({"data": {"text": write_text(tmp_path)}, "training": {"output_dir": str(tmp_path / "run")}})
    ((code, said),) = run_ranks(1, without_console, write_config(tmp_path, raw))
    assert (
        said == "stdout cannot be written (No space left on device); training continues without its console\n"
    )
    assert code == 0
    assert [row["step"] for row in metrics(tmp_path / "run")[0]] == [1, 2, 3, 4, 5, 6]


def test_the_commands_that_a_run_ends_with_work(tmp_path: Path) -> None:
    folder = tmp_path / "of mine"
    raw = tiny({"data": {"text": write_text(tmp_path)}, "training": {"output_dir": str(folder)}})
    (trained,) = run_ranks(1, command, ["train", "--config", write_config(tmp_path, raw)])
    _, _, commands = trained.out.partition("\nNext:\n")
    words = [shlex.split(line)[1:] for line in commands.splitlines()]
    assert [line[:3] for line in words] == [["-m", "megatron_noloco", name] for name in NEXT]
    for _, _, *arguments in words:
        code, _, err = call(*arguments, meanwhile=partial(os.chdir, tmp_path))
        assert code == 0, err
    assert (folder / "report.html").exists()
    assert (tmp_path / "trained-model" / "model.safetensors").exists()


def diverges(rank: int, world_size: int, config: str) -> tuple[bool, list[int], str]:
    """Whether the run was of use, which replicas diverged, and what it wrote to stderr."""
    already_joined()
    run = build_run(config)
    run.evaluator._losses = lambda: [(math.nan, 1.0)]  # type: ignore[method-assign]
    with redirect_stderr(StringIO()) as written:
        of_use = run.train()
    assert run.monitor.evaluated is not None
    return of_use, run.monitor.evaluated.diverged, written.getvalue()


def test_run_with_nonfinite_validation_loss_fails(tmp_path: Path) -> None:
    changes = {
        "parallel": {"replicas": 1, "pipeline_model_parallel_size": 1},
        "training": {"train_iters": 2, "output_dir": str(tmp_path / "run")},
        "evaluation": {"iters": 1},
    }
    config = write_config(tmp_path, tiny({**changes, "data": {"text": write_text(tmp_path)}}))
    ((of_use, diverged, written),) = run_ranks(1, diverges, config)
    assert (of_use, diverged) == (False, [0])
    assert "the validation loss of replica 0 is not finite" in written
