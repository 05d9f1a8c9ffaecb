"""How a process leaves: its exit code, who reports a mistake, and what becomes of the other ranks."""

import atexit
import os
import signal
import sys
import time
from typing import NoReturn

from megatron_noloco.job.launcher import may_be_first

USAGE_ERROR = 2  # the person who started it can put it right
FAILURE = 1
_LATE_RANK_0_SECONDS = 10.0


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
    the same, the time to write. A rank that is still there afterwards is the only one that found it. A rank that
    is ended meanwhile leaves with the same exit code, since launchers report the largest.
    """
    if not may_be_first(os.environ):
        before = signal.signal(signal.SIGTERM, lambda *_: os._exit(USAGE_ERROR))
        time.sleep(_LATE_RANK_0_SECONDS)
        signal.signal(signal.SIGTERM, before)
    sys.stderr.write(f"{error}\n")
    return USAGE_ERROR


def abandon_job(exit_code: int) -> None:
    """End the other ranks too, which would wait for this one for ever; returns where the launcher does it."""
    if "mpi4py.MPI" not in sys.modules:
        return
    from megatron_noloco.job import mpi  # imports torch: not for a mistake in the command line

    mpi.abort(exit_code)
