"""Replicas of a federation as processes of this machine, each with a folder of its own, for measurements."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from tools.netlab.lab import Lab
from tools.netlab.relay import address_of
from tools.written import Written

_BASE = Path(__file__).parents[1] / "configs" / "federation.json"
_PORT = 29500  # on every host of a lab


class Federation(Written):
    """As a context: no process is left behind.

    Args:
        folder: gets a folder and a log for each replica.
        settings: of the block `federation`.
        there: the hosts of the replicas; None: all on this one.
    """

    def __init__(
        self, folder: Path, base: Mapping[str, Any], settings: Mapping[str, Any], there: Lab | None = None
    ) -> None:
        self.folder = folder
        self._there = there
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        slots = settings["slots"]
        self._addresses = [f"{address_of(slot)}:{_PORT}" for slot in range(slots)]
        if there is None:
            self._addresses = [f"127.0.0.1:{port}" for port in free_ports(slots)]
        self._base = {**base, "federation": base["federation"] | settings}

    def __enter__(self) -> "Federation":
        return self

    def __exit__(self, *_: object) -> None:
        for replica in self._processes:
            self.kill(replica)

    def start(self, replica: int, *through: str) -> None:
        """Its job, in the place of the one before.

        Args:
            through: a module with its first arguments, which ends as the command line; none: the command line.
        """
        folder = self.host(replica)
        folder.mkdir(parents=True, exist_ok=True)
        here = {
            "listen": f"tcp://{self._addresses[replica]}",
            "rendezvous": "tcp://" + ",".join(self._addresses),
        }
        config = self._base | {"federation": self._base["federation"] | here}
        config["training"] = config["training"] | {"output_dir": str(folder.resolve())}
        file = (folder / "config.json").resolve()
        file.write_text(json.dumps(config))
        command = [sys.executable, "-m", *(through or ["megatron_noloco"]), "train", "--config", str(file)]
        command += ["--replica", str(replica), "--progress", "lines"]
        if self._there is not None:
            command = self._there.on(self._there.names[replica], *command)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with (self.folder / f"replica_{replica}.log").open("ab") as log:
            self._processes[replica] = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def signal(self, replica: int, number: signal.Signals) -> None:
        self._processes[replica].send_signal(number)

    def kill(self, replica: int) -> None:
        self._processes[replica].kill()
        self._processes[replica].wait()

    def wait(self, seconds: float) -> None:
        """Until all have ended; raises subprocess.TimeoutExpired."""
        deadline = time.monotonic() + seconds
        for process in self._processes.values():
            process.wait(max(0.0, deadline - time.monotonic()))

    def running(self) -> list[int]:
        return [replica for replica, process in self._processes.items() if process.poll() is None]

    def furthest_step(self) -> int:
        return self.step(self._processes)

    def exit_codes(self) -> dict[int, int | None]:
        """Of every replica's last process; None where it runs."""
        return {replica: process.poll() for replica, process in self._processes.items()}

    def host(self, replica: int) -> Path:
        """The folder of a replica, which no other sees."""
        return self.folder / f"host_{replica}"

    def folders(self, replica: int) -> Iterable[Path]:
        return self.host(replica).glob("replica_*")


def base_config(steps: int) -> dict[str, Any]:
    base: dict[str, Any] = json.loads(_BASE.read_text())
    base["training"] |= {"train_iters": steps, "log_interval": 1}
    base["scheduler"]["params"]["total_num_steps"] = steps
    base["evaluation"] = {"interval": max(1, steps // 6), "iters": 10}
    return base


def write_as_one_job(folder: Path, base: Mapping[str, Any], parallel: Mapping[str, int]) -> Path:
    """The config file, in `folder`, of a job that has all replicas of a federation and writes there."""
    config = {name: block for name, block in base.items() if name != "federation"}
    config["noloco"] = config["noloco"] | {"routing": {"interval": "off"}}
    config["parallel"] = dict(parallel)
    config["training"] = config["training"] | {"output_dir": str(folder.resolve())}
    file = folder / "config.json"
    file.write_text(json.dumps(config))
    return file


def free_ports(count: int) -> Iterator[int]:
    """Ports of the loopback interface that nobody uses now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        ports = [each.getsockname()[1] for each in sockets]
    yield from ports


def mean(losses: Iterable[float | None]) -> float | None:
    found = [loss for loss in losses if loss is not None]
    return fmean(found) if found else None
