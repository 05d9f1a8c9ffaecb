"""Two jobs do not write into one folder; what a job that was killed leaves behind stops nobody."""

import fcntl
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_noloco.job import run_folder
from megatron_noloco.job.run_folder import occupy
from tests.harness import REPOSITORY, run_ranks


@pytest.fixture
def another(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """A process that holds the folder."""
    code = (
        "from pathlib import Path; from megatron_noloco.job.run_folder import occupy;"
        f"assert occupy(Path({str(tmp_path)!r})) == '';"
        "print('holds', flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "holds\n"
        yield process
        process.kill()


def taken(folder: Path, who: str) -> str:
    return (
        f"{folder}: another job writes there ({who}); "
        "stop it first, or give this one another training.output_dir"
    )


def test_a_second_job_of_this_host_learns_who_was_first(
    tmp_path: Path, another: "subprocess.Popen[str]"
) -> None:
    assert occupy(tmp_path) == taken(tmp_path, f"process {another.pid} on {socket.gethostname()}")


def starts(rank: int, world_size: int, folder: Path) -> list[str]:
    found = [occupy(folder), occupy(folder)]
    dist.barrier()
    return found


def test_of_jobs_that_start_together_one_writes(tmp_path: Path) -> None:
    first, *others = sorted(run_ranks(3, starts, tmp_path))
    assert first == ["", ""], "a job may ask again"
    assert all(one and two for one, two in others)


@pytest.mark.parametrize("ends", ["by itself", "killed"])
def test_a_job_that_has_ended_leaves_nothing_to_mend(
    ends: str, tmp_path: Path, another: "subprocess.Popen[str]"
) -> None:
    if ends == "killed":
        another.kill()
        another.wait()
        assert json.loads((tmp_path / "running").read_text())["pid"] == another.pid
    else:
        another.communicate("\n")
        assert (tmp_path / "running").read_text() == ""
    assert run_ranks(1, lambda rank, world_size: occupy(tmp_path)) == [""]


@pytest.mark.parametrize("locks", ["free", "stale", "none"])
@pytest.mark.parametrize("lives", [True, False])
def test_a_job_of_another_host_lives_as_long_as_it_writes(
    lives: bool, locks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its lock says: its host may have crashed, or a lock may not reach this host."""
    path, looked = tmp_path / "running", []
    far = {"host": "far", "pid": 7, "kernel": "far 1", "locked": locks != "none"}

    def sleep(seconds: float) -> None:
        looked.append(seconds)
        if lives and len(looked) == 3:
            path.write_text(json.dumps(far | {"beat": 2}))

    def flock(file: int, operation: int) -> None:
        if locks != "free":
            raise BlockingIOError if locks == "stale" else OSError("no locks here")

    clock = iter(range(1000))
    monkeypatch.setattr(run_folder.time, "sleep", sleep)
    monkeypatch.setattr(run_folder.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(run_folder, "_keep_writing", lambda file, own: None)
    path.write_text(json.dumps(far | {"beat": 1}))
    assert occupy(tmp_path) == (taken(tmp_path, "process 7 on far") if lives else "")
    assert len(looked) == (3 if lives else 14)
