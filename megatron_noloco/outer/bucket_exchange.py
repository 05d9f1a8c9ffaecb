"""The exchange of one bucket of a vector: generators that are read from top to bottom.

Each posts messages, yields the `Flight` that it waits for, computes with what has come, yields pieces of the mean,
and so on. All messages of a bucket between two ranks have one tag, and both ranks post them in the order of the
same generator, so they match whatever other buckets do meanwhile.

A pair swaps its buckets, one message each way. A larger group of n uses two phases, as the bandwidth-optimal
all-reduce of Patarasuk and Yuan does ("Bandwidth optimal all-reduce algorithms for clusters of workstations", J.
Parallel Distrib. Comput. 69(2), 2009: reduce-scatter, then all-gather), but by direct messages instead of a ring:
each member owns 1/n of the elements, receives them from the other members, averages them, and sends the mean to
the others. A member sends 2 (n-1)/n vectors, the least possible; sending the vector to all members would cost n-1.
In both schemes all members use bitwise the same mean, which the method's recursion of the mean rests on
(docs/method.md).

Codes (payload.py) need the sketches of all members first, for the steps, and a second digit where one does not
fit. In a larger group the owner of a part finds its steps and sums. A bucket is coded where it lies. Messages
leave from (pinned) host memory, and arrive there. So if the bucket lies on a GPU, codes, sketches and sums cross
the bus in place of fp32. The host waits for the GPU before it sends, and once for each digit, to learn which
blocks it holds.

Left over, and sent in fp32, are blocks in which a difference was larger than two digits hold, blocks in which a
member is not finite, and blocks with elements that are to be exact. All members know which: a pair comes to the
same verdict about each block, and the owner of a part sends its verdict.

Bytes. A member of a pair sends `payload.message_bytes(elements, bits)`, then 64 * bits + 4 for each block that
did not fit, and 4 for each element left over. In a group of n, in whole blocks of 512 elements: an owner of p of e
blocks sends 16 + 64 * bits + 4 bytes for each of the e - p others' blocks, and (n - 1) * (4 + 64 * bits of
`payload.wide_type` + 1) for each of its own; then of blocks that did not fit the same without sketches and steps;
then what is left over, as in fp32.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import torch
from torch import Tensor

from megatron_noloco.outer.bucket_code import Code, GroupCode, PairCode
from megatron_noloco.outer.finite_mean import ExchangeReport, MeanPiece, finite_mean
from megatron_noloco.outer.vectors import Buffers
from megatron_noloco.transport.interface import Flight, Message, Transport

BucketExchange = Iterator[Flight | MeanPiece]
"""Yields the flights that it waits for, and the pieces of the mean, at their places in the bucket."""

Parts = dict[int, slice]
"""The part of a bucket that each member owns, by rank."""


@dataclass(frozen=True)
class Members:
    """Carries the messages of a bucket between this rank and the other members of its group.

    Attributes:
        ranks: of the members, this one included, ascending.
        tag: of all messages.
        buffers: where messages arrive.
    """

    transport: Transport
    ranks: Sequence[int]
    tag: int
    report: ExchangeReport
    buffers: Buffers

    @property
    def others(self) -> list[int]:
        return [rank for rank in self.ranks if rank != self.transport.rank]

    def divide(self, length: int) -> Parts:
        """Divide so many elements, or blocks, among the members."""
        bounds = [length * member // len(self.ranks) for member in range(len(self.ranks) + 1)]
        return {rank: slice(*ends) for rank, ends in zip(self.ranks, pairwise(bounds), strict=True)}

    def swap(self, mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> Flight:
        """Send to the other member of a pair, and receive from it."""
        (partner,) = self.others
        return self._post(((partner, one) for one in mine), ((partner, one) for one in theirs))

    def to_owners(self, parts: Parts, mine: Sequence[Tensor], theirs: Sequence[Sequence[Tensor]]) -> Flight:
        """Send each member its part of our vectors, and receive our part of those of each, in their order."""
        sends = ((rank, one[parts[rank]]) for rank in self.others for one in mine)
        return self._post(
            sends, ((rank, one) for rank, of in zip(self.others, theirs, strict=True) for one in of)
        )

    def from_owners(self, parts: Parts, vectors: Sequence[Tensor]) -> Flight:
        """Send all our part of some vectors, and receive theirs."""
        own, others = parts[self.transport.rank], self.others
        sends = ((rank, one[own]) for rank in others for one in vectors)
        return self._post(sends, ((rank, one[parts[rank]]) for rank in others for one in vectors))

    def _post(self, sends: Iterable[tuple[int, Tensor]], receives: Iterable[tuple[int, Tensor]]) -> Flight:
        outgoing, incoming = _messages(sends), _messages(receives)
        self.report.bytes_sent += sum(message.buffer.nbytes for message in outgoing)
        return self.transport.post(outgoing, incoming, self.tag)


def _messages(buffers: Iterable[tuple[int, Tensor]]) -> list[Message]:
    return [Message(rank, buffer.view(-1)) for rank, buffer in buffers]


class UnderWay:
    """The exchange of a bucket that is under way: its first messages are posted.

    Args:
        start: its first element in the vector.

    Attributes:
        flight: that it waits for; None: it waits for nothing.
        has_ended: whether all of its mean has been yielded.
    """

    def __init__(self, start: int, exchange: BucketExchange) -> None:
        first = next(exchange)
        self._start = start
        self._exchange = chain([first], exchange) if isinstance(first, MeanPiece) else exchange
        self.flight: Flight | None = None if isinstance(first, MeanPiece) else first
        self.has_ended = False

    @property
    def is_ready(self) -> bool:
        """Whether it can go on; moves messages."""
        return not self.has_ended and (self.flight is None or self.flight.done())

    def go_on(self) -> Iterator[MeanPiece]:
        """Compute with what has come, and post what depends on it; yield pieces, at their places in the vector."""
        for found in self._exchange:
            if not isinstance(found, MeanPiece):
                self.flight = found
                return
            yield MeanPiece(self._start + found.start, self._start + found.stop, found.mean)
        self.flight, self.has_ended = None, True


def in_fp32(members: Members, bucket: Tensor) -> BucketExchange:
    """Exchange a bucket in fp32, which lies in host memory."""
    ways = {1: alone, 2: pair_in_fp32}
    return ways.get(len(members.ranks), group_in_fp32)(members, bucket)


def in_codes(members: Members, bucket: Tensor, code: Code) -> BucketExchange:
    """Exchange a bucket in codes, wherever it lies."""
    if len(members.ranks) == 1:
        return alone(members, bucket)
    return (pair_in_codes if len(members.ranks) == 2 else group_in_codes)(members, bucket, code)


def alone(members: Members, bucket: Tensor) -> BucketExchange:
    """Exchange a bucket of a replica that is its own group."""
    yield MeanPiece(0, len(bucket), bucket)


def pair_in_fp32(members: Members, bucket: Tensor) -> BucketExchange:
    """Swap the buckets of a pair. The mean takes the place of the partner's."""
    theirs = members.buffers.get("theirs", torch.float32, len(bucket))
    yield members.swap([bucket], [theirs])
    yield from finite_mean([bucket, theirs], theirs, members.report)


def group_in_fp32(members: Members, bucket: Tensor) -> BucketExchange:
    """Average the part that this rank owns, and hand it out."""
    parts = members.divide(len(bucket))
    own = parts[members.transport.rank]
    theirs = members.buffers.get("parts", torch.float32, len(members.others), own.stop - own.start)
    yield members.to_owners(parts, [bucket], [[part] for part in theirs])
    mean = members.buffers.get("theirs", torch.float32, len(bucket))
    of_rank = dict(zip(members.others, theirs, strict=True))
    of_all = [of_rank.get(rank, bucket[own]) for rank in members.ranks]  # the same order everywhere
    for _ in finite_mean(of_all, mean[own], members.report):
        pass
    flight = members.from_owners(parts, [mean])
    yield MeanPiece(own.start, own.stop, mean[own])
    yield flight
    for rank in members.others:
        yield MeanPiece(parts[rank].start, parts[rank].stop, mean[parts[rank]])


def pair_in_codes(members: Members, bucket: Tensor, how: Code) -> BucketExchange:
    """Swap sketches, then codes, digit by digit, then in fp32 what is left over."""
    code = PairCode(bucket, how, members.buffers, members.report)
    yield members.swap([code.sketches], [code.their_sketches[0]])
    code.find_steps()
    while len(code.numbers):
        yield members.swap(code.encode(), code.theirs[0])
        code.average()
    yield from _left_over(members, code)


def group_in_codes(members: Members, bucket: Tensor, how: Code) -> BucketExchange:
    """Find steps of the own part, then, digit by digit, its sums of codes; hand these out."""
    parts, rank = members.divide(len(how.coded)), members.transport.rank
    code = GroupCode(bucket, how, parts[rank], members.buffers, members.report)
    yield members.to_owners(parts, [code.sketches], [[one] for one in code.their_sketches])
    code.find_steps()
    yield members.from_owners(parts, [code.steps])
    while len(code.numbers):
        of_open = {rank: code.within(part) for rank, part in parts.items()}
        yield members.to_owners(of_open, code.encode(), code.theirs)
        code.add_up()
        yield members.from_owners(of_open, [code.sums, code.held])
        code.average()
    yield from _left_over(members, code)


def _left_over(members: Members, code: PairCode | GroupCode) -> BucketExchange:
    """Exchange in fp32 what the codes do not hold; then the mean is complete."""
    if len(left_over := code.left_over()):
        for found in in_fp32(members, left_over):
            if isinstance(found, MeanPiece):  # of what has been sent
                left_over[found.start : found.stop] = found.mean
            else:
                yield found
        code.fill(left_over)
    yield MeanPiece(0, len(code.mean), code.mean)
