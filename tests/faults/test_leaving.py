"""The command leaves like any other program, but does not tear its interpreter down."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_noloco.cli.exit_codes import LostError, StoppedError, report
from megatron_noloco.job import torchrun
from tests.kit.ranks import REPOSITORY

PROGRAM = """
import atexit, os, sys
import megatron_noloco.cli.main as entry

class Freed:
    def __del__(self):
        os.write(1, b"torn down\\n")

freed = Freed()
atexit.register(os.write, 1, b"exit function\\n")
entry.main = lambda arguments: print("a line") or int(arguments[0])
{leave}
"""


@pytest.mark.parametrize(
    ("leave", "then"), [('entry.run(["3"])', []), ('sys.exit(entry.main(["3"]))', ["torn down"])]
)
def test_leave_runs_exit_functions_without_teardown(leave: str, then: list[str]) -> None:
    program = [sys.executable, "-c", PROGRAM.format(leave=leave)]
    finished = subprocess.run(program, capture_output=True, text=True, cwd=REPOSITORY)
    assert finished.returncode == 3
    assert sorted(finished.stdout.splitlines()) == ["a line", "exit function", *then]


def test_an_exit_handler_that_closes_a_stream_costs_no_exit_code() -> None:
    program = "import sys; from megatron_noloco.job.leaving import leave; sys.stderr.close(); leave(0)"
    assert subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY).returncode == 0


def test_rank_ended_during_message_keeps_exit_code() -> None:
    command = [sys.executable, "-m", "megatron_noloco", "train", "--config", "nowhere.json"]
    waiting = subprocess.Popen(
        command, env={**os.environ, "SLURM_PROCID": "1"}, stderr=subprocess.PIPE, cwd=REPOSITORY
    )
    status = Path(f"/proc/{waiting.pid}/status")
    while not _handles_sigterm(status.read_text()):
        assert waiting.poll() is None
        time.sleep(0.05)
    waiting.terminate()
    _, told = waiting.communicate(timeout=60)
    assert (waiting.returncode, told) == (2, b"")


def _handles_sigterm(status: str) -> bool:
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux's kernel does that")
def test_a_rank_does_not_outlive_its_launcher() -> None:
    rank = (
        "import time; from megatron_noloco.job.leaving import leave_with_parent;"
        "leave_with_parent(); print('ready', flush=True); time.sleep(300)"
    )
    launcher = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {rank!r}])"
    command = [sys.executable, "-c", launcher]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.kill()
        assert process.communicate(timeout=60)[0] == "", "its output ends with the last that holds it"


@pytest.mark.parametrize(("ranks", "given", "threads"), [("2", None, "4"), ("9", None, "1"), ("2", "3", "3")])
def test_ranks_of_torchrun_divide_the_cores(
    ranks: str, given: str | None, threads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = list[str]()
    monkeypatch.setenv("OMP_NUM_THREADS", given or "")
    if given is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(torchrun, "main", lambda arguments: found.append(os.environ["OMP_NUM_THREADS"]))
    assert torchrun.run(["--nproc-per-node", ranks, "-m", "megatron_noloco", "train", "my-run.json"]) == 0
    assert found == [threads]


def test_torchrun_blames_the_first_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Than one that was killed in the same second, or in the next one."""
    failed_at = {}
    for error in (StoppedError("the cause"), LostError("lost another")):
        file = tmp_path / f"{type(error).__name__}.json"
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        monkeypatch.setattr("time.sleep", lambda seconds: None)
        monkeypatch.setattr("time.time", lambda: 1000.9)
        assert report(error) == 1
        failed_at[str(error)] = json.loads(file.read_text())["message"]["extraInfo"]["timestamp"]
    assert failed_at == {"the cause": "1000", "lost another": "1002"}
    assert capsys.readouterr().err == "the cause\nlost another\n"
