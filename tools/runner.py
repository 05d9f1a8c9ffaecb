"""Runs steps one after the other, each in a process of its own, and keeps their outcomes; runs the trainer."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

from megatron_noloco.monitor.run_log import ReplicaLog, RunLog
from megatron_noloco.preflight.mpi_check import find_mpirun

REPOSITORY = Path(__file__).resolve().parents[1]
_GRACE_SECONDS = 5.0
_ERROR_LINES = 12


@dataclass(frozen=True)
class Step:
    """One thing to prove.

    Attributes:
        name: a name without spaces.
        what: one line for the table.
        command: arguments of the Python interpreter. The exit code says whether the step passed. The JSON object
            that ends the output has its "figure", and as "peer" that of what it is compared with; without such an
            object the last line is the figure.
        limit_seconds: time after which its processes are ended.
        gpus: number of GPUs that it needs.
    """

    name: str
    what: str
    command: tuple[str, ...]
    limit_seconds: float
    gpus: int = 1


@dataclass(frozen=True)
class Outcome:
    """The outcome of a step."""

    passed: bool
    seconds: float
    figure: str = ""
    peer: str = ""
    error: str = ""  # the last lines of its output


class Results:
    """The outcomes so far, by the names of the steps, kept in a file of `folder`."""

    def __init__(self, path: Path) -> None:
        self._path, self.folder = path, path.parent
        self.folder.mkdir(parents=True, exist_ok=True)
        saved = json.loads(path.read_text()) if path.exists() else {}
        self.found = {name: Outcome(**outcome) for name, outcome in saved.items()}

    def add(self, name: str, outcome: Outcome) -> None:
        self.found[name] = outcome
        partial = self._path.with_suffix(".partial")
        partial.write_text(
            json.dumps({name: asdict(outcome) for name, outcome in self.found.items()}, indent=1)
        )
        partial.replace(self._path)


def run_all(steps: Sequence[Step], results: Results, gpus: int, seconds: float) -> Iterator[str]:
    """Run the steps without an outcome for which there are GPUs and time; yields a line about each."""
    deadline = time.monotonic() + seconds
    for step in steps:
        if step.name in results.found or step.gpus > gpus or time.monotonic() + step.limit_seconds > deadline:
            continue
        outcome = run(step, results.folder / f"{step.name}.log")
        results.add(step.name, outcome)
        verdict = "passed" if outcome.passed else "FAILED"
        yield f"{step.name}: {verdict} in {outcome.seconds:.0f} s  {outcome.figure}  {outcome.error}".rstrip()


def table(steps: Sequence[Step], found: Mapping[str, Outcome]) -> str:
    """Return a Markdown table with a row for each step, in order, and below it the errors."""
    lines = ["| step | what | passed | seconds | figure | the peer's |", "|---|---|---|---|---|---|"]
    errors = []
    for step in steps:
        cells = ["waiting", "", "", ""]
        if outcome := found.get(step.name):
            verdict = "yes" if outcome.passed else "**no**"
            cells = [verdict, f"{outcome.seconds:.0f}", outcome.figure, outcome.peer]
            errors += ["", f"**{step.name}**", "", "```", outcome.error, "```"] if outcome.error else []
        row = [cell.replace("|", "\\|") for cell in [step.name, step.what, *cells]]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join([*lines, *errors]) + "\n"


def run(step: Step, log: Path, python: str = sys.executable) -> Outcome:
    """Run a step in this repository; see `run_command`."""
    paths = [str(REPOSITORY), os.environ.get("PYTHONPATH")]
    # Unbuffered: what a step had said counts when its time is over.
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    return run_command([python, *step.command], log, step.limit_seconds, REPOSITORY, environ)


def run_command(
    command: Sequence[str], log: Path, limit_seconds: float, folder: Path, environ: Mapping[str, str]
) -> Outcome:
    """Run a command, with its output in the log. No process that it started is left behind."""
    started = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    late = False
    try:
        out, error = process.communicate(timeout=limit_seconds)
    except subprocess.TimeoutExpired:
        late = True
        out, error = _end(process)
    except BaseException:
        _end(process)
        raise
    seconds = round(time.monotonic() - started, 1)
    log.write_text(f"{out}\n{error}")
    passed = process.returncode == 0 and not late
    figure, peer = figures(out)
    if passed:
        return Outcome(True, seconds, figure, peer)
    said = [f"ended after its {limit_seconds:g} seconds"] if late else []
    for told in (out, error):  # pytest names failures in the one, and libraries warn in the other
        said += told.strip().splitlines()[-_ERROR_LINES:]
    return Outcome(False, seconds, figure, peer, "\n".join(said))


def launched(
    config: dict[str, Any], ranks: int, environ: Mapping[str, str] = MappingProxyType({})
) -> tuple[list[ReplicaLog], str]:
    """Train by a script in launch/, in a folder that is then removed; returns the replicas' logs, and its output.

    Args:
        environ: variables to set beside those of this process.

    Raises SystemExit with the last lines of a run that failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        training = config["training"] | {"output_dir": f"{folder}/run"}
        path.write_text(json.dumps(config | {"training": training}))
        script = "mpirun.sh" if "MPIRUN" in os.environ or find_mpirun() else "torchrun.sh"
        finished = subprocess.run(
            [f"launch/{script}", str(ranks), str(path)],
            cwd=REPOSITORY,
            env={**os.environ, "PYTHON": sys.executable, **environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if finished.returncode != 0:
            raise SystemExit("\n".join(finished.stdout.splitlines()[-30:]))
        return RunLog(Path(folder) / "run").replicas, finished.stdout


def figures(out: str) -> tuple[str, str]:
    """Return the figure and its peer's from the output of a step."""
    for start in [at for at, character in enumerate(out) if character == "{"]:
        try:
            told = json.loads(out[start:])
        except ValueError:
            continue
        return str(told.get("figure", "")), str(told.get("peer", ""))
    return (out.strip().splitlines() or [""])[-1].strip("= "), ""


def _end(process: "subprocess.Popen[str]") -> tuple[str, str]:
    """Send SIGTERM, at which launchers end their ranks; then kill what is left, in any session."""
    with contextlib.suppress(psutil.NoSuchProcess):
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        process.terminate()
        for member in psutil.wait_procs(family, _GRACE_SECONDS)[1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.communicate(timeout=_GRACE_SECONDS)
    return "", ""
