"""The network lab: what is measured in it, what it leaves behind, and what it says where it cannot be had."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.kit.ranks import REPOSITORY, network_lab, run_launcher
from tests.kit.tiny import tiny, write_text
from tests.netlab.network import Link
from tests.netlab.relay import address_of

SERVE = (
    "import socket; server = socket.create_server(('', 5000)); print('up', flush=True);"
    "server.accept()[0].send(b'hello')"
)
CALL = (
    f"import socket; connection = socket.create_connection(('{address_of(2)}', 5000));"
    "print(connection.recv(5), socket.gethostname())"
)
ANSWERS = """
import errno, socket, sys
asks = socket.socket()
asks.settimeout(float(sys.argv[2]))
sys.exit(asks.connect_ex((sys.argv[1], 5000)) != errno.ECONNREFUSED)
"""
COMMAND = [sys.executable, "-m", "tests.netlab"]


@pytest.fixture
def permitted() -> None:
    with network_lab([Link()]):
        pass


@pytest.mark.slow
def test_rounds_are_measured_over_mpi_and_gloo(permitted: None) -> None:
    ways = ["round", "exchange of new partners", "MPI_Allreduce, ring", "gloo all_reduce"]
    arguments = ["--hosts", "2", "--rate", "1Gbit", "--delay", "1ms", "--bytes", "100kB"]
    command = [*COMMAND, "rounds", *arguments, "--repeats", "3", "--pause", "0.1", "--ways", ";".join(ways)]
    finished = run_launcher(command, timeout=300, env=None)
    assert finished.returncode == 0, finished.stderr
    rows = json.loads(finished.stdout)["rows"]
    assert [(row["hosts"], row["way"]) for row in rows] == [(2, way) for way in ways]
    assert all(row["slowest_seconds"] >= row["mean_seconds"] >= 1e-3 for row in rows), "none beats the delay"


def test_a_module_runs_on_all_hosts(permitted: None) -> None:
    arguments = ["--hosts", "2", "--rate", "1Gbit", "--delay", "1ms"]
    module = ["tools.bench", "overlap", "--megabytes", "0.1", "--repeats", "1", "--microbatches", "2"]
    finished = run_launcher([*COMMAND, "run", *arguments, "--module", *module], timeout=300, env=None)
    assert finished.returncode == 0, finished.stderr
    found = json.loads(finished.stdout)
    assert (found["ranks"], found["transport"]) == (2, "mpi")
    assert found["exchange_seconds"] >= 1e-3


@pytest.mark.slow
def test_trainings_in_the_lab_are_timed(permitted: None, tmp_path: Path) -> None:
    study = {
        "base": tiny(
            {
                "data": {"text": write_text(tmp_path)},
                "training": {"train_iters": 6, "log_interval": 1},
                "evaluation": {"interval": 2, "iters": 1},
            }
        ),
        "target": 5.4,
        "runs": {"pair": ["parallel.replicas=2"], "alone": ["parallel.replicas=1", "noloco.enabled=false"]},
    }
    file, output = tmp_path / "study.json", tmp_path / "runs"
    file.write_text(json.dumps(study))
    command = [sys.executable, "-m", "tools.time_to_loss", str(file), "--rate", "1Gbit", "--delay", "1ms"]
    for _ in range(2):  # the second time nothing is trained
        finished = run_launcher([*command, "--output", str(output)], timeout=300, env=None)
        assert finished.returncode == 0, finished.stderr
        found = json.loads(finished.stdout[finished.stdout.index("{") :])
        assert {name: run["steps"] for name, run in found["runs"].items()} == {"pair": 6, "alone": 6}
        assert all(run["seconds_per_step"] > 0 for run in found["runs"].values())
    assert (output / "loss.png").stat().st_size > 0


def test_lab_hosts_connect_and_leave_no_process() -> None:
    said = []
    with network_lab([Link(delay=1e-3)] * 3) as there:
        with subprocess.Popen(
            there.on("lab2", sys.executable, "-c", SERVE), stdout=subprocess.PIPE, text=True
        ) as server:
            assert server.stdout is not None
            assert server.stdout.readline() == "up\n"
            said.append(subprocess.check_output(there.on("lab0", sys.executable, "-c", CALL), text=True))
        left = subprocess.Popen(there.on("lab1", "sleep", "1000"))
        assert there.sent_bytes("lab0") > 0
    assert said == ["b'hello' lab0\n"]
    assert left.wait(timeout=60) < 0, "killed"


def test_cut_host_is_unreachable_until_healed() -> None:
    with network_lab([Link(delay=1e-3)] * 2) as there:

        def lab1_answers(seconds: float) -> bool:
            """Nobody listens there: an answer is that the connection is refused."""
            command = there.on("lab0", sys.executable, "-c", ANSWERS, address_of(1), str(seconds))
            return subprocess.run(command, timeout=120).returncode == 0

        assert lab1_answers(60)
        there.cut("lab1")
        assert not lab1_answers(0.5)
        there.heal("lab1")
        assert lab1_answers(60)


LAB = """
import signal
import subprocess
import time
import psutil
from tests.netlab.lab import lab
from tests.netlab.network import Link
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
with lab([Link()] * 2) as there:
    left = subprocess.Popen(there.on("lab1", "sleep", "1000"), start_new_session=True)
    while psutil.Process(left.pid).name() != "sleep":  # it is not there yet
        time.sleep(0.01)
    print(left.pid, flush=True)
    left.wait()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda s: s.name)
def test_lab_leaves_no_process_after_signal(number: signal.Signals, permitted: None) -> None:
    """As Ctrl-C sends it, and `timeout`."""
    command = [sys.executable, "-c", LAB]
    with subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        assert process.stdout is not None
        left = psutil.Process(int(process.stdout.readline()))
        os.killpg(process.pid, number)
        process.wait(timeout=60)
    psutil.wait_procs([left], timeout=60)
    assert not left.is_running()
