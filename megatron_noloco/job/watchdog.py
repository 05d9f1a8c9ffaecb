"""Reports and ends a rank whose main thread is blocked inside a library, by threads of its own."""

import os
import select
import signal
import sys
import threading
import time
from contextlib import suppress
from types import TracebackType

from megatron_noloco.job import activity, leaving
from megatron_noloco.job.leaving import Failure

_REPORT = signal.SIGUSR2
_JOIN_SECONDS = 5.0


class Watchdog:
    """Watches the main thread, which must enter it as a context. Sends nothing to other ranks.

    - A rank that has stood still for `patience_seconds` reports in one line on stderr what it is doing and for
      which rank it waits; and again each time that the wait has doubled.
    - A rank that receives SIGUSR2 reports this at once. Other signals are noted in `activity.now`.
    - When another rank has failed, the process ends with that rank's exit code and without a message.

    Args:
        patience_seconds: with 0 a rank reports only when it receives SIGUSR2.
    """

    def __init__(self, patience_seconds: float) -> None:
        self._patience_seconds = patience_seconds
        self._reported = activity.now.state
        self._next_seconds = patience_seconds
        self._failure: Failure | None = None  # of another rank
        self._left = threading.Event()
        # The store may block, so it has a thread of its own.
        targets = (self._watch, self._poll_failure)
        self._threads = [threading.Thread(target=target, daemon=True) for target in targets]

    def __enter__(self) -> "Watchdog":
        # Python runs handlers only between two calls into libraries, but writes a byte to this pipe at once.
        self._wakeup_read, self._wakeup_write = os.pipe()
        os.set_blocking(self._wakeup_write, False)
        self._handler_before = signal.signal(_REPORT, lambda *_: None)
        self._wakeup_before = signal.set_wakeup_fd(self._wakeup_write, warn_on_full_buffer=False)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        signal.signal(_REPORT, self._handler_before)
        self._left.set()
        os.close(self._wakeup_write)
        for thread in self._threads:
            thread.join(_JOIN_SECONDS)

    def _watch(self) -> None:
        while True:
            if select.select([self._wakeup_read], [], [], leaving.POLL_SECONDS)[0]:
                signals = os.read(self._wakeup_read, 4096)
                if not signals:
                    os.close(self._wakeup_read)
                    return
                activity.now.signals.update(signals)
                if _REPORT in signals:
                    _report(activity.now.state)
            self._report_long_wait()
            if self._failure is not None:
                self._leave_after(self._failure)

    def _report_long_wait(self) -> None:
        state = activity.now.state
        if state is not self._reported:
            self._reported, self._next_seconds = state, self._patience_seconds
        if self._patience_seconds and time.monotonic() - state.since >= self._next_seconds:
            self._next_seconds *= 2
            _report(state)

    def _poll_failure(self) -> None:
        """Poll the store until another rank has failed."""
        while self._failure is None and not self._left.wait(leaving.POLL_SECONDS):
            with suppress(RuntimeError):  # rank 0, which serves the store, has ended
                found = leaving.announced_failure()
                self._failure = None if found is None or found.is_own else found

    def _leave_after(self, failure: Failure) -> None:
        self._left.set()
        time.sleep(leaving.GRACE_SECONDS)
        leaving.keep_serving_store()
        sys.stdout.flush()
        os._exit(failure.exit_code)


def _report(state: activity.State) -> None:
    seconds = time.monotonic() - state.since
    sys.stderr.write(f"{activity.now.who} has stood still for {seconds:.0f} s {state}\n")
    sys.stderr.flush()
