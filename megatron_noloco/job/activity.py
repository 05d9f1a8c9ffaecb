"""What this process is doing: for the end of a traceback, and for whoever asks why it stands still.

A process computes one thing at a time, so there is one activity, `now`. Every package may write it; to note a part
costs a microsecond.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class State(NamedTuple):
    """`part` of `what`, begun at `since` (time.monotonic)."""

    what: str
    part: str
    since: float

    def __str__(self) -> str:
        return f"{self.what}: {self.part}" if self.part else self.what


class Activity:
    """Written by the main thread, read by any.

    Attributes:
        who: the rank, its host and its place, as far as they are known.
        state: what it is doing; another object as soon as it does something else.
    """

    def __init__(self) -> None:
        self.who = "this process"
        self.state = State("starting", "", time.monotonic())

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """An exception that leaves it has a note that tells who was doing what."""
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
        """From here on it does this part of it."""
        self.state = State(self.state.what, part, time.monotonic())


now = Activity()


def told(error: BaseException) -> str:
    """Who was doing what when it was raised."""
    return next(iter(getattr(error, "__notes__", ())), f"{now.who} was {now.state}")
