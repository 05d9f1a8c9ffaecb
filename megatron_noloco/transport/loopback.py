"""A world whose ranks are threads of one process: for tests and simulators."""

import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from megatron_noloco.transport.chunks import (
    DEFAULT_CHUNK_BYTES,
    Chunk,
    Landing,
    LandingFlight,
    check_messages,
    cut,
)
from megatron_noloco.transport.protocol import Message


@dataclass
class _Channel:
    """What waits between two ranks under one tag; at most one of the two queues is ever non-empty."""

    sent: deque[Tensor] = field(default_factory=deque)
    wanted: deque[tuple[Chunk, Landing]] = field(default_factory=deque)


class _Exchange:
    """The wire: channels by (source, destination, tag), under one lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channels: defaultdict[tuple[int, int, int], _Channel] = defaultdict(_Channel)

    def want(self, source: int, destination: int, tag: int, chunk: Chunk, landing: Landing) -> None:
        with self._lock:
            channel = self._channels[source, destination, tag]
            channel.wanted.append((chunk, landing))
            self._match(channel, (source, destination, tag))

    def send(self, source: int, destination: int, tag: int, data: Tensor) -> None:
        with self._lock:
            channel = self._channels[source, destination, tag]
            channel.sent.append(data.clone())
            self._match(channel, (source, destination, tag))

    def _match(self, channel: _Channel, key: tuple[int, int, int]) -> None:
        if channel.sent and channel.wanted:
            data, (chunk, landing) = channel.sent.popleft(), channel.wanted.popleft()
            if len(data) != len(chunk.data):
                source, destination, tag = key
                raise ValueError(
                    f"rank {source} sent {len(data)} bytes where rank {destination} expects "
                    f"{len(chunk.data)} (tag {tag}): both must post equal lengths, dtypes and chunk_bytes"
                )
            chunk.data.copy_(data)
            landing.report(chunk.arrival)
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

    def post(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> LandingFlight:
        check_messages([*sends, *receives], self.rank, self.world_size)
        wanted = cut(receives, self._chunk_bytes)
        landing = Landing(wanted, tag)
        for chunk in wanted:
            self._exchange.want(chunk.rank, self.rank, tag, chunk, landing)
        for chunk in cut(sends, self._chunk_bytes):
            self._exchange.send(self.rank, chunk.rank, tag, chunk.data)
        return LandingFlight(landing, Landing([], tag))  # sends were copied: nothing to wait for


def loopback_world(world_size: int, chunk_bytes: int = DEFAULT_CHUNK_BYTES) -> list[LoopbackTransport]:
    """The transports of a world of `world_size` threads, in rank order."""
    exchange = _Exchange()
    return [LoopbackTransport(exchange, rank, world_size, chunk_bytes) for rank in range(world_size)]
