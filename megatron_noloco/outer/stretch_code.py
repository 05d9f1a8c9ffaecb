"""The arithmetic of a stretch that is exchanged in codes (payload.py), without its messages."""

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
    UnequalError,
    blocks_in,
    find_steps,
    pieces,
    runs,
)
from megatron_noloco.outer.vectors import HOST, Buffers, Ranges, Spans
from megatron_noloco.outer.weights import wait_for


@dataclass(frozen=True)
class Code:
    """Says how a stretch is coded.

    Attributes:
        signs: of the sketches.
        coded: bool, shape [blocks], in host memory; False: exact. In the end it is False for all blocks that are
            left over.
        rounding: as long as the stretch, to be filled with what the codes leave out; None where it is not kept.
    """

    codec: Codec
    signs: Tensor
    coded: Tensor
    rounding: Tensor | None = None


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
    """Sketches and codes a stretch, and notes what its codes hold.

    Attributes:
        sketches: of this member, fp32 of shape [blocks, CELLS], in host memory, as all messages are.
        steps: fp32 of shape [blocks], in host memory; to be filled before the first `encode`.
        coded: see `Code`.
        mine: own codes, where the vector lies.
    """

    def __init__(self, vector: Tensor, code: Code, buffers: Buffers, report: ExchangeReport) -> None:
        self.codec, self.coded = code.codec, code.coded
        self._vector, self._buffers, self._report = vector, buffers, report
        blocks = len(code.coded)
        self.sketches = buffers.get("sketches", torch.float32, blocks, CELLS)
        self.steps = buffers.get("steps", torch.float32, blocks)
        self.mine = self._sent = self.codes("my", blocks)
        if vector.device != HOST:
            self.mine = self.codes("my coded", blocks, vector.device)
        self.codec.sketch(vector, code.signs, self.sketches)
        wait_for(vector.device)

    @property
    def left_over(self) -> Spans:
        """The elements of the blocks that the codes do not hold."""
        length = len(self._vector)
        return Spans([(first * BLOCK, min(last * BLOCK, length)) for first, last in runs(~self.coded)])

    def encode(self, blocks: slice) -> Coded:
        """Code these blocks, and return what is to be sent of them."""
        piece = self._vector[blocks.start * BLOCK : blocks.stop * BLOCK]
        self.codec.encode(piece, self.here(self.steps[blocks]), *at(self.mine, blocks))
        if self.mine is not self._sent:
            for ours, out in zip(at(self.mine, blocks), at(self._sent, blocks), strict=True):
                out.copy_(ours, non_blocking=True)
            wait_for(self._vector.device)
        return at(self._sent, blocks)

    def here(self, part: Tensor) -> Tensor:
        """Return a part of a message where the vector lies."""
        return part.to(self._vector.device, non_blocking=True)

    def note(self, found: tuple[Tensor, Tensor, Tensor], blocks: slice, elements: int) -> None:
        """Fill `coded` for a piece, and add it to the report, after a wait for the device.

        Args:
            found: which of its blocks are right, whether vectors differ in length, and the variance over the
                group, summed over the elements of the blocks that are right.
            blocks, elements: of the piece.

        Raises UnequalError for vectors that differ in length.
        """
        right, unequal, squares = (one.to(HOST, non_blocking=True) for one in found)
        wait_for(self._vector.device)
        if unequal:
            raise UnequalError
        steps, coded = self.steps[blocks], self.coded[blocks]
        coded.copy_(right)
        sizes = torch.full_like(steps, BLOCK).mul_(coded)
        if len(sizes):
            sizes[-1] *= 1 - (len(steps) * BLOCK - elements) / BLOCK
        error = float((steps.square() * sizes).sum()) / 12
        self._report.squared_error += error
        self._report.squared_deviation += max(0.0, float(squares) - error)  # the rounding's own variance
        self._report.compared_elements += round(float(sizes.sum()))

    def held(self, mean: Tensor, blocks: slice) -> Iterator[MeanPiece]:
        """Yield those of a piece's blocks that the codes hold."""
        for first, last in runs(self.coded[blocks]):
            piece = mean[first * BLOCK : last * BLOCK]
            start = (blocks.start + first) * BLOCK
            yield MeanPiece(start, start + len(piece), piece)

    def codes(self, name: str, blocks: int, device: torch.device = HOST) -> Coded:
        """Return memory for the codes and checksums of so many blocks."""
        get = self._buffers.get
        codes = get(f"{name} codes", torch.uint8, blocks, self.codec.block_bytes, device=device)
        return codes, get(f"{name} checksums", torch.int32, blocks, device=device)


class PairCode(StretchCode):
    """Codes a stretch of a pair: `find_steps`, `encode`, `means`, then what is `left_over` in fp32.

    Attributes:
        their_sketches, theirs: to be filled with what the partner sends, before `find_steps` and `means`.
    """

    def __init__(self, vector: Tensor, code: Code, buffers: Buffers, report: ExchangeReport) -> None:
        super().__init__(vector, code, buffers, report)
        blocks = len(code.coded)
        self.theirs = self.codes("their", blocks)
        self.their_sketches = buffers.get("their sketches", torch.float32, blocks, CELLS)

    def find_steps(self) -> None:
        """Fill `steps`."""
        find_steps([self.sketches, self.their_sketches], self.codec.bits, self.steps)
        self.steps.mul_(self.coded)

    def means(self, blocks: slice) -> Iterator[MeanPiece]:
        """Yield the mean of those of the blocks that the codes hold. Raises UnequalError."""
        segment = self._vector[blocks.start * BLOCK : blocks.stop * BLOCK]
        for piece, within in pieces(segment, self.codec.at_once, blocks.start):
            steps, codes, checksums = map(self.here, (self.steps[within], *at(self.theirs, within)))
            m, right, unequal = self.codec.differences(steps, at(self.mine, within), (codes, checksums))
            moved, square = self.codec.from_difference(piece, m, steps * right / 2)
            self.note((right, unequal, 2 * square), within, len(piece))
            yield from self.held(moved, within)


def at(coded: Coded, blocks: slice) -> Coded:
    """Return the codes and checksums of some blocks."""
    return coded[0][blocks], coded[1][blocks]
