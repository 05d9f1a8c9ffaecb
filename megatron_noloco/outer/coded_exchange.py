"""The exchange in 8 or 4 bits per element: agree on steps, send codes, then their next bits where they do not fit.

payload.py has the code. Each phase needs what the one before brought:

| phase | in a pair, a member sends to the other | in a larger group, a member sends |
|---|---|---|
| SKETCHES | sketches of its vector | to the owner of each part, sketches of the part |
| STEPS | nothing: both compute them | as an owner, the steps of its part to the others |
| CODES | codes of its vector, with checksums | to the owner of each part, its codes, with checksums |
| SUMS | nothing | as an owner, the sums of its part to the others, and its verdict on each block |
| CODES, SUMS | the same again, of the next digit of the blocks that did not fit | |
| 0 and 1 | the blocks left over, in fp32, as `Swap` does | as `Share` does |

A vector is coded where it lies. Messages leave from (pinned) host memory, and arrive there. So if the vector lies
on a GPU, codes, sketches and sums cross the bus in place of fp32. The host waits for the GPU before it sends, and
once for each piece that it uses, to learn which blocks are left over.

Left over are blocks in which a difference was larger than two digits hold, blocks in which a member is not
finite, and blocks with elements that are to be exact. All members know which: a pair comes to the same verdict
about each block, and the owner of a part sends its verdict.

Bytes. A member of a pair sends `payload.message_bytes(elements, bits)`, then 64 * bits + 4 for each block that
did not fit, and 4 for each element left over. In a group of n, in whole blocks of 512 elements: an owner of p of e
blocks sends 16 + 64 * bits + 4 bytes for each of the e - p others' blocks, and (n - 1) * (4 + 64 * bits of
`payload.wide_type` + 1) for each of its own; then of blocks that did not fit the same without sketches and steps;
then what is left over, as `Exchange` does.
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
    Codec,
    blocks_in,
    pieces,
    signs_of,
    slices,
    wide_type,
)
from megatron_noloco.outer.stretch import Alone, Session, Stretch, divided
from megatron_noloco.outer.stretch_code import Code, StretchCode, at, blocks_to_code
from megatron_noloco.outer.vectors import NOTHING, Ranges, Spans
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
        coded = blocks_to_code(range(first, self._posted), self._exact)
        code = Code(self._codec, self._signs, coded, members - 1)
        if members == 2:
            return CodedSwap(self._session, part, code)
        rounding = None if self.rounding is None else self.rounding[first : self._posted]
        return CodedShare(self._session, part, code, rounding)

    def _go_on(self) -> None:
        """Send in fp32 what the codes of the last stretch do not hold, then the next stretch."""
        last = self._stretch
        if isinstance(last, CodedStretch) and (left_over := last.code.left_over).length:
            length, device = left_over.length, last.vector.device
            vector = self._buffers.get("left over", torch.float32, length, device=device)
            self._stretch = super()._open(left_over.gather(last.vector, vector))
            first = self._posted - len(last.vector)
            self._spans = Spans([(first + start, first + stop) for start, stop in left_over.ranges])
        else:
            super()._go_on()


class CodedStretch(Stretch):
    """Exchanges a stretch in codes, digit by digit; its mean lacks the blocks that are `code.left_over`.

    Args:
        own: the blocks whose codes the other ranks send to this one.
        parts: those whose codes this one sends to each other rank.
    """

    def __init__(
        self, session: Session, vector: Tensor, code: Code, own: slice, parts: dict[int, slice]
    ) -> None:
        super().__init__(session, vector)
        self._parts = parts
        self.code = StretchCode(vector, code, own, session.buffers, session.report)
        sketches = ((rank, self.code.sketches[part]) for rank, part in parts.items())
        self.send(Phase.SKETCHES, sketches, zip(parts, self.code.their_sketches, strict=True))


class CodedSwap(CodedStretch):
    """Exchanges a stretch of a pair. Codes are sent and used in segments."""

    def __init__(self, session: Session, vector: Tensor, code: Code) -> None:
        every = slice(0, len(code.coded))
        (self._partner,) = set(session.ranks) - {session.place.rank}
        super().__init__(session, vector, code, every, {self._partner: every})
        self._unsent = self._segments()
        self._under_way: list[tuple[slice, Flight]] = []

    def poll(self) -> Iterator[MeanPiece]:
        if self.has(Phase.SKETCHES):
            self.code.find_steps()
            self.phase = Phase.CODES
        if self.phase == Phase.CODES and self._unsent:
            self._send_segment()
            return  # the caller may compute in between
        while self.has(Phase.CODES):
            segment, _ = self._under_way.pop(0)
            yield from self.code.pair_means(segment)
            self.awaited = self._under_way[0][1] if self._under_way else None
        if self.awaited is None:
            self.done = not self.code.next_digit()
            self._unsent = self._segments()

    def _segments(self) -> list[slice]:
        return list(slices(self.code.blocks, _SEGMENT))

    def _send_segment(self) -> None:
        """Code the next segment and send it. After the last one, wait for the partner's first."""
        segment = self._unsent.pop(0)
        (theirs,) = self.code.theirs
        coded = self.code.encode(segment), at(theirs, segment)
        ways = ([(self._partner, part) for part in parts] for parts in coded)
        self._under_way.append((segment, self.send(Phase.CODES, *ways)))
        self.awaited = None if self._unsent else self._under_way[0][1]


class CodedShare(CodedStretch):
    """Exchanges a stretch of a larger group, whose members find steps and sums, each of its own blocks."""

    def __init__(self, session: Session, vector: Tensor, code: Code, rounding: Tensor | None) -> None:
        super().__init__(session, vector, code, *divided(len(code.coded), session))
        self._rounding = rounding

    def poll(self) -> Iterator[MeanPiece]:
        code = self.code
        if self.has(Phase.SKETCHES):
            code.find_steps()
            self._hand_out(Phase.STEPS, code.steps)
        if self.has(Phase.STEPS):
            self._send_codes()
        if self.has(Phase.CODES):
            self._add_up()
            self._hand_out(Phase.SUMS, self._sums, code.held)
        if self.has(Phase.SUMS):
            yield from self._means()
            self.done = not code.next_digit()
            if not self.done:
                self._send_codes()

    def _send_codes(self) -> None:
        code = self.code
        sums = wide_type(code.codec.bits * code.digits, len(self.session.ranks))
        self._sums = self.session.buffers.get(f"sums {code.digits}", sums, code.blocks, BLOCK)
        coded = code.encode(slice(0, code.blocks))
        mine = ((rank, one) for rank, part in self._parts.items() for one in at(coded, code.within(part)))
        theirs = zip(self._parts, code.theirs, strict=True)
        self.send(Phase.CODES, mine, ((rank, one) for rank, coded in theirs for one in coded))

    def _add_up(self) -> None:
        """Form the sums of the own part, and find the blocks that the codes hold."""
        code, own = self.code, self.code.part
        part = code.vector[own.start * BLOCK : own.stop * BLOCK]
        for piece, blocks in pieces(part, code.codec.at_once, own.start):
            steps = code.here(code.steps[blocks])
            found = code.codec.sum_of(piece, steps, code.received(blocks), self._sums[blocks])
            code.note(found, blocks, len(piece))

    def _means(self) -> Iterator[MeanPiece]:
        """Yield the mean of the blocks that the codes hold."""
        code, codec = self.code, self.code.codec
        for piece, blocks in pieces(code.vector, codec.at_once):
            sums = code.here(self._sums[blocks])
            summed = piece, code.here(code.steps[blocks]), sums, len(self.session.ranks)
            if self._rounding is None:
                mean = codec.from_sum(*summed)
            else:
                mean, left_out = codec.common_mean(*summed)
                for start, stop, rounding in code.placed(left_out, blocks):
                    self._rounding[start:stop] = rounding
            yield from code.placed(mean, blocks)

    def _hand_out(self, phase: Phase, *vectors: Tensor) -> None:
        """Send the own part of the open blocks' vectors to the other ranks, and receive theirs."""
        within, own = self.code.within, self.code.part
        mine = ((rank, vector[own]) for rank in self._parts for vector in vectors)
        theirs = ((rank, vector[within(part)]) for rank, part in self._parts.items() for vector in vectors)
        self.send(phase, mine, theirs)
