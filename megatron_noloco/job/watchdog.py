"""A thread that speaks and acts for a rank whose main thread may be blocked inside a library."""

import os
import select
import signal
import sys
import threading
import time
from types import TracebackType

import torch.distributed as dist

from megatron_noloco import activity
from megatron_noloco.job import failure
from megatron_noloco.job.failure import Failure

ASK = signal.SIGUSR2
_END_SECONDS = 5.0


class Watchdog:
    """Between entering and leaving it,

    - a rank that has stood still for `patience_seconds` says so in one line on stderr: what it was doing, and whom
      it waits for; and again each time that the wait has doubled;
    - so does every rank that receives SIGUSR2, at once;
    - when another rank has failed, the process ends with that one's exit code and says nothing.

    To be entered by the main thread. It sends nothing: each rank tells of itself.

    Args:
        patience_seconds: 0: only who is asked says something.
    """

    def __init__(self, patience_seconds: float) -> None:
        self._patience_seconds = patience_seconds
        self._reported = activity.now.state
        self._next_seconds = patience_seconds
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        # The main thread runs handlers only between two calls into libraries; this byte is written at once.
        self._woken, self._wakes = os.pipe()
        os.set_blocking(self._wakes, False)
        self._handler_before = signal.signal(ASK, lambda *_: None)
        self._wakes_before = signal.set_wakeup_fd(self._wakes, warn_on_full_buffer=False)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(self._wakes_before)
        signal.signal(ASK, self._handler_before)
        os.close(self._wakes)  # ends the thread, unless it waits for a store whose host no longer answers
        self._thread.join(_END_SECONDS)

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
            failed = _failed_elsewhere()
            if failed is not None:
                _leave_quietly(failed)

    def _look_at_own_rank(self) -> None:
        state = activity.now.state
        if state is not self._reported:
            self._reported, self._next_seconds = state, self._patience_seconds
        if self._patience_seconds and time.monotonic() - state.since >= self._next_seconds:
            self._next_seconds *= 2
            _say(state)


def _say(state: activity.State) -> None:
    seconds = time.monotonic() - state.since
    sys.stderr.write(f"{activity.now.who} has stood still for {seconds:.0f} s {state}\n")
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
    time.sleep(failure.GRACE_SECONDS)
    failure.serve_the_others()
    sys.stdout.flush()
    os._exit(failed.exit_code)
