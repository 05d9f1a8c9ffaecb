"""The arithmetic of a stretch that is exchanged in codes (payload.py), without its messages.

A stretch is coded digit by digit. The first digit is that of all blocks; the next one of the blocks in which a
difference was larger than the digits before hold. What DIGITS digits do not hold either is left over, as are the
blocks that are not coded.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_noloco.outer.finite_mean import ExchangeReport, MeanPiece
from megatron_noloco.outer.payload import (
    BLOCK,
    CELLS,
    Codec,
    Coded,
    Received,
    UnequalError,
    blocks_in,
    find_steps,
    pieces,
    runs,
)
from megatron_noloco.outer.vectors import HOST, Buffers, Ranges, Spans
from megatron_noloco.outer.weights import wait_for

DIGITS = 2


@dataclass(frozen=True)
class Code:
    """Says how a stretch is coded.

    Attributes:
        signs: of the sketches.
        coded: bool, shape [blocks], in host memory; False: exact. In the end it is False for all blocks that are
            left over.
        others: number of the other members.
    """

    codec: Codec
    signs: Tensor
    coded: Tensor
    others: int = 1


def blocks_to_code(stretch: range, exact: Ranges) -> Tensor:
    """Return which blocks of a stretch have no element in the exact ranges, bool of shape [blocks].

    Args:
        stretch: its elements, counted as those of `exact` are.
    """
    coded = torch.ones(blocks_in(len(stretch)), dtype=torch.bool, device=HOST)
    for start, stop in exact:
        coded[max(0, start - stretch.start) // BLOCK : max(0, blocks_in(stop - stretch.start))] = False
    return coded


class StretchCode:
    """Sketches a stretch, codes the blocks that are open, and notes which of them the codes hold.

    All blocks are open at first. The attributes from `blocks` on are of the open blocks alone, in their order.

    Attributes:
        sketches: of the stretch, fp32 of shape [blocks, CELLS], in host memory, as all messages are.
        their_sketches: of `part` by each other member, to be filled.
        coded: see `Code`.
        blocks: how many are open.
        digits: how many digits of them have been sent, with the next one.
        vector: their elements.
        steps: fp32; to be filled before the first `encode`, those of `part` by `find_steps`.
        mine: codes of this member.
        part: of which blocks the other members send their codes.
        theirs: codes of the other members, to be filled.
        held: bool, whether the codes hold all differences of a block.
    """

    def __init__(
        self, vector: Tensor, code: Code, part: slice, buffers: Buffers, report: ExchangeReport
    ) -> None:
        self.codec, self.coded = code.codec, code.coded
        self._stretch, self._buffers, self._report = vector, buffers, report
        blocks = len(code.coded)
        self._part = part
        self.sketches = buffers.get("sketches", torch.float32, blocks, CELLS)
        self.steps = buffers.get("steps", torch.float32, blocks)
        self.digits, self.vector = 1, vector
        self._open(torch.ones_like(code.coded), [[] for _ in range(code.others)])
        width = self.part.stop - self.part.start
        self.their_sketches = buffers.get("their sketches", torch.float32, code.others, width, CELLS)
        self.codec.sketch(vector, code.signs, self.sketches)
        wait_for(vector.device)

    def _open(self, chosen: Tensor, lower: list[list[Tensor]]) -> None:
        """Open the chosen blocks of the stretch, of whose `part` the other members have sent the lower digits."""
        self._chosen, self._places = chosen, self._spans(chosen)
        self.blocks, self.part = int(chosen.sum()), self.within(self._part)
        self.held = torch.empty(self.blocks, dtype=torch.bool, device=HOST)
        self.mine = self._codes("my", self.blocks)
        width = self.part.stop - self.part.start
        self.theirs = [self._codes(f"their {member}", width) for member in range(len(lower))]
        self._digits = [[*digits, codes] for digits, (codes, _) in zip(lower, self.theirs, strict=True)]

    def _codes(self, name: str, blocks: int) -> Coded:
        codes = self._buffers.get(f"{name} codes", torch.uint8, blocks, self.codec.block_bytes)
        return codes, self._buffers.get(f"{name} checksums", torch.int32, blocks)

    def find_steps(self) -> None:
        """Fill `steps` of `part`."""
        steps = self.steps[self.part]
        find_steps([self.sketches[self.part], *self.their_sketches], self.codec.bits, steps)
        steps *= self.coded[self.part]

    def within(self, part: slice) -> slice:
        """Return which of the open blocks lie in a part of the stretch's blocks."""
        start = int(self._chosen[: part.start].sum())
        return slice(start, start + int(self._chosen[part].sum()))

    def encode(self, blocks: slice) -> Coded:
        """Code these blocks, and return what is to be sent of them."""
        piece = self.vector[blocks.start * BLOCK : blocks.stop * BLOCK]
        codes = at(self.mine, blocks)
        self.codec.encode(piece, self.here(self.steps[blocks]), self.digits - 1, codes)
        wait_for(self.vector.device)
        return codes

    def received(self, blocks: slice) -> list[Received]:
        """Return what the other members have sent of these blocks of `part`, where the vector lies."""
        within = slice(blocks.start - self.part.start, blocks.stop - self.part.start)
        return [
            ([self.here(digit[within]) for digit in digits], self.here(checksums[within]))
            for digits, (_, checksums) in zip(self._digits, self.theirs, strict=True)
        ]

    def here(self, part: Tensor) -> Tensor:
        """Return a part of a message where the vector lies."""
        return part.to(self.vector.device, non_blocking=True)

    def note(self, found: tuple[Tensor, Tensor, Tensor], blocks: slice, elements: int) -> None:
        """Fill `held` for a piece, and add it to the report, after a wait for the device.

        Args:
            found: which of its blocks are right, whether vectors differ in length, and the variance over the
                group, summed over the elements of the blocks that are right.
            blocks, elements: of the piece.

        Raises UnequalError for vectors that differ in length.
        """
        right, unequal, squares = (one.to(HOST, non_blocking=True) for one in found)
        wait_for(self.vector.device)
        if unequal:
            raise UnequalError
        steps, held = self.steps[blocks], self.held[blocks]
        held.copy_(right)
        sizes = torch.full_like(steps, BLOCK).mul_(held)
        if len(sizes):
            sizes[-1] *= 1 - (len(steps) * BLOCK - elements) / BLOCK
        error = float((steps.square() * sizes).sum()) / 12
        self._report.squared_error += error
        self._report.squared_deviation += max(0.0, float(squares) - error)  # the rounding's own variance
        self._report.compared_elements += round(float(sizes.sum()))

    def pair_means(self, blocks: slice) -> Iterator[MeanPiece]:
        """Yield the mean of a pair, of those of the blocks that the codes hold. Raises UnequalError."""
        segment = self.vector[blocks.start * BLOCK : blocks.stop * BLOCK]
        for piece, within in pieces(segment, self.codec.at_once, blocks.start):
            steps = self.here(self.steps[within])
            own, (theirs,) = self.codec.whole_steps(piece, steps), self.received(within)
            m, fits, unequal = self.codec.differences(own, len(piece), theirs)
            right = fits & (steps > 0)
            moved, square = self.codec.from_difference(piece, m, steps * right / 2)
            self.note((right, unequal, 2 * square), within, len(piece))
            yield from self.placed(moved, within)

    def placed(self, mean: Tensor, blocks: slice) -> Iterator[MeanPiece]:
        """Yield those of a piece's blocks that the codes hold, at their places in the stretch."""
        for first, last in runs(self.held[blocks]):
            piece = mean[first * BLOCK : last * BLOCK]
            start = (blocks.start + first) * BLOCK
            yield from self._places.place(MeanPiece(start, start + len(piece), piece))

    def next_digit(self) -> bool:
        """Open the blocks whose differences the codes do not hold; return whether their next digit is to be sent.

        To be called when `held` is filled.
        """
        self.coded[self._chosen] = self.held
        if self.digits == 1:
            self._report.resent_elements += self.left_over.length
        if self.digits == DIGITS:
            return False
        stay = ~self.held & (self.steps > 0)
        theirs = stay[self.part]
        lower = [[digit[theirs] for digit in digits] for digits in self._digits]
        self._open(self._chosen.masked_scatter(self._chosen, stay), lower)
        self.steps = self.steps[stay]
        length, device = self._places.length, self.vector.device
        self.vector = self._buffers.get("open", torch.float32, length, device=device)
        self._places.gather(self._stretch, self.vector)
        self.digits += 1
        return self.blocks > 0

    @property
    def left_over(self) -> Spans:
        """The elements of the stretch that the codes do not hold; complete when there is no next digit."""
        return self._spans(~self.coded)

    def _spans(self, chosen: Tensor) -> Spans:
        """Return the elements of the chosen blocks of the stretch."""
        length = len(self._stretch)
        return Spans([(first * BLOCK, min(last * BLOCK, length)) for first, last in runs(chosen)])


def at(coded: Coded, blocks: slice) -> Coded:
    """Return the codes and checksums of some blocks."""
    return coded[0][blocks], coded[1][blocks]
