"""The choice between torch and compiled kernels (`kernels.py`) for vectors in host memory.

Both give the same bits, so a rank may begin with torch, and go on with kernels once these are compiled
(`compiling`). Ranks with and without numba may work together.
"""

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, wraps
from itertools import pairwise
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import torch

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_log = logging.getLogger(__name__)


class Compiled:
    """Holds the compiled kernels of this process.

    Attributes:
        kernels: their module; None until they are compiled, and where numba is missing.
        leaving: whether the process ends, and nothing more is to be compiled.
    """

    kernels: ModuleType | None = None
    leaving = threading.Event()


class LeavingError(Exception):
    """Raised in place of compiling a kernel when the process ends."""


def stop_if_leaving() -> None:
    """Raise LeavingError when the process ends."""
    if Compiled.leaving.is_set():
        raise LeavingError


@cache
def without_cache() -> None:
    """Say once that the kernels are compiled in every process."""
    _log.warning(
        "numba finds no folder that it may write to: the kernels of rounds are compiled at every start, "
        "in some 10 seconds beside the first steps; NUMBA_CACHE_DIR can name a folder"
    )


def has_kernel(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Let the kernel of the same name do the work for vectors in host memory, once it is compiled.

    The device is that of the first argument; an argument without a device, such as a list, is in host memory.
    """
    name = function.__name__.lstrip("_")

    @wraps(function)
    def chosen(*arguments: _Arguments.args, **named: _Arguments.kwargs) -> _Result:
        device = getattr(arguments[0], "device", None)
        if Compiled.kernels is None or (device is not None and device.type != "cpu"):
            return function(*arguments, **named)
        result: _Result = getattr(Compiled.kernels, name)(*arguments, **named)
        return result

    return chosen


@cache
def pool() -> ThreadPoolExecutor:
    """Return threads for kernels, which hold no lock of the interpreter."""
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="kernels")


def in_parts(kernel: Callable[..., Any], count: int, least: int, *arguments: Any) -> list[Any]:
    """Call kernel(begin, end, *arguments) for parts of 0..count, in as many threads as torch uses.

    Args:
        least: elements for which a thread pays; the parts begin at multiples of it.

    Returns the results, in the order of the parts.
    """
    threads = max(1, min(torch.get_num_threads(), count // least))
    bounds = [count * part // threads // least * least for part in range(threads)] + [count]
    if threads == 1:
        return [kernel(0, count, *arguments)]
    return list(pool().map(lambda ends: kernel(*ends, *arguments), pairwise(bounds)))
