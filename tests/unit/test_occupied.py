"""Two jobs do not write into one folder; what a job that was killed leaves behind stops nobody."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from megatron_noloco.job import occupied
from megatron_noloco.job.occupied import occupy


@pytest.fixture
def another(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """A process that holds the folder."""
    code = (
        "from pathlib import Path; from megatron_noloco.job.occupied import occupy;"
        f"assert occupy(Path({str(tmp_path)!r})) == '';"
        "print('holds', flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "holds\n"
        yield process
        process.kill()


def test_a_second_job_is_told_who_was_first(tmp_path: Path, another: "subprocess.Popen[str]") -> None:
    assert occupy(tmp_path) == (
        f"{tmp_path}: another job writes there (process {another.pid} on {socket.gethostname()}); "
        "stop it first, or give this one another training.output_dir"
    )


def test_a_job_that_has_ended_leaves_nothing(tmp_path: Path, another: "subprocess.Popen[str]") -> None:
    another.communicate("\n")
    assert list(tmp_path.iterdir()) == []


def test_one_that_was_killed_stops_nobody(tmp_path: Path, another: "subprocess.Popen[str]") -> None:
    another.kill()  # it is not waited for: a zombie
    while psutil.Process(another.pid).status() != psutil.STATUS_ZOMBIE:
        pass
    assert occupy(tmp_path) == ""
    assert json.loads((tmp_path / "running").read_text())["pid"] != another.pid


@pytest.mark.parametrize("lives", [True, False])
def test_one_of_another_host_lives_as_long_as_it_writes(
    lives: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, looked = tmp_path / "running", []

    def sleep(seconds: float) -> None:
        looked.append(seconds)
        if lives and len(looked) == 3:
            file.write_text(json.dumps({"host": "far", "pid": 7, "beat": 2}))

    now = iter(range(1000))
    monkeypatch.setattr(occupied.time, "sleep", sleep)
    monkeypatch.setattr(occupied.time, "monotonic", lambda: next(now))
    file.write_text(json.dumps({"host": "far", "pid": 7, "beat": 1}))
    assert ("process 7 on far" in occupy(tmp_path)) == lives
    assert len(looked) == (3 if lives else 14)
