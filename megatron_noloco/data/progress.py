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
    """

    def __init__(self, what: str, total: int) -> None:
        self.what, self.total, self.done = what, total, 0
        self._on_terminal, self._began = sys.stderr.isatty(), time.monotonic()
        self._next = self._began + _FIRST_SECONDS

    def __enter__(self) -> "Progress":
        activity.now.part(self.what)
        return self

    def __exit__(self, *error: object) -> None:
        if self._on_terminal:
            sys.stderr.write("\r\x1b[K")

    def advance(self, read_bytes: int) -> None:
        """Show that so many further bytes are done."""
        now = time.monotonic()
        self.done += read_bytes
        activity.now.part(str(self))
        if now >= self._next:
            self._next = now + (_TERMINAL_SECONDS if self._on_terminal else _LINE_SECONDS)
            sys.stderr.write(f"\r\x1b[K{self}" if self._on_terminal else f"{self}\n")
            sys.stderr.flush()

    def __str__(self) -> str:
        line = f"{self.what}: {self.done / 1e6:,.0f} of {self.total / 1e6:,.0f} MB"
        if not self.done:
            return line
        seconds = (time.monotonic() - self._began) * (self.total - self.done) / self.done
        return f"{line}, {seconds:.0f} s left"
