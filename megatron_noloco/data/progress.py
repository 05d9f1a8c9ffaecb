"""Shows how much of the inputs is read."""

import sys
import time
from types import TracebackType
from typing import Any

from megatron_noloco.job import activity

_FIRST_SECONDS = 2.0  # nothing is shown of what takes less
_LINE_SECONDS = 30.0  # between two lines


class Progress:
    """Shows on stderr what is done, and when it will end: a bar on a terminal, else lines. Tells the watchdog.

    Args:
        what: is being done.
        total: bytes of the inputs.
        shown: False: only the watchdog is told.
    """

    def __init__(self, what: str, total: int, shown: bool = True) -> None:
        self.what, self.total, self.done = what, total, 0
        self._shown = shown
        self._bar: Any = None
        self._next = time.monotonic() + _FIRST_SECONDS
        self._first: tuple[float, int] | None = None  # the first report: when, and bytes

    def __enter__(self) -> "Progress":
        activity.now.part(self.what)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, read_bytes: int) -> None:
        self.show(self.done + read_bytes)

    def show(self, done: int) -> None:
        """Show that so many bytes are done."""
        now, self.done = time.monotonic(), done
        self._first = self._first or (now, done)
        activity.now.part(str(self))
        if not self._shown or now < self._next:
            return
        if sys.stderr.isatty():
            self._bar = self._bar or _bar(self.what, self.total)
            self._bar.update(self._bar.task_ids[0], completed=done)
        else:
            self._next = now + _LINE_SECONDS
            sys.stderr.write(f"{self}\n")
            sys.stderr.flush()

    def __str__(self) -> str:
        line = f"{self.what}: {self.done / 1e6:,.0f} of {self.total / 1e6:,.0f} MB"
        began, first = self._first or (0.0, self.done)
        if self.done <= first:
            return line
        seconds = (time.monotonic() - began) * (self.total - self.done) / (self.done - first)
        return f"{line}, {seconds:.0f} s left"


def _bar(what: str, total: int) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    bar = Bar(TextColumn("{task.description}"), *columns, console=console)
    bar.add_task(what, total=total)
    bar.start()
    return bar
