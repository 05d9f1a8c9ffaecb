"""Keeps what this process is doing at the moment, for tracebacks and for the watchdog.

There is one activity per process, `now`. This file imports no torch, and a call of `part` takes a microsecond.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple


class State(NamedTuple):
    """Says what a process is doing, which part of that, and since when (time.monotonic).

    The part may be a function, which is called when the state is shown, by any thread.
    """

    what: str
    part: str | Callable[[], str]
    since: float

    def __str__(self) -> str:
        part = self.part() if callable(self.part) else self.part
        return f"{self.what}: {part}" if part else self.what


class Activity:
    """Keeps what one process is doing; set by its main thread, read by all threads.

    Attributes:
        who: the rank, its host and its place, as far as they are known.
        state: what the rank is doing; a new object each time that it begins something else.
        signals: numbers of those that have come, also while the main thread is inside a library, which keeps
            Python from calling their handlers.
    """

    def __init__(self) -> None:
        self.who = "this process"
        self.state = State("starting", "", time.monotonic())
        self.signals: set[int] = set()

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Set what the rank is doing inside the block. Adds a note with this and the rank to an exception."""
        before = self.state
        self.state = State(what, "", time.monotonic())
        try:
            yield
        except Exception as error:
            error.add_note(f"{self.who} was {self.state}")
            raise
        finally:
            self.state = State(before.what, before.part, time.monotonic())

    def part(self, part: str | Callable[[], str]) -> None:
        """Set the part that begins now of what the rank is doing."""
        self.state = State(self.state.what, part, time.monotonic())


now = Activity()


def note_of(error: BaseException) -> str:
    """Return which rank was doing what when `error` was raised."""
    return next(iter(getattr(error, "__notes__", ())), f"{now.who} was {now.state}")


def line_of(error: BaseException) -> str:
    """Return the message of an error as one line."""
    return " ".join(str(error).split())
