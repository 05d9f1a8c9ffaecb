"""Two jobs do not write into one folder; what a job that was killed leaves behind stops nobody."""

import errno
import fcntl
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Timer

import pytest
import torch.distributed as dist

from megatron_noloco.errors import UserError
from megatron_noloco.job.run_folder import (
    FolderLostError,
    OccupiedFolder,
    ask_to_stop,
    asks_to_leave,
    is_under_way,
    occupy,
    stop_request,
)
from tests.kit.faults import full_disk
from tests.kit.ranks import REPOSITORY, run_ranks


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
    assert is_under_way(tmp_path)


def test_a_disk_that_is_full_at_the_start_is_named(tmp_path: Path) -> None:
    with (
        full_disk(0),
        pytest.raises(UserError, match=r"/running: cannot be written: .*training\.output_dir$"),
    ):
        occupy(tmp_path)


@pytest.mark.usefixtures("another")
def test_the_name_of_the_other_job_is_one_harmless_line(tmp_path: Path) -> None:
    """Another host may have written it."""
    (tmp_path / "running").write_bytes(b"\x1b[2Jowned\nby \xff")
    assert occupy(tmp_path) == taken(tmp_path, "\\x1b[2Jowned\\nby \\ufffd")
    assert is_under_way(tmp_path)
    (tmp_path / "stop").write_bytes(b"\xff")
    assert stop_request(tmp_path)


def test_federation_job_locks_its_replica_folder(tmp_path: Path) -> None:
    (tmp_path / "replica_01").mkdir()
    assert not is_under_way(tmp_path)
    (tmp_path / "replica_01" / "running").write_text("process 1 on another-host\n")
    assert is_under_way(tmp_path)


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
    else:
        another.communicate("\n")
    assert not is_under_way(tmp_path)
    assert ((tmp_path / "running").read_text() == "") == (ends == "by itself"), "for other hosts"
    (tmp_path / "running").write_text("process 1 on another-host\n")
    assert is_under_way(tmp_path), "only that host can know"
    assert run_ranks(1, lambda rank, world_size: occupy(tmp_path)) == [""]


def test_a_disk_without_locks_refuses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    assert occupy(tmp_path) == ""


def test_a_look_at_the_folder_keeps_no_job_out(tmp_path: Path) -> None:
    """`watch` and `stop` lock the file for an instant."""
    (tmp_path / "running").touch()
    with (tmp_path / "running").open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        Timer(0.2, fcntl.flock, (file, fcntl.LOCK_UN)).start()
        assert occupy(tmp_path) == ""


@pytest.mark.parametrize("then", ["renamed", "removed", "taken by another", "a file"])
def test_a_job_notices_that_its_folder_is_another_one(then: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert occupy(folder) == ""
    place = OccupiedFolder(folder)
    place.check()
    if then == "removed":
        (folder / "running").unlink()
    else:
        folder.rename(tmp_path / "old")
    if then == "a file":
        folder.touch()
    if then == "taken by another":
        folder.mkdir()
        (folder / "running").touch()
    with pytest.raises(FolderLostError, match=f"{folder}: was renamed or removed while this job wrote there"):
        place.check()


def test_a_mark_that_cannot_be_opened_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "running").mkdir()
    with pytest.raises(
        UserError, match=r"running: cannot be written: Is a directory; give another training.out"
    ):
        occupy(tmp_path)


@pytest.mark.parametrize("leave", [False, True])
def test_a_request_says_whether_it_is_one_to_leave(tmp_path: Path, leave: bool) -> None:
    ask_to_stop(tmp_path, leave)
    assert asks_to_leave(stop_request(tmp_path)) == leave
    assert not asks_to_leave("")
