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

import sys
from collections.abc import Sequence
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
_IN_CACHE = 512  # blocks: 1 MiB of fp32
_LARGEST = 2.0**30  # of the integers, so that a sum over a group and int32 hold them

_NEAR = 2  # blocks on each side, see `_smooth`
_UNLUCKY = 8.0  # less than an eighth of the true square is found in 3 blocks of 100
_FINEST = 2.0**-22  # of the root mean square of c: a finer step is below the resolution of fp32
_SMALLEST = 2.0**-100  # step where all is zero


class UnequalError(ConnectionError):
    """Raised for codes of a vector of another length; `why` continues "rank ..."."""

    why = "has a vector of another length"

    def __init__(self) -> None:
        super().__init__("the replicas' vectors differ in length; all must have as many weights")


Coded = tuple[Tensor, Tensor]
"""A digit of each element, uint8 of shape [blocks, bytes of a block], and checksums, int32 of shape [blocks]."""
Received = tuple[Sequence[Tensor], Tensor]
"""All digits that a member has sent of some blocks, the lowest first, and the checksums."""


class Blocks(NamedTuple):
    """Some blocks of a vector, in the order of their codes, checksums, sums and verdicts; tensors lie with it.

    Attributes:
        vector: fp32, flat, of any length.
        numbers: of the blocks in the vector, ascending, int64.
        steps: of these blocks, fp32; 0 if a block is not coded.
    """

    vector: Tensor
    numbers: Tensor
    steps: Tensor

    @property
    def rest(self) -> Tensor:
        """What the checksums add for the length: else vectors with as many blocks would look alike."""
        return (self.numbers == len(self.vector) // BLOCK) * (len(self.vector) % BLOCK)


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
    """What the codes of the other members show: tensors where the vector lies.

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
    """Encodes vectors on `device` in digits of `bits` bits, by operations of torch; the host never waits for it.

    Messages may lie on the host.

    Attributes:
        at_once: blocks that are best worked on at a time.
        weights: w of the checksums, int32 of shape [BLOCK].
    """

    def __init__(self, bits: int, device: torch.device = HOST) -> None:
        if bits not in BITS:
            raise ValueError(f"a code has {', '.join(map(str, BITS))} bits, not {bits}")
        self.bits, self.device = bits, device
        self.block_bytes = BLOCK * bits // 8
        self.at_once = _IN_CACHE if device == HOST else sys.maxsize
        self.weights = _checksum_weights().to(device)

    def sketch(self, vector: Tensor, signs: Tensor, out: Tensor) -> None:
        """Fill `out`, fp32 of shape [blocks, CELLS]."""
        cells = (in_blocks(vector) * signs).view(-1, _CELL, CELLS)
        while cells.shape[1] > 1:  # in a fixed order, unlike torch.sum
            lower, upper = cells.chunk(2, dim=1)
            cells = lower + upper
        out.copy_(cells[:, 0], non_blocking=True)

    def range_in_steps(self, members: int) -> float:
        """Return how many root mean squares of a difference make a step, in a group of so many."""
        return CODES[self.bits].ranges[keeps_rounding(self.bits, members)] / (2 ** (self.bits - 1) - 1)

    def find_steps(self, sketches: Sequence[Tensor], out: Tensor) -> None:
        """Fill `out`, [blocks], with the steps for members of these sketches; 0 where a member is not finite.

        All lie on the host. Two members may give the two sketches in either order, and get the same. Steps have 8
        significant bits: the product of a step and a difference is exact in fp32.
        """
        first, *others = sketches
        size = _energy(first)
        difference = torch.zeros_like(size)
        for other in others:
            difference += _energy(first - other) / len(others)
            size += _energy(other)
        finite = torch.isfinite(size) & torch.isfinite(difference)
        difference, size = (torch.where(finite, energy, 0.0) for energy in (difference, size))
        difference, size = (_smooth(energy) / BLOCK for energy in (difference, size))
        step = _root(difference).mul_(self.range_in_steps(len(sketches)))
        step = torch.maximum(step, _root(size.div_(len(sketches))).mul_(_FINEST)).clamp_(min=_SMALLEST)
        out.copy_(step.mul_(1 + 2**-8).bfloat16().float().mul_(finite))

    def encode(self, blocks: Blocks, digit: int, out: Coded) -> None:
        """Fill `out` with digit number `digit` of n, the lowest first, and the checksums."""
        _, n = whole_steps(blocks)
        codes, checksums = out
        checksums.copy_(self._checksums(blocks, n), non_blocking=True)
        digits = n.bitwise_right_shift_(self.bits * digit).to(torch.int8)
        codes.view(torch.int8).copy_(_packed(digits, self.bits), non_blocking=True)

    def average(self, blocks: Blocks, theirs: Received, out: Tensor) -> Found:
        """Fill the blocks of `out`, which may be the vector, with a pair's mean.

        A block that is not right gets its own numbers.
        """
        rows, n = whole_steps(blocks)
        m, right, unequal = self.differences(blocks, n, theirs)
        right &= blocks.steps > 0
        moved = rows + m.float().mul_((blocks.steps / 2).unsqueeze(1))
        write(torch.where(right.unsqueeze(1), moved, rows), blocks.numbers, out)
        squares = m.float().square_().sum(dim=1).mul_(blocks.steps.square()).mul_(right)
        return Found(right, unequal, squares.sum(dtype=torch.float64) / 2)

    def differences(self, blocks: Blocks, n: Tensor, theirs: Received) -> tuple[Tensor, Tensor, Tensor]:
        """Return m = n_theirs - n, for which blocks it is right, and `Found.unequal`.

        m is int32 of shape [blocks, BLOCK]; the others are bools, of shape [blocks] and a single one.
        """
        codes, checksums = theirs
        bits = self.bits * len(codes)
        m = torch.zeros_like(n)
        for digit, code in enumerate(codes):
            m |= self._unpacked(code).int() << self.bits * digit
        half, mask = 2 ** (bits - 1), 2**bits - 1
        m.sub_(n).add_(half).bitwise_and_(mask).sub_(half)
        off = checksums - self._checksums(blocks, n + m)
        # Differences that do not fit are off by multiples of 2^bits. That of -2^(bits-1) is the same at both ends.
        return m, (off == 0) & (m.amin(dim=1) > -half), (off & mask).any()

    def sum_of(self, blocks: Blocks, others: Sequence[Received], out: Tensor) -> Found:
        """Fill `out`, of `wide_type` and shape [blocks, BLOCK], with the group's sums of n."""
        _, n = whole_steps(blocks)
        members, steps = 1 + len(others), blocks.steps
        right, unequal = steps > 0, torch.zeros((), dtype=torch.bool, device=n.device)
        total, least, most = torch.zeros_like(n), torch.zeros_like(n), torch.zeros_like(n)
        squares = torch.zeros_like(steps)
        for theirs in others:
            m, fits, differ = self.differences(blocks, n, theirs)
            right &= fits
            unequal |= differ
            total += m
            torch.minimum(least, m, out=least)
            torch.maximum(most, m, out=most)
            squares += m.float().square_().sum(dim=1)
        largest = torch.iinfo(out.dtype).max
        right &= (total - members * least).amax(dim=1) <= largest
        right &= (total - members * most).amin(dim=1) >= -largest
        squares -= total.float().square_().sum(dim=1) / members
        variance = squares.mul_(steps.square()).mul_(right).sum(dtype=torch.float64) / (members - 1)
        if keeps_rounding(self.bits, members):  # s * n is used, so a clamped n is not right
            right &= (n.amax(dim=1) < _LARGEST) & (n.amin(dim=1) > -_LARGEST)
        out.copy_(total.add_(n, alpha=members), non_blocking=True)
        return Found(right, unequal, variance)

    def average_sums(
        self, blocks: Blocks, held: Tensor, sums: Tensor, members: int, out: tuple[Tensor, Tensor | None]
    ) -> None:
        """Fill the blocks of the first of `out`, which may be the vector, with the mean from the sums of n.

        With a second of `out` the mean is s * mean(n), the same bits for the whole group, and the second is filled
        with this member's roundings, c - s n.

        Args:
            held: bool of shape [blocks], in host memory: which blocks are filled.
        """
        mean, rounding = out
        kept = held.nonzero().view(-1).to(self.device, non_blocking=True)
        blocks = Blocks(blocks.vector, blocks.numbers[kept], blocks.steps[kept])
        rows, n = whole_steps(blocks)
        m = (sums[kept] - members * n).to(sums.dtype)
        steps = blocks.steps.unsqueeze(1)
        if rounding is None:
            write(rows.add_(m * _divided(steps, members)), blocks.numbers, mean)
        else:
            write(rows.sub_(n * steps), blocks.numbers, rounding)
            whole = n.double().mul_(members).add_(m).mul_(_divided(steps.double(), members))
            write(whole.float(), blocks.numbers, mean)

    def _checksums(self, blocks: Blocks, n: Tensor) -> Tensor:
        checksums = (n * self.weights).sum(dim=1, dtype=torch.int32)
        return checksums.add_(blocks.rest)

    def _unpacked(self, code: Tensor) -> Tensor:
        """Return the digit of each element, uint8 of shape [blocks, BLOCK]."""
        digits, done = torch.zeros(len(code), BLOCK, dtype=torch.uint8, device=code.device), 0
        widths = CODES[self.bits].planes
        for plane, width in zip(
            code.split([BLOCK * width // 8 for width in widths], dim=1), widths, strict=True
        ):
            parts = torch.stack([plane >> shift & 2**width - 1 for shift in range(0, 8, width)], dim=1)
            digits |= parts.view(-1, BLOCK) << done
            done += width
        return digits


def _packed(digits: Tensor, bits: int) -> Tensor:
    """Return the lowest bits of int8 of shape [blocks, BLOCK] in the bytes of a block, plane after plane."""
    planes, done = list[Tensor](), 0
    for width in CODES[bits].planes:
        plane, parts = (digits >> done) & 2**width - 1, 8 // width
        while parts > 1:
            parts //= 2
            lower, upper = plane.chunk(2, dim=1)
            plane = lower | upper << width * parts
        planes.append(plane)
        done += width
    return torch.cat(planes, dim=1)


def in_blocks(vector: Tensor) -> Tensor:
    """Return the vector in shape [blocks, BLOCK], with zeros after its end: a view if it needs none."""
    rest = -len(vector) % BLOCK
    return (torch.nn.functional.pad(vector, (0, rest)) if rest else vector).view(-1, BLOCK)


def whole_steps(blocks: Blocks) -> tuple[Tensor, Tensor]:
    """Return a copy of the blocks, and n; both of shape [blocks, BLOCK].

    n is int32; of a value that is not finite it is any number.
    """
    rows = in_blocks(blocks.vector)[blocks.numbers]
    inverse = blocks.steps.reciprocal().nan_to_num_(posinf=0.0)
    return rows, (rows * inverse.unsqueeze(1)).round_().clamp_(-_LARGEST, _LARGEST).int()


def write(rows: Tensor, numbers: Tensor, out: Tensor) -> None:
    """Write rows, of shape [blocks, BLOCK], to the places of the blocks of these numbers in a vector."""
    whole = in_blocks(out)
    whole[numbers] = rows
    if len(out) % BLOCK:
        out.copy_(whole.view(-1)[: len(out)])


def _divided(steps: Tensor, members: int) -> Tensor:
    """Return steps / members. By a number of the host, a GPU would multiply by its reciprocal."""
    return steps / torch.full_like(steps, members)


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
