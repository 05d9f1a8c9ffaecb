"""A command of the user that tells whether this machine is about to be taken away."""

import os
import signal
import subprocess
import time
from collections.abc import Callable

_EVERY_SECONDS, _LONGEST_SECONDS = 5.0, 10.0


def notice_of(command: str | None) -> Callable[[], bool]:
    """Return what tells whether a command of the shell has ended with exit code 0, and runs it every 5 seconds.

    What is returned does not block. A command that takes more than 10 seconds is killed, and run again.

    Args:
        command: None: there is none, and never a notice.
    """
    return (lambda: False) if command is None else _Notice(command)


class _Notice:
    def __init__(self, command: str) -> None:
        self._command = command
        self._running: subprocess.Popen[bytes] | None = None
        self._began = float("-inf")

    def __call__(self) -> bool:
        now = time.monotonic()
        if self._running is None:
            if now - self._began >= _EVERY_SECONDS:
                self._began, self._running = now, self._run()
            return False
        code = self._running.poll()
        if code is None and now - self._began > _LONGEST_SECONDS:
            os.killpg(self._running.pid, signal.SIGKILL)
        if code is not None:
            self._running = None
        return code == 0

    def _run(self) -> subprocess.Popen[bytes]:
        nothing = subprocess.DEVNULL
        return subprocess.Popen(
            self._command, shell=True, start_new_session=True, stdin=nothing, stdout=nothing, stderr=nothing
        )
