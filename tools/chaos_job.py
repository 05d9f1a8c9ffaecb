"""The replicas of `tools.chaos` as one job under mpirun, which starts it again after each kill."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from tools.processes import write_as_one_job
from tools.written import Written

if TYPE_CHECKING:
    from tools.chaos import Fault

_LAUNCH = Path(__file__).parents[1] / "launch" / "mpirun.sh"
_LOOK_SECONDS = 0.05
_RANK = "OMPI_COMM_WORLD_RANK"


class OneJob(Written):
    """One rank for each replica, on this machine. As a context: no process is left behind.

    Args:
        base: the config of a federation; what only a federation has is left out.
    """

    def __init__(self, folder: Path, replicas: int, base: dict[str, Any]) -> None:
        self._folder, self._replicas = folder, replicas
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True)
        self._config, self._log = write_as_one_job(folder, base, {"replicas": replicas}), folder / "job.log"

    def __enter__(self) -> "OneJob":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None and self._process.poll() is None:
            ranks = psutil.Process(self._process.pid).children(recursive=True)
            self._process.kill()  # before its ranks: it would start the job again
            for rank in ranks:
                with suppress(psutil.NoSuchProcess):
                    rank.kill()
            self._process.wait()

    def folders(self, replica: int) -> Iterable[Path]:
        return [self._folder / f"replica_{replica:02d}"]

    def run(self, faults: Sequence["Fault"], limit: float) -> int | None:
        """The exit code; None where it was not over in so many seconds.

        Of the faults, kills and freezes are done: where one rank ends, so do all, and nobody can join or return.
        After each kill the launch script starts the job again.
        """
        deadline = time.monotonic() + limit
        coming = [fault for fault in faults if fault.what in ("kill", "freeze")]
        process = self._start(restarts=sum(fault.what == "kill" for fault in coming))
        while process.poll() is None and time.monotonic() < deadline:
            if coming and self.step(range(self._replicas)) >= coming[0].step and self._apply(coming[0]):
                del coming[0]
            time.sleep(_LOOK_SECONDS)
        return process.poll()

    def exit_codes_before(self) -> list[int]:
        """Of the starts but the last one."""
        found = re.findall(r"^the job has ended with exit code (\d+): start", self._told(), re.MULTILINE)
        return [int(code) for code in found]

    def continued_from(self) -> list[int]:
        """The steps of the checkpoints from which the starts after the first went on."""
        found = re.findall(r"^continuing from .*: step (\d+),", self._told(), re.MULTILINE)
        return [int(step) for step in found]

    def _told(self) -> str:
        return self._log.read_text()

    def _start(self, restarts: int) -> "subprocess.Popen[bytes]":
        settings = {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "RESTARTS": str(restarts)}
        command = ["sh", str(_LAUNCH), str(self._replicas), str(self._config)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | settings)
        return self._process

    def _apply(self, fault: "Fault") -> bool:
        """False where the rank is not there: the job is being started again."""
        time.sleep(fault.seconds)
        ranks = self._ranks()
        rank = ranks.get(str(fault.replica))
        if rank is None:
            return False
        if fault.what == "kill":
            rank.kill()
            psutil.wait_procs(ranks.values())  # the next fault is for the next start
        else:
            rank.send_signal(signal.SIGSTOP)
            time.sleep(fault.lasts_seconds)
            rank.send_signal(signal.SIGCONT)
        return True

    def _ranks(self) -> dict[str, psutil.Process]:
        assert self._process is not None
        found = {}
        for process in psutil.Process(self._process.pid).children(recursive=True):
            with suppress(psutil.Error, KeyError):  # it has ended meanwhile; it is no rank
                found[process.environ()[_RANK]] = process
        return found
