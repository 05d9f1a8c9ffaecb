"""Transfers between the ranks of one replica and its leader, bucket by bucket of the canonical vector.

The leader, rank 0, alone is connected to other replicas. In a transfer each rank sends it what it has of a bucket
(`plans.canonical`), gets its part of a result, or both. So replicas of any layout exchange the same buckets. A
rank holds its own part of a vector, and the leader a few buckets besides.

    follower    sends its part of bucket after bucket       receives its part of bucket after bucket
    leader      transfer.content(bucket)                    transfer.hand_out(bucket, result)

A follower does both in threads, at the pace of the leader. What the leader has not asked for, `wait` gathers and
hands out, so that followers come to the end whatever happened. Where a rank is lost, the others raise
RuntimeError. A replica of one rank copies nothing: contents and results are parts of its vectors.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from functools import cached_property
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_noloco.federation.mesh import in_thread
from megatron_noloco.federation.movement import Movement
from megatron_noloco.outer.vectors import HOST, NOTHING
from megatron_noloco.plans.canonical import Block, Holding
from megatron_noloco.transport.interface import Message, RankLostError

_NEVER_SECONDS = 365 * 86400.0  # a partner's delay is limited by its conversation
_STUCK_SECONDS = 1.0


class Gather:
    """Begins the transfers of a replica. All ranks begin theirs in the same order; several may be under way.

    Args:
        first_tag: of messages inside the replica; each transfer has a tag of its own.
    """

    def __init__(self, movement: Movement, first_tag: int = 0) -> None:
        self.movement = movement
        self._tags = count(first_tag)

    @cached_property
    def _fragments(self) -> list[Holding]:
        return [self.movement.own.ascending(interval.start) for interval in self.movement.intervals]

    def fragment(self, index: int, gives: Tensor | None, gets: Tensor | None) -> "Transfer":
        """Begin a transfer of what this rank has of a fragment, in canonical order; padding follows, and stays.

        Args:
            gives: fp32, flat, on any device, not to be written before the end; None: nothing is gathered.
            gets: fp32, flat, in host memory; None: nothing is handed out.
        """
        interval, own = self.movement.intervals[index], self.movement.own
        if gives is not None and gets is not None:
            moved = own.before(interval.stop) - own.before(interval.start)
            gets[moved:] = gives[moved:]
        return self._begin(interval, _Vectors(self._fragments[index], gives, gets))

    def whole(self, gives: Tensor | None, gets: Tensor | None) -> "Transfer":
        """Begin a transfer of vectors with the places of the weights; arguments as in `fragment`."""
        return self._begin(range(self.movement.length), _Vectors(self.movement.own, gives, gets))

    def _begin(self, interval: range, vectors: "_Vectors") -> "Transfer":
        kind = Follower if self.movement.rank else Leader
        return kind(self.movement, interval, next(self._tags), vectors)


class _Vectors(NamedTuple):
    """The vectors of a transfer, and the places of this rank's blocks in them."""

    holding: Holding
    gives: Tensor | None
    gets: Tensor | None


class Transfer(ABC):
    """A transfer of an interval of the canonical vector, as one rank takes part in it.

    Attributes:
        buckets: the elements of each bucket.
    """

    def __init__(self, movement: Movement, interval: range, tag: int, vectors: _Vectors) -> None:
        self.movement = movement
        self.buckets = movement.buckets(interval)
        self._tag = tag
        self._holding, self._gives, self._gets = vectors

    @abstractmethod
    def wait(self) -> None:
        """Wait for the end; on the leader, after the last call of its other methods.

        Raises RuntimeError where a rank of the replica is lost.
        """

    def _move(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        try:
            if (flight := self.movement.post(sends, receives, self._tag)) is not None:
                flight.wait(_NEVER_SECONDS)
        except RankLostError as error:  # a ConnectionError would be about a partner
            raise RuntimeError(f"a rank of this replica is lost: {error}") from None


class Follower(Transfer):
    """A transfer on a rank that is not the leader. Begins at once."""

    def __init__(self, movement: Movement, interval: range, tag: int, vectors: _Vectors) -> None:
        super().__init__(movement, interval, tag, vectors)
        ways = (self._gives, self._send), (self._gets, self._receive)
        self._jobs = [in_thread(job, "noloco-gather") for vector, job in ways if vector is not None]

    def wait(self) -> None:
        try:
            for job in wait(self._jobs, return_when=FIRST_EXCEPTION).done:
                job.result()
        finally:
            wait(self._jobs, _STUCK_SECONDS)

    def _send(self) -> None:
        assert self._gives is not None
        for bucket in self.buckets:
            packed = _packed(self._gives, self._holding.between(bucket.start, bucket.stop, given=True))
            self._move([Message(0, packed)], [])

    def _receive(self) -> None:
        assert self._gets is not None
        for bucket in self.buckets:
            blocks = self._holding.between(bucket.start, bucket.stop)
            packed = _memory(_size(blocks))
            self._move([], [Message(0, packed)])
            _unpack(packed, blocks, self._gets)


class Leader(Transfer):
    """A transfer on the leader. Its methods are called for bucket after bucket; they raise RuntimeError where a
    rank of the replica is lost.
    """

    def __init__(self, movement: Movement, interval: range, tag: int, vectors: _Vectors) -> None:
        super().__init__(movement, interval, tag, vectors)
        self._gathered = self._handed = 0  # buckets

    def content(self, at: int) -> Tensor:
        """Gather bucket number `at`, fp32 in host memory, not to be written."""
        assert self._gives is not None
        bucket = self.buckets[at]
        parts = [(blocks, rank, _memory(_size(blocks))) for rank, blocks in self._others(bucket, given=True)]
        self._move([], [Message(rank, packed) for _, rank, packed in parts])
        self._gathered = at + 1
        if (inside := self._inside(self._gives, bucket)) is not None:
            return inside
        content, own = _memory(len(bucket)), self._holding.between(bucket.start, bucket.stop, given=True)
        for blocks, packed in [(own, _packed(self._gives, own)), *((one[0], one[2]) for one in parts)]:
            _to_bucket(packed, blocks, content, bucket.start)
        return content

    def result(self, at: int) -> Tensor:
        """Return memory for the result of bucket number `at`."""
        inside = self._inside(self._gets, self.buckets[at])
        return _memory(len(self.buckets[at])) if inside is None else inside

    def hand_out(self, at: int, result: Tensor) -> None:
        """Hand out the result of bucket number `at`, which lies in the memory of `result(at)`."""
        assert self._gets is not None
        bucket = self.buckets[at]
        if self._inside(self._gets, bucket) is None:
            own = self._holding.between(bucket.start, bucket.stop)
            _unpack(_from_bucket(result, own, bucket.start), own, self._gets)
        others = self._others(bucket)
        self._move([Message(rank, _from_bucket(result, blocks, bucket.start)) for rank, blocks in others], [])
        self._handed = at + 1

    def wait(self) -> None:
        if len(self.movement.holdings) > 1:
            for at in range(self._gathered, len(self.buckets) * (self._gives is not None)):
                self.content(at)
            for at in range(self._handed, len(self.buckets) * (self._gets is not None)):
                self.hand_out(at, _memory(len(self.buckets[at])).zero_())

    def _others(self, bucket: range, given: bool = False) -> list[tuple[int, list[Block]]]:
        """Return what each other rank has of a bucket."""
        holdings = list(enumerate(self.movement.holdings))[1:]
        return [(rank, holding.between(bucket.start, bucket.stop, given)) for rank, holding in holdings]

    def _inside(self, vector: Tensor | None, bucket: range) -> Tensor | None:
        """Return the bucket as a part of the leader's vector; None where it does not lie there as a whole."""
        blocks = self._holding.between(bucket.start, bucket.stop)
        ends = [block.own + block.size for block in blocks]
        follow = all(end == block.own for end, block in zip(ends, blocks[1:], strict=False))
        if vector is None or vector.device != HOST or _size(blocks) != len(bucket) or not follow:
            return None
        return vector[blocks[0].own : ends[-1]]


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


def _to_bucket(packed: Tensor, blocks: Sequence[Block], bucket: Tensor, start: int) -> None:
    """Write packed elements to their places in a bucket that begins at element `start` of the canonical vector."""
    for block, part in zip(blocks, packed.split([block.size for block in blocks]), strict=True):
        _window(bucket, block, start).copy_(part.view(block.rows, block.width))


def _from_bucket(bucket: Tensor, blocks: Sequence[Block], start: int) -> Tensor:
    """Return the elements of blocks of a bucket, one block after the other."""
    parts = [_window(bucket, block, start).reshape(-1) for block in blocks]
    return torch.cat(parts) if parts else NOTHING


def _window(bucket: Tensor, block: Block, start: int) -> Tensor:
    """Return a block of a bucket as a view, shape [rows, width]."""
    offset = bucket.storage_offset() + block.first - start
    return bucket.as_strided((block.rows, block.width), (block.matrix.columns, 1), offset)
