"""What a command's errors come to: a line on stderr, or a traceback, and the exit code."""

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from megatron_noloco.job.leaving import FAILURE, GRACE_SECONDS, fail, usage_error

# What each extra installs, by the names that are imported. `pip install .` alone installs torch and numpy.
_EXTRAS = {
    "trainer": ("deepspeed", "megatron", "pydantic", "rich", "safetensors", "tensorboard", "tokenizers"),
    "mpi": ("mpi4py",),
    "federation": ("zmq",),
    "huggingface": ("transformers",),
    "report": ("matplotlib",),
    "data": ("pyarrow", "zstandard"),
}


class StoppedError(Exception):
    """A command cannot go on, through no mistake in its input or in this program; the message says why."""


class LostError(StoppedError):
    """Another process of the job has gone."""


class UnexpectedError(Exception):
    """Its cause needs a traceback, whatever its type: what a person can get wrong was checked before."""


@contextmanager
def naming(path: str) -> Iterator[None]:
    """Each line of a ValueError that leaves begins with the file it is about."""
    try:
        yield
    except ValueError as error:
        lines = [line.removeprefix(f"{path}: ") for line in str(error).splitlines()]
        raise ValueError("\n".join(f"{path}: {line}" for line in lines)) from None


def report(error: Exception) -> int:
    """Write what there is to say about `error` to stderr, from one rank of the job; returns the exit code.

    2 for what the person who started the command can put right: one line per problem.
    1 for everything else: a line where the reason is known, else a traceback.
    """
    if isinstance(error, ModuleNotFoundError):
        error = _missing_extra(error) or error
    if isinstance(error, ValueError | OSError):
        return usage_error(error)
    if isinstance(error, StoppedError):
        is_cause = not isinstance(error, LostError)
        exit_code = fail(str(error), FAILURE, is_cause)
        if not is_cause:
            time.sleep(GRACE_SECONDS)  # launchers name the first that leaves, and look now and then
        return exit_code
    cause = error.__cause__ if isinstance(error, UnexpectedError) else error
    assert cause is not None
    return fail("".join(traceback.format_exception(cause)).rstrip(), FAILURE)


def _missing_extra(error: ModuleNotFoundError) -> ValueError | None:
    for extra, packages in _EXTRAS.items():
        if (error.name or "").partition(".")[0] in packages:
            missing = [name for name in packages if find_spec(name) is None]
            return ValueError(
                f"megatron_noloco: this command needs packages that are not installed ({', '.join(missing)}); "
                f"pip install 'megatron-noloco[{extra}]'"
            )
    return None
