"""Passes over a vector of a replica of several ranks: one of them speaks, and moves the vector in slabs.

The speaker, the first rank of a replica, exchanges slabs of the canonical vector (`plans.canonical`) with another
replica, or passes them on in one direction. Each rank sends it what it has of a slab, and gets back the result. So
replicas of any layout exchange the same slabs. A rank holds its own part of a vector, and the speaker a few slabs
besides.
"""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_noloco.federation.movement import Movement
from megatron_noloco.outer.vectors import HOST, NOTHING
from megatron_noloco.plans.canonical import Block, Holding
from megatron_noloco.transport.interface import Flight, Message

DEPTH = 4  # slabs under way at a time
_POLL_SECONDS = 0.001


class Dealing(Protocol):
    """What the speaker does with one slab."""

    @property
    def done(self) -> bool: ...

    def poll(self) -> bool:
        """Move what can be moved; return whether anything was. Raises one of `FAILURES`."""
        ...


Work = Callable[[range, Tensor, Tensor], Dealing]
"""work(place, content, result) begins to deal with a slab: its elements, what was gathered, and what goes back."""

FAILURES = (ConnectionError, TimeoutError)


class Pass(NamedTuple):
    """A pass over a vector, as one rank takes part in it: slab by slab to the speaker, back from it, or both.

    Attributes:
        interval: of the canonical vector.
        holding: places in the vectors of this rank that follow.
        tag: of messages inside the replica; no other pass that is under way has it.
        gives: what this rank sends to the speaker; None: nothing is gathered.
        gets: to be filled with what comes back; None: nothing is handed out.
    """

    movement: Movement
    interval: range
    holding: Holding
    tag: int
    gives: Tensor | None
    gets: Tensor | None


class Moving(ABC):
    """Runs a pass on one rank.

    Attributes:
        failure: on the speaker: why slabs are not dealt with; None where they are. After a failure what was
            gathered goes back, or zeros.
    """

    def __init__(self, way: Pass) -> None:
        self.movement, self.holding, self.tag = way.movement, way.holding, way.tag
        self.gives, self.gets = way.gives, way.gets
        self.waiting = deque(way.movement.slabs(way.interval))
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
    """Runs a pass on a rank that does not speak."""

    def __init__(self, way: Pass) -> None:
        super().__init__(way)
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
            packed = _memory(_size(blocks))
            flight = self.movement.post(sends, [Message(0, packed)], self.tag)
            self._returning.append(_Returning(blocks, packed, flight))
            moved = True
        while self._returning and is_over(self._returning[0].flight):
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
    """Runs a pass on the speaker, which deals with each slab in between."""

    def __init__(self, way: Pass, work: Work) -> None:
        super().__init__(way)
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
        while self._gathering and is_over(self._gathering[0].flight):
            self._deal(self._gathering.popleft())
            moved = True
        for slab in self._dealing:
            if slab.dealing is not None:
                try:
                    moved |= slab.dealing.poll()
                except FAILURES as failure:
                    self.fail(failure)
        while self._dealing and _is_dealt_with(self._dealing[0]):
            self._hand_out(self._dealing.popleft())
            moved = True
        while self._returning and is_over(self._returning[0]):
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
                NOTHING if vector is None else vector[here] for vector in (self.gives, self.gets)
            )
            return _Slab(place, content.to(HOST), result, True, [], None)
        parts, receives = [], []
        content = NOTHING if self.gives is None else _memory(len(place))
        if self.gives is not None:
            for rank in range(1, len(self.movement.holdings)):
                blocks = self.movement.holdings[rank].between(place.start, place.stop, given=True)
                packed = _memory(_size(blocks))
                parts.append((blocks, packed))
                receives.append(Message(rank, packed))
            given = self.part(place, given=True)
            _to_slab(_packed(self.gives, given), given, content, place.start)
        flight = self.movement.post([], receives, self.tag)
        result = NOTHING if self.gets is None else _memory(len(place))
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
        result = slab.result if len(slab.result) else _memory(len(slab.place)).zero_()
        if not slab.in_place:
            own = self.part(slab.place)
            _unpack(_from_slab(result, own, slab.place.start), own, self.gets)
        sends = []
        for rank in range(1, len(self.movement.holdings)):
            blocks = self.movement.holdings[rank].between(slab.place.start, slab.place.stop)
            sends.append(Message(rank, _from_slab(result, blocks, slab.place.start)))
        self._returning.append(self.movement.post(sends, [], self.tag))


def _is_dealt_with(slab: _Slab) -> bool:
    return slab.dealing is None or slab.dealing.done


def run(moving: Moving | Dealing, look: Callable[[], None] = lambda: None) -> None:
    """Move a vector, or deal with a slab, to the end; `look` is called whenever nothing can be moved."""
    while not moving.done:
        if not moving.poll():
            look()
            time.sleep(_POLL_SECONDS)


def runner_of(way: Pass, work: Work | None) -> Moving:
    """Return what runs a pass. All ranks of the replica make it.

    Args:
        work: of the speaker; None on the other ranks.
    """
    return Following(way) if work is None else Speaking(way, work)


def whole(
    movement: Movement, tag: int, gives: Tensor | None, gets: Tensor | None, work: Work | None
) -> Moving:
    """Return what runs a pass over vectors with the layout of the weights; see `runner_of`, and `Pass`."""
    return runner_of(Pass(movement, range(movement.length), movement.own, tag, gives, gets), work)


def is_over(flight: Flight | None) -> bool:
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


def _memory(elements: int) -> Tensor:
    return torch.empty(elements, dtype=torch.float32, device=HOST)


def _size(blocks: Sequence[Block]) -> int:
    return sum(block.size for block in blocks)


def _packed(vector: Tensor, blocks: Sequence[Block]) -> Tensor:
    """Return the elements at the places `own` of a vector, one block after the other, in host memory."""
    parts = [vector[block.own : block.own + block.size] for block in blocks]
    return torch.cat(parts).to(HOST) if parts else NOTHING


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
    return torch.cat(parts) if parts else NOTHING


def _window(slab: Tensor, block: Block, start: int) -> Tensor:
    """Return a block of a slab as a view, shape [rows, width]."""
    offset = slab.storage_offset() + block.first - start
    return slab.as_strided((block.rows, block.width), (block.matrix.columns, 1), offset)
