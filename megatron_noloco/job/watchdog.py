"""Threads that speak and act for a rank whose main thread may be blocked inside a library."""

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import torch.distributed as dist

from megatron_noloco.job import activity, failure, leaving
from megatron_noloco.job.failure import Failure
from megatron_noloco.job.waits import Wait, write_wait

ASK = signal.SIGUSR2
WRITE_SECONDS = 10.0  # a wait of so long is written down, and again after as long
_END_SECONDS = 5.0


class Watchdog:
    """Between entering and leaving it,

    - a rank that has stood still for `patience_seconds` says so in one line on stderr: what it was doing, and whom
      it waits for; and again each time that the wait has doubled;
    - so does every rank that receives SIGUSR2, at once;
    - a wait of 10 seconds, or of `patience_seconds` if that is less, is in the file `path` until it is over;
    - when another rank has failed, the process ends with that one's exit code and says nothing.

    To be entered by the main thread. It sends nothing: each rank tells of itself.

    Args:
        patience_seconds: 0: only who is asked says something.
        path: see `waits.wait_file`; None: of a rank that `watch` does not know.
    """

    def __init__(self, patience_seconds: float, path: Path | None) -> None:
        self._patience_seconds = patience_seconds
        self._reported = activity.now.state
        self._next_seconds = patience_seconds
        interval = min(WRITE_SECONDS, patience_seconds or WRITE_SECONDS)
        self._wait_file = None if path is None else _WaitFile(path, interval)
        self._failed: Failure | None = None  # another rank
        self._left = threading.Event()
        # The store may not answer: rank 0 holds it, and may be the one that stands still.
        self._threads = [
            threading.Thread(target=self._watch, name="watchdog", daemon=True),
            threading.Thread(target=self._follow, name="watchdog of the others", daemon=True),
        ]

    def __enter__(self) -> "Watchdog":
        # The main thread runs handlers only between two calls into libraries; this byte is written at once.
        self._woken, self._wakes = os.pipe()
        os.set_blocking(self._wakes, False)
        self._handler_before = signal.signal(ASK, lambda *_: None)
        self._wakes_before = signal.set_wakeup_fd(self._wakes, warn_on_full_buffer=False)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(self._wakes_before)
        signal.signal(ASK, self._handler_before)
        self._left.set()
        os.close(self._wakes)
        for thread in self._threads:
            thread.join(_END_SECONDS)
        self._close_wait_file()

    def _watch(self) -> None:
        while True:
            if select.select([self._woken], [], [], failure.LOOK_SECONDS)[0]:
                signals = os.read(self._woken, 4096)
                if not signals:
                    os.close(self._woken)
                    return
                if ASK in signals:
                    _say(activity.now.state)
            self._look_at_own_rank()
            if self._failed is not None:
                self._close_wait_file()
                _leave_quietly(self._failed)

    def _follow(self) -> None:
        while self._failed is None and not self._left.wait(failure.LOOK_SECONDS):
            self._failed = _failed_elsewhere()

    def _look_at_own_rank(self) -> None:
        state = activity.now.state
        if state is not self._reported:
            self._reported, self._next_seconds = state, self._patience_seconds
        if self._patience_seconds and time.monotonic() - state.since >= self._next_seconds:
            self._next_seconds *= 2
            _say(state)
        if self._wait_file is not None:
            self._wait_file.update(state)

    def _close_wait_file(self) -> None:
        if self._wait_file is not None:
            self._wait_file.close()


class _WaitFile:
    """Says that the rank stands still, as long as it does.

    Other threads write and remove it: what stands still may be the file system.
    """

    def __init__(self, path: Path, interval_seconds: float) -> None:
        self._path, self._interval_seconds = path, interval_seconds
        self._next_seconds = interval_seconds
        self._state = activity.now.state  # what was looked at last
        self._there = False
        self._work = threading.Thread()

    def update(self, state: activity.State) -> None:
        """At every look at the rank."""
        if self._work.is_alive():
            return
        if state is not self._state:
            self._state, self._next_seconds = state, self._interval_seconds
            self._remove()
        wait = _wait(state)
        if wait.seconds >= self._next_seconds:
            self._next_seconds = wait.seconds + self._interval_seconds
            self._there = True
            self._begin(lambda: write_wait(self._path, wait))

    def close(self) -> None:
        """The rank leaves."""
        self._join()
        self._remove()
        self._join()

    def _remove(self) -> None:
        if self._there:
            self._there = False
            self._begin(lambda: self._path.unlink(missing_ok=True))

    def _begin(self, work: Callable[[], None]) -> None:
        def run() -> None:
            with suppress(OSError):  # a full disk is no reason to say so here
                work()

        self._join()
        self._work = threading.Thread(target=run, daemon=True)
        self._work.start()

    def _join(self) -> None:
        if self._work.ident is not None:
            self._work.join(_END_SECONDS)


def _wait(state: activity.State) -> Wait:
    return Wait(activity.now.who, str(state), time.monotonic() - state.since)


def _say(state: activity.State) -> None:
    sys.stderr.write(f"{_wait(state)}\n")
    sys.stderr.flush()


def _failed_elsewhere() -> Failure | None:
    if not dist.is_initialized():
        return None
    try:
        failed = failure.announced()
    except RuntimeError:  # the store is gone, and rank 0 with it: the launcher's business
        return None
    return None if failed is None or failure.is_own(failed) else failed


def _leave_quietly(failed: Failure) -> None:
    time.sleep(leaving.GRACE_SECONDS)
    failure.serve_the_others()
    sys.stdout.flush()
    os._exit(failed.exit_code)
