"""Small files in a run's folder, by which its job communicates with other programs on any host.

- `running` keeps a second job out of the folder.
- `stop` asks the job to save and stop; the command `stop` writes it.
- `waits_*.json` in a replica's folder, one for each rank that stands still; the command `watch` reads them.
"""

import fcntl
import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from megatron_noloco.files import write_text
from megatron_noloco.job.activity import now

_occupied: dict[Path, int] = {}  # files `running` by the process that locked them: a forked child has not


def occupy(folder: Path) -> str:
    """Keep other jobs out of `folder` until this process ends; return "", or a message if another job is there.

    A job holds a lock (flock) on the file `running`, which the kernel releases however the job ends. On a file
    system without locks (NFS without lockd) nothing is refused; where locks stay on their host (NFS with
    `nolock`, Lustre with `localflock`, BeeGFS by default), only a second job of this host is. An NFSv3 server
    may keep the lock of a host that has crashed: remove the file. Raises OSError where it cannot be written.
    """
    path = (folder / "running").absolute()
    if _occupied.get(path) == os.getpid():
        return ""
    folder.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    now.part(f"locking {path}")  # NFSv3 may wait for ever for its lock daemon
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return (
            f"{folder}: another job writes there ({path.read_text().strip() or 'it is starting'}); "
            "stop it first, or give this one another training.output_dir"
        )
    except OSError:  # a file system without locks
        pass
    finally:
        now.part("")
    _occupied[path] = os.getpid()
    os.ftruncate(file, 0)
    os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return ""


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
