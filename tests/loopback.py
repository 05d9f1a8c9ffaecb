"""Messages between threads of one process that stand for ranks: for tests and simulators."""

import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from megatron_noloco.transport.chunks import DEFAULT_CHUNK_BYTES, ReportedTransfers, check_messages, cut
from megatron_noloco.transport.interface import Chunk, Flight, Message


@dataclass
class _Channel:
    """The unmatched sends and receives from one rank to another under one tag; one of the two queues is empty."""

    sends: deque[Tensor] = field(default_factory=deque)
    receives: deque[tuple[Chunk, ReportedTransfers]] = field(default_factory=deque)


_Key = tuple[int, int, int]  # source, destination, tag


class _Channels:
    """The channels between all ranks, under one lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channels: defaultdict[_Key, _Channel] = defaultdict(_Channel)

    def receive(self, key: _Key, chunk: Chunk, received: ReportedTransfers) -> None:
        with self._lock:
            self._channels[key].receives.append((chunk, received))
            self._match(key)

    def send(self, key: _Key, data: Tensor) -> None:
        with self._lock:
            self._channels[key].sends.append(data.clone())
            self._match(key)

    def _match(self, key: _Key) -> None:
        channel = self._channels[key]
        if channel.sends and channel.receives:
            data, (chunk, received) = channel.sends.popleft(), channel.receives.popleft()
            if len(data) != len(chunk.data):
                source, destination, tag = key
                raise ValueError(
                    f"rank {source} sent {len(data)} bytes where rank {destination} expects "
                    f"{len(chunk.data)} (tag {tag}): both must post equal lengths, dtypes and chunk_bytes"
                )
            chunk.data.copy_(data)
            received.report(chunk.arrival)
        if not channel.sends and not channel.receives:
            del self._channels[key]  # a long simulation uses a fresh tag every round


class _Received(ReportedTransfers):
    """Chunks to arrive. Gives up `turn`, if there is one, while it waits for them."""

    def __init__(self, chunks: list[Chunk], tag: int, turn: "threading.Lock | None") -> None:
        super().__init__(chunks, tag)
        self._turn = turn

    def _wait(self, waited_seconds: float, left_seconds: float) -> None:
        if self._turn is None:
            super()._wait(waited_seconds, left_seconds)
            return
        self._turn.release()
        try:
            super()._wait(waited_seconds, left_seconds)
        finally:
            self._turn.acquire()


class LoopbackTransport:
    """The endpoint of one rank of `loopback_world`; only one thread may use it."""

    name = "loopback"
    connects_lazily = False

    def __init__(
        self,
        channels: _Channels,
        rank: int,
        world_size: int,
        chunk_bytes: int,
        turn: "threading.Lock | None" = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._channels = channels
        self._chunk_bytes = chunk_bytes
        self._turn = turn

    def post(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Flight:
        check_messages([*sends, *receives], self.rank, self.world_size)
        incoming = cut(receives, self._chunk_bytes)
        received = _Received(incoming, tag, self._turn)
        for chunk in incoming:
            self._channels.receive((chunk.rank, self.rank, tag), chunk, received)
        for chunk in cut(sends, self._chunk_bytes):
            self._channels.send((self.rank, chunk.rank, tag), chunk.data)
        return Flight(received, ReportedTransfers([], tag))  # sends are copied: they need no waiting


def loopback_world(
    world_size: int, chunk_bytes: int = DEFAULT_CHUNK_BYTES, turn: "threading.Lock | None" = None
) -> list[LoopbackTransport]:
    """Return the transports of a world of `world_size` threads, in rank order.

    Args:
        turn: a lock that each thread holds when it calls a transport, and that is released while a call waits.
            Many threads that take turns need half the time of those that compete for a core. None: no turns.
    """
    channels = _Channels()
    return [LoopbackTransport(channels, rank, world_size, chunk_bytes, turn) for rank in range(world_size)]
