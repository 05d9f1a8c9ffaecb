"""What the transports share: messages cut into chunks, a queue on which chunks land, and a flight of such."""

import queue
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_noloco.transport.protocol import Arrival, ExchangeTimeoutError, Message

DEFAULT_CHUNK_BYTES = 4 * 1024 * 1024  # long enough that calls are cheap, short enough to overlap the update


class Chunk(NamedTuple):
    """A piece of a message: what `Arrival` will report, the rank at the other end, and its bytes."""

    arrival: Arrival
    rank: int
    data: Tensor  # uint8 view of the message's buffer


def cut(messages: Sequence[Message], chunk_bytes: int) -> list[Chunk]:
    """Every message in pieces of at most `chunk_bytes`, in order. An empty message is one empty piece.

    Both ends must cut alike, so `chunk_bytes` has to agree between ranks.
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


def check_messages(
    messages: Sequence[Message], rank: int, world_size: int, device_buffers: bool = False
) -> None:
    """Raise ValueError for a message that no transport carries."""
    for message in messages:
        if message.rank == rank or not 0 <= message.rank < world_size:
            raise ValueError(f"rank {rank} of {world_size} cannot exchange messages with rank {message.rank}")
        buffer = message.buffer
        if (
            buffer.dim() != 1
            or not buffer.is_contiguous()
            or not (device_buffers or buffer.device.type == "cpu")
            or buffer.requires_grad
        ):
            raise ValueError(
                f"the buffer to or from rank {message.rank} must be flat, contiguous, on the CPU and without "
                f"gradient, not shape {tuple(buffer.shape)}, strides {buffer.stride()}, on {buffer.device}, "
                f"requires_grad={buffer.requires_grad}"
            )


class Landing:
    """Chunks of one flight that another thread reports and the owner's thread collects until a deadline."""

    def __init__(self, chunks: Sequence[Chunk], tag: int) -> None:
        self.wait_seconds = 0.0
        self._tag = tag
        self._posted = time.monotonic()
        self._owed = {chunk.arrival: chunk.rank for chunk in chunks}
        self._reports: queue.SimpleQueue[Arrival | ConnectionError] = queue.SimpleQueue()

    def report(self, outcome: Arrival | ConnectionError) -> None:
        """Called from any thread: a chunk has landed, or never will."""
        self._reports.put(outcome)

    def collect(self, deadline_seconds: float) -> Iterator[Arrival]:
        """Yield what lands until nothing is owed; raise at the deadline, or on the first failure reported."""
        while self._owed:
            yield self._settle(self._next(deadline_seconds))

    def landed(self) -> list[Arrival]:
        """What `collect` would yield without waiting; same failures."""
        landed = []
        while self._owed:
            try:
                landed.append(self._settle(self._reports.get_nowait()))
            except queue.Empty:
                break
        return landed

    def complete(self) -> bool:
        """Whether nothing is owed any more."""
        return not self._owed

    def _settle(self, outcome: Arrival | ConnectionError) -> Arrival:
        if isinstance(outcome, ConnectionError):
            raise outcome
        del self._owed[outcome]
        return outcome

    def _next(self, deadline_seconds: float) -> Arrival | ConnectionError:
        started = time.monotonic()
        try:
            return self._reports.get(timeout=max(0.0, self._posted + deadline_seconds - started))
        except queue.Empty:
            rank = next(iter(self._owed.values()))
            raise ExchangeTimeoutError(rank, self._tag, time.monotonic() - self._posted) from None
        finally:
            self.wait_seconds += time.monotonic() - started


class LandingFlight:
    """A flight whose chunks others report as they land: those received, and those that have left.

    After a time-out chunks may still be reported, so whoever reports them keeps their buffers.
    """

    def __init__(self, received: Landing, sent: Landing) -> None:
        self._received = received
        self._sent = sent

    def arrivals(self, deadline_seconds: float) -> Iterator[Arrival]:
        return self._received.collect(deadline_seconds)

    def finish(self, deadline_seconds: float) -> None:
        for _ in self._sent.collect(deadline_seconds):
            pass

    def landed(self) -> list[Arrival]:
        return self._received.landed()

    def done(self) -> bool:
        self._sent.landed()
        return self._received.complete() and self._sent.complete()

    @property
    def wait_seconds(self) -> float:
        return self._received.wait_seconds + self._sent.wait_seconds
