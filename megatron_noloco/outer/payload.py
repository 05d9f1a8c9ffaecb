"""The code of an exchange in 16, 8 or 4 bits per element: integers on a common grid, modulo 2^bits.

Members of a group agree on a step s for every block of BLOCK elements (steps.py). Each rounds its vector to
whole steps, n = round(c / s), and sends n modulo 2^bits. A receiver knows its own n, and so finds the
difference to the sender's, m = n_theirs - n_mine, if |m| < 2^(bits-1): whatever the size of c, only the
*difference* has to fit. This is Moniqua (Lu and De Sa, "Moniqua: Modulo Quantized Communication in
Decentralized SGD", ICML 2020, arXiv 2002.11787).

A member then moves by the mean difference to the group, mean = c + s * mean(m), instead of to a mean of rounded
vectors, as in CHOCO-SGD (Koloskova et al., 2019, arXiv 1902.00340). The differences are integers that add up to
zero over the group, so the sum of c over the group is kept exactly, whatever the rounding; an error of the code
moves members against each other only, and the next round sees it as a part of their difference.

Whether the differences did fit is told by a checksum of each block, sum(w * n) modulo 2^32 with random odd
weights w: it must differ between two members by sum(w * m). One difference that does not fit is always found,
several in a block with a probability of about 1 - 2^(bits-32). m is -m at the other end, element by element, so
both ends come to the same verdict, and a pair keeps the sum even where both are wrong.

All results that members must agree on come from element-wise operations, which IEEE 754 makes equal everywhere.
"""

from collections.abc import Iterator, Sequence
from functools import cache

import torch
from torch import Tensor

from megatron_noloco.plans.draws import Stream, draw_words

BLOCK = 512  # elements with one step and one checksum
CELLS = 4  # sketches of a block; element e belongs to cell e % CELLS
BITS = (16, 8, 4)

_CELL = BLOCK // CELLS
_PIECE = 128  # blocks worked on at a time: 256 KiB of fp32 stay in cache
_LARGEST = 2.0**30  # of the integers, so that a sum over a group and int32 hold them

Coded = tuple[Tensor, Tensor]
"""Codes, uint8 of shape [blocks, bytes of a block], and checksums, int32 of shape [blocks]."""


def blocks_in(elements: int) -> int:
    """Blocks of a vector. The last one may be short, and is coded as if zeros followed."""
    return -(-elements // BLOCK)


def message_bytes(elements: int, bits: int) -> int:
    """What one rank of a pair sends: per block, the last one counted whole, codes, a checksum and CELLS sketches.

    512 elements make 1044, 532 or 276 bytes in 16, 8 or 4 bits; fp32 takes 2048.
    """
    return blocks_in(elements) * (BLOCK * bits // 8 + 4 + 4 * CELLS)


def signs_of(number: int) -> Tensor:
    """+1 and -1, shape [BLOCK]: those of the sketches of exchange `number`."""
    words = draw_words(BLOCK, 0, Stream.SKETCH, number)
    return torch.from_numpy((words >> 63).astype("float32")).mul_(2).sub_(1)


@cache
def _checksum_weights() -> Tensor:
    words = (draw_words(BLOCK, 0, Stream.CHECKSUM) >> 32).astype("uint32") | 1
    return torch.from_numpy(words.view("int32"))


def wide_type(bits: int, members: int) -> torch.dtype:
    """The narrowest integers that hold members * n less the sum of n over the group, modulo their range.

    Each n differs from the owner's by less than 2^(bits-1), so from any other by less than 2^bits.
    """
    for wide in (torch.int8, torch.int16):
        if (members - 1) << bits < 1 << (torch.iinfo(wide).bits - 1):
            return wide
    return torch.int32


class Codec:
    """Codes in `bits` bits. Its methods take and give whole vectors, and work in pieces that stay in cache.

    Vectors are fp32, flat, in host memory, of any length; `steps` have one element per block, 0 where a block is
    not coded. Holds working memory for one piece.
    """

    def __init__(self, bits: int) -> None:
        if bits not in BITS:
            raise ValueError(f"a code has {', '.join(map(str, BITS))} bits, not {bits}")
        self.bits = bits
        self.block_bytes = BLOCK * bits // 8
        self._narrow = torch.int16 if bits == 16 else torch.int8
        self._floats = torch.empty(_PIECE, BLOCK)
        self._integers = torch.empty(_PIECE, BLOCK, dtype=torch.int32)
        self._weighted = torch.empty(_PIECE, BLOCK, dtype=torch.int32)
        self._sums = torch.empty(_PIECE, BLOCK, dtype=torch.int32)
        self._small = torch.empty(_PIECE, BLOCK, dtype=self._narrow)

    def sketch(self, vector: Tensor, signs: Tensor, out: Tensor) -> None:
        """Fill `out`, fp32 of shape [blocks, CELLS]."""
        for piece, at in pieces(vector):
            rows = self._rows(piece, signs).view(-1, _CELL, CELLS)
            width = _CELL
            while width > 1:  # in a fixed order, unlike torch.sum
                width //= 2
                rows[:, :width].add_(rows[:, width : 2 * width])
            out[at] = rows[:, 0]

    def encode(self, vector: Tensor, steps: Tensor, codes: Tensor, checksums: Tensor) -> None:
        """Fill `codes`, uint8 of shape [blocks, block_bytes], and `checksums`, int32 of shape [blocks]."""
        for piece, at in pieces(vector):
            integers = self._whole_steps(piece, steps[at])
            self._checksum(integers, checksums[at])
            out = codes[at]
            if self.bits != 4:
                out.view(self._narrow).copy_(integers)
                continue
            small = self._small[: len(out)].copy_(integers)
            low, high = small.split(BLOCK // 2, dim=1)
            torch.bitwise_or(low.bitwise_and_(15), high.bitwise_left_shift_(4), out=out.view(torch.int8))

    def differences(self, steps: Tensor, mine: Coded, theirs: Coded) -> tuple[Tensor, Tensor]:
        """m = n_theirs - n_mine of at most one piece, from codes and checksums; and for which blocks it is right.

        Returns int8 or int16 of shape [blocks, BLOCK], valid until the next call, and bool of shape [blocks].
        """
        (my_codes, my_checksums), (their_codes, their_checksums) = mine, theirs
        m = self._small[: len(steps)]
        if self.bits == 4:
            low, high = m.split(BLOCK // 2, dim=1)
            my_bytes, their_bytes = my_codes.view(torch.int8), their_codes.view(torch.int8)
            torch.sub(their_bytes, my_bytes, out=low).bitwise_left_shift_(4).bitwise_right_shift_(4)
            torch.bitwise_and(their_bytes, -16, out=high).sub_(my_bytes.bitwise_and(-16))
            high.bitwise_right_shift_(4)
        else:
            torch.sub(their_codes.view(self._narrow), my_codes.view(self._narrow), out=m)
        apart = self._checksum(m, torch.empty_like(my_checksums))
        right = (apart == their_checksums - my_checksums) & (steps > 0)
        # Its negative does not fit, so the two ends would not agree.
        return m, right & (m.amin(dim=1) > -(2 ** (self.bits - 1)))

    def sum_of(
        self, piece: Tensor, steps: Tensor, coded: Sequence[Coded], out: Tensor
    ) -> tuple[Tensor, float]:
        """Fill `out`, of `wide_type` and shape [blocks, BLOCK], with the sums of n over the group.

        Args:
            piece: of this member's vector; `coded[0]` is its own, the others those of the other members.

        Returns which blocks are right, and the variance of s * n over the group, summed over their elements.
        """
        members = len(coded)
        right = steps > 0
        total = self._sums[: len(steps)].zero_()
        squares = torch.zeros(len(steps))
        for other in coded[1:]:
            m, fits = self.differences(steps, coded[0], other)
            right &= fits
            total += m
            squares += torch.square(self._floats[: len(m)].copy_(m)).sum(dim=1)
        squares -= self._floats[: len(total)].copy_(total).square_().sum(dim=1) / members
        variance = squares.mul_(steps.square()).mul_(right).sum() / (members - 1)
        torch.add(total, self._whole_steps(piece, steps), alpha=members, out=total)
        out.copy_(total)
        return right, float(variance)

    def from_difference(self, piece: Tensor, m: Tensor, scale: Tensor) -> tuple[Tensor, float]:
        """piece + scale * m, valid until the next call, and the sum of the squares of scale * m."""
        moved = self._floats[: len(m)].copy_(m).mul_(scale.unsqueeze(1)).view(-1)
        square = float(torch.dot(moved, moved))
        return moved[: len(piece)].add_(piece), square

    def from_sum(self, piece: Tensor, steps: Tensor, total: Tensor, members: int) -> Tensor:
        """The mean of at most one piece, from the sums of n over the group; valid until the next call."""
        own = self._whole_steps(piece, steps)
        apart = torch.mul(own, -members, out=own).add_(total).to(total.dtype)
        return self.from_difference(piece, apart, steps / members)[0]

    def _whole_steps(self, piece: Tensor, steps: Tensor) -> Tensor:
        """n, int32 of shape [blocks, BLOCK]; a value that is not finite becomes any number."""
        inverse = torch.where(steps > 0, steps.reciprocal(), 0.0)
        rows = self._rows(piece, inverse.unsqueeze(1)).round_().clamp_(-_LARGEST, _LARGEST)
        return self._integers[: len(rows)].copy_(rows)

    def _rows(self, piece: Tensor, factor: Tensor) -> Tensor:
        """The piece times `factor`, in shape [blocks, BLOCK], with zeros after its end."""
        rows = self._floats[: blocks_in(len(piece))]
        if len(piece) == rows.numel():
            return torch.mul(piece.view(rows.shape), factor, out=rows)
        rows.view(-1)[: len(piece)] = piece
        rows.view(-1)[len(piece) :] = 0.0
        return rows.mul_(factor)

    def _checksum(self, integers: Tensor, out: Tensor) -> Tensor:
        weighted = torch.mul(integers, _checksum_weights(), out=self._weighted[: len(integers)])
        return torch.sum(weighted, dim=1, dtype=torch.int32, out=out)


def pieces(vector: Tensor, blocks: int = _PIECE, first: int = 0) -> Iterator[tuple[Tensor, slice]]:
    """The vector in pieces of so many blocks, each with the numbers of its blocks, counted from `first`."""
    for at in slices(blocks_in(len(vector)), blocks):
        yield vector[at.start * BLOCK : at.stop * BLOCK], slice(first + at.start, first + at.stop)


def slices(length: int, step: int) -> Iterator[slice]:
    """start..stop from 0 to `length`, of `step` each; the last one may be shorter."""
    return (slice(start, min(start + step, length)) for start in range(0, length, step))
