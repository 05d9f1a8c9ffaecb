"""`payload.Codec` for vectors in host memory by `host_kernels`: each block in one pass.

A round codes its vector in some tens of operations of torch, each of which reads and writes memory. These have the
same bits. Only the variance for reports is added up in another order.
"""

from collections.abc import Callable, Sequence
from ctypes import CDLL, byref, c_double, c_float, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from megatron_noloco.outer.host_kernels import addresses, at, functions, in_parts
from megatron_noloco.outer.payload import STEPS_AT_ONCE, Codec, Coded, Found, Received, slices
from megatron_noloco.outer.vectors import HOST
from megatron_noloco.plans.payloads import keeps_rounding

_LEAST = 128  # blocks for which a thread pays


def codec_for(bits: int, device: torch.device = HOST) -> Codec:
    """Return the fastest codec for vectors on this device."""
    if (kernels := functions(device)) is None:
        return Codec(bits, device)
    return HostCodec(bits, kernels)


class HostCodec(Codec):
    """Works on vectors in host memory, in as many threads as torch's operations."""

    def __init__(self, bits: int, kernels: CDLL) -> None:
        super().__init__(bits)
        self._c = kernels

    def sketch(self, vector: Tensor, signs: Tensor, out: Tensor) -> None:
        """See `Codec`."""
        in_parts(self._c.sketch, len(out), _LEAST, _vector(vector), at(signs), at(out))

    def find_steps(self, sketches: Sequence[Tensor], out: Tensor) -> None:
        """See `Codec`."""
        rows = len(sketches), addresses(map(at, sketches)), c_float(self.range_in_steps(len(sketches)))
        for piece in slices(len(out), STEPS_AT_ONCE):
            self._c.find_steps(c_int64(piece.start), c_int64(piece.stop), *rows, at(out))

    def encode(self, vector: Tensor, steps: Tensor, digit: int, out: Coded) -> None:
        """See `Codec`."""
        coding = self.bits, digit, at(steps), at(self.weights)
        in_parts(self._c.encode, len(steps), _LEAST, _vector(vector), coding, map(at, out))

    def average(self, vector: Tensor, steps: Tensor, theirs: Received, out: Tensor) -> Found:
        """See `Codec`."""
        (low, high), checksums = _digits(theirs), theirs[1]
        coding = self.bits, at(steps), at(self.weights), low, high, at(checksums)
        return self._found(self._c.average, steps, (_vector(vector), coding, at(out)))

    def sum_of(self, vector: Tensor, steps: Tensor, others: Sequence[Received], out: Tensor) -> Found:
        """See `Codec`."""
        low, high = (addresses(column) for column in zip(*map(_digits, others), strict=True))
        checksums = addresses([at(checksums) for _, checksums in others])
        coding = self.bits, at(steps), at(self.weights), len(others), low, high, checksums
        sums = keeps_rounding(self.bits, 1 + len(others)), 8 * out.itemsize, at(out)
        return self._found(self._c.sum_of, steps, (_vector(vector), coding, sums))

    def average_sums(
        self, vector: Tensor, steps: Tensor, sums: Tensor, members: int, out: tuple[Tensor, Tensor | None]
    ) -> None:
        """See `Codec`."""
        coding = at(steps), 8 * sums.itemsize, at(sums), members, *map(at, out)
        in_parts(self._c.average_sums, len(steps), _LEAST, _vector(vector), coding)

    def _found(self, function: Callable[..., bool], steps: Tensor, arguments: tuple[Any, ...]) -> Found:
        right = torch.empty(len(steps), dtype=torch.bool, device=self.device)

        def part(*arguments: Any) -> tuple[bool, float]:
            variance = c_double()
            return function(*arguments, byref(variance)), variance.value

        unequal, variances = zip(*in_parts(part, len(steps), _LEAST, *arguments, at(right)), strict=True)
        variance = torch.tensor(sum(variances), dtype=torch.float64, device=self.device)
        return Found(right, torch.tensor(any(unequal), dtype=torch.bool, device=self.device), variance)


def _vector(tensor: Tensor) -> tuple[c_void_p, c_int64]:
    return at(tensor), c_int64(len(tensor))


def _digits(theirs: Received) -> tuple[c_void_p, c_void_p]:
    """Return where a member's digits lie, the lowest first."""
    low, *more = map(at, theirs[0])
    return low, more[0] if more else at(None)
