"""Launch scripts that are asked to stop, or killed and called again: nothing is lost, and no rank trains on."""

import signal
from pathlib import Path

import pytest

from tests.kit.disturbed import Run, assert_same_state
from tests.kit.launched import PATIENCE_SECONDS, launched
from tests.kit.ranks import slow
from tests.kit.tiny import tiny, write_config, write_text

RANKS = 2


@pytest.mark.parametrize(
    ("script", "launcher", "victim"),
    [
        ("mpirun.sh", "", "rank"),
        slow("mpirun.sh", "", "launcher"),
        slow("torchrun.sh", "", "rank"),
        slow("torchrun.sh", "", "launcher"),
        slow("deepspeed.sh", "", "rank"),
        slow("deepspeed.sh", "openmpi", "rank"),
    ],
)
def test_a_kill_costs_steps_and_sigterm_none(script: str, launcher: str, victim: str, tmp_path: Path) -> None:
    """A kill costs the steps since the last save. SIGTERM saves. Neither leaves a process behind."""
    changes = {
        "parallel": {"replicas": RANKS},
        "training": {"train_iters": 100_000},
        "checkpoint": {"save_interval": 5},
    }
    disturbed = Run(tmp_path / "disturbed", changes)
    config, environ = disturbed.arguments()[2], {"OMP_NUM_THREADS": "1"}
    if launcher:
        (tmp_path / "hosts").write_text(f"localhost slots={RANKS}\n")
        environ |= {"LAUNCHER": launcher, "HOSTFILE": str(tmp_path / "hosts"), "NIC": "lo"}
        environ |= {"LAUNCHER_ARGS": "--oversubscribe"}
    with launched(script, RANKS, config, environ, log=tmp_path / "killed") as run:
        run.wait_until((disturbed.checkpoints / "latest").exists)
        (run.ranks()[-1] if victim == "rank" else run.launcher()).kill()
        assert run.processes[0].wait(PATIENCE_SECONDS) == 137
        run.wait_until(lambda: not run.ranks())
    with launched(script, RANKS, config, environ, log=tmp_path / "log") as run:
        run.wait_until("/100000 |")
        assert len(run.ranks()) >= RANKS
        run.processes[0].terminate()
        run.ends()
    assert sum(line.startswith("continuing from") for line in run.said.splitlines()) == 1
    name = (
        "mpirun" if launcher else script.removesuffix(".sh")
    )  # DeepSpeed starts our ranks under that of MPI
    assert f"started by {name}; exchanges over {'mpi' if name == 'mpirun' else 'torch'}" in run.said
    (stopped,) = [line for line in run.said.splitlines() if line.startswith("stopped after")]
    step = int(stopped.split()[3])
    assert (disturbed.checkpoints / "latest").read_text() == f"step_{step:08d}\n"
    undisturbed = disturbed.clean(tmp_path / "undisturbed")
    undisturbed.launch(
        RANKS, changes={"training": {"train_iters": step}, "checkpoint": {"save_interval": step}}
    )
    assert_same_state(disturbed.step_folder(step), undisturbed.step_folder(step))
    assert disturbed.exact_metrics() == undisturbed.exact_metrics()


@pytest.mark.parametrize("script", ["mpirun.sh", slow("torchrun.sh"), slow("deepspeed.sh")])
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
