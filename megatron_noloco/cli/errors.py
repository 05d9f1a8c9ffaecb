"""What a command's errors come to: a line on stderr, or a traceback, and the exit code."""

import sys
import traceback

from megatron_noloco.job.leaving import FAILURE, usage_error

# The packages that an extra installs, by the name that is imported. `pip install .` alone has torch and numpy.
_EXTRAS = {
    "trainer": ("deepspeed", "megatron", "pydantic", "rich", "safetensors", "tensorboard"),
    "mpi": ("mpi4py",),
    "huggingface": ("transformers",),
    "data": ("pyarrow", "tokenizers", "zstandard"),
}


class StoppedError(Exception):
    """A command cannot go on, through no mistake in its input or in this program; the message says why."""


def report(error: Exception, command: str) -> int:
    """Write what there is to say about `error` to stderr; returns the exit code.

    2 for what the person who started the command can put right: one line per problem, from one rank of the job.
    1 for everything else: a line where the reason is known, else a traceback.
    """
    if isinstance(error, ModuleNotFoundError):
        error = _missing_extra(error, command) or error
    if isinstance(error, ValueError | OSError):
        return usage_error(error)
    if isinstance(error, StoppedError):
        sys.stderr.write(f"{error}\n")
    else:
        traceback.print_exception(error)
    return FAILURE


def _missing_extra(error: ModuleNotFoundError, command: str) -> ValueError | None:
    package = (error.name or "").partition(".")[0]
    for extra, packages in _EXTRAS.items():
        if package in packages:
            return ValueError(
                f"the command {command} needs the package {package}, which is not installed; "
                f'pip install "megatron-noloco[{extra}]"'
            )
    return None
