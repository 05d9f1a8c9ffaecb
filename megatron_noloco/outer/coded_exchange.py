"""The exchange in 8 or 4 bits per element: agree on steps, send codes, send again in fp32 what did not fit.

payload.py has the code. Each phase needs what the one before brought:

| phase | in a pair, a member sends to the other | in a larger group, a member sends |
|---|---|---|
| SKETCHES | sketches of its vector | to the owner of each part, sketches of the part |
| STEPS | nothing: both compute them | as an owner, the steps of its part to the others |
| CODES | codes of its vector, with checksums | to the owner of each part, its codes, with checksums |
| SUMS | nothing | as an owner, the sums of its part to the others, and its verdict on each block |
| 0 and 1 | the blocks left over, in fp32, as `Exchange` does | likewise |

Left over are blocks in which a difference was larger than the code holds, blocks in which a member is not
finite, and blocks with elements that are to be exact. All members know which: a pair comes to the same verdict
about each block, and the owner of a part sends its verdict.

Bytes. A member of a pair sends `payload.message_bytes(elements, bits)`, and 4 for each of
`report.resent_elements`. In a group of n, in whole blocks of 512 elements: an owner of p of e blocks sends 16 +
64 * bits + 4 bytes for each of the e - p others' blocks, and (n - 1) * (4 + 64 * bits of `payload.wide_type` +
1) for each of its own; then what is left over, as `Exchange` does.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import torch
from torch import Tensor

from megatron_noloco.outer.exchange import STRETCH, Exchange
from megatron_noloco.outer.mean import MeanPiece
from megatron_noloco.outer.payload import (
    BLOCK,
    CELLS,
    Codec,
    Coded,
    blocks_in,
    find_steps,
    pieces,
    runs,
    signs_of,
    wide_type,
)
from megatron_noloco.outer.vectors import Ranges, Spans
from megatron_noloco.plans.grouping import Group
from megatron_noloco.plans.stability import keeps_rounding
from megatron_noloco.plans.topology import Place
from megatron_noloco.transport.protocol import Message, Transport

_SKETCHES, _STEPS, _CODES, _SUMS = range(2, 6)
_SEGMENT = 8192  # blocks coded and posted at a time in a pair, so that coding overlaps with sending


@dataclass(frozen=True)
class Coding:
    """How a vector is coded; the same for the counterparts.

    Attributes:
        bits: of a code: 8 or 4.
        stretch: elements that are under way at a time, rounded up to whole blocks.
    """

    bits: int
    stretch: int = STRETCH


class CodedExchange(Exchange):
    """An `Exchange` that sends codes. The mean of a piece is this replica's estimate of it.

    The mean of a group's estimates is that of its vectors, to the rounding of fp32; two estimates differ by a step
    at most. With `rounding` all members have the same bits, which lack the mean of `rounding` (payload.py). Works
    in host memory. `begin` posts the sketches of the first stretch.
    """

    def __init__(
        self, transport: Transport, place: Place, channel: int, deadline_seconds: float, coding: Coding
    ) -> None:
        super().__init__(transport, place, channel, deadline_seconds, blocks_in(coding.stretch) * BLOCK)
        self.coding = coding
        self._codec = Codec(coding.bits)
        self._first = 0  # element of the stretch posted next
        self._signs = torch.empty(0)

    def begin(self, vector: Tensor, group: Group, number: int, what: str, exact: Ranges = ()) -> None:
        if not self._under_way:
            self._first, self._signs = 0, signs_of(number)
            keeps = keeps_rounding(self.coding.bits, len(group))
            self.rounding = self._buffers.take("rounding", torch.float32, len(vector)) if keeps else None
            if self.rounding is not None:
                self.rounding.zero_()
        super().begin(vector, group, number, what, exact)

    def _post(self, part: Tensor) -> Iterator[MeanPiece | None]:
        first, self._first = self._first, self._first + len(part)
        if part.device.type != "cpu":
            part = self._buffers.take("outbox", torch.float32, len(part)).copy_(part)
        if len(self.report.group) == 1:
            return iter([MeanPiece(0, len(part), part)])
        blocks = blocks_in(len(part))
        sketches = self._buffers.take("sketches", torch.float32, blocks, CELLS)
        self._codec.sketch(part, self._signs, sketches)
        coded = torch.ones(blocks, dtype=torch.bool)
        for start, stop in self._exact:
            coded[max(0, start - first) // BLOCK : max(0, blocks_in(stop - first))] = False
        if len(self.report.group) == 2:
            exchange = self._pair(part, sketches, coded)
        else:
            exchange = self._group(part, sketches, coded, first)
        # When `_again` runs, `coded` says what is left over.
        return chain(exchange, self._again(part, coded))

    def _pair(self, part: Tensor, sketches: Tensor, coded: Tensor) -> Iterator[MeanPiece | None]:
        (partner,) = (member for member in self.report.group if member != self.place.replica)
        rank, blocks, codec = self.place.rank_of(partner), len(coded), self._codec
        their_sketches = self._buffers.take("their sketches", torch.float32, blocks, CELLS)
        agreed = self._send({rank: [sketches]}, {rank: [their_sketches]}, _SKETCHES)

        def all_pieces() -> Iterator[MeanPiece | None]:
            yield from agreed
            steps = self._buffers.take("steps", torch.float32, blocks)
            find_steps([sketches, their_sketches], codec.bits, steps)
            steps.mul_(coded)
            mine, theirs = self._codes("my", blocks), self._codes("their", blocks)
            segments = []
            for piece, at in pieces(part, _SEGMENT):
                codec.encode(piece, steps[at], *_at(mine, at))
                sent = self._send({rank: _at(mine, at)}, {rank: _at(theirs, at)}, _CODES)
                segments.append((piece, at, sent))
                yield None  # the caller may compute in between
            for segment, within, sent in segments:
                yield from sent
                for piece, at in pieces(segment, first=within.start):
                    m, coded[at] = codec.differences(steps[at], _at(mine, at), _at(theirs, at))
                    moved, square = codec.from_difference(piece, m, steps[at] * coded[at] / 2)
                    self._count(2 * square, steps[at], coded[at], len(piece))
                    yield from _chosen(moved, at.start, coded[at])

        return all_pieces()

    def _group(self, part: Tensor, sketches: Tensor, coded: Tensor, first: int) -> Iterator[MeanPiece | None]:
        group, codec = self.report.group, self._codec
        members, blocks = len(group), len(coded)
        bounds = [blocks * member // members for member in range(members + 1)]
        at = {
            self.place.rank_of(member): slice(*ends)
            for member, ends in zip(group, pairwise(bounds), strict=True)
        }
        own = at.pop(self.place.rank)
        width = own.stop - own.start
        theirs = self._buffers.take("their sketches", torch.float32, members - 1, width, CELLS)
        sketched = self._send(
            {rank: [sketches[other]] for rank, other in at.items()},
            {rank: [theirs[j]] for j, rank in enumerate(at)},
            _SKETCHES,
        )

        def all_pieces() -> Iterator[MeanPiece | None]:
            yield from sketched
            steps = self._buffers.take("steps", torch.float32, blocks)
            find_steps([sketches[own], *theirs], codec.bits, steps[own])
            steps[own] *= coded[own]
            yield from self._hand_out([steps], own, at, _STEPS)
            mine = self._codes("my", blocks)
            codec.encode(part, steps, *mine)
            received = [self._codes(f"their {j}", width) for j in range(members - 1)]
            yield from self._send(
                {rank: _at(mine, other) for rank, other in at.items()},
                dict(zip(at, received, strict=True)),
                _CODES,
            )
            sums = self._buffers.take("sums", wide_type(self.coding.bits, members), blocks, BLOCK)
            my_steps, my_sums, my_coded = steps[own], sums[own], coded[own]
            parts = [_at(mine, own), *received]
            for piece, here in pieces(part[own.start * BLOCK : own.stop * BLOCK]):
                my_coded[here], squares = codec.sum_of(
                    piece, my_steps[here], [_at(one, here) for one in parts], my_sums[here]
                )
                self._count(squares, my_steps[here], my_coded[here], len(piece))
            yield from self._hand_out([sums, coded], own, at, _SUMS)
            for piece, here in pieces(part):
                if self.rounding is None:
                    mean = codec.from_sum(piece, steps[here], sums[here], members)
                else:
                    start = first + here.start * BLOCK
                    left_out = self.rounding[start : start + len(piece)]
                    mean = codec.common_mean(piece, steps[here], sums[here], members, coded[here], left_out)
                yield from _chosen(mean, here.start, coded[here])

        return all_pieces()

    def _again(self, part: Tensor, coded: Tensor) -> Iterator[MeanPiece | None]:
        """Exchange in fp32 the blocks that are not coded."""
        left_over = _spans(coded.logical_not(), len(part))
        if not left_over.length:
            return
        self.report.resent_elements += left_over.length
        vector = left_over.gather(part, self._buffers.take("left over", torch.float32, left_over.length))
        for piece in super()._post(vector):
            if piece is None:
                yield None
            else:
                yield from left_over.place(piece)

    def _count(self, squares: float, steps: Tensor, coded: Tensor, elements: int) -> None:
        """Add a piece to the report: `squares` is the variance over the group, summed over its coded blocks."""
        sizes = torch.full((len(steps),), float(BLOCK)).mul_(coded)
        if len(sizes):
            sizes[-1] *= 1 - (len(steps) * BLOCK - elements) / BLOCK
        error = float((steps.square() * sizes).sum()) / 12
        self.report.squared_error += error
        self.report.squared_deviation += max(0.0, squares - error)  # the rounding's own variance
        self.report.compared_elements += round(float(sizes.sum()))

    def _send(
        self, sends: Mapping[int, Sequence[Tensor]], receives: Mapping[int, Sequence[Tensor]], phase: int
    ) -> Iterator[None]:
        """Post messages to and from each rank; iterating waits until all are received and sent."""
        outgoing, incoming = (
            [Message(rank, buffer.view(-1)) for rank, buffers in way.items() for buffer in buffers]
            for way in (sends, receives)
        )
        flight = self.transport.post(outgoing, incoming, self._tag + phase)
        self.report.bytes_sent += sum(message.buffer.nbytes for message in outgoing)
        arrivals = self.waiting.collect(flight)

        def waits() -> Iterator[None]:
            yield from (None for arrival in arrivals if arrival is None)
            self.report.wait_seconds += flight.wait_seconds

        return waits()

    def _hand_out(
        self, vectors: Sequence[Tensor], own: slice, others: Mapping[int, slice], phase: int
    ) -> Iterator[None]:
        """Send our part of the vectors to the other ranks, and receive theirs."""
        return self._send(
            {rank: [vector[own] for vector in vectors] for rank in others},
            {rank: [vector[at] for vector in vectors] for rank, at in others.items()},
            phase,
        )

    def _codes(self, name: str, blocks: int) -> Coded:
        codes = self._buffers.take(f"{name} codes", torch.uint8, blocks, self._codec.block_bytes)
        return codes, self._buffers.take(f"{name} checksums", torch.int32, blocks)


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
