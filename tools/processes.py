"""Federations whose jobs are processes of this machine, and what a process holds."""

import contextlib
import ctypes
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil

from megatron_noloco.federation.keys import Keys
from megatron_noloco.monitor.numbers import Row
from megatron_noloco.monitor.run_log import ReplicaLog

_BASE = Path(__file__).parents[1] / "configs" / "federation.json"


class Federation:
    """Replicas as separate jobs. A context that leaves no process behind.

    Args:
        folder: for a folder and a log of each replica.
        settings: changes of the block `federation`; and "slots", the most replicas.
    """

    def __init__(self, folder: Path, base: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        self.folder = folder
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        settings = {"key_file": str((folder / "key").resolve()), **settings}
        folder.mkdir(parents=True, exist_ok=True)
        Keys.make(folder / "key")
        self._addresses = [f"127.0.0.1:{port}" for port in free_ports(settings.pop("slots"))]
        self._base = {**base, "federation": base["federation"] | settings}

    def __enter__(self) -> "Federation":
        return self

    def __exit__(self, *_: object) -> None:
        for replica in self._processes:
            self.kill(replica)

    def start(self, replica: int, *through: str) -> None:
        """Start the job of a replica.

        Args:
            through: a module with its first arguments that runs the command line; none: the command line itself.
        """
        folder = self.host(replica)
        folder.mkdir(parents=True, exist_ok=True)
        config = self._base | {"federation": self._base["federation"] | self.network(replica)}
        config["training"] = config["training"] | {"output_dir": str(folder.resolve())}
        file = (folder / "config.json").resolve()
        file.write_text(json.dumps(config))
        command = [sys.executable, "-m", *(through or ["megatron_noloco"]), "train", "--config", str(file)]
        command += ["--replica", str(replica), "--progress", "lines"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with (self.folder / f"replica_{replica}.log").open("ab") as log:
            self._processes[replica] = subprocess.Popen(
                self.placed(replica, command), stdout=log, stderr=log, env=environment
            )

    def network(self, replica: int) -> dict[str, str]:
        """Return where a replica listens, and the addresses that it knows."""
        return {
            "listen": f"tcp://{self._addresses[replica]}",
            "rendezvous": "tcp://" + ",".join(self._addresses),
        }

    def placed(self, replica: int, command: list[str]) -> list[str]:
        """Return what runs the command of a replica where it belongs: on this host."""
        return command

    def start_all(self, replicas: Iterable[int]) -> None:
        for replica in replicas:
            self.start(replica)

    def signal(self, replica: int, number: signal.Signals) -> None:
        self._processes[replica].send_signal(number)

    def kill(self, replica: int) -> None:
        self._processes[replica].kill()
        self._processes[replica].wait()

    def wait(self, seconds: float) -> None:
        """Wait until all have ended; raises subprocess.TimeoutExpired."""
        deadline = time.monotonic() + seconds
        for process in self._processes.values():
            process.wait(max(0.0, deadline - time.monotonic()))

    def running(self) -> list[int]:
        return [replica for replica, process in self._processes.items() if process.poll() is None]

    def furthest_step(self) -> int:
        return max((int(self.last(replica, "step") or 0) for replica in self._processes), default=0)

    def exit_codes(self) -> dict[int, int | None]:
        """Return the exit code of every replica's last process; None where it runs."""
        return {replica: process.poll() for replica, process in self._processes.items()}

    def host(self, replica: int) -> Path:
        """Return the folder of a replica, which no other replica uses."""
        return self.folder / f"host_{replica}"

    def loss(self, replica: int) -> float | None:
        """Return the loss of a replica's last evaluation, in nats per token."""
        return self.last(replica, "validation/loss")

    def last(self, replica: int, name: str) -> Any:
        """Return the newest value of a metric."""
        return next((row[name] for row in reversed(self.rows(replica)) if name in row), None)

    def total(self, replica: int, name: str) -> int:
        """Return a counter; it is 0 where the log leaves it out."""
        return int(self.last(replica, f"total/{name}") or 0)

    def longest_pause(self, replica: int) -> float:
        """Return the longest time, in seconds, for which a round stopped training."""
        return max((row.get("round/pause_seconds", 0.0) for row in self.rows(replica)), default=0.0)

    def rows(self, replica: int) -> list[Row]:
        """Return all rows of a replica's metrics, those of earlier starts included."""
        logs = [ReplicaLog(folder) for folder in self.host(replica).glob("replica_*")]
        for log in logs:
            log.update()
        return [row for log in logs for row in log.rows]


def base_config(steps: int) -> dict[str, Any]:
    base: dict[str, Any] = json.loads(_BASE.read_text())
    base["training"] |= {"train_iters": steps, "log_interval": 1}
    base["scheduler"]["params"]["total_num_steps"] = steps
    base["evaluation"] = {"interval": max(1, steps // 6), "iters": 10}
    return base


def free_ports(count: int) -> Iterator[int]:
    """Yield ports of the loopback interface that are free now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        ports = [each.getsockname()[1] for each in sockets]
    yield from ports


def mean(losses: Iterable[float | None]) -> float | None:
    found = [loss for loss in losses if loss is not None]
    return fmean(found) if found else None


class _Mallinfo2(ctypes.Structure):
    """Of glibc's malloc.h: bytes in mapped blocks are the fifth number, bytes in use in arenas the eighth."""

    _fields_ = (("numbers", ctypes.c_size_t * 10),)


def held() -> dict[str, int]:
    """Return what this process holds: memory, files, threads, without what waits to be freed."""
    gc.collect()
    libc, this = ctypes.CDLL(None), psutil.Process()
    libc.malloc_trim(0)
    libc.mallinfo2.restype = _Mallinfo2
    malloc = libc.mallinfo2().numbers
    return {
        "allocated_bytes": malloc[4] + malloc[7],  # what all libraries have taken and not given back
        "resident_bytes": this.memory_info().rss,
        "python_blocks": sys.getallocatedblocks(),
        "files": this.num_fds(),
        "threads": threading.active_count(),
    }
