"""The fault bench: a full disk, and a death at any touch of a folder."""

import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_TOUCHES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


@contextmanager
def full_disk(file_bytes: int = 1000) -> Iterator[None]:
    """Let the system refuse to write more than this into any file of this process (EFBIG)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def die_at_touch(place: str, touch: int, milliseconds: float = 0.0) -> None:
    """Have SIGKILL end this process at the n-th touch of a path with `place` in it, or some milliseconds later."""
    left = touch

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if left > 0 and event in _TOUCHES and place in str(arguments[0]):
            left -= 1
            if left:
                return
            if milliseconds:
                threading.Timer(milliseconds / 1000, os.kill, (os.getpid(), signal.SIGKILL)).start()
            else:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def is_killed(place: str, touch: int, function: Callable[[], object]) -> bool:
    """Call a function in a forked process that dies at a touch; returns whether it died before its end."""
    child = os.fork()
    if not child:
        die_at_touch(place, touch)
        try:
            function()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)
