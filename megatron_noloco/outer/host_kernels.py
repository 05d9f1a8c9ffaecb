"""Arithmetic of a round on fp32 vectors in host memory, in C (`host_kernels.c`), with the bits of torch's.

The C file is built when it is first needed, in a third of a second, and kept in the user's cache folder. Without
a compiler torch computes the same, in more time (`python -m tools.bench host`); ranks with and without it may work
together.
"""

import hashlib
import logging
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from ctypes import CDLL, Array, c_bool, c_double, c_float, c_int64, c_void_p
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from megatron_noloco.outer import step

_SOURCE = Path(__file__).with_suffix(".c")
_FLAGS = (
    *("-O3", "-march=native", "-shared", "-fPIC"),
    *("-ffp-contract=off", "-fwrapv"),  # no fused operations; integers wrap around
    *("-fno-math-errno", "-fno-trapping-math"),  # so that roundings become vector instructions
)
_LEAST = 1 << 16  # elements for which a thread pays
_log = logging.getLogger(__name__)


def combine(theta: Tensor, phi: Tensor, kept: Tensor | None, beta: float, gamma: float, out: Tensor) -> None:
    """Fill `out`, which may be theta, with c + kept (`step.combine`); all fp32, of one shape, on one device."""
    if (kernels := functions(out.device)) is None:
        step.combine(theta, phi, beta, gamma, out=out)
        if kept is not None:
            out.add_(kept)
    else:
        numbers = c_float(beta), c_float(gamma - beta), at(out)
        in_parts(kernels.combine, len(out), _LEAST, at(theta), at(phi), at(kept), numbers)


def outer_step(
    phi: Tensor,
    delta: Tensor | None,
    mean_c: Tensor,
    method: tuple[float, float, bool],
    snapshot: Tensor | None = None,
    theta: Tensor | None = None,
) -> None:
    """Do `step.outer_step` in place; all tensors have one shape and device, and no memory in common.

    Args:
        delta: None without momentum, which is then 0.
        method: alpha, gamma, nesterov.
        snapshot: theta_s, which becomes the correction phi - theta_s.
        theta: becomes phi.
    """
    if (kernels := functions(phi.device)) is None:
        delta = torch.zeros_like(phi) if delta is None else delta
        step.outer_step(phi, delta, mean_c, *method, out=(phi, delta))
        if snapshot is not None:
            torch.sub(phi, snapshot, out=snapshot)
        if theta is not None:
            theta.copy_(phi)
    else:
        alpha, gamma, nesterov = method
        vectors = map(at, (mean_c, phi, delta, snapshot, theta))
        numbers = c_float(alpha), c_float(gamma), c_bool(nesterov)
        in_parts(kernels.outer_step, len(phi), _LEAST, vectors, numbers)


def squared_distance(one: Tensor, two: Tensor) -> float:
    """Return the sum of squares of the difference; infinite or NaN where fp32 does not hold it."""
    if (kernels := functions(one.device)) is None:
        apart = one - two
        return float(torch.dot(apart, apart))
    return c_float(sum(in_parts(kernels.squared_distance, len(one), _LEAST, at(one), at(two)))).value


def halve(one: Tensor, two: Tensor, out: Tensor) -> None:
    """Fill `out`, which may be one of the vectors, with their mean."""
    if (kernels := functions(out.device)) is None:
        torch.add(one, two, out=out).mul_(0.5)
    else:
        in_parts(kernels.halve, len(out), _LEAST, at(one), at(two), at(out))


def mean_of_group(members: Sequence[Tensor], out: Tensor) -> float:
    """Fill `out`, none of the members, with their mean; return the sum of the squares of the differences to it."""
    if (kernels := functions(out.device)) is None:
        mean_of_rows(members, out)
        differences = (member - out for member in members)  # torch.var along this axis is 40 times as slow
        return sum(float(torch.dot(one, one)) for one in differences)
    vectors = len(members), addresses(map(at, members)), at(out)
    return c_float(sum(in_parts(kernels.mean_of_group, len(out), _LEAST, vectors))).value


def mean_of_rows(rows: Sequence[Tensor], out: Tensor) -> Tensor:
    """Fill `out`, row by row: `torch.mean` adds the last elements in another order than the others."""
    out.copy_(rows[0])
    for row in rows[1:]:
        out.add_(row)
    return out.div_(len(rows))


def at(tensor: Tensor | None) -> c_void_p:
    """Return where a tensor lies, which must be contiguous; None is NULL."""
    if tensor is None:
        return c_void_p(None)
    assert tensor.is_contiguous()
    return c_void_p(tensor.data_ptr())


def addresses(places: Iterable[c_void_p]) -> Array[c_void_p]:
    """Return an array of places."""
    numbers = [place.value for place in places]
    return (c_void_p * len(numbers))(*numbers)


def in_parts(function: Callable[..., Any], count: int, least: int, *arguments: Any) -> list[Any]:
    """Call function(begin, end, ...) for parts of 0..count, in as many threads as torch's operations.

    Args:
        least: of a part.
        arguments: may be in tuples.

    Returns the results.
    """
    flat = [one for given in arguments for one in (given if isinstance(given, (tuple, map)) else (given,))]
    threads = max(1, min(torch.get_num_threads(), count // least))
    bounds = [count * part // threads for part in range(threads + 1)]
    parts = [(c_int64(begin), c_int64(end)) for begin, end in pairwise(bounds)]
    if threads == 1:
        return [function(*parts[0], *flat)]
    return list(_threads().map(lambda part: function(*part, *flat), parts))


@cache
def _threads() -> ThreadPoolExecutor:
    os.register_at_fork(after_in_child=_threads.cache_clear)
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="kernels")


def functions(device: torch.device) -> CDLL | None:
    """Return the C functions for vectors on this device, if there are any."""
    return _library() if device.type == "cpu" else None


@cache
def _library() -> CDLL | None:
    """Return the C functions; None, with a line, where they cannot be built."""
    try:
        library = _load()
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        _log.warning(
            "no C compiler could be used, so torch computes rounds in host memory, more slowly: %s",
            said.strip().partition("\n")[0],
        )
        return None
    for function in (library.average, library.sum_of):
        function.restype = c_bool
    for function in (library.squared_distance, library.mean_of_group):
        function.restype = c_double
    return library


def _load() -> CDLL:
    """Return the library for this processor and compiler. Raises OSError, RuntimeError, SubprocessError."""
    compiler = [*shlex.split(os.environ.get("CC") or "cc"), *_FLAGS]
    # What the compiler knows of this processor, and its own version
    facts = _run(*compiler, "-dM", "-E", "-x", "c", os.devnull)
    recipe = "\0".join([_SOURCE.read_text(), *compiler, facts])
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    kept = caches / "megatron_noloco" / "code" / f"{hashlib.sha256(recipe.encode()).hexdigest()[:24]}.so"
    with suppress(OSError):
        return CDLL(str(kept))
    with TemporaryDirectory() as folder:
        built = Path(folder) / kept.name
        _run(*compiler, "-o", str(built), str(_SOURCE), "-lm")
        with suppress(OSError):  # where this user may not write, each process builds it
            kept.parent.mkdir(parents=True, exist_ok=True)
            copy = shutil.copyfile(built, kept.with_suffix(f".{os.getpid()}"))
            built = copy.replace(kept)
        return CDLL(str(built))


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
