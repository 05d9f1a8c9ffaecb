"""Launch scripts that are asked to stop, or killed and called again: nothing is lost, and no rank trains on."""

import signal
from pathlib import Path

import pytest

from tests.integration.chaos import Run, assert_same_state
from tests.integration.launched import PATIENCE_SECONDS, launched
from tests.integration.tiny import tiny, write_config, write_text

STEPS, RANKS = 60, 2


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
        "parallel": {"replicas": RANKS},
        "data": {"text": write_text(tmp_path)},
        "training": {"train_iters": 100_000, "output_dir": str(tmp_path / "run")},
    }
    environ = {}
    if launcher:
        (tmp_path / "hosts").write_text(f"localhost slots={RANKS}\n")
        environ |= {"LAUNCHER": launcher, "HOSTFILE": str(tmp_path / "hosts"), "NIC": "lo"}
        environ |= {"LAUNCHER_ARGS": "--oversubscribe"}
    config = write_config(tmp_path, tiny(changes))
    with launched(script, RANKS, config, environ, log=tmp_path / "log") as run:
        run.wait_until("iteration      5/100000")
        assert len(run.ranks()) >= RANKS
        run.processes[0].terminate()
        run.ends()
    if launcher:  # DeepSpeed starts our ranks under mpirun
        assert "started by mpirun; exchanges over mpi" in run.said
    (stopped,) = [line for line in run.said.splitlines() if line.startswith("stopped after")]
    step = int(stopped.split()[3])
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text() == f"step_{step:08d}\n"


@pytest.mark.parametrize(
    "script",
    [
        "mpirun.sh",
        *(pytest.param(f"{name}.sh", marks=pytest.mark.slow) for name in ("torchrun", "deepspeed")),
    ],
)
def test_ctrl_c_at_the_start_is_one_line(script: str, tmp_path: Path) -> None:
    """While the ranks import torch: nothing of them is there that could save."""
    changes = {
        "parallel": {"replicas": RANKS},
        "data": {"text": write_text(tmp_path)},
        "training": {"output_dir": str(tmp_path / "run")},
    }
    config = write_config(tmp_path, tiny(changes))
    with launched(script, RANKS, config, {"DS_ACCELERATOR": "cpu"}, log=tmp_path / "log") as run:
        run.wait_until(lambda: len(run.ranks()) >= RANKS)
        run.processes[0].send_signal(signal.SIGINT)
        assert run.processes[0].wait(PATIENCE_SECONDS) == 130
        run.wait_until(lambda: not run.ranks())
    *others, line = run.said.splitlines()
    assert line == "ended before the training began; the same command starts it again"
    assert all("[WARNING]" in other for other in others), "only DeepSpeed's launcher says more"


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
    changes = {
        "parallel": {"replicas": RANKS},
        "training": {"train_iters": STEPS},
        "checkpoint": {"save_interval": 5},
    }
    undisturbed = Run(tmp_path / "undisturbed", changes, write_text(tmp_path, 200_000))
    undisturbed.launch(RANKS)
    clean = undisturbed.clean(tmp_path / "disturbed")
    clean.folder.mkdir()
    config = clean.arguments()[2]
    environ = {"OMP_NUM_THREADS": "1"}
    with launched(script, RANKS, config, environ, log=tmp_path / "killed") as run:
        run.wait_until((clean.checkpoints / "latest").exists)
        (run.ranks()[-1] if victim == "rank" else run.launcher()).kill()
        assert run.processes[0].wait(PATIENCE_SECONDS) == 137
        run.wait_until(lambda: not run.ranks())
    with launched(script, RANKS, config, environ, log=tmp_path / "log") as run:
        run.ends()
    assert sum(line.startswith("continuing from") for line in run.said.splitlines()) == 1
    assert_same_state(clean.step_folder(STEPS), undisturbed.step_folder(STEPS))
    assert clean.exact_metrics() == undisturbed.exact_metrics()
