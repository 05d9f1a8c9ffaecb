"""Turns the errors of commands into a line or a traceback on stderr, and an exit code."""

import errno
import re
import time
import traceback
from importlib.util import find_spec

from megatron_noloco.errors import UserError
from megatron_noloco.job.leaving import FAILURE, GRACE_SECONDS, fail, usage_error

# Names of the modules that each extra installs. `pip install .` alone installs torch, numpy and pydantic.
_EXTRAS = {
    "trainer": "deepspeed megatron psutil rich safetensors tensorboard tokenizers",
    "federation": "cryptography",
    "bucket": "s3fs",
    "mpi": "mpi4py",
    "huggingface": "transformers yaml",
    "report": "plotly",
    "data": "pyarrow",
}
# Why a system refuses a file, through no fault of this program: rights, a full or failing disk, limits, odd names.
_REFUSALS = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.EMFILE, errno.ENFILE),
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE),
}


class StoppedError(Exception):
    """A command cannot go on, through no mistake in its input or in this program. The message says why."""


class LostError(StoppedError):
    """This process has lost the connection to another one of the job."""


def report(error: Exception) -> int:
    """Write `error` to stderr, from one rank of the job, and return the exit code.

    2 for what the user can put right: one line per problem.
    1 for everything else: a line where the reason is known, else a traceback.
    """
    if isinstance(error, ModuleNotFoundError):
        error = _missing_extra(error) or error
    if isinstance(error, OSError) and error.errno in _REFUSALS:
        error = UserError(str(error))
    if isinstance(error, UserError):
        return usage_error(error)
    if isinstance(error, StoppedError):
        is_cause = not isinstance(error, LostError)
        exit_code = fail(str(error), FAILURE, is_cause)
        if not is_cause:
            time.sleep(GRACE_SECONDS)  # launchers blame the first process that leaves, and look at intervals
        return exit_code
    return fail("".join(traceback.format_exception(error)).rstrip(), FAILURE)


def _missing_extra(error: ModuleNotFoundError) -> UserError | None:
    """Return the error for the user where a package of an extra is missing."""
    for extra, names in _EXTRAS.items():
        packages = names.split()
        if re.split("[.-]", error.name or "")[0] in packages:  # of a module, or of a distribution
            missing = [name for name in packages if find_spec(name) is None]
            return UserError(
                f"megatron-noloco: this command needs packages that are not installed ({', '.join(missing)}); "
                f"pip install 'megatron-noloco[{extra}]'"
            )
    return None
