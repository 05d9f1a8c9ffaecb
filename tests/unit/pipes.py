"""Connections in memory, in place of sockets; who uses them says when bytes arrive."""

from collections.abc import Callable
from typing import Any, cast

from megatron_noloco.federation.wires import Script, SocketAddress, Wire

ROOM = 256  # bytes that a connection holds each way


class End:
    """An end of a connection, in place of a socket, with the bytes under way from there to the other end."""

    other: "End"
    wire: Wire

    def __init__(self, process: Any) -> None:
        self.process = process
        self.under_way, self.arrived = bytearray(), bytearray()
        self.closed = self.finished = False  # here: altogether, or for sending
        self.broken = False  # for the network: what is sent is lost
        self.noticed = False  # here: it is known that the connection has ended

    def fileno(self) -> int:
        return 0

    def send(self, data: memoryview) -> int:
        if self.noticed:
            raise BrokenPipeError
        if self.broken:
            return len(data)
        count = min(len(data), ROOM - len(self.under_way))
        if not count:
            raise BlockingIOError
        self.under_way += data[:count]
        return count

    def recv_into(self, place: memoryview) -> int:
        if not self.arrived:
            if self.noticed:
                return 0
            raise BlockingIOError
        count = min(len(place), len(self.arrived))
        place[:count] = self.arrived[:count]
        del self.arrived[:count]
        return count

    def shutdown(self, how: int) -> None:
        self.finished = True

    def close(self) -> None:
        self.closed = self.finished = True


class Sockets:
    """All connections of a process, in place of `Wires`."""

    def __init__(self, process: Any, find: Callable[[str], Any], ends: list[End]) -> None:
        self.ready = set[Wire]()
        self._process, self._find, self._ends = process, find, ends

    def dial(self, endpoint: str, to: SocketAddress, script: Callable[[Wire], Script]) -> Wire:
        other = self._find(endpoint)
        if other is None:
            raise ConnectionRefusedError(111, "Connection refused")
        near = End(self._process)
        self._ends += [near, visit(near, other)]
        near.wire = Wire(self, near, endpoint, to)  # type: ignore[arg-type]
        near.wire.run(script(near.wire))
        return near.wire

    def welcome(self, wire: Wire) -> None:
        pass

    def advance(self) -> None:
        while self.ready:
            ready, self.ready = list(self.ready), set()
            for wire in sorted(ready, key=lambda wire: (wire.bulk, wire.endpoint)):
                end = cast(End, wire._socket)
                if wire.error is None:
                    wire.advance()
                if wire.error is not None and not end.closed:
                    wire.close()


def visit(near: End, other: Any) -> End:
    """Connect an end to another process; return the end there."""
    far = End(other)
    near.other, far.other = far, near
    far.wire = Wire(other.sockets, far)  # type: ignore[arg-type]
    far.wire.run(other.peers.visited(far.wire))
    other.sockets.advance()
    return far
