"""A thread reports for a rank that is blocked inside a library, and ends it when another rank has failed."""

import os
import re
import signal
import time
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_noloco.job import activity, leaving
from megatron_noloco.job.activity import Activity
from megatron_noloco.job.watchdog import Watchdog
from tests.kit.ranks import RankFailedError, run_ranks

SECONDS = 60.0


def wait_until(path: Path, text: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not path.exists() or text not in path.read_text():
        assert time.monotonic() < deadline, path
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def _poll_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaving, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(leaving, "GRACE_SECONDS", 0.02)
    monkeypatch.setattr(activity, "now", Activity())


def test_an_exception_tells_who_was_doing_what() -> None:
    now = activity.now
    now.who = "rank 3"

    def fail() -> None:
        with now.doing("computing local step 7"):
            now.part("microbatch 2, forward")
            raise KeyError

    with pytest.raises(KeyError) as caught:
        fail()
    assert caught.value.__notes__ == ["rank 3 was computing local step 7: microbatch 2, forward"]
    assert activity.note_of(caught.value) == caught.value.__notes__[0]
    assert str(now.state) == "starting"


def blocked(rank: int, world_size: int, path: Path, patience_seconds: float, ask: bool) -> str:
    """Rank 0 waits inside gloo for rank 1, which sends when rank 0 has reported that it waits for rank 1."""
    activity.now.who = f"rank {rank}"
    token = torch.zeros(1)
    if rank == 1:
        wait_until(path, "waits\n")
        if ask:
            os.kill(int(path.read_text().split()[0]), signal.SIGUSR2)
        wait_until(path, "waiting for rank 1\n")
        dist.send(token, 0)
        return ""
    step = activity.now.doing("computing local step 7")
    watchdog = Watchdog(patience_seconds)
    with path.open("w", buffering=1) as log, redirect_stderr(log), watchdog, step:
        activity.now.part(lambda: "waiting for rank 1")
        log.write(f"{os.getpid()} waits\n")
        dist.recv(token, 1)
    return path.read_text().splitlines()[-1]


@pytest.mark.parametrize(("patience_seconds", "ask"), [(0.1, False), (0.0, True)], ids=["by itself", "asked"])
def test_a_rank_blocked_in_a_library_reports_what_it_waits_for(
    patience_seconds: float, ask: bool, tmp_path: Path
) -> None:
    line, _ = run_ranks(2, blocked, tmp_path / "log", patience_seconds, ask, timeout=SECONDS)
    assert re.fullmatch(r"rank 0 has stood still for \d+ s computing local step 7: waiting for rank 1", line)


@pytest.mark.parametrize(("goes_on", "reported_after"), [(False, ["100", "200", "400"]), (True, [])])
def test_hung_rank_reports_at_doubled_waits(
    goes_on: bool,
    reported_after: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Checks every 50 seconds of a fake clock."""
    clock = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    activity.now.part("waiting for rank 1")
    watchdog = Watchdog(100.0)
    for seconds in range(0, 500, 50):
        clock = float(seconds)
        watchdog._report_long_wait()
        if goes_on:
            activity.now.part("waiting for rank 2")
    assert re.findall(r"has stood still for (\d+) s", capsys.readouterr().err) == reported_after


def one_fails(rank: int, world_size: int, folder: Path) -> None:
    """Rank 1 announces its failure; the others wait for each other inside gloo."""
    path = folder / f"log{rank}"
    with path.open("w", buffering=1) as log, redirect_stderr(log), Watchdog(0.0):
        if rank == 1:
            assert leaving.announce_failure(7) == leaving.Failure(rank=1, exit_code=7)
            time.sleep(SECONDS)
        dist.recv(torch.zeros(1), 2 - rank)


def test_waiting_ranks_leave_with_first_exit_code(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match="died with exit code 7"):
        run_ranks(3, one_fails, tmp_path, timeout=SECONDS)
    assert [(tmp_path / f"log{rank}").read_text() for rank in range(3)] == ["", "", ""]


def announces(rank: int, world_size: int) -> leaving.Failure:
    first = leaving.announce_failure(10 + rank)
    dist.barrier()
    assert leaving.announced_failure() == leaving.wait_for_failure(SECONDS) == first
    assert first.is_own == (first.rank == rank)
    return first


def test_all_ranks_agree_which_failure_was_first() -> None:
    found = run_ranks(3, announces)
    assert found == 3 * [leaving.Failure(found[0].rank, 10 + found[0].rank)]


def loses_the_other(rank: int, world_size: int, ends: Path) -> bool:
    dist.barrier()
    if rank == 1:
        dist.destroy_process_group()  # closes its connections, as the kernel does for a process that is killed
        wait_until(ends, "lost")
        return True
    with pytest.raises(RuntimeError) as caught:
        dist.recv(torch.zeros(1), 1)
    ends.write_text("lost")
    wrapped = KeyError()
    wrapped.__cause__ = caught.value
    return leaving.lost_connection(wrapped) is caught.value


def test_a_connection_that_gloo_has_lost_is_recognised(tmp_path: Path) -> None:
    assert run_ranks(2, loses_the_other, tmp_path / "ends", timeout=SECONDS) == [True, True]
    assert leaving.lost_connection(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
    lost = ConnectionError("the connection to rank 1 was lost")
    assert leaving.lost_connection(lost) is lost
