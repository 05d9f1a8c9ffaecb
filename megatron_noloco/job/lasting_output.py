"""Lets a process outlive its console: a reader that is gone, a log file on a full disk, a closed terminal."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any, TextIO, cast

from megatron_noloco.job.launcher import may_be_first


class _LastingStream:
    """A stream that drops everything from its first error on."""

    def __init__(self, stream: TextIO, when_lost: Callable[[OSError], object]) -> None:
        self._stream, self._when_lost = stream, when_lost

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._errors_dropped():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._errors_dropped():
            self._stream.flush()

    @contextmanager
    def _errors_dropped(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            with (
                suppress(OSError),
                open(os.devnull, "w") as null,
            ):  # for what is buffered, and for libraries, too
                os.dup2(null.fileno(), self._stream.fileno())
            self._when_lost(error)


@contextmanager
def lasting_output() -> Iterator[None]:
    """Drop what stdout or stderr cannot take inside the block; stderr says so once for stdout, on rank 0."""
    error_output = cast(TextIO, _LastingStream(sys.stderr, lambda error: None))

    def say(error: OSError) -> None:
        if may_be_first(os.environ):
            error_output.write(
                f"stdout cannot be written ({error.strerror}); training continues without its console\n"
            )

    output = cast(TextIO, _LastingStream(sys.stdout, say))
    with redirect_stdout(output), redirect_stderr(error_output):
        try:
            yield
        finally:
            output.flush()
            error_output.flush()
