"""One job at a time writes into a folder: a file there says which one, and that it is alive."""

import atexit
import json
import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

from megatron_noloco.files import write_text

_NAME = "running"
_BEAT_SECONDS = 5.0
_PATIENCE_SECONDS = 15.0  # in which a job on another host has written again


def occupy(folder: Path) -> str:
    """Hold the folder until this process ends; the line for who finds another job there, or "".

    A job of this host is there as long as its process is. One of another host is watched for 15 s: of one that was
    killed the file is still there, but no longer written.
    """
    path = folder / _NAME
    folder.mkdir(parents=True, exist_ok=True)
    found = _read(path)
    if found is not None and _lives(path, found):
        return (
            f"{folder}: another job writes there (process {found.get('pid')} on {found.get('host')}); "
            "stop it first, or give this one another training.output_dir"
        )
    _Holder(path).start()
    return ""


class _Holder(threading.Thread):
    def __init__(self, path: Path) -> None:
        super().__init__(name="occupied", daemon=True)
        self._path = path
        self._own = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": psutil.Process().create_time(),
        }
        self._beat, self._over = 0, threading.Event()
        self._write()
        atexit.register(self._leave)

    def run(self) -> None:
        while not self._over.wait(_BEAT_SECONDS):
            with suppress(OSError):
                self._write()

    def _write(self) -> None:
        self._beat += 1
        write_text(self._path, json.dumps({**self._own, "beat": self._beat}))

    def _leave(self) -> None:
        self._over.set()
        self.join()
        with suppress(OSError):
            self._path.unlink()


def _read(path: Path) -> dict[str, object] | None:
    """None where there is none, or none that could be read."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _lives(path: Path, found: dict[str, object]) -> bool:
    if found.get("host") == socket.gethostname():
        with suppress(psutil.Error, TypeError, ValueError):
            process = psutil.Process(int(str(found["pid"])))
            there = process.create_time() == found["started"] and process.status() != psutil.STATUS_ZOMBIE
            return there and process.pid != os.getpid()
        return False
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < deadline:
        time.sleep(1.0)
        if _read(path) not in (found, None):
            return True
    return False
