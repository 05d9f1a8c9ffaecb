"""Checks messages and cuts them into chunks, whose completion threads may report; for all transports."""

import queue
from collections.abc import Sequence
from contextlib import suppress

import torch

from megatron_noloco.transport.interface import Arrival, Chunk, Message, RankLostError, Transfers

DEFAULT_CHUNK_BYTES = 4 * 1024 * 1024  # long enough that calls are cheap, short enough to overlap the update

_Outcome = Arrival | RankLostError  # a completed chunk, or the reason why one never will


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
