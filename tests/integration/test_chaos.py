"""A rank is killed during a save; the next start loses nothing but the steps since the last complete one.

The number in a test's name is the seed of the rank and the moment. For more of them: `pytest -m slow`.
"""

import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_noloco.checkpoint import catalog
from tests.harness import REPOSITORY, run_torchrun
from tests.integration.chaos import Death, Run, assert_same_state
from tests.integration.tiny import write_text

STEPS, RANKS = 20, 4
CHANGES: dict[str, Any] = {
    "parallel": {"replicas": 2, "pipeline_model_parallel_size": 2},
    "noloco": {"local_steps": 4, "routing": "microbatch"},
    "model": {"hidden_dropout": 0.1},
    "training": {"train_iters": STEPS},
    "checkpoint": {"save_interval": 5},
}
TOUCHES_OF_A_SAVE = 18  # about: files and folders that one rank opens, makes and renames
SAVE_MILLISECONDS = 40.0  # about


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("undisturbed")
    run = Run(folder / "run", CHANGES, write_text(folder, 200_000))
    run.launch(RANKS)
    return run


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(100, 120))]
)
def test_killed_during_a_save(seed: int, undisturbed: Run, tmp_path: Path) -> None:
    draw = random.Random(seed)
    death = Death(
        rank=draw.randrange(RANKS),
        touch=draw.randint(1, 3 * TOUCHES_OF_A_SAVE),
        milliseconds=draw.choice([0.0, draw.uniform(0, SAVE_MILLISECONDS)]),
    )
    run = undisturbed.clean(tmp_path)
    run.launch_to_die(RANKS, [death])
    whole = [path for path in catalog.steps(run.checkpoints) if catalog.is_complete(path)]
    (first, *_) = run.launch(RANKS)
    continued = [line for line in first.out.splitlines() if line.startswith("continuing from ")]
    assert [line.split(":")[0] for line in continued] == [f"continuing from {path}" for path in whole[:1]], (
        death
    )
    assert_same_state(run.step_folder(STEPS), undisturbed.step_folder(STEPS))
    assert run.exact_metrics() == undisturbed.exact_metrics()


# Under launchers


def start(launcher: Sequence[str], run: Run) -> "subprocess.Popen[str]":
    """Launch in a session of its own; returns when its first checkpoint folder is there."""
    command = [*launcher, *run.arguments()]
    process = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    while not catalog.steps(run.checkpoints):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    return process


def torchrun() -> list[str]:
    options = ["--standalone", "--nproc-per-node", str(RANKS), "-m", "megatron_noloco"]
    return [sys.executable, "-m", "torch.distributed.run", *options]


def mpirun() -> list[str]:
    program = Path(sys.executable).parent / "mpirun"
    if not program.exists():
        pytest.skip("no mpirun beside the Python interpreter")
    options = ["--oversubscribe", "--bind-to", "none", "-n", str(RANKS)]
    return [str(program), *options, sys.executable, "-m", "megatron_noloco"]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that starts a launch, which ends with the test."""
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    processes: list[subprocess.Popen[str]] = []

    def launch(launcher: Sequence[str], run: Run) -> "subprocess.Popen[str]":
        processes.append(start(launcher, run))
        return processes[-1]

    yield launch
    for process in processes:
        if process.poll() is None:
            for rank in psutil.Process(process.pid).children(recursive=True):
                rank.kill()
            process.kill()
        process.wait()


@pytest.mark.slow
def test_a_rank_killed_under_torchrun(undisturbed: Run, tmp_path: Path, launched: Any) -> None:
    run = undisturbed.clean(tmp_path)
    process = launched(torchrun(), run)
    ranks = psutil.Process(process.pid).children()
    random.Random(0).choice(ranks).send_signal(signal.SIGKILL)
    process.communicate(timeout=120)
    assert process.returncode == 1
    again = run_torchrun(RANKS, "megatron_noloco", run.arguments(), timeout=240)
    assert again.returncode == 0, again.stderr
    assert_same_state(run.step_folder(STEPS), undisturbed.step_folder(STEPS))
    assert run.exact_metrics() == undisturbed.exact_metrics()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "number", "code"),
    [
        (torchrun, signal.SIGTERM, 1),
        (torchrun, signal.SIGINT, 1),
        (mpirun, signal.SIGUSR1, 0),
    ],
    ids=["torchrun SIGTERM", "torchrun Ctrl-C", "mpirun SIGUSR1"],
)
def test_a_launcher_asked_to_stop(
    launcher: Any, number: signal.Signals, code: int, undisturbed: Run, tmp_path: Path, launched: Any
) -> None:
    """torchrun reports a failure although its ranks exit with 0."""
    run = undisturbed.clean(tmp_path)
    run.change({"training": {"train_iters": 100_000}, "checkpoint": {"save_interval": 200}})
    process = launched(launcher(), run)
    process.send_signal(number)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == code, out
    newest = catalog.steps(run.checkpoints)[0]
    assert catalog.is_complete(newest)
    stopped = f"stopped after iteration {catalog.step_of(newest)} ({number.name}); the same command continues"
    assert stopped in out
