"""Small files in a run's folder, by which its job communicates with other programs on any host.

- `running` keeps a second job out of the folder. It names the process, and is empty after its end.
- `stop` asks the job to save and stop; the command `stop` writes it.
"""

import atexit
import fcntl
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from megatron_noloco.files import outside, write_text, writing
from megatron_noloco.job.activity import now
from megatron_noloco.job.launcher import same_command

_LEAVE = " leave"
_occupied: dict[Path, int] = {}  # files `running` by the process that locked them: a forked child has not


def occupy(folder: Path) -> str:
    """Keep other jobs out of `folder` until this process ends; return "", or a message if another job is there.

    A job holds a lock (flock) on the file `running`, which the kernel releases however the job ends. On a file
    system without locks (NFS without lockd) nothing is refused; where locks stay on their host (NFS with
    `nolock`, Lustre with `localflock`, BeeGFS by default), only a second job of this host is. An NFSv3 server
    may keep the lock of a host that has crashed: remove the file. Raises UserError where it cannot be written,
    as where another user made it.
    """
    path = (folder / "running").absolute()
    if _occupied.get(path) == os.getpid():
        return ""
    with writing(path, "training.output_dir"):
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    now.part(f"locking {path}")  # NFSv3 may wait for ever for its lock daemon
    try:
        _lock(file)
    except BlockingIOError:
        os.close(file)
        name = outside(path.read_text(errors="replace").strip())
        return (
            f"{folder}: another job writes there ({name or 'it is starting'}); "
            "stop it first, or give this one another training.output_dir"
        )
    except OSError:  # a file system without locks
        pass
    finally:
        now.part("")
    _occupied[path] = os.getpid()
    with writing(path, "training.output_dir"):
        os.ftruncate(file, 0)
        os.pwrite(file, _own_name(), 0)
    atexit.register(_vacate, file)
    return ""


def _own_name() -> bytes:
    return f"process {os.getpid()} on {socket.gethostname()}\n".encode()


def _vacate(file: int) -> None:
    """Say to hosts that do not see the lock that this process has ended."""
    with suppress(OSError):
        if os.pread(file, len(_own_name()), 0) == _own_name():
            os.ftruncate(file, 0)


class FolderLostError(RuntimeError):
    """Raised where the folder of a run was renamed or removed; another job may write under its name."""


class OccupiedFolder:
    """Tells whether a job's folder is still the one that it has occupied. Any rank may ask.

    Args:
        folder: occupied before.
    """

    def __init__(self, folder: Path) -> None:
        self._path = (folder / "running").absolute()
        self._file = self._identity()

    def check(self) -> None:
        """Raise FolderLostError where `running` is another file than at first, or is gone."""
        with suppress(OSError):  # of a disk that does not answer
            if self._identity() != self._file:
                raise FolderLostError(
                    f"{self._path.parent}: was renamed or removed while this job wrote there, so the job ends and "
                    f"saves nothing more; under the old name {same_command(os.environ)} continues from the last "
                    "checkpoint"
                )

    def _identity(self) -> tuple[int, int] | None:
        try:
            status = self._path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return status.st_dev, status.st_ino


def _lock(file: int) -> None:
    """Lock a file; tries again for a second, since `is_under_way` holds the lock for an instant."""
    for _ in range(10):
        with suppress(BlockingIOError):
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(0.1)
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_under_way(output_dir: Path) -> bool:
    """Return whether a job writes there; true also where only another host can know."""
    for path in (output_dir / "running", *output_dir.glob("replica_*/running")):
        try:
            with path.open("r+", errors="replace") as file:
                name = file.read()
                if not name:
                    continue
                if not name.endswith(f" on {socket.gethostname()}\n"):
                    return True
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:  # in a federation only the folders of replicas have the file
            continue
        except OSError:  # locked, or not ours to open
            return True
    return False


def ask_to_stop(output_dir: Path, leave: bool = False) -> None:
    """Ask the jobs that write to `output_dir` to stop; they poll every second. Raises OSError.

    Args:
        leave: whether jobs of a federation exchange once more before; see `asks_to_leave`.
    """
    write_text(output_dir / "stop", f"{time.time()}{_LEAVE * leave}\n")


def stop_request(output_dir: Path) -> str:
    """Return the last request to stop, or "". A request stays in the folder: only a change is a new request."""
    try:
        return (output_dir / "stop").read_text(errors="replace")
    except OSError:
        return ""


def asks_to_leave(request: str) -> bool:
    """Return whether a `stop_request` is one to leave a federation."""
    return request.endswith(f"{_LEAVE}\n")
