"""How a process leaves, and how a job ends: one rank says why, and all leave with its exit code.

A rank that fails writes so into the job's key-value store. Every rank looks there (`Watchdog`), also one that
would wait for the failed one for ever, and leaves without a message. A rank that is killed writes nothing;
the first rank that loses its connection to it then fails in its place.

A command that needs no torch leaves without importing it.
"""

import atexit
import ctypes
import json
import os
import queue
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

from megatron_noloco.job.launcher import may_be_first, rank_here

USAGE_ERROR = 2  # the person who started it can put it right
FAILURE = 1
INTERRUPTED = 130  # 128 + SIGINT, as shells have it
GRACE_SECONDS = 2.0  # in which the rank that failed leaves before the others: launchers name the first
LOOK_SECONDS = 1.0  # between two looks for a failure
_ANSWER_SECONDS = 10.0  # in which the store answers, if its host can
_LATE_RANK_0_SECONDS = 10.0
_KEY = "failure"
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")
_PR_SET_PDEATHSIG = 1  # of Linux's sys/prctl.h


def leave(exit_code: int) -> NoReturn:
    """Leave the process as at any exit, but without tearing the interpreter down.

    Gloo's threads outlive their groups, and one may still be freeing the tensors of its last collective. To
    ask an interpreter that is being torn down for its lock ends that thread inside a C++ destructor, and so
    the process, with SIGABRT, after everything has succeeded.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def leave_with_parent() -> None:
    """Let the kernel kill this process when the one that started it has ended. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def abandon_job() -> None:
    """After a failure, before leaving: do not wait for the ranks that wait for this one.

    The launcher ends them, or their watchdogs. MPI_Finalize would wait; a process that leaves without it ends
    an MPI job.
    """
    if "mpi4py.MPI" in sys.modules:
        from megatron_noloco.transport.mpi import finalize

        atexit.unregister(finalize)
    serve_the_others()


def usage_error(error: ValueError | OSError) -> int:
    """Write one clear line per problem, from one rank of the job; return the exit code.

    Launchers end the job when a first rank leaves. So the other ranks give rank 0, which has most likely
    found the same, the time to write. A rank that is still there afterwards is the only one that found it,
    and names itself. A rank that is ended meanwhile leaves with the same exit code, since launchers report
    the largest.
    """
    if may_be_first(os.environ):
        return fail(str(error), USAGE_ERROR)
    before = signal.signal(signal.SIGTERM, lambda *_: os._exit(USAGE_ERROR))
    wait_for_failure(_LATE_RANK_0_SECONDS)
    signal.signal(signal.SIGTERM, before)
    here = rank_here(os.environ)
    return fail("\n".join(f"{here}: {line}" for line in str(error).splitlines()), USAGE_ERROR)


def fail(text: str, exit_code: int, is_cause: bool = True) -> int:
    """Write `text`, unless another rank of the job has failed before; return the exit code of the first.

    Under torchrun also into the file from which torchrun learns the reason. It names the rank that failed
    first, in whole seconds.

    Args:
        is_cause: False for a rank that fails because it has lost another, which could not say anything.
    """
    first = announce_failure(exit_code)
    if not first.is_own:
        time.sleep(GRACE_SECONDS)
        return first.exit_code
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file:  # as torch.distributed.elastic.multiprocessing.errors documents it
        failed_at = time.time() + (0 if is_cause else GRACE_SECONDS)
        details = {"py_callstack": text, "timestamp": str(int(failed_at))}
        message = {"message": text.splitlines()[-1], "extraInfo": details}
        Path(error_file).write_text(json.dumps({"message": message}))
    return exit_code


class Failure(NamedTuple):
    """A failure as the store has it."""

    rank: int
    exit_code: int

    @property
    def is_own(self) -> bool:
        return self.rank == _own_rank()


def announce_failure(exit_code: int) -> Failure:
    """Tell the job that this rank fails; return the job's first failure.

    That is this rank's, unless another was before. If the store does not answer, it is this rank's as well.
    """
    own, answer = Failure(_own_rank(), exit_code), queue.SimpleQueue[Failure]()
    if not _joined():
        return own

    def ask() -> None:
        with suppress(RuntimeError):  # the store is gone, and rank 0 with it
            answer.put(_parse(_store().compare_set(_KEY, "", f"{own.rank} {exit_code}")))

    asking = threading.Thread(target=ask, daemon=True)  # the host of rank 0 may no longer answer
    asking.start()
    asking.join(_ANSWER_SECONDS)
    return own if answer.empty() else answer.get()


def announced_failure() -> Failure | None:
    """Return the job's first failure, if there is one. Raises RuntimeError when the store is gone."""
    if not _joined():
        return None
    store = _store()
    return _parse(store.get(_KEY)) if store.check([_KEY]) else None


def wait_for_failure(seconds: float) -> Failure | None:
    """Return the failure that another rank announces within `seconds`, if there is one."""
    if not _joined():
        time.sleep(seconds)
        return None
    deadline, found = time.monotonic() + seconds, None
    with suppress(RuntimeError):  # the store is gone
        while not (found := announced_failure()) and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS / 5)
    return found


def lost_connection(error: BaseException | None) -> BaseException | None:
    """Return the error that tells that a connected process has gone: `error`, one of its causes, or None."""
    from torch.distributed import DistNetworkError

    while error is not None:
        by_name = isinstance(error, RuntimeError) and any(text in str(error) for text in _LOST)
        if by_name or isinstance(error, ConnectionError | DistNetworkError):
            return error
        error = error.__cause__
    return None


def serve_the_others() -> None:
    """Where this process holds the store, let the others read of the failure in it before it leaves."""
    dist = _joined()
    serves = dist is not None and dist.get_rank() == 0 and dist.get_world_size() > 1
    if serves and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        time.sleep(1.5 * LOOK_SECONDS)


def _joined() -> ModuleType | None:
    """Return torch.distributed where this process has joined the others of its job, else None."""
    dist = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_initialized() else None


def _own_rank() -> int:
    dist = _joined()
    return 0 if dist is None else dist.get_rank()


def _store() -> Any:
    from megatron_noloco.job.agreement import store

    return store()


def _parse(value: bytes) -> Failure:
    rank, exit_code = value.decode().split()
    return Failure(int(rank), int(exit_code))
