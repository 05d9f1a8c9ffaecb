"""Ends a process, and a job after a failure: one rank writes the reason, and all leave with its exit code.

A rank that fails records this in the job's key-value store. The other ranks poll the store (`Watchdog`), also
while they are blocked by the failed rank, and leave without a message. A rank that is killed records nothing; the
first rank that loses its connection to it then fails in its place.

This file does not import torch, since some commands do not need it.
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
from typing import NamedTuple, NoReturn

from megatron_noloco.errors import UserError
from megatron_noloco.job.launcher import may_be_first, rank_here

USAGE_ERROR = 2  # an error that the user can correct
FAILURE = 1
INTERRUPTED = 130  # 128 + SIGINT, as in shells
GRACE_SECONDS = 2.0  # other ranks leave later than the failed one, because launchers name the first to leave
POLL_SECONDS = 1.0  # between two reads of the store
# Set once this process knows that a rank of its job has failed. Nothing must ask the store from then on: it ends
# with rank 0, and torch writes a stack trace for each question without an answer.
job_has_failed = threading.Event()
_ANSWER_SECONDS = 10.0  # time limit for an answer of the store, whose host may have failed
_LATE_RANK_0_SECONDS = 10.0  # in which rank 0 reports the same usage error
_KEY = "failure"
_PR_SET_PDEATHSIG = 1  # of Linux's sys/prctl.h


def leave(exit_code: int) -> NoReturn:
    """Run the exit handlers and end the process, without finalizing the interpreter.

    Gloo's threads outlive their groups, and one may still be freeing the tensors of its last collective. A thread
    that asks for the GIL while the interpreter finalizes is ended, here inside a C++ destructor: that would end
    the process with SIGABRT after everything has succeeded.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        # A full disk was reported; an exit handler may have closed the stream.
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(exit_code)


def leave_with_parent() -> None:
    """Let the kernel kill this process when the one that started it has ended. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def abandon_job() -> None:
    """Skip MPI_Finalize, and give the other ranks time to read of the failure; called before leaving.

    MPI_Finalize would wait for ranks that wait for this one. Their watchdogs or the launcher end those ranks; MPI
    ends the job of a process that leaves without MPI_Finalize.
    """
    if "mpi4py.MPI" in sys.modules:
        from megatron_noloco.transport.mpi import finalize

        atexit.unregister(finalize)
    keep_serving_store()


def usage_error(error: UserError) -> int:
    """Write one line per problem, from one rank of the job; return the exit code.

    Most errors are the same on all ranks. Launchers end the job when the first rank leaves, so the other ranks
    wait until rank 0 has written. If rank 0 does not fail meanwhile, the rank writes the lines itself, with its
    name. A rank that the launcher ends meanwhile leaves with the same exit code, since launchers report the
    largest.
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

    Under torchrun, also writes it to torchrun's error file. torchrun names the rank with the earliest time there,
    in whole seconds.

    Args:
        is_cause: False for a rank that fails because it has lost another, which could not write anything.
    """
    first = announce_failure(exit_code)
    if not first.is_own:
        time.sleep(GRACE_SECONDS)
        return first.exit_code
    with suppress(OSError):  # a reader that is gone
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
    """Names the rank that failed, and its exit code."""

    rank: int
    exit_code: int

    @property
    def is_own(self) -> bool:
        return self.rank == _own_rank()


def announce_failure(exit_code: int) -> Failure:
    """Record in the store that this rank fails; return the job's first failure.

    Where the store does not answer, this rank's failure counts as the first.
    """
    own, answer = Failure(_own_rank(), exit_code), queue.SimpleQueue[Failure]()
    if not _distributed():
        return own
    from megatron_noloco.job.agreement import claim

    job_has_failed.set()

    def ask() -> None:
        with suppress(RuntimeError):  # rank 0, which serves the store, has ended
            answer.put(_parse(claim(_KEY, f"{own.rank} {exit_code}")))

    asking = threading.Thread(target=ask, daemon=True)  # the host of rank 0 may no longer answer
    asking.start()
    asking.join(_ANSWER_SECONDS)
    return own if answer.empty() else answer.get()


def announced_failure() -> Failure | None:
    """Return the job's first failure, or None. Raises RuntimeError when the store is lost."""
    if not _distributed():
        return None
    from megatron_noloco.job.agreement import claimed

    text = claimed(_KEY)
    if not text:
        return None
    job_has_failed.set()
    return _parse(text)


def wait_for_failure(seconds: float) -> Failure | None:
    """Wait until a rank announces a failure, and return it; None after `seconds`."""
    if not _distributed():
        time.sleep(seconds)
        return None
    deadline, found = time.monotonic() + seconds, None
    with suppress(RuntimeError):  # rank 0, which serves the store, has ended
        while not (found := announced_failure()) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS / 5)
    return found


def lost_connection(error: BaseException | None) -> BaseException | None:
    """Return `error` or the first of its causes that reports a lost connection to a process; else None."""
    from torch.distributed import DistNetworkError

    while error is not None:
        if isinstance(error, ConnectionError | DistNetworkError) or _is_of_a_lost_connection(error):
            return error
        error = error.__cause__
    return None


def keep_serving_store() -> None:
    """Wait before leaving, on the rank that serves the store, so that the others can read of the failure."""
    dist = _distributed()
    serves = dist is not None and dist.get_rank() == 0 and dist.get_world_size() > 1
    if serves and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        time.sleep(1.5 * POLL_SECONDS)


def _distributed() -> ModuleType | None:
    """Return torch.distributed where this process has joined its job, else None."""
    dist = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_initialized() else None


def _own_rank() -> int:
    dist = _distributed()
    return 0 if dist is None else dist.get_rank()


def _is_of_a_lost_connection(error: BaseException) -> bool:
    """Return whether this is the RuntimeError with which torch.distributed reports a lost connection.

    Gloo's text, as in torch 2.13, ends with one of its own or with that of Linux; the last text is NCCL's.
    """
    texts = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)


def _parse(text: str) -> Failure:
    rank, exit_code = text.split()
    return Failure(int(rank), int(exit_code))
