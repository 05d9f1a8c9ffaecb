"""Exchanges of a replica of several ranks: one of them speaks, and moves the vector in slabs.

The speaker, the first rank of a replica, exchanges slabs of the canonical vector (`plans.canonical`) with another
replica. Each rank sends it what it has of a slab, and gets back the mean. So replicas of any layout exchange the
same slabs. A rank holds its own part of a vector, and the speaker a few slabs besides.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle, pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_noloco.job.agreement import of_all_ranks
from megatron_noloco.outer.exchange import Exchange
from megatron_noloco.outer.finite_mean import ExchangeReport, MeanPiece
from megatron_noloco.outer.messages import PartnerLostError, tag_of
from megatron_noloco.outer.vectors import Buffers, Ranges
from megatron_noloco.outer.weights import Weights
from megatron_noloco.plans.canonical import Block, Holding, Matrix
from megatron_noloco.plans.grouping import Group
from megatron_noloco.transport.interface import ExchangeTimeoutError, Flight, Message, Transport
from megatron_noloco.transport.torch_dist import TorchTransport

Held = tuple[Sequence[Block], Sequence[Block]]
"""What a rank has of the canonical vector, and those of these blocks that another rank has as well, and sends."""

SLAB = 1 << 22  # elements: 16 MiB in fp32
DEPTH = 4  # slabs under way at a time
_POLL_SECONDS = 0.001


@dataclass(frozen=True)
class Movement:
    """The ranks of a replica, and what each has of the canonical vector.

    Attributes:
        holdings: by rank. Rank 0 speaks.
        intervals: of the canonical vector, one for each fragment.
        transport: between the ranks of the replica; None: it has one rank.
        exact: ranges of the canonical vector that are never sent as codes.
        padding: ranges of this rank's weights that have no place in the canonical vector.
        slab: elements of a slab; the same for all replicas.
    """

    holdings: Sequence[Holding]
    intervals: Sequence[range]
    transport: Transport | None = None
    exact: Ranges = ()
    padding: Ranges = ()
    slab: int = SLAB

    @property
    def rank(self) -> int:
        return 0 if self.transport is None else self.transport.rank

    @property
    def own(self) -> Holding:
        """What this rank has."""
        return self.holdings[self.rank]

    def slabs(self, interval: range) -> list[range]:
        """Cut an interval into slabs, the last of which may be shorter."""
        return [
            range(start, min(start + self.slab, interval.stop))
            for start in range(interval.start, interval.stop, self.slab)
        ]

    def post(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Flight | None:
        """Post messages inside the replica; None where there is nothing in them."""
        sends, receives = ([message for message in way if len(message.buffer)] for way in (sends, receives))
        if self.transport is None or not (sends or receives):
            return None
        return self.transport.post(sends, receives, tag)


class _Moving(ABC):
    """One vector under way, on one rank."""

    def __init__(self, movement: Movement, vector: Tensor, mean: Tensor, interval: range, tag: int) -> None:
        self.movement, self.vector, self.mean = movement, vector, mean
        self.first = movement.own.before(interval.start)
        self.waiting = deque(movement.slabs(interval))
        self.tag = tag

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether the mean is there, and all that was sent has arrived."""

    @abstractmethod
    def poll(self) -> bool:
        """Move what can be moved without waiting; return whether anything was."""

    def part(self, slab: range, given: bool = False) -> list[Block]:
        """Return what this rank has of a slab; `own` is the place in its vector."""
        shift = self.movement.own.before(slab.start) - self.first
        return [
            block._replace(own=block.own + shift)
            for block in self.movement.own.between(slab.start, slab.stop, given)
        ]


class _Returning(NamedTuple):
    blocks: list[Block]
    packed: Tensor
    flight: Flight | None


class Following(_Moving):
    """A vector on a rank that does not speak: its parts go to the speaker, and those of the mean come back."""

    def __init__(self, movement: Movement, vector: Tensor, mean: Tensor, interval: range, tag: int) -> None:
        super().__init__(movement, vector, mean, interval, tag)
        self._returning: deque[_Returning] = deque()

    @property
    def done(self) -> bool:
        return not self.waiting and not self._returning

    def poll(self) -> bool:
        moved = False
        while self.waiting and len(self._returning) < DEPTH:
            slab = self.waiting.popleft()
            blocks = self.part(slab)
            given = _packed(self.vector, self.part(slab, given=True))
            mean = torch.empty(_size(blocks))
            flight = self.movement.post([Message(0, given)], [Message(0, mean)], self.tag)
            self._returning.append(_Returning(blocks, mean, flight))
            moved = True
        while self._returning and _over(self._returning[0].flight):
            blocks, packed, _ = self._returning.popleft()
            _unpack(packed, blocks, self.mean)
            moved = True
        return moved


@dataclass
class _Slab:
    """A slab on the speaker."""

    place: range
    content: Tensor
    parts: list[tuple[list[Block], Tensor]]  # that come from other ranks
    flight: Flight | None
    mean: Tensor
    exchange: Exchange | None = None


class Speaking(_Moving):
    """A vector on the speaker.

    Args:
        exchanges: one for each slab that may be under way.
        begin: the arguments of `Exchange.begin` after the vector.

    Attributes:
        report: of all slabs.
        squared_norm: of the slabs that were exchanged.
        failure: why there is no mean. The slabs that are left go back to the other ranks as they came.
    """

    def __init__(
        self,
        movement: Movement,
        vector: Tensor,
        mean: Tensor,
        interval: range,
        tag: int,
        exchanges: Sequence[Exchange],
        begin: tuple[Group, int, str],
    ) -> None:
        super().__init__(movement, vector, mean, interval, tag)
        self.report = ExchangeReport(begin[0])
        self.squared_norm = 0.0
        self.failure: PartnerLostError | None = None
        self._exchanges = cycle(exchanges)  # of the slabs in their order, on both sides alike
        self._begin = begin
        self._gathering: deque[_Slab] = deque()
        self._exchanging: deque[_Slab] = deque()
        self._returning: deque[Flight | None] = deque()

    @property
    def done(self) -> bool:
        return not (self.waiting or self._gathering or self._exchanging or self._returning)

    def poll(self) -> bool:
        moved = False
        while self.waiting and len(self._gathering) + len(self._exchanging) < DEPTH:
            self._gathering.append(self._gather(self.waiting.popleft()))
            moved = True
        while self._gathering and _over(self._gathering[0].flight):
            self._exchange(self._gathering.popleft())
            moved = True
        for slab in self._exchanging:
            moved |= self._collect(slab)
        while self._exchanging and _is_over(self._exchanging[0]):
            self._hand_out(self._exchanging.popleft())
            moved = True
        while self._returning and _over(self._returning[0]):
            self._returning.popleft()
            moved = True
        return moved

    def fail(self, failure: PartnerLostError) -> None:
        """Exchange no more; late messages keep the memory of the slabs under way."""
        self.failure = self.failure or failure
        for slab in self._exchanging:
            slab.exchange, slab.mean = None, slab.content

    def time_out(self, seconds: float) -> None:
        """Fail, because the partner has not answered for so long."""
        group, number, what = self._begin
        exchange = next((slab.exchange for slab in self._exchanging if slab.exchange is not None), None)
        if exchange is not None:
            place = exchange.place
            (partner,) = set(group) - {place.replica}
            timeout = ExchangeTimeoutError(place.rank_of(partner), tag_of(number, exchange.channel), seconds)
            failure = PartnerLostError(f"replica {place.replica}: no answer from partner {partner} in {what}")
            failure.__cause__ = timeout
            self.fail(failure)

    def _gather(self, place: range) -> _Slab:
        own = self.part(place)
        if _size(own) == len(place):  # all of it, as in a replica of one rank: nothing is copied
            here = slice(own[0].own, own[0].own + len(place))
            return _Slab(place, self.vector[here].to("cpu"), [], None, self.mean[here])
        parts, receives = [], []
        for rank in range(1, len(self.movement.holdings)):
            blocks = self.movement.holdings[rank].between(place.start, place.stop, given=True)
            packed = torch.empty(_size(blocks))
            parts.append((blocks, packed))
            receives.append(Message(rank, packed))
        flight = self.movement.post([], receives, self.tag)
        given, content = self.part(place, given=True), torch.empty(len(place))
        _to_slab(_packed(self.vector, given), given, content, place.start)
        return _Slab(place, content, parts, flight, torch.empty(len(place)))

    def _exchange(self, slab: _Slab) -> None:
        for blocks, packed in slab.parts:
            _to_slab(packed, blocks, slab.content, slab.place.start)
        self._exchanging.append(slab)
        if self.failure is not None:
            slab.mean = slab.content
        else:
            self.squared_norm += float(torch.dot(slab.content, slab.content))
            slab.exchange = next(self._exchanges)
            start, stop = slab.place.start, slab.place.stop
            exact = [
                (max(first, start) - start, min(last, stop) - start) for first, last in self.movement.exact
            ]
            slab.exchange.begin(
                slab.content, *self._begin, [range_ for range_ in exact if range_[0] < range_[1]]
            )

    def _collect(self, slab: _Slab) -> bool:
        moved = False
        if slab.exchange is not None:
            try:
                for piece in slab.exchange.progress():
                    slab.mean[piece.start : piece.stop] = piece.mean
                    moved = True
            except PartnerLostError as failure:
                self.fail(failure)
        return moved

    def _hand_out(self, slab: _Slab) -> None:
        if slab.exchange is not None:
            for _ in slab.exchange.finish():  # nothing: it is done
                pass
            self.report.add(slab.exchange.report)
        if slab.parts:  # else the mean is where it belongs
            own = self.part(slab.place)
            _unpack(_from_slab(slab.mean, own, slab.place.start), own, self.mean)
        sends = []
        for rank in range(1, len(self.movement.holdings)):
            blocks = self.movement.holdings[rank].between(slab.place.start, slab.place.stop)
            sends.append(Message(rank, _from_slab(slab.mean, blocks, slab.place.start)))
        self._returning.append(self.movement.post(sends, [], self.tag))


def _is_over(slab: _Slab) -> bool:
    return slab.exchange is None or slab.exchange.done


class MovedExchange:
    """An exchange of a pair whose vectors are moved in slabs; has the interface of `Exchange`, on all ranks.

    Yields the mean in one piece, at the end. The other ranks of the replica learn from their speaker whether it is
    one (`commit`): where the exchange has failed they get back their own vector.

    Args:
        make: makes the speaker's exchanges, one for each slab that may be under way, each on a channel of its own.
        tag: of the messages inside the replica; no other exchange that is under way has it.
        background: whether a thread moves the vector between `begin` and `finish`; else `progress` does.
    """

    rounding = None  # of pairs nothing is kept

    def __init__(
        self, movement: Movement, make: Callable[[], Sequence[Exchange]], tag: int, background: bool = True
    ) -> None:
        self.movement = movement
        self._make = make
        self.exchanges = [] if movement.rank else make()
        self.deadline_seconds = 600.0
        self.report = ExchangeReport(())
        self._tag = tag
        self._background = background
        self._buffers = Buffers()
        self._moving: Speaking | Following
        self._mean = torch.empty(0)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._awaited_since: float | None = None

    @property
    def done(self) -> bool:
        return self._moving.done

    @property
    def squared_norm(self) -> float:
        """Of the vector, on the speaker."""
        assert isinstance(self._moving, Speaking)
        return self._moving.squared_norm

    def begin(self, vector: Tensor, group: Group, number: int, what: str, exact: Ranges = ()) -> None:
        """Begin as `Exchange.begin` does; `group` is a pair. All ranks of the replica call it."""
        interval = self.movement.intervals[number % len(self.movement.intervals)]
        self._mean = self._buffers.get("mean", torch.float32, len(vector))
        moves = self.movement.own.before(interval.stop) - self.movement.own.before(interval.start)
        self._mean[moves:] = vector[moves:]  # padding
        moved = self.movement, vector, self._mean, interval, self._tag
        self.report, self._error, self._awaited_since = ExchangeReport(group), None, None
        if self.movement.rank:
            self._moving = Following(*moved)
        else:
            self._moving = Speaking(*moved, self.exchanges, (group, number, what))
            self.report = self._moving.report
        if self._background:
            self._thread = threading.Thread(target=self._run, name="noloco-moving", daemon=True)
            self._thread.start()

    def progress(self) -> Iterator[MeanPiece]:
        """Move what can be moved. Yields nothing; raises PartnerLostError as `finish` does."""
        if self._thread is None:
            self._moving.poll()
        self._check()
        yield from ()

    def finish(self) -> Iterator[MeanPiece]:
        """Wait for the mean, and yield it. Raises PartnerLostError where there is none."""
        self._awaited_since = started = time.monotonic()
        if self._thread is None:
            self._run()
        else:
            self._thread.join()
            self._thread = None
        self.report.wait_seconds += time.monotonic() - started
        self._check()
        yield MeanPiece(0, len(self._mean), self._mean)

    def _run(self) -> None:
        try:
            while not self._moving.done:
                if not self._moving.poll():
                    self._check_deadline()
                    time.sleep(_POLL_SECONDS)
        except BaseException as error:  # raised where the exchange is awaited
            self._error = error
        self.report.seconds = time.perf_counter() - self.report.started

    def _check_deadline(self) -> None:
        since = self._awaited_since
        if since is None or not isinstance(self._moving, Speaking) or self._moving.failure is not None:
            return
        seconds = time.monotonic() - since
        if seconds > self.deadline_seconds:
            self._moving.time_out(seconds)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._moving.done and isinstance(self._moving, Speaking) and self._moving.failure is not None:
            self.exchanges = self._make()  # late messages may still come to the others
            raise self._moving.failure


def _over(flight: Flight | None) -> bool:
    """Return whether all messages have come and gone; moves them."""
    if flight is None:
        return True
    flight.arrived()
    return flight.done()


def _size(blocks: Sequence[Block]) -> int:
    return sum(block.size for block in blocks)


def _packed(vector: Tensor, blocks: Sequence[Block]) -> Tensor:
    """Return the elements at the places `own` of a vector, one block after the other, in host memory."""
    parts = [vector[block.own : block.own + block.size] for block in blocks]
    return torch.cat(parts).to("cpu") if parts else torch.empty(0)


def _unpack(packed: Tensor, blocks: Sequence[Block], vector: Tensor) -> None:
    """Write packed elements to the places `own` of a vector."""
    for block, part in zip(blocks, packed.split([block.size for block in blocks]), strict=True):
        vector[block.own : block.own + block.size] = part


def _to_slab(packed: Tensor, blocks: Sequence[Block], slab: Tensor, start: int) -> None:
    """Write packed elements to their places in a slab that begins at element `start` of the canonical vector."""
    for block, part in zip(blocks, packed.split([block.size for block in blocks]), strict=True):
        _window(slab, block, start).copy_(part.view(block.rows, block.width))


def _from_slab(slab: Tensor, blocks: Sequence[Block], start: int) -> Tensor:
    """Return the elements of blocks of a slab, one block after the other."""
    parts = [_window(slab, block, start).reshape(-1) for block in blocks]
    return torch.cat(parts) if parts else torch.empty(0)


def _window(slab: Tensor, block: Block, start: int) -> Tensor:
    """Return a block of a slab as a view, shape [rows, width]."""
    offset = slab.storage_offset() + block.first - start
    return slab.as_strided((block.rows, block.width), (block.matrix.columns, 1), offset)


def alone(length: int, fragments: int = 1, slab: int = SLAB) -> Movement:
    """Return how a replica of one rank moves vectors of so many elements: nowhere."""
    whole = Block(0, Matrix(0, 1, length), 0, 0, 1, length)
    return Movement([Holding([whole])], _intervals(length, fragments), slab=slab)


def movement_of(weights: Weights, fragments: int, held: Held | None = None) -> Movement:
    """Return how the ranks of this job move their vectors. A collective of the job.

    Args:
        weights: of this rank.
        held: of this rank; None: the canonical vector is that of the ranks, one after the other.
    """
    ranges = of_all_ranks((weights.length, list(weights.copied())))
    exact: list[tuple[int, int]] = []
    if held is None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        starts = list(accumulate((length for length, _ in ranges), initial=0))
        whole = Block(0, Matrix(starts[rank], 1, weights.length), 0, 0, 1, weights.length)
        held = [whole] if weights.length else [], []
        exact = [
            (start + first, start + last)
            for start, (_, copied) in zip(starts, ranges, strict=False)
            for first, last in copied
        ]
    holdings = [Holding(*one) for one in of_all_ranks(held)]
    length = max(holding.stop for holding in holdings)
    transport = TorchTransport() if len(holdings) > 1 else None
    own = sorted((block.own, block.own + block.size) for block in held[0])
    edges = [0, *(edge for range_ in own for edge in range_), weights.length]
    padding = [range_ for range_ in zip(edges[::2], edges[1::2], strict=True) if range_[0] < range_[1]]
    return Movement(holdings, _intervals(length, fragments), transport, exact, padding)


def _intervals(length: int, fragments: int) -> list[range]:
    if fragments > length:
        raise ValueError(f"fragments {fragments} are more than the {length} weights of the model")
    edges = [length * part // fragments for part in range(fragments + 1)]
    return [range(*ends) for ends in pairwise(edges)]
