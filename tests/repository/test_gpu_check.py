"""`make gpu-check` on a CPU: what waits, what is remembered, what is shown; with real processes."""

import time
from pathlib import Path

import pytest

from tests.kit.ranks import run_python
from tools import runner
from tools.gpu_check.steps import STEPS
from tools.runner import REPOSITORY, Results, Step, run, run_all


def python(name: str, code: str, limit_seconds: float = 60, gpus: int = 1) -> Step:
    return Step(name, f"what {name} proves", ("-c", code), limit_seconds, gpus)


GOOD = python("good", """print('noise'); print('{"figure": "2 tokens/s", "peer": "3"}')""")
BAD = python("bad", "print('half done'); raise SystemExit('it is wrong')")


def results(folder: Path) -> Results:
    return Results(folder / "results.json")


def test_without_a_gpu_every_step_waits(tmp_path: Path) -> None:
    words = ("-m", "tools.gpu_check", "--output", str(tmp_path))
    finished = run_python(*words, env={"CUDA_VISIBLE_DEVICES": ""})
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.startswith(f"no GPU: these {len(STEPS)} steps are waiting: about, ")


def test_a_step_that_passes_and_one_that_fails(tmp_path: Path) -> None:
    kept = results(tmp_path)
    good, bad = run_all([GOOD, BAD], kept, gpus=1, seconds=600)
    assert good.startswith("good: passed in ")
    assert bad.startswith("bad: FAILED in ")
    assert (kept.found["good"].figure, kept.found["good"].peer) == ("2 tokens/s", "3")
    assert not kept.found["bad"].passed
    assert kept.found["bad"].error == "half done\nit is wrong"
    assert (tmp_path / "bad.log").read_text().startswith("half done")


def test_a_step_that_is_too_slow_ends_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with a rank that is in a session of its own and does not hear."""
    monkeypatch.setattr(runner, "_GRACE_SECONDS", 0.5)
    child = tmp_path / "child"
    code = (
        "import subprocess, sys, time\n"
        "code = 'import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)'\n"
        "other = subprocess.Popen([sys.executable, '-c', code], start_new_session=True)\n"
        f"open({str(child)!r}, 'w').write(str(other.pid))\n"
        "print('began')\n"
        "time.sleep(600)"
    )
    outcome = run(python("slow", code, limit_seconds=5), tmp_path / "slow.log")
    assert not outcome.passed
    assert outcome.error.splitlines() == ["ended after its 5 seconds", "began"]
    while running(int(child.read_text())):  # its end is on its way; the test's own time-out is the limit
        time.sleep(0.05)


def running(pid: int) -> bool:
    """A process that has ended and waits for its parent does not run."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_every_step_names_a_module_or_a_test_that_is_there() -> None:
    for step in STEPS:
        if step.command[1] == "pytest":
            assert (REPOSITORY / step.command[-1]).exists(), step.name
        else:
            path = REPOSITORY / step.command[1].replace(".", "/")
            if path.is_dir():  # a package, whose case is the next word
                path /= step.command[2]
            assert path.with_suffix(".py").exists(), step.name
    tested = {Path(step.command[-1]).name for step in STEPS if step.command[1] == "pytest"}
    assert tested == {path.name for path in (REPOSITORY / "tests/gpu").glob("test_*.py")}
