"""Every launch script, asked to stop: the run is saved, and nobody trains on."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.harness import REPOSITORY, free_port
from tests.integration.tiny import tiny, write_config, write_text

PATIENCE_SECONDS = 400  # a start takes minutes where other work shares the cores


def ranks_of(config: str, module: str = "megatron_noloco") -> list[psutil.Process]:
    """Processes of a run, launchers left out; also those that have lost the launcher that began them."""
    commands = ((process, process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"]))
    return [process for process, words in commands if config in words and module in words[:4]]


def wait_until(told: Path, text: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while text not in told.read_text():
        assert time.monotonic() < deadline, told.read_text()
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("script", "launcher"),
    [
        ("mpirun.sh", ""),
        pytest.param("torchrun.sh", "", marks=pytest.mark.slow),
        pytest.param("deepspeed.sh", "", marks=pytest.mark.slow),
        pytest.param("deepspeed.sh", "openmpi", marks=pytest.mark.slow),
    ],
)
def test_sigterm_saves_and_leaves_nobody(script: str, launcher: str, tmp_path: Path) -> None:
    changes = {
        "parallel": {"replicas": 2},
        "data": {"text": write_text(tmp_path)},
        "training": {"train_iters": 100_000, "output_dir": str(tmp_path / "run")},
    }
    config, told = write_config(tmp_path, tiny(changes)), tmp_path / "told"
    environ = {**os.environ, "PYTHON": sys.executable, "PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    if launcher:
        (tmp_path / "hosts").write_text("localhost slots=2\n")
        environ |= {"LAUNCHER": launcher, "HOSTFILE": str(tmp_path / "hosts"), "NIC": "lo"}
        environ |= {"LAUNCHER_ARGS": "--oversubscribe"}
    with told.open("w") as log:
        launched = subprocess.Popen(
            [str(REPOSITORY / "launch" / script), "2", config, "--progress", "lines"],
            env=environ,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_until(told, "iteration      5/100000")
        assert len(ranks_of(config)) >= 2
        launched.terminate()
        assert launched.wait(PATIENCE_SECONDS) == 0, told.read_text()
        assert ranks_of(config) == []
    finally:
        for rank in ranks_of(config):
            rank.kill()
        launched.kill()
        launched.wait()
    (stopped,) = [line for line in told.read_text().splitlines() if line.startswith("stopped after")]
    step = int(stopped.split()[3])
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text() == f"step_{step:08d}\n"
