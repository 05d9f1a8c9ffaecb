"""A rank fails, or stands still: one says why, the others no more than that, under every launcher."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron_noloco.checkpoint import catalog
from megatron_noloco.cli.exit_codes import StoppedError
from megatron_noloco.cli.main import main
from megatron_noloco.job import watchdog
from tests.kit.disturbed import Outcome, Run, command
from tests.kit.faulty_run import plant
from tests.kit.federation import Federation, begin_alone
from tests.kit.launched import PATIENCE_SECONDS, launched
from tests.kit.ranks import REPOSITORY, by_hand, free_port, run_launcher, run_ranks
from tests.kit.tiny import at_steps, tiny, write_config, write_text

WAITING = "computing local step 3: waiting for the activations of microbatch 0 from rank 0"
FAULTY = "tests.kit.faulty_run"
MPIRUN = Path(sys.executable).parent / "mpirun"
LAUNCHERS = ("mpirun.sh", "torchrun.sh", "deepspeed.sh")


@pytest.mark.parametrize("replicas", [1, 2])
def test_run_of_skipped_steps_ends_and_keeps_checkpoint(replicas: int, tmp_path: Path) -> None:
    """A step at an absurd rate leaves weights with which no gradient is finite. Each step is to be saved."""
    run = Run(tmp_path, {"parallel": {"replicas": replicas}, "checkpoint": {"save_interval": 1}})
    run.change({"noloco": {"local_steps": 4}, "gradient_clipping": 0.0, "scheduler": None})
    run.launch(replicas, changes={"training": {"train_iters": 4}})
    outcomes = run.launch(replicas, changes={"optimizer": {"params": {"lr": 1e18}}})
    assert [outcome.code for outcome in outcomes] == [1] * replicas, outcomes
    (line,) = "".join(outcome.err for outcome in outcomes).splitlines()
    assert "the last 10 local steps were skipped" in line
    assert [catalog.step_of(folder) for folder in catalog.steps(run.checkpoints)] == [5, 4]


def renamed_at(rank: int, world_size: int, step: int, arguments: list[str]) -> Outcome:
    """Rename the folder of the run in a local step; its name is then another run's."""

    def rename(done: int) -> None:
        if done == step:
            folder = Path(arguments[2]).parent / "run"
            folder.rename(folder.with_name("old"))
            folder.mkdir()
            (folder / "running").touch()

    at_steps(rename)
    return command(rank, world_size, arguments)


@pytest.mark.parametrize(("step", "asynchronous"), [(4, False), (5, False), (5, True)])
def test_renamed_run_writes_into_no_other_folder(step: int, asynchronous: bool, tmp_path: Path) -> None:
    """It saves after each third step."""
    changes = {"checkpoint": {"save_interval": 3, "async_save": asynchronous}}
    run = Run(tmp_path, {"training": {"output_dir": str(tmp_path / "run")}, **changes})
    (outcome,) = run_ranks(1, renamed_at, step, run.arguments())
    assert outcome.code == 1
    assert outcome.err.startswith(f"{tmp_path}/run: was renamed or removed while this job wrote there")
    assert len(outcome.err.splitlines()) == 1
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["running"]
    assert catalog.latest(tmp_path / "old" / "checkpoints") == ("step_00000003", "")


def config_of_two_stages(folder: Path, replicas: int, **training: object) -> str:
    changes = {
        "parallel": {"replicas": replicas, "pipeline_model_parallel_size": 2},
        "model": {"num_layers": 2},
        "data": {"text": write_text(folder)},
        "training": {"train_iters": 8, "output_dir": str(folder / "run"), **training},
    }
    return write_config(folder, tiny(changes))


def environ_with(fault: str, folder: Path) -> dict[str, str]:
    """Of a launch script whose Python starts `FAULTY` in the place of the command line."""
    python = folder / "python"
    python.write_text(f"""#!/bin/sh
for word; do
    shift
    [ "$word" != megatron_noloco ] || word={FAULTY}
    set -- "$@" "$word"
done
exec {sys.executable} "$@"
""")
    python.chmod(0o755)
    environ = {"PYTHON": str(python), "PORT": str(free_port()), "FAULT": fault, "DS_ACCELERATOR": "cpu"}
    return environ | ({"MPIRUN": str(MPIRUN)} if MPIRUN.exists() else {})


def launch_with(fault: str, script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [
        str(REPOSITORY / "launch" / script),
        "4",
        config_of_two_stages(folder, 2),
        "--progress",
        "lines",
    ]
    return run_launcher(command, PATIENCE_SECONDS, environ_with(fault, folder))


def assert_joined(finished: subprocess.CompletedProcess[str], script: str) -> None:
    """The ranks have found each other, and the transport, by what their launcher says."""
    name = script.removesuffix(".sh")
    line = f"started by {name}; exchanges over {'mpi' if name == 'mpirun' else 'torch'}"
    assert line in " ".join(finished.stdout.split()), finished.stdout


def of_our_ranks(told: str) -> list[str]:
    return [line for line in told.splitlines() if line.startswith("rank ") and " on " in line]


@pytest.mark.parametrize("script", by_hand(LAUNCHERS, ["torchrun.sh", "deepspeed.sh"]))
def test_the_rank_that_fails_says_why_and_nobody_else(script: str, tmp_path: Path) -> None:
    finished = launch_with("raise 2 5", script, tmp_path)
    assert finished.returncode == 1, finished.stderr
    assert_joined(finished, script)
    assert finished.stderr.count("Traceback (most recent call last)") == 1, finished.stderr
    assert "ZeroDivisionError: a mistake in the model" in finished.stderr
    (line,) = of_our_ranks(finished.stderr)
    assert line.startswith("rank 2 on ")
    assert "(replica 1, stage 0, dp 0, tp 0) was computing local step 5: microbatch 0, forward" in line


@pytest.mark.parametrize("script", by_hand(LAUNCHERS, ["mpirun.sh", "deepspeed.sh"]))
def test_a_rank_that_is_killed_is_missed_by_one_other(script: str, tmp_path: Path) -> None:
    """Or by none, where the launcher ends them before they can say so."""
    finished = launch_with("SIGKILL 2 5", script, tmp_path)
    assert finished.returncode == 128 + signal.SIGKILL, finished.stderr
    assert_joined(finished, script)
    assert "Traceback" not in finished.stderr
    said = of_our_ranks(finished.stderr)
    assert len(said) <= 1, finished.stderr
    for line in said:
        assert "the connection was lost: another process of the job was killed" in line
    if script == "torchrun.sh":
        assert "was ended by SIGKILL" in finished.stderr


def test_how_long_a_rank_stands_still_before_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def show(patience_seconds: float) -> None:
        raise StoppedError(f"patience {patience_seconds}")

    monkeypatch.setattr(watchdog, "Watchdog", show)
    training = {"output_dir": str(tmp_path), "watchdog_seconds": 7.0}
    config = write_config(tmp_path, tiny({"data": {"text": write_text(tmp_path)}, "training": training}))
    assert main(["train", "--config", config]) == 1
    assert capsys.readouterr().err == "patience 7.0\n"


def stops_in_local_step_3() -> None:
    begin_alone()
    plant("SIGSTOP", 0, 3)


def test_hung_rank_is_named_by_waiting_ranks(tmp_path: Path) -> None:
    """It is stopped in its third local step, until the other has said so; then the job goes on to its end.

    It is rank 0, which has the key-value store of the job: nobody else may wait for an answer of that.
    """
    changes = {
        "parallel": {"pipeline_model_parallel_size": 2},
        "data": {"text": write_text(tmp_path)},
        "training": {"train_iters": 8, "watchdog_seconds": 1.0},
    }
    with Federation(tmp_path, changes) as federation:
        federation.start(0, ranks=2, disturb=stops_in_local_step_3)
        federation.until_log(0, f"{WAITING} (replica 0, stage 0)", rank=1)
        federation.signal(0, signal.SIGCONT)
        federation.wait()
        assert [row["step"] for row in federation.rows(0)] == list(range(1, 9))


@pytest.mark.slow
def test_ranks_say_what_they_wait_for_when_asked(tmp_path: Path) -> None:
    """By a signal for the launcher. One of them is stopped, as above."""
    config = config_of_two_stages(tmp_path, 1, watchdog_seconds=0.0)
    environ = environ_with("SIGSTOP 0 3", tmp_path)
    with launched("mpirun.sh", 2, config, environ, log=tmp_path / "log", module=FAULTY) as run:
        run.wait_until("iteration 2/8")
        while WAITING not in run.said:  # they may be asked before they wait
            run.launcher().send_signal(signal.SIGUSR2)
            time.sleep(1.0)
        (stopped,) = [rank for rank in run.ranks() if rank.status() == psutil.STATUS_STOPPED]
        stopped.send_signal(signal.SIGCONT)
        run.ends()
