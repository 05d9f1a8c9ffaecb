"""Compiles the kernels of rounds in a thread, so that no step waits; until they are ready torch computes.

Compiling takes some 10 seconds, and with numba's cache less than one. `NUMBA_DISABLE_JIT=1` leaves all to torch.
"""

import atexit
import logging
import os
import threading
from importlib import import_module
from importlib.util import find_spec

from megatron_noloco.outer.host_kernels import Compiled, LeavingError, pool

_log = logging.getLogger(__name__)


class Compiler:
    """Compiles the kernels once in a process.

    A process that is forked meanwhile inherits locks that no thread of it opens: it stays with torch.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        os.register_at_fork(after_in_child=self._forked)
        atexit.register(self._leave)

    def start(self) -> None:
        """Begin to compile, unless that has begun."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=_compile, name="kernels", daemon=True)
                self._thread.start()

    def wait(self) -> bool:
        """Wait until the kernels are compiled, if that has begun; return whether there are any."""
        if self._thread is not None and self._thread.is_alive():
            self._thread.join()
        return Compiled.kernels is not None

    def _forked(self) -> None:
        self._lock = threading.Lock()  # in the child the thread counts as ended
        pool.cache_clear()

    def _leave(self) -> None:
        """Wait for the kernel that is being compiled: the interpreter must not end while LLVM works."""
        Compiled.leaving.set()
        self.wait()


def _compile() -> None:
    if find_spec("numba") is None or os.environ.get("NUMBA_DISABLE_JIT", "0") != "0":
        return
    try:
        Compiled.kernels = import_module("megatron_noloco.outer.kernels")
    except LeavingError:
        pass
    except Exception as error:  # numba for another numpy, a full disk: torch computes the same, slower
        _log.warning("torch computes the rounds, since numba failed: %s", str(error).partition("\n")[0])


compiler = Compiler()
