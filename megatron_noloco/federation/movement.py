"""Exchanges of a replica of several ranks: one of them speaks, and moves the vector in slabs.

The speaker, the first rank of a replica, exchanges slabs of the canonical vector (`plans.canonical`) with another
replica. Each rank sends it what it has of a slab, and gets back the mean. So replicas of any layout exchange the
same slabs. A rank holds its own part of a vector, and the speaker a few slabs besides.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, cycle, pairwise
from typing import Any, NamedTuple, Protocol

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
        """What this rank has; places are those in its weights."""
        return self.holdings[self.rank]

    @property
    def length(self) -> int:
        """Number of elements of the canonical vector."""
        return self.intervals[-1].stop

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


class Dealing(Protocol):
    """What the speaker does with one slab."""

    @property
    def done(self) -> bool: ...

    def poll(self) -> bool:
        """Move what can be moved; return whether anything was. Raises one of `FAILURES`."""
        ...


Work = Callable[[range, Tensor, Tensor], Dealing]
"""work(place, content, result) begins to deal with a slab: its elements, what was gathered, and what goes back."""

FAILURES = (PartnerLostError, ConnectionError, TimeoutError)


class Moving(ABC):
    """A pass over a vector on one rank: slab by slab to the speaker, back from it, or both.

    Args:
        interval: of the canonical vector.
        holding: places in the vectors of this rank that follow.
        tag: of messages inside the replica; no other pass that is under way has it.
        gives: what this rank sends to the speaker; None: nothing is gathered.
        gets: to be filled with what comes back; None: nothing is handed out.

    Attributes:
        failure: on the speaker: why slabs are not dealt with; None where they are. After a failure what was
            gathered goes back, or zeros.
    """

    def __init__(
        self,
        movement: Movement,
        interval: range,
        holding: Holding,
        tag: int,
        gives: Tensor | None,
        gets: Tensor | None,
    ) -> None:
        self.movement, self.holding, self.tag = movement, holding, tag
        self.gives, self.gets = gives, gets
        self.waiting = deque(movement.slabs(interval))
        self.failure: Exception | None = None

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether all slabs are dealt with, and all that was sent has arrived."""

    @abstractmethod
    def poll(self) -> bool:
        """Move what can be moved without waiting; return whether anything was."""

    def part(self, slab: range, given: bool = False) -> list[Block]:
        """Return what this rank has of a slab."""
        return self.holding.between(slab.start, slab.stop, given)


class _Returning(NamedTuple):
    blocks: list[Block]
    packed: Tensor
    flight: Flight | None


class Following(Moving):
    """A pass on a rank that does not speak."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._returning: deque[_Returning] = deque()

    @property
    def done(self) -> bool:
        return not self.waiting and not self._returning

    def poll(self) -> bool:
        moved = False
        while self.waiting and len(self._returning) < DEPTH:
            slab, sends = self.waiting.popleft(), list[Message]()
            if self.gives is not None:
                sends = [Message(0, _packed(self.gives, self.part(slab, given=True)))]
            blocks = [] if self.gets is None else self.part(slab)
            packed = torch.empty(_size(blocks))
            flight = self.movement.post(sends, [Message(0, packed)], self.tag)
            self._returning.append(_Returning(blocks, packed, flight))
            moved = True
        while self._returning and _over(self._returning[0].flight):
            blocks, packed, _ = self._returning.popleft()
            if self.gets is not None:
                _unpack(packed, blocks, self.gets)
            moved = True
        return moved


@dataclass
class _Slab:
    """A slab on the speaker."""

    place: range
    content: Tensor
    result: Tensor
    in_place: bool  # whether these are views of the speaker's own vectors
    parts: list[tuple[list[Block], Tensor]]  # that come from other ranks
    flight: Flight | None
    dealing: Dealing | None = None


class Speaking(Moving):
    """A pass on the speaker, which deals with each slab in between."""

    def __init__(
        self,
        movement: Movement,
        interval: range,
        holding: Holding,
        tag: int,
        gives: Tensor | None,
        gets: Tensor | None,
        work: Work,
    ) -> None:
        super().__init__(movement, interval, holding, tag, gives, gets)
        self._work = work
        self._gathering: deque[_Slab] = deque()
        self._dealing: deque[_Slab] = deque()
        self._returning: deque[Flight | None] = deque()

    @property
    def done(self) -> bool:
        return not (self.waiting or self._gathering or self._dealing or self._returning)

    @property
    def deals(self) -> bool:
        """Whether a slab is being dealt with."""
        return any(slab.dealing is not None for slab in self._dealing)

    def poll(self) -> bool:
        moved = False
        while self.waiting and len(self._gathering) + len(self._dealing) < DEPTH:
            self._gathering.append(self._gather(self.waiting.popleft()))
            moved = True
        while self._gathering and _over(self._gathering[0].flight):
            self._deal(self._gathering.popleft())
            moved = True
        for slab in self._dealing:
            if slab.dealing is not None:
                try:
                    moved |= slab.dealing.poll()
                except FAILURES as failure:
                    self.fail(failure)
        while self._dealing and _is_over(self._dealing[0]):
            self._hand_out(self._dealing.popleft())
            moved = True
        while self._returning and _over(self._returning[0]):
            self._returning.popleft()
            moved = True
        return moved

    def fail(self, failure: Exception) -> None:
        """Deal with no more slabs; late messages keep the memory of the slabs under way."""
        self.failure = self.failure or failure
        for slab in self._dealing:
            slab.dealing, slab.result, slab.in_place = None, slab.content, False

    def _gather(self, place: range) -> _Slab:
        own = self.part(place)
        if _in_one(own, len(place)):  # all of it, as in a replica of one rank: nothing is copied
            here = slice(own[0].own, own[0].own + len(place))
            content, result = (
                torch.empty(0) if vector is None else vector[here] for vector in (self.gives, self.gets)
            )
            return _Slab(place, content.to("cpu"), result, True, [], None)
        parts, receives = [], []
        content = torch.empty(0 if self.gives is None else len(place))
        if self.gives is not None:
            for rank in range(1, len(self.movement.holdings)):
                blocks = self.movement.holdings[rank].between(place.start, place.stop, given=True)
                packed = torch.empty(_size(blocks))
                parts.append((blocks, packed))
                receives.append(Message(rank, packed))
            given = self.part(place, given=True)
            _to_slab(_packed(self.gives, given), given, content, place.start)
        flight = self.movement.post([], receives, self.tag)
        result = torch.empty(0 if self.gets is None else len(place))
        return _Slab(place, content, result, False, parts, flight)

    def _deal(self, slab: _Slab) -> None:
        for blocks, packed in slab.parts:
            _to_slab(packed, blocks, slab.content, slab.place.start)
        self._dealing.append(slab)
        if self.failure is not None:
            slab.result, slab.in_place = slab.content, False
            return
        try:
            slab.dealing = self._work(slab.place, slab.content, slab.result)
        except FAILURES as failure:
            self.fail(failure)

    def _hand_out(self, slab: _Slab) -> None:
        if self.gets is None:
            return
        result = slab.result if len(slab.result) else torch.zeros(len(slab.place))
        if not slab.in_place:
            own = self.part(slab.place)
            _unpack(_from_slab(result, own, slab.place.start), own, self.gets)
        sends = []
        for rank in range(1, len(self.movement.holdings)):
            blocks = self.movement.holdings[rank].between(slab.place.start, slab.place.stop)
            sends.append(Message(rank, _from_slab(result, blocks, slab.place.start)))
        self._returning.append(self.movement.post(sends, [], self.tag))


def _is_over(slab: _Slab) -> bool:
    return slab.dealing is None or slab.dealing.done


def run(moving: Moving, look: Callable[[], None] = lambda: None) -> None:
    """Move a vector to its end; `look` is called whenever nothing can be moved."""
    while not moving.done:
        if not moving.poll():
            look()
            time.sleep(_POLL_SECONDS)


def whole(
    movement: Movement, tag: int, gives: Tensor | None, gets: Tensor | None, work: Work | None
) -> Moving:
    """Return a pass over vectors with the layout of the weights. All ranks of the replica make it.

    Args:
        gives, gets: see `Moving`.
        work: of the speaker; None on the other ranks.
    """
    arguments = movement, range(movement.length), movement.own, tag, gives, gets
    return Following(*arguments) if work is None else Speaking(*arguments, work)


class Sends:
    """Sends slabs to the speakers of other replicas; the `Work` of a pass.

    Attributes:
        slots: that are sent to. A slot that is lost is taken out, and the others go on.
        bytes: sent to each of them.
    """

    def __init__(self, transport: Transport, slots: Mapping[int, int]) -> None:
        self.slots, self.bytes = dict(slots), 0
        self._transport = transport

    def __call__(self, place: range, content: Tensor, result: Tensor) -> "_Sent":
        self.bytes += content.nbytes
        return _Sent(self, {slot: self.post(slot, content) for slot in self.slots})

    def post(self, slot: int, content: Tensor) -> Flight:
        """Send to one slot, under its tag."""
        return self._transport.post([Message(slot, content)], [], self.slots[slot])


class _Sent:
    def __init__(self, sends: Sends, flights: dict[int, Flight]) -> None:
        self._sends, self._flights = sends, flights

    @property
    def done(self) -> bool:
        return not self._flights

    def poll(self) -> bool:
        before = len(self._flights)
        for slot, flight in list(self._flights.items()):
            try:
                over = slot not in self._sends.slots or _over(flight)
            except ConnectionError:
                self._sends.slots.pop(slot, None)
                over = True
            if over:
                del self._flights[slot]
        return len(self._flights) < before


class Receives:
    """Receives slabs from the speaker of another replica; the `Work` of a pass.

    Raises ExchangeTimeoutError where nothing has come for `seconds`, or what `look` raises.
    """

    def __init__(
        self,
        transport: Transport,
        slot: int,
        tag: int,
        seconds: float,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        self._transport, self._slot, self._tag, self._seconds = transport, slot, tag, seconds
        self._look = look
        self._came = time.monotonic()

    def __call__(self, place: range, content: Tensor, result: Tensor) -> "_Received":
        return _Received(self, self._transport.post([], [Message(self._slot, result)], self._tag))

    def came(self, anything: bool) -> None:
        """Note whether something has just come."""
        now = time.monotonic()
        if anything:
            self._came = now
        elif now - self._came > self._seconds:
            raise ExchangeTimeoutError(self._slot, self._tag, self._seconds)
        self._look()


class _Received:
    def __init__(self, receives: Receives, flight: Flight) -> None:
        self._receives, self._flight = receives, flight

    @property
    def done(self) -> bool:
        return self._flight.done()

    def poll(self) -> bool:
        arrived = bool(self._flight.arrived())
        self._receives.came(arrived)
        return arrived


class MovedExchange:
    """An exchange of a pair whose vectors are moved in slabs; has the interface of `Exchange`, on all ranks.

    Yields the mean in one piece, at the end. The other ranks of the replica learn from their speaker whether it is
    one (`commit`): where the exchange has failed they get back their own vector.

    Args:
        make: makes the speaker's exchanges, one for each slab that may be under way, each on a channel of its own.
        tag: see `Moving`.
        background: whether a thread moves the vector between `begin` and `finish`; else `progress` does.

    Attributes:
        squared_norm: of the vector, on the speaker.
    """

    rounding = None  # of pairs nothing is kept

    def __init__(
        self, movement: Movement, make: Callable[[], Sequence[Exchange]], tag: int, background: bool = True
    ) -> None:
        self.movement = movement
        self._make = make
        self.exchanges = [] if movement.rank else make()
        self.squared_norm = 0.0
        self._holdings = [movement.own.ascending(interval.start) for interval in movement.intervals]
        self.deadline_seconds = 600.0
        self.report = ExchangeReport(())
        self._tag = tag
        self._background = background
        self._buffers = Buffers()
        self._moving: Speaking | Following
        self._begun: tuple[Group, int, str] = (), 0, ""
        self._mean = torch.empty(0)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._awaited_since: float | None = None

    @property
    def done(self) -> bool:
        return self._moving.done

    def begin(self, vector: Tensor, group: Group, number: int, what: str, exact: Ranges = ()) -> None:
        """Begin as `Exchange.begin` does; `group` is a pair. All ranks of the replica call it."""
        fragment = number % len(self.movement.intervals)
        interval, holding = self.movement.intervals[fragment], self._holdings[fragment]
        self._mean = self._buffers.get("mean", torch.float32, len(vector))
        moves = self.movement.own.before(interval.stop) - self.movement.own.before(interval.start)
        self._mean[moves:] = vector[moves:]  # padding
        self._begun, self._error, self._awaited_since = (group, number, what), None, None
        self.report, self.squared_norm = ExchangeReport(group), 0.0
        arguments = self.movement, interval, holding, self._tag, vector, self._mean
        if self.movement.rank:
            self._moving = Following(*arguments)
        else:
            exchanges = cycle(self.exchanges)  # of the slabs in their order, on both sides alike
            self._moving = Speaking(*arguments, partial(self._exchange, exchanges))
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

    def _exchange(
        self, exchanges: Iterator[Exchange], place: range, content: Tensor, result: Tensor
    ) -> "_Exchanged":
        """Begin the exchange of a slab."""
        self.squared_norm += float(torch.dot(content, content))
        exact = [(max(first, place.start), min(last, place.stop)) for first, last in self.movement.exact]
        inside = [(first - place.start, last - place.start) for first, last in exact if first < last]
        exchange = next(exchanges)
        exchange.begin(content, *self._begun, inside)
        return _Exchanged(exchange, result, self.report)

    def _run(self) -> None:
        try:
            run(self._moving, self._check_deadline)
        except BaseException as error:  # raised where the exchange is awaited
            self._error = error
        self.report.seconds = time.perf_counter() - self.report.started

    def _check_deadline(self) -> None:
        """Fail where the partner has not answered for so long."""
        since, moving = self._awaited_since, self._moving
        if since is None or not isinstance(moving, Speaking) or moving.failure is not None:
            return
        seconds = time.monotonic() - since
        if seconds > self.deadline_seconds and moving.deals:
            (group, number, what), place = self._begun, self.exchanges[0].place
            (partner,) = set(group) - {place.replica}
            failure = PartnerLostError(f"replica {place.replica}: no answer from partner {partner} in {what}")
            tag = tag_of(number, self.exchanges[0].channel)
            failure.__cause__ = ExchangeTimeoutError(place.rank_of(partner), tag, seconds)
            moving.fail(failure)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._moving.done and isinstance(self._moving, Speaking) and self._moving.failure is not None:
            self.exchanges = self._make()  # late messages may still come to the others
            raise self._moving.failure


class _Exchanged:
    """A slab that is exchanged; its report is added to `report`."""

    def __init__(self, exchange: Exchange, result: Tensor, report: ExchangeReport) -> None:
        self._exchange, self._result, self._report = exchange, result, report
        self.done = False

    def poll(self) -> bool:
        moved = False
        for piece in self._exchange.progress():
            self._result[piece.start : piece.stop] = piece.mean
            moved = True
        if self._exchange.done and not self.done:
            for _ in self._exchange.finish():  # nothing: it is done
                pass
            self._report.add(self._exchange.report)
            self.done = moved = True
        return moved


def _over(flight: Flight | None) -> bool:
    """Return whether all messages have come and gone; moves them."""
    if flight is None:
        return True
    flight.arrived()
    return flight.done()


def _in_one(blocks: Sequence[Block], size: int) -> bool:
    """Return whether blocks are so many elements that lie one after the other in the rank's vector."""
    ends = [block.own + block.size for block in blocks]
    return _size(blocks) == size and all(
        end == block.own for end, block in zip(ends, blocks[1:], strict=False)
    )


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
