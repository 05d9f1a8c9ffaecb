"""`payload.Codec` for vectors in host memory by `host_kernels`: each block in one pass.

A round codes its vector in some tens of operations of torch, each of which reads and writes memory. These have the
same bits. Only the variance for reports is added up in another order.
"""

import sys
from collections.abc import Callable, Sequence
from ctypes import CDLL, byref, c_double, c_float, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from megatron_noloco.outer.host_kernels import addresses, at, functions, in_parts
from megatron_noloco.outer.payload import Blocks, Codec, Coded, Found, Received
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
        self.at_once = sys.maxsize
        self._c = kernels

    def sketch(self, vector: Tensor, signs: Tensor, out: Tensor) -> None:
        """See `Codec`."""
        in_parts(self._c.sketch, len(out), _LEAST, at(vector), c_int64(len(vector)), at(signs), at(out))

    def find_steps(self, sketches: Sequence[Tensor], out: Tensor) -> None:
        """See `Codec`."""
        units = c_float(self.range_in_steps(len(sketches)))
        self._c.find_steps(c_int64(len(out)), len(sketches), addresses(map(at, sketches)), units, at(out))

    def encode(self, blocks: Blocks, digit: int, out: Coded) -> None:
        """See `Codec`."""
        self._in_parts(self._c.encode, blocks, self.bits, digit, at(self.weights), *map(at, out))

    def average(self, blocks: Blocks, theirs: Received, out: Tensor) -> Found:
        """See `Codec`."""
        coding = self.bits, at(self.weights), *_digits(theirs), at(theirs[1])
        return self._found(self._c.average, blocks, *coding, at(out))

    def sum_of(self, blocks: Blocks, others: Sequence[Received], out: Tensor) -> Found:
        """See `Codec`."""
        low, high = (addresses(column) for column in zip(*map(_digits, others), strict=True))
        checksums = addresses([at(checksums) for _, checksums in others])
        coding = self.bits, at(self.weights), len(others), low, high, checksums
        limited = keeps_rounding(self.bits, 1 + len(others))
        return self._found(self._c.sum_of, blocks, *coding, limited, 8 * out.itemsize, at(out))

    def average_sums(
        self, blocks: Blocks, held: Tensor, sums: Tensor, members: int, out: tuple[Tensor, Tensor | None]
    ) -> None:
        """See `Codec`."""
        summed = at(held), 8 * sums.itemsize, at(sums), members
        self._in_parts(self._c.average_sums, blocks, *summed, *map(at, out))

    def _in_parts(self, function: Callable[..., Any], blocks: Blocks, *arguments: Any) -> list[Any]:
        vector, numbers, steps = blocks
        given = at(vector), c_int64(len(vector)), at(numbers), at(steps)
        return in_parts(function, len(numbers), _LEAST, *given, *arguments)

    def _found(self, function: Callable[..., bool], blocks: Blocks, *arguments: Any) -> Found:
        right = torch.empty(len(blocks.numbers), dtype=torch.bool, device=HOST)

        def part(*arguments: Any) -> tuple[bool, float]:
            variance = c_double()
            return function(*arguments, byref(variance)), variance.value

        found = self._in_parts(part, blocks, *arguments, at(right))
        unequal, variances = zip(*found, strict=True)
        return Found(
            right,
            torch.tensor(any(unequal), dtype=torch.bool, device=HOST),
            torch.tensor(sum(variances), dtype=torch.float64, device=HOST),
        )


def _digits(theirs: Received) -> tuple[c_void_p, c_void_p]:
    """Return where a member's digits lie, the lowest first."""
    low, *more = map(at, theirs[0])
    return low, more[0] if more else at(None)
