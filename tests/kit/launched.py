"""Runs that a launch script has started, as a user starts them; none of their processes outlives its test."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.kit.ranks import REPOSITORY, free_port

PATIENCE_SECONDS = 400  # a start takes minutes where other work shares the cores


@dataclass
class Launched:
    """A run under way. `processes` are those of the launch script, one for each host."""

    processes: list["subprocess.Popen[bytes]"]
    config: str
    log: Path
    module: str

    @property
    def said(self) -> str:
        return self.log.read_text()

    def ranks(self) -> list[psutil.Process]:
        """Return the run's processes without its launchers; also those that have lost their launcher."""
        commands = ((process, process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"]))
        return [process for process, words in commands if self.config in words and self.module in words[:4]]

    def launcher(self) -> psutil.Process:
        """Return what the script has started on the first host, in a session of its own."""
        script = self.processes[0].pid
        (launcher,) = [child for child in psutil.Process(script).children() if os.getsid(child.pid) != script]
        return launcher

    def wait_until(self, condition: str | Callable[[], bool]) -> None:
        """Wait until the run has said this, or the condition holds."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (condition in self.said if isinstance(condition, str) else condition()):
            assert time.monotonic() < deadline, self.said
            time.sleep(0.02)

    def ends(self) -> None:
        """Wait until the run has ended well, on all hosts and with all ranks."""
        codes = [process.wait(PATIENCE_SECONDS) for process in self.processes]
        assert codes == [0] * len(codes), self.said
        assert self.ranks() == []


@contextmanager
def launched(
    script: str,
    ranks: int,
    config: str,
    *environs: Mapping[str, str],
    log: Path,
    on: Sequence[Callable[..., list[str]]] = (lambda *command: list(command),),
    module: str = "megatron_noloco",
) -> Iterator[Launched]:
    """Start a launch script once for each host; kill what is left of it at the end.

    Args:
        environs: what is set on all hosts, or on each one.
        on: for each host the function that makes its command of a command.
    """
    command = [str(REPOSITORY / "launch" / script), str(ranks), config, "--progress", "lines"]
    here = {**os.environ, "PYTHON": sys.executable, "PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    run = Launched([], config, log, module)
    try:
        with log.open("w") as file:
            for place, host in enumerate(on):
                environ = here | dict(environs[place % len(environs)] if environs else {})
                run.processes.append(
                    subprocess.Popen(
                        host(*command), env=environ, stdout=file, stderr=file, start_new_session=True
                    )
                )
        yield run
    finally:
        for rank in run.ranks():
            rank.kill()
        for process in run.processes:
            process.kill()
            process.wait()


def run_launch_script(
    script: str, *arguments: str, environ: Mapping[str, str] | None = None, **options: Any
) -> "subprocess.CompletedProcess[str]":
    """Run a launch script to its end; `PYTHON` is this interpreter unless `environ` says otherwise."""
    command = [str(REPOSITORY / "launch" / script), *arguments]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "UCX_"))}
    env = {**inherited, "PYTHON": sys.executable, **(environ or {})}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "timeout": 60} | options
    return subprocess.run(command, env=env, text=True, **options)


def said_by(script: str, *arguments: str, environ: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Return the exit code and stderr of a launch script."""
    finished = run_launch_script(script, *arguments, environ=environ)
    return finished.returncode, finished.stderr
