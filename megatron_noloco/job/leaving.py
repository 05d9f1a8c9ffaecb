"""How a process leaves: its exit code, which rank of a job says why, and what becomes of the other ranks."""

import atexit
import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

from megatron_noloco.job.launcher import may_be_first, rank_here

USAGE_ERROR = 2  # the person who started it can put it right
FAILURE = 1
INTERRUPTED = 130  # 128 + SIGINT, as shells have it
GRACE_SECONDS = 2.0  # in which the rank that failed leaves before the others: launchers name the first
_LATE_RANK_0_SECONDS = 10.0
_PR_SET_PDEATHSIG = 1  # of Linux's sys/prctl.h


def leave(exit_code: int) -> NoReturn:
    """Leave the process as at any exit, but without tearing the interpreter down.

    Gloo's threads outlive their groups, and one may still be freeing the tensors of its last collective. To ask
    an interpreter that is being torn down for its lock ends that thread inside a C++ destructor, and so the
    process, with SIGABRT, after everything has succeeded.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def usage_error(error: ValueError | OSError) -> int:
    """Write one clear line per problem, from one rank of the job; returns the exit code.

    Launchers end the job when a first rank leaves. So the other ranks give rank 0, which has most likely found
    the same, the time to write. A rank that is still there afterwards is the only one that found it, and names
    itself. A rank that is ended meanwhile leaves with the same exit code, since launchers report the largest.
    """
    if may_be_first(os.environ):
        return fail(str(error), USAGE_ERROR)
    before = signal.signal(signal.SIGTERM, lambda *_: os._exit(USAGE_ERROR))
    _wait_for_rank_0()
    signal.signal(signal.SIGTERM, before)
    here = rank_here(os.environ)
    return fail("\n".join(f"{here}: {line}" for line in str(error).splitlines()), USAGE_ERROR)


def fail(text: str, exit_code: int, is_cause: bool = True) -> int:
    """Write `text`, unless another rank of the job has failed before; returns the exit code of the first.

    Under torchrun also into the file from which it, and those who started it, learn the reason. It names the rank
    that failed first, in whole seconds.

    Args:
        is_cause: False for a rank that has lost another, which could not say anything.
    """
    if "torch" in sys.modules:  # else nobody has joined, and there are seconds to save
        from megatron_noloco.job import failure

        first = failure.announce(exit_code)
        if not failure.is_own(first):
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


def leave_with_parent() -> None:
    """From here on the kernel kills this process when the one that started it has ended. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def abandon_job() -> None:
    """After a failure, before leaving: nothing waits for the ranks that wait for this one.

    The launcher ends them, or their watchdogs. MPI_Finalize would wait; a process that leaves without it ends an
    MPI job.
    """
    if "mpi4py.MPI" in sys.modules:
        from megatron_noloco.transport.mpi import finalize

        atexit.unregister(finalize)
    if "torch" in sys.modules:
        from megatron_noloco.job import failure

        failure.serve_the_others()


def _wait_for_rank_0() -> None:
    if "torch" in sys.modules:
        from megatron_noloco.job import failure

        failure.wait_for_another(_LATE_RANK_0_SECONDS)
    else:
        time.sleep(_LATE_RANK_0_SECONDS)
