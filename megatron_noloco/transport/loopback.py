"""Messages between threads of one process that stand for ranks: for tests and simulators."""

import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from megatron_noloco.transport.chunks import (
    DEFAULT_CHUNK_BYTES,
    Chunk,
    ChunkFlight,
    ReportedTransfers,
    check_messages,
    cut,
)
from megatron_noloco.transport.protocol import Message


@dataclass
class _Channel:
    """What waits between two ranks under one tag. At most one of the two queues has anything in it."""

    sent: deque[Tensor] = field(default_factory=deque)
    wanted: deque[tuple[Chunk, ReportedTransfers]] = field(default_factory=deque)


_Key = tuple[int, int, int]  # source, destination, tag


class _Exchange:
    """The channels between all ranks, under one lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channels: defaultdict[_Key, _Channel] = defaultdict(_Channel)

    def want(self, key: _Key, chunk: Chunk, received: ReportedTransfers) -> None:
        with self._lock:
            self._channels[key].wanted.append((chunk, received))
            self._match(key)

    def send(self, key: _Key, data: Tensor) -> None:
        with self._lock:
            self._channels[key].sent.append(data.clone())
            self._match(key)

    def _match(self, key: _Key) -> None:
        channel = self._channels[key]
        if channel.sent and channel.wanted:
            data, (chunk, received) = channel.sent.popleft(), channel.wanted.popleft()
            if len(data) != len(chunk.data):
                source, destination, tag = key
                raise ValueError(
                    f"rank {source} sent {len(data)} bytes where rank {destination} expects "
                    f"{len(chunk.data)} (tag {tag}): both must post equal lengths, dtypes and chunk_bytes"
                )
            chunk.data.copy_(data)
            received.report(chunk.arrival)
        if not channel.sent and not channel.wanted:
            del self._channels[key]  # a long simulation uses a fresh tag every round


class LoopbackTransport:
    """One rank of `loopback_world`; to be used by one thread."""

    name = "loopback"
    device_buffers = False
    connects_lazily = False
    progress = "the thread that sends"

    def __init__(self, exchange: _Exchange, rank: int, world_size: int, chunk_bytes: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._exchange = exchange
        self._chunk_bytes = chunk_bytes

    def post(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> ChunkFlight:
        check_messages([*sends, *receives], self.rank, self.world_size)
        wanted = cut(receives, self._chunk_bytes)
        received = ReportedTransfers(wanted, tag)
        for chunk in wanted:
            self._exchange.want((chunk.rank, self.rank, tag), chunk, received)
        for chunk in cut(sends, self._chunk_bytes):
            self._exchange.send((self.rank, chunk.rank, tag), chunk.data)
        return ChunkFlight(received, ReportedTransfers([], tag))  # sends were copied: nothing to wait for


def loopback_world(world_size: int, chunk_bytes: int = DEFAULT_CHUNK_BYTES) -> list[LoopbackTransport]:
    """Return the transports of a world of `world_size` threads, in rank order."""
    exchange = _Exchange()
    return [LoopbackTransport(exchange, rank, world_size, chunk_bytes) for rank in range(world_size)]
