"""The processes of a comparison: replicas, and torchft's coordinator."""

import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_noloco.federation.keys import Keys
from tests.netlab.lab import NIC, REPOSITORY, Lab
from tests.netlab.relay import address_of
from tools.peers.replica import Work
from tools.processes import free_ports

VERSION = "0.2.0"  # of torchft
LIGHTHOUSE = -1  # torchft's coordinator, among the replicas
_PORT = 29600  # on every host of a lab
_SECONDS = 300.0  # for any one thing to happen


class Environment:
    """A Python with torchft, in an environment of its own that shares this one's torch; it is made once."""

    def __init__(self, folder: Path) -> None:
        self.python, self.lighthouse = folder / "bin" / "python", folder / "bin" / "torchft_lighthouse"
        if not self.lighthouse.exists():
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
            ours = sysconfig.get_paths()["purelib"]
            theirs = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
            (theirs / "shared.pth").write_text(f"{ours}\n{REPOSITORY}\n")
            pip = [str(self.python), "-m", "pip", "install", "-q", f"torchft=={VERSION}"]
            subprocess.run(pip, check=True)


class Replicas:
    """The processes of one comparison, each with a log. A context that leaves none behind.

    Args:
        way: one of `replica.WAYS`.
        there: the hosts of the replicas; None: all run on this one.
        quorum: the fewest replicas of a round under torchft; None: all.
    """

    def __init__(
        self,
        folder: Path,
        way: str,
        replicas: int,
        work: Work,
        there: Lab | None = None,
        quorum: int | None = None,
    ) -> None:
        folder.mkdir(parents=True)
        self.folder, self.way, self.replicas, self.work = folder.resolve(), way, replicas, work
        self._there, self._quorum = there, quorum or replicas
        Keys.make(folder / "key")
        self._environment = Environment(self.folder.parents[1] / "environment") if way == "torchft" else None
        hosts = [address_of(replica) for replica in range(replicas)] if there else ["127.0.0.1"] * replicas
        ports = [_PORT] * replicas if there else list(free_ports(replicas))
        self._addresses = [f"{host}:{port}" for host, port in zip(hosts, ports, strict=True)]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "Replicas":
        for replica in range(0 if self._environment is None else LIGHTHOUSE, self.replicas):
            self.start(replica)
        return self

    def __exit__(self, *_: object) -> None:
        for process in list(self._processes):
            self.kill(process)

    def start(self, replica: int) -> None:
        """Start a replica, or the lighthouse."""
        python = self._environment.python if self._environment else sys.executable
        command = [
            *[str(python), "-m", "tools.peers.replica", self.way, "--replica", str(replica)],
            *["--addresses", *self._addresses, "--output", str(self.folder)],
            *["--work", json.dumps(asdict(self.work))],
        ]
        if replica == LIGHTHOUSE:
            assert self._environment is not None
            bind = f"0.0.0.0:{self._addresses[0].rpartition(':')[2]}"
            quorum = str(self._quorum)
            command = [str(self._environment.lighthouse), "--min_replicas", quorum, "--bind", bind]
        environ = os.environ | {"OMP_NUM_THREADS": "1"}
        if self._there:
            host = self._there.names[max(0, replica)]
            environ, command = environ | {"GLOO_SOCKET_IFNAME": NIC}, self._there.on(host, *command)
        with (self.folder / f"{replica}.log").open("ab") as log:
            self._processes[replica] = subprocess.Popen(
                command, cwd=REPOSITORY, env=environ, stdout=log, stderr=log, start_new_session=True
            )

    def kill(self, replica: int) -> None:
        process = self._processes.pop(replica)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def running(self, replica: int) -> bool:
        """Return whether the process has not ended."""
        return self._processes[replica].poll() is None

    def events(self, replica: int, after: float = 0.0, event: str = "round") -> list[dict[str, Any]]:
        """Return the events of a replica with a time after `after`, in seconds since 1970."""
        file = self.folder / f"replica_{replica}.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        rows = [json.loads(line) for line in lines if line.endswith("}")]
        return [row for row in rows if row["event"] == event and row["time"] > after]

    def counted(self, replica: int, after: float = 0.0) -> list[dict[str, Any]]:
        """Return the rounds that counted."""
        return [row for row in self.events(replica, after) if row["counts"]]

    def wait(self) -> None:
        """Wait for all replicas to end. Raises RuntimeError when one fails."""
        for replica in range(self.replicas):
            if self._processes[replica].wait(timeout=_SECONDS):
                log = (self.folder / f"{replica}.log").read_text()
                raise RuntimeError(f"{self.way}, replica {replica}:\n{log[-2000:]}")


def until(true: Callable[[], Any], seconds: float = _SECONDS) -> bool:
    """Wait until a condition holds; returns whether it does."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
