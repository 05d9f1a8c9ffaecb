"""The exchange in 8 or 4 bits per element: agree on steps, send codes, send again in fp32 what did not fit.

payload.py has the code. Each phase needs what the one before brought:

| phase | in a pair, a member sends to the other | in a larger group, a member sends |
|---|---|---|
| SKETCHES | sketches of its vector | to the owner of each part, sketches of the part |
| STEPS | nothing: both compute them | as an owner, the steps of its part to the others |
| CODES | codes of its vector, with checksums | to the owner of each part, its codes, with checksums |
| SUMS | nothing | as an owner, the sums of its part to the others, and its verdict on each block |
| 0 and 1 | the blocks left over, in fp32, as `Swap` does | as `Share` does |

A vector is coded where it lies. Messages leave from (pinned) host memory, and arrive there. So if the vector lies
on a GPU, codes, sketches and sums cross the bus in place of fp32. The host waits for the GPU before it sends, and
once for each piece that it uses, to learn which blocks are left over.

Left over are blocks in which a difference was larger than the code holds, blocks in which a member is not
finite, and blocks with elements that are to be exact. All members know which: a pair comes to the same verdict
about each block, and the owner of a part sends its verdict.

Bytes. A member of a pair sends `payload.message_bytes(elements, bits)`, and 4 for each of
`report.resent_elements`. In a group of n, in whole blocks of 512 elements: an owner of p of e blocks sends 16 +
64 * bits + 4 bytes for each of the e - p others' blocks, and (n - 1) * (4 + 64 * bits of `payload.wide_type` +
1) for each of its own; then what is left over, as `Exchange` does.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from megatron_noloco.outer.exchange import STRETCH, Exchange
from megatron_noloco.outer.finite_mean import MeanPiece
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
    signs_of,
    wide_type,
)
from megatron_noloco.outer.stretch import Alone, Session, Stretch, divided
from megatron_noloco.outer.vectors import HOST, NOTHING, Ranges, Spans
from megatron_noloco.outer.weights import wait_for
from megatron_noloco.plans.grouping import Group
from megatron_noloco.plans.stability import keeps_rounding
from megatron_noloco.plans.topology import Place
from megatron_noloco.transport.interface import Flight, Transport

_SEGMENT = 8192  # blocks coded and posted at a time in a pair, so that coding overlaps with sending


class Phase(IntEnum):
    """Numbers the phases of a coded stretch, and the tags of its messages; what is left over has 0 and 1."""

    SKETCHES = 2
    STEPS = 3
    CODES = 4
    SUMS = 5


@dataclass(frozen=True)
class Coding:
    """Says how a vector is coded; the same for the counterparts.

    Attributes:
        bits: of a code: 8 or 4.
        stretch: elements that are under way at a time, rounded up to whole blocks.
    """

    bits: int
    stretch: int = STRETCH


class CodedExchange(Exchange):
    """Exchanges vectors in codes. The mean of a piece is this replica's estimate of it.

    The mean of a group's estimates is that of its vectors, to the rounding of fp32; two estimates differ by a step
    at most. With `rounding` all members have the same bits, which lack the mean of `rounding` (payload.py).
    `begin` posts the sketches of the first stretch.
    """

    def __init__(
        self, transport: Transport, place: Place, channel: int, deadline_seconds: float, coding: Coding
    ) -> None:
        super().__init__(transport, place, channel, deadline_seconds, blocks_in(coding.stretch) * BLOCK)
        self.coding = coding
        self._codec = Codec(coding.bits)
        self._signs = NOTHING

    def begin(self, vector: Tensor, group: Group, number: int, what: str, exact: Ranges = ()) -> None:
        if not self._under_way:
            device = vector.device
            if self._codec.device != device:
                self._codec = Codec(self.coding.bits, device)
            self._signs = signs_of(number).to(device, non_blocking=True)
            self.rounding = None
            if keeps_rounding(self.coding.bits, len(group)):
                rounding = self._buffers.get("rounding", torch.float32, len(vector), device=device)
                self.rounding = rounding.zero_()
        super().begin(vector, group, number, what, exact)

    def _open(self, part: Tensor) -> Stretch:
        """Open the stretch that ends with the last element posted."""
        members, first = len(self.report.group), self._posted - len(part)
        if members == 1:
            return Alone(self._session, part)
        coded = torch.ones(blocks_in(len(part)), dtype=torch.bool, device=HOST)
        for start, stop in self._exact:
            coded[max(0, start - first) // BLOCK : max(0, blocks_in(stop - first))] = False
        rounding = None if self.rounding is None else self.rounding[first : self._posted]
        code = Code(self._codec, self._signs, coded, rounding)
        return (CodedSwap if members == 2 else CodedShare)(self._session, part, code)

    def _go_on(self) -> None:
        """Send in fp32 what the codes of the last stretch do not hold, then the next stretch."""
        last = self._stretch
        if isinstance(last, CodedStretch) and (left_over := _spans(~last.coded, len(last.vector))).length:
            self.report.resent_elements += left_over.length
            length, device = left_over.length, last.vector.device
            vector = self._buffers.get("left over", torch.float32, length, device=device)
            self._stretch = super()._open(left_over.gather(last.vector, vector))
            first = self._posted - len(last.vector)
            self._spans = Spans([(first + start, first + stop) for start, stop in left_over.ranges])
        else:
            super()._go_on()


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
    rounding: Tensor | None


class CodedStretch(Stretch):
    """Exchanges a stretch in codes; its mean lacks the blocks that are not `coded`.

    `sketches` and `steps` are in host memory, as all messages are; own codes are where the vector lies.
    """

    def __init__(self, session: Session, vector: Tensor, code: Code) -> None:
        super().__init__(session, vector)
        self.codec, self.coded, self.rounding = code.codec, code.coded, code.rounding
        blocks, get = len(code.coded), session.buffers.get
        self.sketches = get("sketches", torch.float32, blocks, CELLS)
        self.steps = get("steps", torch.float32, blocks)
        self.mine = self._sent = self._codes("my", blocks)
        if vector.device != HOST:
            self.mine = self._codes("my coded", blocks, vector.device)
        self.codec.sketch(vector, code.signs, self.sketches)
        wait_for(vector.device)

    def _encode(self, vector: Tensor, at: slice) -> Coded:
        """Code these blocks, and return what is to be sent of them."""
        self.codec.encode(vector, self._here(self.steps[at]), *_at(self.mine, at))
        if self.mine is not self._sent:
            for ours, out in zip(_at(self.mine, at), _at(self._sent, at), strict=True):
                out.copy_(ours, non_blocking=True)
            wait_for(vector.device)
        return _at(self._sent, at)

    def _here(self, part: Tensor) -> Tensor:
        """Return a part of a message where the vector lies."""
        return part.to(self.vector.device, non_blocking=True)

    def _note(
        self, found: tuple[Tensor, Tensor, Tensor], steps: Tensor, coded: Tensor, elements: int
    ) -> None:
        """Fill `coded` for a piece, and add it to the report, after a wait for the device.

        Args:
            found: which of its blocks are right, whether vectors differ in length, and the variance over the
                group, summed over the elements of the blocks that are right.
            steps, coded: of the piece, in host memory.

        Raises UnequalError for vectors that differ in length.
        """
        right, unequal, squares = (one.to(HOST, non_blocking=True) for one in found)
        wait_for(self.vector.device)
        if unequal:
            raise UnequalError
        coded.copy_(right)
        sizes = torch.full_like(steps, BLOCK).mul_(coded)
        if len(sizes):
            sizes[-1] *= 1 - (len(steps) * BLOCK - elements) / BLOCK
        error = float((steps.square() * sizes).sum()) / 12
        report = self.session.report
        report.squared_error += error
        report.squared_deviation += max(0.0, float(squares) - error)  # the rounding's own variance
        report.compared_elements += round(float(sizes.sum()))

    def _codes(self, name: str, blocks: int, device: torch.device = HOST) -> Coded:
        get = self.session.buffers.get
        codes = get(f"{name} codes", torch.uint8, blocks, self.codec.block_bytes, device=device)
        return codes, get(f"{name} checksums", torch.int32, blocks, device=device)


class CodedSwap(CodedStretch):
    """Exchanges a stretch of a pair. Codes are sent and used in segments."""

    def __init__(self, session: Session, vector: Tensor, code: Code) -> None:
        super().__init__(session, vector, code)
        blocks = len(self.coded)
        (self._partner,) = set(session.ranks) - {session.place.rank}
        self._theirs = self._codes("their", blocks)
        self._their_sketches = session.buffers.get("their sketches", torch.float32, blocks, CELLS)
        self._unsent = list(pieces(vector, _SEGMENT))
        self._under_way: list[tuple[Tensor, slice, Flight]] = []
        sketches = [(self._partner, self.sketches)], [(self._partner, self._their_sketches)]
        self.send(Phase.SKETCHES, *sketches)

    def poll(self) -> Iterator[MeanPiece]:
        if self.has(Phase.SKETCHES):
            find_steps([self.sketches, self._their_sketches], self.codec.bits, self.steps)
            self.steps.mul_(self.coded)
            self.phase = Phase.CODES
        if self.phase == Phase.CODES and self._unsent:
            self._send_segment()
            return  # the caller may compute in between
        while self.has(Phase.CODES):
            yield from self._use_segment()

    def _send_segment(self) -> None:
        """Code the next segment and send it. After the last one, wait for the partner's first."""
        piece, at = self._unsent.pop(0)
        coded = self._encode(piece, at), _at(self._theirs, at)
        mine, theirs = ([(self._partner, part) for part in parts] for parts in coded)
        self._under_way.append((piece, at, self.send(Phase.CODES, mine, theirs)))
        self.awaited = None if self._unsent else self._under_way[0][2]

    def _use_segment(self) -> Iterator[MeanPiece]:
        """Yield the mean of the segment that has come, and wait for the next one."""
        segment, within, _ = self._under_way.pop(0)
        for piece, at in pieces(segment, self.codec.at_once, within.start):
            steps, codes, checksums = map(self._here, (self.steps[at], *_at(self._theirs, at)))
            m, right, unequal = self.codec.differences(steps, _at(self.mine, at), (codes, checksums))
            moved, square = self.codec.from_difference(piece, m, steps * right / 2)
            self._note((right, unequal, 2 * square), self.steps[at], self.coded[at], len(piece))
            yield from _chosen(moved, at.start, self.coded[at])
        self.done = not self._under_way
        self.awaited = None if self.done else self._under_way[0][2]


class CodedShare(CodedStretch):
    """Exchanges a stretch of a larger group, whose members find steps and sums, each of its own blocks."""

    def __init__(self, session: Session, vector: Tensor, code: Code) -> None:
        super().__init__(session, vector, code)
        blocks, get = len(self.coded), session.buffers.get
        self._own, self._parts = divided(blocks, session)
        others, width = len(self._parts), self._own.stop - self._own.start
        self._received = [self._codes(f"their {place}", width) for place in range(others)]
        self._their_sketches = get("their sketches", torch.float32, others, width, CELLS)
        self._sums = get("sums", wide_type(self.codec.bits, others + 1), blocks, BLOCK)
        sketches = ((rank, self.sketches[part]) for rank, part in self._parts.items())
        self.send(Phase.SKETCHES, sketches, zip(self._parts, self._their_sketches, strict=True))

    def poll(self) -> Iterator[MeanPiece]:
        if self.has(Phase.SKETCHES):
            steps = self.steps[self._own]
            find_steps([self.sketches[self._own], *self._their_sketches], self.codec.bits, steps)
            steps *= self.coded[self._own]
            self._hand_out(Phase.STEPS, self.steps)
        if self.has(Phase.STEPS):
            coded = self._encode(self.vector, slice(0, len(self.coded)))
            mine = ((rank, one) for rank, part in self._parts.items() for one in _at(coded, part))
            theirs = zip(self._parts, self._received, strict=True)
            self.send(Phase.CODES, mine, ((rank, one) for rank, coded in theirs for one in coded))
        if self.has(Phase.CODES):
            self._add_up()
            self._hand_out(Phase.SUMS, self._sums, self.coded)
        if self.has(Phase.SUMS):
            yield from self._means()
            self.done = True

    def _add_up(self) -> None:
        """Form the sums of the own part, and find the blocks that the codes hold."""
        own = self._own
        steps, sums, coded = self.steps[own], self._sums[own], self.coded[own]
        mine = _at(self.mine, own)
        for piece, at in pieces(self.vector[own.start * BLOCK : own.stop * BLOCK], self.codec.at_once):
            theirs = [(self._here(codes[at]), self._here(checks[at])) for codes, checks in self._received]
            found = self.codec.sum_of(piece, self._here(steps[at]), [_at(mine, at), *theirs], sums[at])
            self._note(found, steps[at], coded[at], len(piece))

    def _means(self) -> Iterator[MeanPiece]:
        """Yield the mean of the blocks that the codes hold."""
        for piece, at in pieces(self.vector, self.codec.at_once):
            summed = piece, self._here(self.steps[at]), self._here(self._sums[at]), len(self.session.ranks)
            if self.rounding is None:
                mean = self.codec.from_sum(*summed)
            else:
                left_out = self.rounding[at.start * BLOCK : at.start * BLOCK + len(piece)]
                mean = self.codec.common_mean(*summed, self.coded[at], left_out)
            yield from _chosen(mean, at.start, self.coded[at])

    def _hand_out(self, phase: Phase, *vectors: Tensor) -> None:
        """Send the own part of the vectors to the other ranks, and receive theirs."""
        mine = ((rank, vector[self._own]) for rank in self._parts for vector in vectors)
        theirs = ((rank, vector[part]) for rank, part in self._parts.items() for vector in vectors)
        self.send(phase, mine, theirs)


def _at(coded: Coded, at: slice) -> Coded:
    return coded[0][at], coded[1][at]


def _chosen(mean: Tensor, first_block: int, chosen: Tensor) -> Iterator[MeanPiece]:
    """Yield the chosen blocks of `mean`, which begins at block `first_block` of the vector."""
    for first, last in runs(chosen):
        piece = mean[first * BLOCK : last * BLOCK]
        start = (first_block + first) * BLOCK
        yield MeanPiece(start, start + len(piece), piece)


def _spans(chosen: Tensor, length: int) -> Spans:
    """Return the chosen blocks of a vector of `length` elements."""
    return Spans([(first * BLOCK, min(last * BLOCK, length)) for first, last in runs(chosen)])
