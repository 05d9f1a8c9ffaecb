"""The arithmetic of a bucket that is exchanged in codes (payload.py), without its messages.

A bucket is coded digit by digit. Its blocks are all *open* at first. After each digit those stay open in which a
difference was larger than the digits so far hold; of the others the mean is known. What DIGITS digits do not hold
is left over, as are the blocks that are not to be coded. A GPU runs as many kernels however many blocks are open.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_noloco.outer.finite_mean import ExchangeReport
from megatron_noloco.outer.payload import (
    BLOCK,
    CELLS,
    Blocks,
    Codec,
    Coded,
    Found,
    Received,
    UnequalError,
    blocks_in,
    in_blocks,
    wide_type,
    write,
)
from megatron_noloco.outer.vectors import HOST, NOTHING, Buffers, Ranges
from megatron_noloco.outer.weights import wait_for

DIGITS = 2


@dataclass(frozen=True)
class Code:
    """Says how a bucket is coded.

    Attributes:
        signs: of the sketches.
        coded: which blocks are, bool of shape [blocks], in host memory; the others are exact.
        others: number of the other members.
        rounding: to be filled with what the mean leaves out, beside the bucket; None: nothing is kept.
        mean: to be filled with the mean, beside the bucket; None: the bucket itself is.
    """

    codec: Codec
    signs: Tensor
    coded: Tensor
    others: int = 1
    rounding: Tensor | None = None
    mean: Tensor | None = None


def blocks_to_code(bucket: range, exact: Ranges) -> Tensor:
    """Return which blocks of a bucket have no element in the exact ranges, bool of shape [blocks].

    Args:
        bucket: its elements, counted as those of `exact` are.
    """
    coded = torch.ones(blocks_in(len(bucket)), dtype=torch.bool, device=HOST)
    for start, stop in exact:
        coded[max(0, start - bucket.start) // BLOCK : max(0, blocks_in(stop - bucket.start))] = False
    return coded


class BucketCode:
    """Sketches a bucket, codes its open blocks, forms their mean, and notes which of them the codes hold.

    Args:
        part: of which blocks the other members send their codes.

    Attributes:
        sketches: of the bucket, fp32 of shape [blocks, CELLS], in host memory, as all messages are.
        their_sketches: of `part` by each other member, to be filled.
        mean: of the bucket; complete when no block is open and `fill` has been called.
        numbers: of the open blocks, in host memory; the following attributes are of these, in their order.
        digits: how many digits have been sent, with the next one.
        steps: fp32; to be filled before the first `encode`, those of `part` by `find_steps`.
        part: of which blocks the other members send their codes.
        theirs: codes of the other members, to be filled.
        held: bool, whether the codes hold all differences of a block.
    """

    def __init__(
        self, bucket: Tensor, code: Code, part: slice, buffers: Buffers, report: ExchangeReport
    ) -> None:
        self.codec, self._code = code.codec, code
        self._bucket, self._part, self._buffers, self._report = bucket, part, buffers, report
        blocks, width = len(code.coded), part.stop - part.start
        self.sketches = buffers.get("sketches", torch.float32, blocks, CELLS)
        self.their_sketches = buffers.get("their sketches", torch.float32, code.others, width, CELLS)
        self.steps = buffers.get("steps", torch.float32, blocks)
        self.mean = bucket if code.mean is None else code.mean
        self.digits = 1
        self._left_over = torch.ones(blocks, dtype=torch.bool, device=HOST)
        self._missing = -len(bucket) % BLOCK  # elements of the last block
        self._sizes = torch.full((blocks,), BLOCK, dtype=torch.float32, device=HOST)
        self._sizes[-1] -= self._missing
        self._open(torch.arange(blocks, dtype=torch.int64, device=HOST), [[] for _ in range(code.others)])
        for at in self._pieces(slice(0, blocks)):
            self.codec.sketch(bucket[at.start * BLOCK : at.stop * BLOCK], code.signs, self.sketches[at])
        wait_for(bucket.device)

    def _open(self, numbers: Tensor, lower: list[list[Tensor]]) -> None:
        """Open the blocks of these numbers, of whose `part` the other members have sent the lower digits."""
        self.numbers = numbers
        self.part = self.within(self._part)
        self.held = torch.empty(len(numbers), dtype=torch.bool, device=HOST)
        width = self.part.stop - self.part.start
        self.theirs = [self._codes(f"their {member}", width) for member in range(len(lower))]
        self._digits = [[*digits, codes] for digits, (codes, _) in zip(lower, self.theirs, strict=True)]

    def _codes(self, name: str, blocks: int) -> Coded:
        codes = self._buffers.get(f"{name} codes", torch.uint8, blocks, self.codec.block_bytes)
        return codes, self._buffers.get(f"{name} checksums", torch.int32, blocks)

    def find_steps(self) -> None:
        """Fill `steps` of `part`. Call it before the first `encode`."""
        steps = self.steps[self.part]
        self.codec.find_steps([self.sketches[self.part], *self.their_sketches], steps)
        steps *= self._code.coded[self.part]

    def within(self, part: slice) -> slice:
        """Return which of the open blocks lie in a part of the bucket's blocks."""
        ends = torch.tensor([part.start, part.stop], dtype=torch.int64, device=HOST)
        return slice(*torch.searchsorted(self.numbers, ends).tolist())

    def encode(self) -> Coded:
        """Return the next digit of the open blocks, and the checksums, which are to be sent."""
        codes, checksums = self._codes("my", len(self.numbers))
        for at in self._pieces(self._all):
            self.codec.encode(self._blocks(at), self.digits - 1, (codes[at], checksums[at]))
        wait_for(self._bucket.device)
        return codes, checksums

    def left_over(self) -> Tensor:
        """Return the elements that the codes do not hold, in host memory; complete when no block is open."""
        numbers = self._left_over.nonzero().view(-1)
        if not len(numbers):
            return NOTHING
        rows = in_blocks(self._bucket)[self._here(numbers)].view(-1)
        elements = rows[: len(rows) - self._missing * int(self._left_over[-1])]
        return self._buffers.get("left over", torch.float32, len(elements)).copy_(elements)

    def fill(self, left_over: Tensor) -> None:
        """Fill in the mean of the elements that are left over."""
        rows, numbers = in_blocks(self._here(left_over)), self._here(self._left_over.nonzero().view(-1))
        write(rows, numbers, self.mean)
        if self._code.rounding is not None:
            write(torch.zeros_like(rows), numbers, self._code.rounding)

    @property
    def _all(self) -> slice:
        return slice(0, len(self.numbers))

    def _pieces(self, part: slice) -> Iterator[slice]:
        """Yield a part of the open blocks in pieces, of which the codec works on one at a time."""
        for start in range(part.start, part.stop, self.codec.at_once):
            yield slice(start, min(start + self.codec.at_once, part.stop))

    def _blocks(self, at: slice) -> Blocks:
        """Return some of the open blocks."""
        return Blocks(self._bucket, self._here(self.numbers[at]), self._here(self.steps[at]))

    def _received(self, at: slice) -> list[Received]:
        """Return what the other members have sent of some open blocks of `part`, where the bucket lies."""
        at = slice(at.start - self.part.start, at.stop - self.part.start)
        return [
            ([self._here(digit[at]) for digit in digits], self._here(checksums[at]))
            for digits, (_, checksums) in zip(self._digits, self.theirs, strict=True)
        ]

    def _here(self, part: Tensor) -> Tensor:
        """Return a part of a message where the bucket lies."""
        return part.to(self._bucket.device, non_blocking=True)

    def _note(self, at: slice, found: Found) -> None:
        """Fill `held` of some open blocks, and add them to the report, after a wait for the device.

        Raises UnequalError for vectors that differ in length.
        """
        right, unequal, squares = (one.to(HOST, non_blocking=True) for one in found)
        wait_for(self._bucket.device)
        if unequal:
            raise UnequalError
        self.held[at] = right
        steps, sizes = self.steps[at] * right, self._sizes[at] * right
        error = float(torch.dot(steps.square_(), sizes)) / 12
        self._report.squared_error += error
        self._report.squared_deviation += max(0.0, float(squares) - error)  # the rounding's own variance
        self._report.compared_elements += int(sizes.sum())

    def _next_digit(self) -> None:
        """Let the blocks be open whose differences the codes do not hold; none after the last digit."""
        missed = ~self.held
        self._left_over[self.numbers] = missed
        if self.digits == 1:
            self._report.resent_elements += int((self._sizes * missed).sum())
        elif self.digits == DIGITS:
            self.numbers = self.numbers[:0]
            return
        missed &= self.steps > 0
        stay, theirs = missed.nonzero().view(-1), missed[self.part].nonzero().view(-1)
        lower = [[digit[theirs] for digit in digits] for digits in self._digits]
        self.digits, self.steps, self._sizes = self.digits + 1, self.steps[stay], self._sizes[stay]
        self._open(self.numbers[stay], lower)


class PairCode(BucketCode):
    """Codes of a pair, which finds from the partner's the mean of both."""

    def __init__(self, bucket: Tensor, code: Code, buffers: Buffers, report: ExchangeReport) -> None:
        super().__init__(bucket, code, slice(0, len(code.coded)), buffers, report)

    def average(self) -> None:
        """Form the mean of the open blocks, and go on to the next digit of those that the codes do not hold.

        Raises UnequalError for vectors that differ in length.
        """
        for at in self._pieces(self._all):
            (theirs,) = self._received(at)
            self._note(at, self.codec.average(self._blocks(at), theirs, self.mean))
        self._next_digit()


class GroupCode(BucketCode):
    """Codes of a larger group, whose members each add up those of a part.

    Attributes:
        sums: of the open blocks, of `payload.wide_type`; those of the others' parts are to be filled, and `held`.
    """

    sums: Tensor

    def add_up(self) -> None:
        """Form the sums of the own part, and find which blocks the codes hold. Raises UnequalError."""
        dtype = wide_type(self.codec.bits * self.digits, 1 + self._code.others)
        self.sums = self._buffers.get(f"sums {self.digits}", dtype, len(self.numbers), BLOCK)
        for at in self._pieces(self.part):
            self._note(at, self.codec.sum_of(self._blocks(at), self._received(at), self.sums[at]))

    def average(self) -> None:
        """Form the mean of the blocks that the codes hold, and go on to the next digit of the others."""
        members, out = 1 + self._code.others, (self.mean, self._code.rounding)
        for at in self._pieces(self._all):
            sums = self._here(self.sums[at])
            self.codec.average_sums(self._blocks(at), self.held[at], sums, members, out)
        self._next_digit()
