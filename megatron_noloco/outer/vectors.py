"""Flat vectors: the memory they lie in, ranges of them, and the algorithm (`step`) applied to them in pieces."""

import math
import mmap
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress

import numpy as np
import torch
from torch import Tensor

from megatron_noloco.outer import host_kernels, step
from megatron_noloco.outer.finite_mean import MeanPiece
from megatron_noloco.outer.weights import Joined, Weights, wait_for
from megatron_noloco.settings import NolocoSettings

HOST = torch.device("cpu")
BUCKET = 1 << 21  # elements of a vector that are exchanged as one: 8 MiB
NOTHING = torch.empty(0, dtype=torch.float32, device=HOST)
_PORTABLE = 1  # cudaHostRegisterPortable
_AT_ONCE = 1 << 22  # elements formed at a time: few, long kernels of a GPU, and 16 MiB


def buffer(
    length: int, device: torch.device, dtype: torch.dtype = torch.float32, pinned: bool = True
) -> Tensor:
    """Return a new vector, in host memory in huge pages if the system has them: copies are then twice as fast.

    Beside an accelerator it is pinned as well.
    """
    if device.type != "cpu":
        return torch.empty(length, dtype=dtype, device=device)
    size = length * dtype.itemsize
    if pinned and torch.cuda.is_available():
        memory = _pinned(size)
    else:
        memory = torch.from_numpy(
            np.empty(max(1, size), np.uint8)
        )  # numpy asks for huge pages, torch does not
    return memory[:size].view(dtype)


def number_tensor(value: int | float) -> Tensor:
    """Return a number as torch's optimizers keep it, whatever the default dtype is."""
    dtype = torch.float32 if isinstance(value, float) else torch.int64
    return torch.tensor(value, dtype=dtype, device=HOST)


def _pinned(size: int) -> Tensor:
    """Return pinned bytes: `pin_memory` rounds up to a power of two and never gives them back."""
    size = max(1, size)
    pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    # After a fork, a write gives this process another page than the GPU has, unless the child gets none.
    pages.madvise(mmap.MADV_DONTFORK)
    memory = np.frombuffer(pages, np.uint8)
    failure = int(torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, size, _PORTABLE))
    if failure:
        raise MemoryError(f"{size:,} bytes of host memory could not be pinned: CUDA's error {failure}")
    weakref.finalize(memory, torch.cuda.cudart().cudaHostUnregister, memory.ctypes.data).atexit = False
    return torch.from_numpy(memory)


class Buffers:
    """Keeps named vectors that are reused from round to round.

    Args:
        pinned: see `buffer`.
    """

    def __init__(self, pinned: bool = True) -> None:
        self._pinned = pinned
        self._held: dict[str, Tensor] = {}

    def get(self, name: str, dtype: torch.dtype, *shape: int, device: torch.device = HOST) -> Tensor:
        """Return the vector of this name; it is allocated anew if it was shorter, of another type or elsewhere."""
        length = math.prod(shape)
        held = self._held.get(name)
        if held is None or len(held) < length or (held.dtype, held.device) != (dtype, device):
            held = self._held[name] = buffer(length, device, dtype, self._pinned)
        return held[:length].view(shape)

    def release(self) -> None:
        """Drop our references; messages in flight keep theirs. Waits for copies from and to a GPU."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._held.clear()


Ranges = Sequence[tuple[int, int]]
"""Elements start..stop of a vector; no two ranges overlap."""


class Spans:
    """Shows some ranges of a vector as a vector of their own, in the order given.

    Attributes:
        length: number of elements in all ranges.
    """

    def __init__(self, ranges: Ranges) -> None:
        self.ranges = ranges
        self._joined = Joined([range(*ends) for ends in ranges])
        self.length = self._joined.length

    def within(self, start: int, stop: int) -> Iterator[tuple[slice, slice]]:
        """Yield elements start..stop in pieces: the place of each in these ranges' vector and in the whole one."""
        for place, ours in self._joined.overlaps(start, stop - start):
            yield slice(start + ours.start, start + ours.stop), slice(place.start, place.stop)

    def gather(self, vector: Tensor, out: Tensor) -> Tensor:
        """Fill `out`, of `length` elements, from the whole vector."""
        for ours, place in self.within(0, self.length):
            out[ours] = vector[place]
        return out

    def scatter(self, ours: Tensor, out: Tensor) -> None:
        """Write the vector of these ranges to its places in the whole one, `out`."""
        for within, place in self.within(0, self.length):
            out[place] = ours[within]


class SideStream:
    """Runs work on a CUDA stream: on vectors that no local step reads or writes.

    These are slow weights, momentum, corrections, codes and means. The stream does the work in the order in which
    the host queued it, and the host runs ahead of it. On the stream of the local steps, each piece of a mean would
    wait for all local steps queued before. The kernels here are short and go first. The caller ensures
    (`wait_for`) that the local steps' stream has written what is read here. On a CPU all work is done when a call
    returns.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def used(self) -> AbstractContextManager[object]:
        """Queue the work inside on the stream."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def wait(self) -> None:
        """Wait for what is queued on the stream."""
        if self._stream is not None:
            self._stream.synchronize()


class OuterVectors:
    """Holds phi and delta of one rank, and applies `step` to ranges of them, piece by piece.

    Args:
        weights: theta.
        keeps_rounding: whether `rounding` is kept.

    Attributes:
        home: where slow weights, momentum and rounding errors lie.
        side: the stream of their arithmetic.
        slow_weights: phi, fp32, shape [weights.length].
        momentum: delta, likewise; None with alpha = 0, where nothing of it is kept.
        rounding: r, likewise, what the codes of the last rounds left out (`payload`); None where it is not kept.
    """

    def __init__(self, weights: Weights, settings: NolocoSettings, keeps_rounding: bool) -> None:
        self.weights = weights
        self.settings = settings
        self.home = weights.device if settings.slow_weights == "device" else HOST
        self.slow_weights = buffer(weights.length, self.home)
        weights.read_into(self.slow_weights)
        self.momentum = buffer(weights.length, self.home).zero_() if settings.outer_momentum else None
        self.rounding = buffer(weights.length, self.home).zero_() if keeps_rounding else None
        self.side = SideStream(self.home)

    @torch.no_grad()
    def combine(self, spans: Spans, combined: Tensor, snapshot: Tensor | None) -> None:
        """Fill `combined` with c of these ranges (c + r), formed where phi lies. On return it can be sent.

        Args:
            combined: shape [spans.length], on any device.
            snapshot: to be filled with theta_s, likewise, where phi lies; None for a round without delay.
        """
        beta, gamma = self.settings.outer_lr, self.settings.gamma
        parts, pieces = Joined(self.weights.parts()), [*self._pieces(spans, 0, spans.length)]
        copied = deque[torch.cuda.Event]()
        crosses, here = self.weights.device != self.home, combined if snapshot is None else snapshot
        if crosses:  # all pieces are under way to the host while the first are combined
            for ours, place in pieces:
                for theta, within in parts.overlaps(place.start, place.stop - place.start):
                    here[ours][within].copy_(theta, non_blocking=True)
                copied.append(torch.cuda.current_stream().record_event())
            parts = Joined([here])
        for ours, place in pieces:
            if crosses:
                copied.popleft().synchronize()
            for theta, within in parts.overlaps((ours if crosses else place).start, ours.stop - ours.start):
                phi, c = self.slow_weights[place][within], combined[ours][within]
                kept = None if self.rounding is None else self.rounding[place][within]
                fast = theta.to(phi.dtype)
                if here is snapshot and not crosses:
                    snapshot[ours][within].copy_(fast)
                piece = c if c.device == phi.device else torch.empty_like(phi)
                host_kernels.combine(fast, phi, kept, beta, gamma, out=piece)
                if piece is not c:
                    c.copy_(piece, non_blocking=True)
        wait_for(self.home)

    @torch.no_grad()
    def outer_step(self, spans: Spans, mean: MeanPiece, after: "Tensor | Joined[Tensor]") -> None:
        """Take the outer step of a piece.

        To be called inside `side.used()`; then it does not wait for local steps that are queued on an accelerator.
        There it is queued on return, and done where the mean has come from host memory: that may be overwritten.

        Args:
            after: a snapshot theta_s, shape [spans.length], where phi lies, which becomes the correction,
                phi - theta_s; or the fast weights, which become phi.
        """
        method = self.settings.outer_momentum, self.settings.gamma, self.settings.outer_nesterov
        for ours, place in self._pieces(spans, mean.start, mean.stop):
            phi = self.slow_weights[place]
            delta = None if self.momentum is None else self.momentum[place]
            c = mean.mean[ours.start - mean.start : ours.stop - mean.start].to(self.home, non_blocking=True)
            if isinstance(after, Tensor):
                host_kernels.outer_step(phi, delta, c, method, snapshot=after[ours])
                continue
            for theta, at in after.overlaps(place.start, len(phi)):
                direct = theta if (theta.dtype, theta.device) == (phi.dtype, phi.device) else None
                host_kernels.outer_step(
                    phi[at], None if delta is None else delta[at], c[at], method, theta=direct
                )
                if direct is None:
                    theta.copy_(phi[at], non_blocking=True)
        if mean.mean.device != self.home:
            self.side.wait()

    @torch.no_grad()
    def merge(self, spans: Spans, correction: Tensor) -> None:
        """Move the fast weights, where they lie, by the correction, of shape [spans.length]."""
        parts = Joined(self.weights.parts())
        for ours, place in self._pieces(spans, 0, spans.length):
            for theta, within in parts.overlaps(place.start, place.stop - place.start):
                shift = correction[ours][within].to(theta.device, non_blocking=True)
                step.merge(theta, shift, out=theta)
        self.refresh()

    def refresh(self) -> None:
        """Wait until the fast weights are written, before what they come from changes; then refresh them."""
        if self.home != self.weights.device:
            wait_for(self.weights.device)
        self.weights.refresh()

    def _pieces(self, spans: Spans, start: int, stop: int) -> Iterator[tuple[slice, slice]]:
        """Yield elements in pieces: their places in the vector of the ranges and in that of all weights."""
        for first in range(start, stop, _AT_ONCE):
            yield from spans.within(first, min(first + _AT_ONCE, stop))
