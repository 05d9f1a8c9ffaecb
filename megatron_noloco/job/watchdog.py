"""Threads that speak and act for a rank whose main thread may be blocked inside a library."""

import os
import select
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from megatron_noloco.job import activity, leaving
from megatron_noloco.job.leaving import Failure
from megatron_noloco.job.run_folder import Wait, write_wait

ASK = signal.SIGUSR2
WRITE_SECONDS = 10.0  # a wait of this length is written to the file, and again after each further one
_END_SECONDS = 5.0


class Watchdog:
    """Watches over the main thread between entering and leaving it.

    - A rank that has stood still for `patience_seconds` says so in one line on stderr: what it was doing, and
      for which rank it waits; and again each time that the wait has doubled.
    - A rank that receives SIGUSR2 does so at once.
    - A wait of 10 seconds, or of `patience_seconds` if that is less, is in the file `path` until it is over.
    - When another rank has failed, the process ends with that rank's exit code and without a message.

    To be entered by the main thread. It sends nothing to other ranks.

    Args:
        patience_seconds: 0: a rank says something only when it receives SIGUSR2.
        path: see `run_folder.wait_file`; None for a rank that `watch` does not know.
    """

    def __init__(self, patience_seconds: float, path: Path | None) -> None:
        self._patience_seconds = patience_seconds
        self._reported = activity.now.state
        self._next_seconds = patience_seconds
        self._failed: Failure | None = None  # that of another rank
        self._left = threading.Event()
        # The store may not answer, since rank 0 has it; nor may the file system. So each has a thread.
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._watch, self._follow)]
        if path is not None:
            file = WaitFile(path, min(WRITE_SECONDS, patience_seconds or WRITE_SECONDS))
            self._threads.append(threading.Thread(target=file.keep, args=(self._left,), daemon=True))

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

    def _watch(self) -> None:
        while True:
            if select.select([self._woken], [], [], leaving.LOOK_SECONDS)[0]:
                signals = os.read(self._woken, 4096)
                if not signals:
                    os.close(self._woken)
                    return
                if ASK in signals:
                    _say(activity.now.state)
            self._look_at_own_rank()
            if self._failed is not None:
                self._leave_quietly(self._failed)

    def _look_at_own_rank(self) -> None:
        state = activity.now.state
        if state is not self._reported:
            self._reported, self._next_seconds = state, self._patience_seconds
        if self._patience_seconds and time.monotonic() - state.since >= self._next_seconds:
            self._next_seconds *= 2
            _say(state)

    def _follow(self) -> None:
        """Look for the failure of another rank."""
        while self._failed is None and not self._left.wait(leaving.LOOK_SECONDS):
            with suppress(RuntimeError):  # the store is gone, and rank 0 with it: the launcher ends this rank
                found = leaving.announced_failure()
                self._failed = None if found is None or found.is_own else found

    def _leave_quietly(self, failed: Failure) -> None:
        self._left.set()
        for thread in self._threads[2:]:  # the wait is removed
            thread.join(_END_SECONDS)
        time.sleep(leaving.GRACE_SECONDS)
        leaving.serve_the_others()
        sys.stdout.flush()
        os._exit(failed.exit_code)


class WaitFile:
    """Says in a file that the rank stands still, as long as it does."""

    def __init__(self, path: Path, interval_seconds: float) -> None:
        self._path, self._interval_seconds = path, interval_seconds
        self._next_seconds = interval_seconds
        self._state = activity.now.state  # what was looked at last
        self._there = False

    def keep(self, left: threading.Event) -> None:
        """Look at the rank again and again until it has left."""
        while not left.wait(leaving.LOOK_SECONDS):
            self.update()
        self._remove()

    def update(self) -> None:
        """Look at the rank once: write its wait, write it again, or remove it."""
        state = activity.now.state
        if state is not self._state:
            self._state, self._next_seconds = state, self._interval_seconds
            self._remove()
        wait = _wait(state)
        if wait.seconds >= self._next_seconds:
            self._next_seconds = wait.seconds + self._interval_seconds
            self._there = True
            with suppress(OSError):  # a full disk is no reason to say so here
                write_wait(self._path, wait)

    def _remove(self) -> None:
        if self._there:
            self._there = False
            with suppress(OSError):
                self._path.unlink(missing_ok=True)


def _wait(state: activity.State) -> Wait:
    return Wait(activity.now.who, str(state), time.monotonic() - state.since)


def _say(state: activity.State) -> None:
    sys.stderr.write(f"{_wait(state)}\n")
    sys.stderr.flush()
