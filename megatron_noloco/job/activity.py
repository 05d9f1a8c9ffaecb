"""What this process is doing at the moment, for tracebacks and for the watchdog.

A process computes one thing at a time, so there is one activity, `now`. Every package may write it, also
without torch; a part costs a microsecond.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class State(NamedTuple):
    """A `part` of `what` the process is doing, begun at `since` (time.monotonic)."""

    what: str
    part: str
    since: float

    def __str__(self) -> str:
        return f"{self.what}: {self.part}" if self.part else self.what


class Activity:
    """What one process is doing; written by its main thread, read by any.

    Attributes:
        who: the rank, its host and its place, as far as they are known.
        state: what the rank is doing; a new object for everything that it begins.
    """

    def __init__(self) -> None:
        self.who = "this process"
        self.state = State("starting", "", time.monotonic())

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Set what the rank is doing inside the block. An exception gets a note with it, and with who did it."""
        before = self.state
        self.state = State(what, "", time.monotonic())
        try:
            yield
        except Exception as error:
            error.add_note(f"{self.who} was {self.state}")
            raise
        finally:
            self.state = State(before.what, before.part, time.monotonic())

    def part(self, part: str) -> None:
        """Set the part of it that begins now."""
        self.state = State(self.state.what, part, time.monotonic())


now = Activity()


def note_of(error: BaseException) -> str:
    """Return who was doing what when `error` was raised."""
    return next(iter(getattr(error, "__notes__", ())), f"{now.who} was {now.state}")
