"""The arithmetic of a bucket that is exchanged in codes (payload.py), without its messages.

A bucket is coded digit by digit. Its blocks are all *open* at first. After each digit those stay open in which a
difference was larger than the digits so far hold; of the others the mean is known. What DIGITS digits do not hold
is left over, as are the blocks that are not to be coded.

The mean is formed for all open blocks at once, and formed again where it was wrong. So a GPU runs as many kernels
however many blocks stay open.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_noloco.outer.finite_mean import ExchangeReport
from megatron_noloco.outer.payload import (
    BLOCK,
    CELLS,
    Codec,
    Coded,
    Found,
    Received,
    UnequalError,
    blocks_in,
    wide_type,
)
from megatron_noloco.outer.vectors import HOST, Buffers, Ranges
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
        mean: to be filled with the mean, beside the bucket; None: the buffers have memory for it.
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

    The attributes from `blocks` on are of the open blocks alone, in their order.

    Args:
        part: of which blocks the other members send their codes.

    Attributes:
        sketches: of the bucket, fp32 of shape [blocks, CELLS], in host memory, as all messages are.
        their_sketches: of `part` by each other member, to be filled.
        mean: of the bucket, where it lies; complete when no block is open and `fill` has been called.
        blocks: how many are open.
        digits: how many digits of them have been sent, with the next one.
        vector: their elements.
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
        self.mean = (
            buffers.get("mean", torch.float32, len(bucket), device=bucket.device)
            if code.mean is None
            else code.mean
        )
        self.digits, self.vector = 1, bucket
        self._left_over = torch.ones(blocks, dtype=torch.bool, device=HOST)
        self._open(torch.arange(blocks, dtype=torch.int64, device=HOST), [[] for _ in range(code.others)])
        self.codec.sketch(bucket, code.signs, self.sketches)
        wait_for(bucket.device)

    def _open(self, numbers: Tensor, lower: list[list[Tensor]]) -> None:
        """Open the blocks of these numbers, of whose `part` the other members have sent the lower digits."""
        self._numbers, self.blocks = numbers, len(numbers)
        self.part = self.within(self._part)
        self.held = torch.empty(self.blocks, dtype=torch.bool, device=HOST)
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
        return slice(*(int((self._numbers < edge).sum()) for edge in (part.start, part.stop)))

    def encode(self) -> Coded:
        """Return the next digit of the open blocks, and the checksums, which are to be sent."""
        mine = self._codes("my", self.blocks)
        self.codec.encode(self.vector, self._here(self.steps), self.digits - 1, mine)
        wait_for(self.vector.device)
        return mine

    @property
    def _formed(self) -> Tensor:
        """Where the mean of the open blocks is formed: at its place if all blocks are open, else in their copy."""
        return self.mean if self.digits == 1 else self.vector

    def left_over(self) -> Tensor:
        """Return the elements that the codes do not hold, in host memory; complete when no block is open."""
        return self._gather(self._left_over.nonzero().view(-1), "left over", HOST)

    def fill(self, left_over: Tensor) -> None:
        """Fill in the mean of the elements that are left over."""
        numbers, values = self._left_over.nonzero().view(-1), self._here(left_over)
        self._scatter(values, numbers, self.mean)
        if self._code.rounding is not None:
            self._scatter(torch.zeros_like(values), numbers, self._code.rounding)

    def _received(self) -> list[Received]:
        """Return what the other members have sent of `part`, where the bucket lies."""
        return [
            ([self._here(digit) for digit in digits], self._here(checksums))
            for digits, (_, checksums) in zip(self._digits, self.theirs, strict=True)
        ]

    def _here(self, part: Tensor) -> Tensor:
        """Return a part of a message where the bucket lies."""
        return part.to(self._bucket.device, non_blocking=True)

    def _note(self, found: Found, elements: int) -> None:
        """Fill `held` of `part`, of so many elements, and add it to the report, after a wait for the device.

        Raises UnequalError for vectors that differ in length.
        """
        right, unequal, squares = (one.to(HOST, non_blocking=True) for one in found)
        wait_for(self.vector.device)
        if unequal:
            raise UnequalError
        steps = self.steps[self.part]
        self.held[self.part] = right
        sizes = torch.full_like(steps, BLOCK).mul_(right)
        if len(sizes):
            sizes[-1] *= 1 - (len(steps) * BLOCK - elements) / BLOCK
        error = float((steps.square() * sizes).sum()) / 12
        self._report.squared_error += error
        self._report.squared_deviation += max(0.0, float(squares) - error)  # the rounding's own variance
        self._report.compared_elements += round(float(sizes.sum()))

    def _put(self, formed: Tensor, out: Tensor) -> None:
        """Write numbers of the open blocks to their places in `out`, unless they lie there."""
        if formed is not out:
            self._scatter(formed, self._numbers, out)

    def _next_digit(self) -> None:
        """Let the blocks be open whose differences the codes do not hold; none after the last digit."""
        left_over = self._left_over
        left_over[self._numbers[self.held]] = False
        if self.digits == 1:
            missing = int(left_over[-1]) * (-len(self._bucket) % BLOCK)
            self._report.resent_elements += int(left_over.sum()) * BLOCK - missing
        elif self.digits == DIGITS:
            self.blocks = 0
            return
        stay = ~self.held & (self.steps > 0)
        theirs = stay[self.part]
        lower = [[digit[theirs] for digit in digits] for digits in self._digits]
        self.digits, self.steps = self.digits + 1, self.steps[stay]
        self._open(self._numbers[stay], lower)
        self.vector = self._gather(self._numbers, "open", self._bucket.device)

    def _gather(self, numbers: Tensor, name: str, device: torch.device) -> Tensor:
        """Return the elements of the blocks of these numbers, in memory of this name."""
        if not len(numbers):
            return self._buffers.get(name, torch.float32, 0, device=device)
        whole = len(self._bucket) // BLOCK
        rows = self._bucket[: whole * BLOCK].view(whole, BLOCK)[self._here(numbers[numbers < whole])].view(-1)
        if int(numbers[-1]) == whole:
            rows = torch.cat([rows, self._bucket[whole * BLOCK :]])
        return self._buffers.get(name, torch.float32, len(rows), device=device).copy_(rows)

    def _scatter(self, values: Tensor, numbers: Tensor, out: Tensor) -> None:
        """Write the elements of the blocks of these numbers to their places in `out`; the last may be short."""
        whole = len(out) // BLOCK
        inside = numbers[numbers < whole]
        rows, rest = values.split([len(inside) * BLOCK, len(values) - len(inside) * BLOCK])
        out[: whole * BLOCK].view(whole, BLOCK)[self._here(inside)] = rows.view(-1, BLOCK)
        if len(rest):
            out[whole * BLOCK :] = rest


class PairCode(BucketCode):
    """Codes of a pair, which finds from the partner's the mean of both."""

    def __init__(self, bucket: Tensor, code: Code, buffers: Buffers, report: ExchangeReport) -> None:
        super().__init__(bucket, code, slice(0, len(code.coded)), buffers, report)

    def average(self) -> None:
        """Form the mean of the open blocks, and go on to the next digit of those that the codes do not hold.

        Raises UnequalError for vectors that differ in length.
        """
        (theirs,), mean = self._received(), self._formed
        found = self.codec.average(self.vector, self._here(self.steps), theirs, mean)
        self._put(mean, self.mean)
        self._note(found, len(self.vector))
        self._next_digit()


class GroupCode(BucketCode):
    """Codes of a larger group, whose members each add up those of a part.

    Attributes:
        sums: of the open blocks, of `payload.wide_type`; those of the others' parts are to be filled, and `held`.
    """

    sums: Tensor

    def add_up(self) -> None:
        """Form the sums of the own part, and find which blocks the codes hold. Raises UnequalError."""
        own, members = self.part, 1 + self._code.others
        dtype = wide_type(self.codec.bits * self.digits, members)
        self.sums = self._buffers.get(f"sums {self.digits}", dtype, self.blocks, BLOCK)
        part = self.vector[own.start * BLOCK : own.stop * BLOCK]
        found = self.codec.sum_of(part, self._here(self.steps[own]), self._received(), self.sums[own])
        self._note(found, len(part))

    def average(self) -> None:
        """Form the mean of the open blocks, and go on to the next digit of those that the codes do not hold."""
        members, rounding = 1 + self._code.others, self._code.rounding
        mean = self._formed
        left_out = rounding if mean is self.mean or rounding is None else torch.empty_like(mean)
        steps, sums = self._here(self.steps), self._here(self.sums)
        self.codec.average_sums(self.vector, steps, sums, members, (mean, left_out))
        self._put(mean, self.mean)
        if rounding is not None and left_out is not None:
            self._put(left_out, rounding)
        self._next_digit()
