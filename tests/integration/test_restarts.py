"""RESTARTS of the launch scripts: a rank is killed, or the launcher, and the run ends as an undisturbed one."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.harness import REPOSITORY, free_port
from tests.integration.chaos import Run, assert_same_state
from tests.integration.test_stopped_launchers import PATIENCE_SECONDS, ranks_of
from tests.integration.tiny import write_text

STEPS, RANKS = 60, 2


@pytest.mark.parametrize(
    ("script", "victim"),
    [
        ("mpirun.sh", "rank"),
        pytest.param("mpirun.sh", "launcher", marks=pytest.mark.slow),
        pytest.param("torchrun.sh", "rank", marks=pytest.mark.slow),
        pytest.param("torchrun.sh", "launcher", marks=pytest.mark.slow),
        pytest.param("deepspeed.sh", "rank", marks=pytest.mark.slow),
    ],
)
def test_a_kill_costs_the_steps_since_the_last_save(script: str, victim: str, tmp_path: Path) -> None:
    text = write_text(tmp_path, 200_000)
    changes = {
        "parallel": {"replicas": RANKS},
        "training": {"train_iters": STEPS},
        "checkpoint": {"save_interval": 5},
    }
    undisturbed = Run(tmp_path / "undisturbed", changes, text)
    undisturbed.launch(RANKS)
    run = undisturbed.clean(tmp_path / "disturbed")
    run.folder.mkdir()
    _, _, config, *options = run.arguments()
    log = tmp_path / "told"
    environ = {
        **os.environ, "PYTHON": sys.executable, "PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1", "RESTARTS": "1", "RESTART_SECONDS": "1",
    }  # fmt: skip
    command = [str(REPOSITORY / "launch" / script), str(RANKS), config, *options]
    with log.open("w") as told:
        process = subprocess.Popen(command, env=environ, stdout=told, stderr=told, start_new_session=True)
    try:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (run.checkpoints / "latest").exists():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        (launcher,) = psutil.Process(process.pid).children()
        before = ranks_of(config)
        (before[-1] if victim == "rank" else launcher).kill()
        assert process.wait(PATIENCE_SECONDS) == 0, log.read_text()
        assert ranks_of(config) == []
    finally:
        for rank in ranks_of(config):
            rank.kill()
        process.kill()
        process.wait()
    told_lines = log.read_text().splitlines()
    assert "the job has ended with exit code 137: start 2 of 2 in 1 s" in told_lines
    assert sum(line.startswith("continuing from") for line in told_lines) == 1
    assert_same_state(run.step_folder(STEPS), undisturbed.step_folder(STEPS))
    assert run.exact_metrics() == undisturbed.exact_metrics()
