"""The parts that the transports share: messages cut into chunks, and a flight of chunks under way."""

import queue
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_noloco.transport.interface import Arrival, ExchangeTimeoutError, Message, RankLostError

DEFAULT_CHUNK_BYTES = 4 * 1024 * 1024  # long enough that calls are cheap, short enough to overlap the update

_Outcome = Arrival | RankLostError  # a completed chunk, or the reason why one never will


class Chunk(NamedTuple):
    """A piece of a message: its `Arrival`, the rank at the other end, and its bytes."""

    arrival: Arrival
    rank: int
    data: Tensor  # uint8 view of the message's buffer


def cut(messages: Sequence[Message], chunk_bytes: int) -> list[Chunk]:
    """Cut every message into pieces of at most `chunk_bytes`, in order. An empty message is one empty piece.

    All ranks must use the same `chunk_bytes`.
    """
    chunks = []
    for index, message in enumerate(messages):
        buffer, count = message.buffer, message.buffer.numel()
        step = max(1, chunk_bytes // buffer.element_size())
        for start in range(0, max(1, count), step):
            stop = min(start + step, count)
            data = buffer[start:stop].view(torch.uint8)
            chunks.append(Chunk(Arrival(index, start, stop), message.rank, data))
    return chunks


def check_messages(messages: Sequence[Message], rank: int, world_size: int) -> None:
    """Raise ValueError for a message that no transport carries."""
    for message in messages:
        if message.rank == rank or not 0 <= message.rank < world_size:
            raise ValueError(f"rank {rank} of {world_size} cannot exchange messages with rank {message.rank}")
        buffer = message.buffer
        if (
            buffer.dim() != 1
            or not buffer.is_contiguous()
            or buffer.device.type != "cpu"
            or buffer.requires_grad
        ):
            raise ValueError(
                f"the buffer to or from rank {message.rank} must be flat, contiguous, on the CPU and without "
                f"gradient, not shape {tuple(buffer.shape)}, strides {buffer.stride()}, on {buffer.device}, "
                f"requires_grad={buffer.requires_grad}"
            )


class Transfers:
    """The chunks that a flight sends, or those that it receives; subclasses find out which have completed.

    Attributes:
        chunks: the chunks under way, by their `Arrival`, in the order of posting.
        posted: the time of the post, on the monotonic clock.
        wait_seconds: seconds spent waiting in `next`.
        timed_out: whether `next` has raised ExchangeTimeoutError; the caller then collects no more chunks.
    """

    def __init__(self, chunks: Sequence[Chunk], tag: int) -> None:
        self.chunks = {chunk.arrival: chunk for chunk in chunks}
        self.wait_seconds = 0.0
        self.timed_out = False
        self._tag = tag
        self.posted = time.monotonic()

    def completed(self) -> list[Arrival]:
        """Return the chunks completed since the last call, and remove them from `chunks`; never blocks.

        Raises RankLostError when a chunk will never complete.
        """
        raise NotImplementedError

    def _wait(self, waited_seconds: float, left_seconds: float) -> None:
        """Block until a chunk may have completed, at most `left_seconds`."""
        raise NotImplementedError

    def next(self, deadline_seconds: float) -> list[Arrival]:
        """Wait until at least one chunk completes; then return what `completed` does.

        Raises ExchangeTimeoutError when `deadline_seconds` have passed since the post.
        """
        started = now = time.monotonic()
        try:
            while not (completed := self.completed()):
                left_seconds = self.posted + deadline_seconds - now
                if left_seconds <= 0:
                    self.timed_out = True
                    rank = next(iter(self.chunks.values())).rank
                    raise ExchangeTimeoutError(rank, self._tag, now - self.posted)
                self._wait(now - started, left_seconds)
                now = time.monotonic()
            return completed
        finally:
            self.wait_seconds += time.monotonic() - started


class ReportedTransfers(Transfers):
    """Chunks whose completion other threads report.

    A chunk may still be reported after a time-out: the thread that reports it keeps its buffer alive.
    """

    def __init__(self, chunks: Sequence[Chunk], tag: int) -> None:
        super().__init__(chunks, tag)
        self._reports: queue.SimpleQueue[_Outcome] = queue.SimpleQueue()
        self._taken: list[_Outcome] = []  # from the queue, but not yet returned

    def report(self, outcome: _Outcome) -> None:
        """Report, from any thread, that a chunk has completed, or that it never will."""
        self._reports.put(outcome)

    def completed(self) -> list[Arrival]:
        completed: list[Arrival] = []
        with suppress(queue.Empty):
            while self.chunks:
                outcome = self._taken.pop() if self._taken else self._reports.get_nowait()
                if isinstance(outcome, RankLostError):
                    if not completed:
                        raise outcome
                    self._taken.append(outcome)
                    break
                del self.chunks[outcome]
                completed.append(outcome)
        return completed

    def _wait(self, waited_seconds: float, left_seconds: float) -> None:
        with suppress(queue.Empty):
            self._taken.append(self._reports.get(timeout=left_seconds))


class ChunkFlight:
    """A `protocol.Flight` whose messages are cut into chunks."""

    def __init__(self, received: Transfers, sent: Transfers) -> None:
        self._received = received
        self._sent = sent
        self._arrived: list[Arrival] = []  # found by `wait`

    @property
    def posted(self) -> float:
        return self._received.posted

    def arrivals(self, deadline_seconds: float) -> Iterator[Arrival]:
        while self._arrived or self._received.chunks:
            if not self._arrived:
                self._arrived = self._received.next(deadline_seconds)
            yield self._arrived.pop(0)

    def finish(self, deadline_seconds: float) -> None:
        while self._sent.chunks:
            self._sent.next(deadline_seconds)

    def arrived(self) -> list[Arrival]:
        found, self._arrived = self._arrived, []
        return found + self._received.completed()

    def done(self) -> bool:
        self._sent.completed()
        return not (self._arrived or self._received.chunks or self._sent.chunks)

    def wait(self, deadline_seconds: float) -> None:
        if self._arrived:
            return
        if self._received.chunks:
            self._arrived = self._received.next(deadline_seconds)
        else:
            self.finish(deadline_seconds)

    @property
    def wait_seconds(self) -> float:
        return self._received.wait_seconds + self._sent.wait_seconds
