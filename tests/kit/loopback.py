"""Messages between threads of one process that stand for ranks: for tests and simulators."""

import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from megatron_noloco.transport.interface import Flight, Message, ReportedFlight, check_messages


@dataclass
class _Channel:
    """The unmatched sends and receives from one rank to another under one tag; one of the two queues is empty."""

    sends: deque[Tensor] = field(default_factory=deque)
    receives: deque[tuple[int, Tensor, ReportedFlight]] = field(default_factory=deque)


_Key = tuple[int, int, int]  # source, destination, tag


class _Channels:
    """The channels between all ranks, under one lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channels: defaultdict[_Key, _Channel] = defaultdict(_Channel)

    def receive(self, key: _Key, number: int, buffer: Tensor, flight: ReportedFlight) -> None:
        with self._lock:
            self._channels[key].receives.append((number, buffer, flight))
            self._match(key)

    def send(self, key: _Key, buffer: Tensor) -> None:
        with self._lock:
            channel = self._channels[key]
            channel.sends.append(buffer if channel.receives else buffer.clone())
            self._match(key)

    def _match(self, key: _Key) -> None:
        channel = self._channels[key]
        if channel.sends and channel.receives:
            sent, (number, buffer, flight) = channel.sends.popleft(), channel.receives.popleft()
            if (sent.dtype, sent.nbytes) != (buffer.dtype, buffer.nbytes):
                source, destination, tag = key
                raise ValueError(
                    f"rank {source} sent {sent.nbytes} bytes where rank {destination} expects "
                    f"{buffer.nbytes} (tag {tag}): both must post equal lengths and dtypes"
                )
            buffer.copy_(sent)
            flight.report(number)
        if not channel.sends and not channel.receives:
            del self._channels[key]  # a long simulation uses a fresh tag every round


class _Flight(ReportedFlight):
    """Gives up `turn`, if there is one, while it waits. Sends are copied: they need no waiting."""

    def __init__(self, receives: Sequence[Message], tag: int, turn: "threading.Lock | None") -> None:
        super().__init__(receives, [], tag)
        self._turn = turn

    def _block(self, waited_seconds: float, left_seconds: float) -> None:
        if self._turn is None:
            super()._block(waited_seconds, left_seconds)
            return
        self._turn.release()
        try:
            super()._block(waited_seconds, left_seconds)
        finally:
            self._turn.acquire()


class LoopbackTransport:
    """The endpoint of one rank of `loopback_world`; only one thread may use it."""

    name = "loopback"
    connects_lazily = False

    def __init__(
        self, channels: _Channels, rank: int, world_size: int, turn: "threading.Lock | None" = None
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._channels = channels
        self._turn = turn

    def post(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Flight:
        check_messages([*sends, *receives], self.rank, self.world_size)
        flight = _Flight(receives, tag, self._turn)
        for number, message in enumerate(receives):
            self._channels.receive((message.rank, self.rank, tag), number, message.buffer, flight)
        for message in sends:
            self._channels.send((self.rank, message.rank, tag), message.buffer)
        return flight


def loopback_world(world_size: int, turn: "threading.Lock | None" = None) -> list[LoopbackTransport]:
    """Return the transports of a world of `world_size` threads, in rank order.

    Args:
        turn: a lock that each thread holds when it calls a transport, and that is released while a call waits.
            Many threads that take turns need half the time of those that compete for a core. None: no turns.
    """
    channels = _Channels()
    return [LoopbackTransport(channels, rank, world_size, turn) for rank in range(world_size)]
