"""The code of an exchange in 8, 4 or 3 bits per element: integers on a common grid, modulo 2^bits.

Members of a group agree on a step s for every block of BLOCK elements. Each rounds its vector to
whole steps, n = round(c / s), and sends n modulo 2^bits. A receiver knows its own n, and so finds the
difference to the sender's, m = n_theirs - n_mine, if |m| < 2^(bits-1): whatever the size of c, only the
*difference* has to fit. Of a block in which one does not, the next `bits` bits of n are sent as well: the next
*digit*. Then differences below 2^(2 bits - 1) fit. This is Moniqua (Lu and De Sa, "Moniqua: Modulo Quantized
Communication in Decentralized SGD", ICML 2020, arXiv 2002.11787).

A member then moves by the mean difference to the group, mean = c + s * mean(m), instead of to a mean of rounded
vectors, as in CHOCO-SGD (Koloskova et al., 2019, arXiv 1902.00340). The differences are integers that add up to
zero over the group, so the sum of c over the group is kept exactly, whatever the rounding; an error of the code
moves members against each other only, and the next round sees it as a part of their difference.

Whether the differences did fit is shown by a checksum of each block, sum(w * n) modulo 2^32 with random odd
weights w: it must differ between two members by sum(w * m). A single difference that does not fit is always
found, several in a block with a probability of about 1 - 2^(bits-32). The last checksum has the length as well.
m is -m at the other end, element by element, so both ends come to the same verdict, and a pair keeps the sum
even where both are wrong.

The step is found from sketches. The sketch of a cell of 128 elements is their sum with random signs. The
difference of two members' sketches has the expected square 128 sigma^2, sigma the root mean square of the
difference of their elements (Alon, Matias and Szegedy, "The space complexity of approximating the frequency
moments", 1996). The step is such that differences of some sigma
(`ranges` in `plans.payloads`) fit into one digit. Sketches are new in each exchange, with other signs, so they
need not be kept or saved. A large range makes the steps coarse, a small one lets more differences fall outside: in
4 bits 22 to 25 % of the blocks with a range of 4, 8 to 11 % with 5, 4 to 5 % with 6
(a Llama of 84,816 weights, rounds every 1 and every 10 steps; docs/log.md).

**Errors that are kept.** In 4 and 3 bits steps are so coarse that the rounding errors r = c - s n would keep the
members of a larger group apart: their variance is a quarter of that of c over the group, while a round of 8
leaves an eighth. So the members of a group of more than 2 keep r from round to round (error feedback, Seide et
al., "1-bit stochastic gradient descent", Interspeech 2014): all use s * mean(n), the same bits, and each adds its
r to its next c. The quantized means that members use, plus the errors that they keep, add up to what they had.
So the mean over the replicas only lacks mean(r), which does not accumulate (with alpha > 0 it lacks sum_j
alpha^j mean(r_t-j)). The variance of a member's error falls from (n-1)/n to 1/n of that of r. In a pair these
are equal, so a pair keeps nothing.

All results that members must agree on come from element-wise operations that IEEE 754 makes equal everywhere:
sums, differences, products and quotients of two numbers, roots (`_root`), rounding to integers and bf16. None is
fused.
The same operations run on a GPU if the vector lies there, and give the same bits. Only the squares in reports are
added up in another order. Steps are found on the host, from sketches, which are messages: a GPU multiplies by 1/5
where a CPU divides by 5, and a pair of both would not agree on steps.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_noloco.outer.vectors import HOST
from megatron_noloco.plans.draws import Stream, draw_words
from megatron_noloco.plans.payloads import BITS, CODES, keeps_rounding

BLOCK = 512  # elements with one step and one checksum
CELLS = 4  # sketches of a block; element e belongs to cell e % CELLS
_CELL = BLOCK // CELLS
_PIECE = 512  # blocks that a CPU works on at a time: few calls, and 1 MiB of fp32 that stays in cache
_LARGEST = 2.0**30  # of the integers, so that a sum over a group and int32 hold them

_NEAR = 2  # blocks on each side, see `_smooth`
_UNLUCKY = 8.0  # less than an eighth of the true square is found in 3 blocks of 100
_FINEST = 2.0**-22  # of the root mean square of c: a finer step is below the resolution of fp32
_SMALLEST = 2.0**-100  # step where all is zero
_AT_ONCE = 8192  # blocks that a GPU works on at a time: few, long kernels
STEPS_AT_ONCE = 8192  # blocks in which steps are found: those nearby are looked for within them


class UnequalError(ConnectionError):
    """Raised for codes of a vector of another length; `why` continues "rank ..."."""

    why = "has a vector of another length"

    def __init__(self) -> None:
        super().__init__("the replicas' vectors differ in length; all must have as many weights")


Coded = tuple[Tensor, Tensor]
"""A digit of each element, uint8 of shape [blocks, bytes of a block], and checksums, int32 of shape [blocks]."""
Received = tuple[Sequence[Tensor], Tensor]
"""All digits that a member has sent of some blocks, the lowest first, and the checksums."""


def blocks_in(elements: int) -> int:
    """Return the number of blocks of a vector. The last may be short, and is coded as if zeros followed."""
    return -(-elements // BLOCK)


def message_bytes(elements: int, bits: int) -> int:
    """Return what one rank of a pair sends: codes, a checksum and CELLS sketches for each block.

    512 elements make 532, 276 or 212 bytes in 8, 4 or 3 bits; fp32 takes 2048.
    """
    return blocks_in(elements) * (BLOCK * bits // 8 + 4 + 4 * CELLS)


def signs_of(number: int) -> Tensor:
    """Return the signs (+1, -1) of the sketches of exchange `number`, shape [BLOCK]."""
    words = draw_words(BLOCK, 0, Stream.SKETCH, number)
    return torch.from_numpy((words >> 63).astype("float32")).mul_(2).sub_(1)


@cache
def _checksum_weights() -> Tensor:
    words = (draw_words(BLOCK, 0, Stream.CHECKSUM) >> 32).astype("uint32") | 1
    return torch.from_numpy(words.view("int32"))


def wide_type(bits: int, members: int) -> torch.dtype:
    """Return the integers of sums of n over the group, which are sent modulo their range.

    They are the narrowest that hold members * n less the sum for an n that is less than 2^(bits-1) from the mean.
    `Codec.sum_of` finds blocks with an n further away, which are rarer than differences that a code does not hold.
    """
    for wide in (torch.int8, torch.int16):
        if members << (bits - 1) <= 1 << (torch.iinfo(wide).bits - 1):
            return wide
    return torch.int32


def sum_bytes(elements: int, bits: int, members: int) -> int:
    """Return the bytes of the sums of n over the group, for whole blocks; 0 in a pair, which sends no sums."""
    return blocks_in(elements) * BLOCK * wide_type(bits, members).itemsize if members > 2 else 0


class Found(NamedTuple):
    """What the codes of the other members show: tensors on the codec's device.

    Attributes:
        right: bool of shape [blocks]: all differences fit, and the block is coded.
        unequal: a bool: vectors differ in length (UnequalError). If they do by a multiple of 2^bits, the last
            block is not right instead.
        variance: of s * n over the group, summed over the elements of the blocks that are right.
    """

    right: Tensor
    unequal: Tensor
    variance: Tensor


class Codec:
    """Encodes vectors in digits of `bits` bits. Its methods work in pieces that stay in cache.

    Vectors are fp32, flat, of any length; `steps` have one element per block, 0 if it is not coded. Tensors lie
    on `device` by default; the host never waits for it. Holds working memory for one piece.

    Attributes:
        weights: w of the checksums, int32 of shape [BLOCK].
    """

    def __init__(self, bits: int, device: torch.device = HOST) -> None:
        if bits not in BITS:
            raise ValueError(f"a code has {', '.join(map(str, BITS))} bits, not {bits}")
        self.bits, self.device = bits, device
        self.block_bytes = BLOCK * bits // 8
        self._at_once = _PIECE if device.type == "cpu" else _AT_ONCE
        self._floats = torch.empty(self._at_once, BLOCK, dtype=torch.float32, device=device)
        self._integers, self._weighted, self._sums = (
            torch.empty_like(self._floats, dtype=torch.int32) for _ in range(3)
        )
        self.weights = _checksum_weights().to(device)
        self._places = {  # of the parts of a byte
            width: torch.arange(0, 8, width, dtype=torch.uint8, device=device).unsqueeze(1)
            for width in CODES[bits].planes
        }

    def sketch(self, vector: Tensor, signs: Tensor, out: Tensor) -> None:
        """Fill `out`, fp32 of shape [blocks, CELLS], on any device."""
        for piece, at in pieces(vector, self._at_once):
            rows = self._rows(piece, signs).view(-1, _CELL, CELLS)
            width = _CELL
            while width > 1:  # in a fixed order, unlike torch.sum
                width //= 2
                rows[:, :width].add_(rows[:, width : 2 * width])
            out[at].copy_(rows[:, 0], non_blocking=True)

    def range_in_steps(self, members: int) -> float:
        """Return how many root mean squares of a difference make a step, in a group of so many."""
        return CODES[self.bits].ranges[keeps_rounding(self.bits, members)] / (2 ** (self.bits - 1) - 1)

    def find_steps(self, sketches: Sequence[Tensor], out: Tensor) -> None:
        """Fill `out`, [blocks], with the steps for members of these sketches; 0 where a member is not finite.

        All lie on the host. Two members may give the two sketches in either order, and get the same. Steps have 8
        significant bits: the product of a step and a difference is exact in fp32.
        """
        first, *others = sketches
        for at in slices(len(first), STEPS_AT_ONCE):
            size = _energy(first[at])
            difference = torch.zeros_like(size)
            for other in others:
                difference += _energy(first[at] - other[at]) / len(others)
                size += _energy(other[at])
            finite = torch.isfinite(size) & torch.isfinite(difference)
            difference, size = (torch.where(finite, energy, 0.0) for energy in (difference, size))
            difference, size = (_smooth(energy) / BLOCK for energy in (difference, size))
            step = _root(difference).mul_(self.range_in_steps(len(sketches)))
            step = torch.maximum(step, _root(size.div_(len(sketches))).mul_(_FINEST)).clamp_(min=_SMALLEST)
            out[at] = step.mul_(1 + 2**-8).bfloat16().float().mul_(finite)

    def encode(self, vector: Tensor, steps: Tensor, digit: int, out: Coded) -> None:
        """Fill `out`, on any device, with digit number `digit` of n, the lowest first, and the checksums."""
        codes, checksums = out
        for piece, at in pieces(vector, self._at_once):
            integers = self.whole_steps(piece, steps[at])
            checksums[at].copy_(self._checksum(integers, len(piece)), non_blocking=True)
            if digit:
                integers.bitwise_right_shift_(self.bits * digit)
            codes[at].view(torch.int8).copy_(_packed(integers.to(torch.int8), self.bits), non_blocking=True)

    def average(self, vector: Tensor, steps: Tensor, theirs: Received, out: Tensor) -> Found:
        """Fill `out`, which may be the vector, with a pair's mean; where a block is not right with its own."""
        found = self._nothing_found(steps)
        for piece, at in pieces(vector, self._at_once):
            m, right, unequal = self.differences(
                self.whole_steps(piece, steps[at]), len(piece), _received(theirs, at)
            )
            moved, square = self._moved(piece, m, steps[at] * right / 2)
            out[at.start * BLOCK :][: len(piece)] = moved
            torch.logical_and(right, steps[at] > 0, out=found.right[at])
            found.unequal.logical_or_(unequal)
            found.variance.add_(square, alpha=2)
        return found

    def differences(self, own: Tensor, elements: int, theirs: Received) -> tuple[Tensor, Tensor, Tensor]:
        """Return m = n_theirs - n_mine of at most one piece, for which blocks it is right, and `Found.unequal`.

        Args:
            own: n of this member (`whole_steps`).
            elements: of the piece.

        Returns int8 or int16 of shape [blocks, BLOCK], bool of shape [blocks], and a bool.
        """
        digits, checksums = theirs
        bits = self.bits * len(digits)
        small = torch.int8 if bits <= 8 else torch.int16
        *lower, highest = (self._unpacked(code) for code in digits)
        modulo = highest.view(torch.int8).to(small)  # n_theirs modulo 2^bits
        for digit in reversed(lower):
            modulo.bitwise_left_shift_(self.bits).bitwise_or_(digit.bitwise_and_(2**self.bits - 1))
        m = modulo - own.to(small)
        if unused := torch.iinfo(small).bits - bits:
            m.bitwise_left_shift_(unused).bitwise_right_shift_(unused)
        their_n = self._weighted[: len(m)].copy_(m).add_(own)
        off = checksums - self._checksum(their_n, elements)
        # Differences that do not fit are off by multiples of 2^bits. That of -2^(bits-1) is the same at both ends.
        return m, (off == 0) & (m.amin(dim=1) > -(2 ** (bits - 1))), (off & (2**bits - 1)).any()

    def sum_of(self, vector: Tensor, steps: Tensor, others: Sequence[Received], out: Tensor) -> Found:
        """Fill `out`, of `wide_type` and shape [blocks, BLOCK], on any device, with the group's sums of n."""
        found = self._nothing_found(steps)
        for piece, at in pieces(vector, self._at_once):
            received = [_received(theirs, at) for theirs in others]
            right, unequal, variance = self._sum_of_piece(piece, steps[at], received, out[at])
            found.right[at] = right
            found.unequal.logical_or_(unequal)
            found.variance.add_(variance)
        return found

    def _nothing_found(self, steps: Tensor) -> Found:
        right = torch.empty(len(steps), dtype=torch.bool, device=self.device)
        unequal = torch.zeros((), dtype=torch.bool, device=self.device)
        return Found(right, unequal, torch.zeros((), dtype=torch.float64, device=self.device))

    def _sum_of_piece(self, piece: Tensor, steps: Tensor, others: Sequence[Received], out: Tensor) -> Found:
        members, own = 1 + len(others), self.whole_steps(piece, steps)
        right, unequal = steps > 0, torch.zeros((), dtype=torch.bool, device=self.device)
        total = self._sums[: len(steps)].zero_()
        least, most = torch.zeros(2, len(steps), BLOCK, dtype=torch.int16, device=self.device)
        squares = torch.zeros_like(steps)
        for theirs in others:
            m, fits, differ = self.differences(own, len(piece), theirs)
            right &= fits
            unequal |= differ
            total += m
            torch.minimum(least, m, out=least)
            torch.maximum(most, m, out=most)
            squares += self._floats[: len(m)].copy_(m).square_().sum(dim=1)
        largest = torch.iinfo(out.dtype).max
        right &= torch.sub(total, least, alpha=members).amax(dim=1) <= largest
        right &= torch.sub(total, most, alpha=members).amin(dim=1) >= -largest
        squares -= self._floats[: len(total)].copy_(total).square_().sum(dim=1) / members
        variance = squares.mul_(steps.square()).mul_(right).sum() / (members - 1)
        if keeps_rounding(self.bits, members):  # s * n is used, so a clamped n is not right
            right &= own.amax(dim=1) < _LARGEST
            right &= own.amin(dim=1) > -_LARGEST
        torch.add(total, own, alpha=members, out=total)
        out.copy_(total, non_blocking=True)
        return Found(right, unequal, variance)

    def average_sums(
        self, vector: Tensor, steps: Tensor, sums: Tensor, members: int, out: tuple[Tensor, Tensor | None]
    ) -> None:
        """Fill the first of `out`, which may be the vector, with the mean from the sums of n over the group.

        With a second of `out` the mean is s * mean(n), the same bits for the whole group, and the second is filled
        with this member's roundings, c - s n.
        """
        mean, rounding = out
        for piece, at in pieces(vector, self._at_once):
            within = slice(at.start * BLOCK, at.start * BLOCK + len(piece))
            own = self.whole_steps(piece, steps[at])
            if rounding is None:
                differences = _sum_of_differences(own, sums[at], members)
                mean[within] = self._moved(piece, differences, _divided(steps[at], members))[0]
                continue
            floats = self._floats[: len(own)].copy_(own).mul_(steps[at].unsqueeze(1))
            torch.sub(piece, floats.view(-1)[: len(piece)], out=rounding[within])
            whole = own.double().mul_(members)
            whole.add_(_sum_of_differences(own, sums[at], members))
            whole.mul_(_divided(steps[at].double(), members).unsqueeze(1))
            mean[within] = floats.copy_(whole).view(-1)[: len(piece)]

    def _moved(self, piece: Tensor, m: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Return piece + scale * m, valid until the next call, and the sum of the squares of scale * m."""
        moved = self._floats[: len(m)].copy_(m).mul_(scale.unsqueeze(1)).view(-1)
        square = torch.dot(moved, moved)
        return moved[: len(piece)].add_(piece), square

    def whole_steps(self, piece: Tensor, steps: Tensor) -> Tensor:
        """Return n, int32 of shape [blocks, BLOCK]; a value that is not finite becomes any number."""
        inverse = steps.reciprocal().nan_to_num_(posinf=0.0)
        rows = self._rows(piece, inverse.unsqueeze(1)).round_().clamp_(-_LARGEST, _LARGEST)
        return self._integers[: len(rows)].copy_(rows)

    def _rows(self, piece: Tensor, factor: Tensor) -> Tensor:
        """Return the piece times `factor`, in shape [blocks, BLOCK], with zeros after its end."""
        rows = self._floats[: blocks_in(len(piece))]
        if len(piece) == rows.numel():
            return torch.mul(piece.view(rows.shape), factor, out=rows)
        rows.view(-1)[: len(piece)] = piece
        rows.view(-1)[len(piece) :] = 0.0
        return rows.mul_(factor)

    def _checksum(self, integers: Tensor, elements: int) -> Tensor:
        weighted = torch.mul(integers, self.weights, out=self._weighted[: len(integers)])
        checksums = weighted.sum(dim=1, dtype=torch.int32)
        if rest := elements % BLOCK:  # else vectors of other lengths in as many blocks would look alike
            checksums[-1:].add_(rest)
        return checksums

    def _unpacked(self, code: Tensor) -> Tensor:
        """Return the digit of each element, uint8 of shape [blocks, BLOCK], perhaps with other bits above it."""
        if self.bits == 8:
            return code
        widths = CODES[self.bits].planes
        planes = code.split([BLOCK * width // 8 for width in widths], dim=1)
        *lower, digits = (
            (plane.unsqueeze(1) >> self._places[width]).view(-1, BLOCK)
            for plane, width in zip(planes, widths, strict=True)
        )
        for plane, width in zip(reversed(lower), reversed(widths[:-1]), strict=True):
            digits = digits.bitwise_left_shift_(width).bitwise_or_(plane.bitwise_and_(2**width - 1))
        return digits


def _packed(digits: Tensor, bits: int) -> Tensor:
    """Return the lowest bits of int8 of shape [blocks, BLOCK] in the bytes of a block, plane after plane."""
    if bits == 8:
        return digits
    planes, done = list[Tensor](), 0
    for width in CODES[bits].planes:
        plane, parts = (digits >> done if done else digits) & (2**width - 1), 8 // width
        while parts > 1:
            parts //= 2
            lower, upper = plane.chunk(2, dim=1)
            plane = lower.bitwise_or_(upper.bitwise_left_shift_(width * parts))
        planes.append(plane)
        done += width
    return torch.cat(planes, dim=1)


def pieces(vector: Tensor, blocks: int = _PIECE) -> Iterator[tuple[Tensor, slice]]:
    """Yield the vector in pieces of `blocks` blocks, each with the numbers of its blocks."""
    for at in slices(blocks_in(len(vector)), blocks):
        yield vector[at.start * BLOCK : at.stop * BLOCK], at


def _received(theirs: Received, at: slice) -> Received:
    """Return what a member has sent of some of the blocks."""
    digits, checksums = theirs
    return [digit[at] for digit in digits], checksums[at]


def _divided(steps: Tensor, members: int) -> Tensor:
    """Return steps / members. By a number of the host, a GPU would multiply by its reciprocal."""
    return steps / torch.full_like(steps, members)


def _sum_of_differences(own: Tensor, total: Tensor, members: int) -> Tensor:
    """Return the sum over the group of n less this member's n, `own`, which is overwritten."""
    return torch.mul(own, -members, out=own).add_(total).to(total.dtype)


def slices(length: int, step: int) -> Iterator[slice]:
    """Yield slices of `step` elements from 0 to `length`; the last one may be shorter."""
    return (slice(start, min(start + step, length)) for start in range(0, length, step))


def _root(x: Tensor) -> Tensor:
    """Return the square root of fp32 as IEEE 754 rounds it; the last bit of torch's own depends on its library."""
    return x.double().sqrt_().float()


def _energy(sketches: Tensor) -> Tensor:
    """Return an unbiased estimate of the sum of squares of each block's elements; shape [blocks]."""
    square = sketches.square()
    half = square[:, :2].add_(square[:, 2:])
    return half[:, 0] + half[:, 1]


def _smooth(energy: Tensor) -> Tensor:
    """Return the mean of the blocks nearby where it is larger, but at most _UNLUCKY times a block's own.

    A block's own four sketches are small by chance now and then, and blocks nearby are often alike.
    """
    padded = torch.nn.functional.pad(energy, (_NEAR, _NEAR))
    total = torch.zeros_like(energy)
    for shift in range(2 * _NEAR + 1):
        total += padded[shift : shift + len(energy)]
    return torch.maximum(energy, torch.minimum(total / (2 * _NEAR + 1), _UNLUCKY * energy))
