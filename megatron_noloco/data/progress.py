"""Shows how much of the inputs is read."""

import sys
import time

from megatron_noloco.job import activity

_FIRST_SECONDS = 2.0  # nothing is shown of what takes less
_TERMINAL_SECONDS, _LINE_SECONDS = 0.5, 30.0  # between two lines; on a terminal each replaces the one before


class Progress:
    """Shows on stderr what is done, and when it will end; tells the watchdog.

    Args:
        what: is being done.
        total: bytes of the inputs.
        shown: False: only the watchdog is told.
    """

    def __init__(self, what: str, total: int, shown: bool = True) -> None:
        self.what, self.total, self.done = what, total, 0
        self._shown, self._on_terminal = shown, sys.stderr.isatty()
        self._next = time.monotonic() + _FIRST_SECONDS
        self._first: tuple[float, int] | None = None  # the first report: when, and bytes

    def __enter__(self) -> "Progress":
        activity.now.part(self.what)
        return self

    def __exit__(self, *error: object) -> None:
        if self._on_terminal and self._shown:
            sys.stderr.write("\r\x1b[K")

    def advance(self, read_bytes: int) -> None:
        self.show(self.done + read_bytes)

    def show(self, done: int) -> None:
        """Show that so many bytes are done."""
        now, self.done = time.monotonic(), done
        self._first = self._first or (now, done)
        activity.now.part(str(self))
        if self._shown and now >= self._next:
            self._next = now + (_TERMINAL_SECONDS if self._on_terminal else _LINE_SECONDS)
            sys.stderr.write(f"\r\x1b[K{self}" if self._on_terminal else f"{self}\n")
            sys.stderr.flush()

    def __str__(self) -> str:
        line = f"{self.what}: {self.done / 1e6:,.0f} of {self.total / 1e6:,.0f} MB"
        began, first = self._first or (0.0, self.done)
        if self.done <= first:
            return line
        seconds = (time.monotonic() - began) * (self.total - self.done) / (self.done - first)
        return f"{line}, {seconds:.0f} s left"
