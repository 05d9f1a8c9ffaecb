"""Small files in a run's folder, by which its job communicates with other programs on any host.

- `running` keeps a second job out of the folder.
- `stop` asks the job to save and stop; the command `stop` writes it.
- `waits_*.json` in a replica's folder, one for each rank that stands still; the command `watch` reads them.
"""

import atexit
import fcntl
import itertools
import json
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_noloco.files import write_text
from megatron_noloco.job.activity import now

_WRITE_SECONDS = 5.0  # between two writes of `running`
_PATIENCE_SECONDS = 15.0  # time after which a job on another host that writes nothing counts as ended
_occupied: dict[Path, int] = {}  # files `running` by the process that locked them: a forked child has no lock


def occupy(folder: Path) -> str:
    """Keep other jobs out of `folder` until this process ends; return "", or a message if another job is there.

    A job holds a lock (flock) on the file `running`, which the kernel of its host releases however the job
    ends. On some file systems a lock does not reach other hosts (NFS with `nolock`, Lustre with `localflock`,
    BeeGFS by default), on others it outlives a host that has crashed (NFSv3). So a job also writes the file
    every 5 s, and a job of another host counts as ended when it has not written for 15 s, whatever the lock
    says. Raises OSError where the file cannot be written.
    """
    path = (folder / "running").absolute()
    if _occupied.get(path) == os.getpid():
        return ""
    folder.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    now.part(f"locking {path}")  # NFSv3 may wait for ever for its lock daemon
    locked, found = _lock(file), _read(path)
    now.part("")
    if not found:
        taken = locked is False  # another job is starting at this moment
    elif found.get("locked") and found.get("kernel") == _kernel():
        taken = not locked
    else:
        taken = _is_written_again(path, found)
    if taken:
        os.close(file)
        who = f"process {found.get('pid')} on {found.get('host')}" if found else "it is starting"
        return (
            f"{folder}: another job writes there ({who}); "
            "stop it first, or give this one another training.output_dir"
        )
    _occupied[path] = os.getpid()
    own = {"host": socket.gethostname(), "pid": os.getpid(), "kernel": _kernel(), "locked": locked is True}
    _keep_writing(file, own)
    return ""


def _lock(file: int) -> bool | None:
    """Return whether an open file could be locked; None where the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _read(path: Path) -> dict[str, Any]:
    """Return what a job has written; {} where no job writes, or where the file is incomplete."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _is_written_again(path: Path, found: dict[str, Any]) -> bool:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < deadline:
        time.sleep(1.0)
        if _read(path) not in (found, {}):
            return True
    return False


def _keep_writing(file: int, own: dict[str, Any]) -> None:
    """Write `own` now and every few seconds until the process ends; then empty the file.

    The file is written in place, since it is locked, and never removed, since another job may have opened it.
    """
    ended = threading.Event()

    def write(beat: int) -> None:
        content = json.dumps({**own, "beat": beat}).encode()
        os.pwrite(file, content, 0)
        os.ftruncate(file, len(content))
        os.fsync(file)

    def beat() -> None:
        for number in itertools.count(1):
            if ended.wait(_WRITE_SECONDS):
                return
            with suppress(OSError):
                write(number)

    def leave() -> None:
        ended.set()
        writer.join()
        with suppress(OSError):
            os.ftruncate(file, 0)

    write(0)
    writer = threading.Thread(target=beat, name="running", daemon=True)
    writer.start()
    atexit.register(leave)


def _kernel() -> str:
    """Return the host's name and the id of its last boot: a lock surely works between processes that share both.

    Containers of one host have names of their own, and may have mounts of their own.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"


def ask_to_stop(output_dir: Path) -> None:
    """Ask the jobs that write to `output_dir` to stop; they poll every second. Raises OSError."""
    write_text(output_dir / "stop", f"{time.time()}\n")


def stop_request(output_dir: Path) -> str:
    """Return the last request to stop, or "". A request stays in the folder: only a change is a new request."""
    try:
        return (output_dir / "stop").read_text()
    except OSError:
        return ""


@dataclass(frozen=True)
class Wait:
    """What a rank that stands still reports.

    Attributes:
        who: the rank, its host and its place.
        doing: what the rank is doing, and for which other rank it waits.
        seconds: since it began to wait.
    """

    who: str
    doing: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.who} has stood still for {self.seconds:.0f} s {self.doing}"


WAITS = "waits_*.json"


def wait_file(replica_folder: Path, rank: int) -> Path:
    """Return the file into which a rank writes its wait; it exists only while the rank stands still."""
    return replica_folder / WAITS.replace("*", f"{rank:05d}")


def write_wait(path: Path, wait: Wait) -> None:
    """Write a wait. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(vars(wait)))


def waits_of(replica_folder: Path) -> dict[Wait, float]:
    """Return the waits of a replica's ranks, in rank order, and when each was written (seconds since the epoch).

    The last wait of a rank that is killed stays.
    """
    found = {}
    for path in sorted(replica_folder.glob(WAITS)):
        try:
            found[Wait(**json.loads(path.read_text()))] = path.stat().st_mtime
        except FileNotFoundError:  # the rank no longer waits
            continue
    return found
