"""A connection to one rank of another job: a ZeroMQ socket, and the frames that wait to be sent on it."""

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import zmq
from zmq.utils.monitor import parse_monitor_message

from megatron_noloco.federation.keys import Keys

_SEND_QUEUE = 4  # messages that ZeroMQ holds for a connection: few, so that cancelled chunks stop soon
_AT_ONCE = 4  # chunks handed to ZeroMQ before other work has its turn
_RECONNECT_MILLISECONDS = (100, 2000)
_UNACKNOWLEDGED_MILLISECONDS = 10_000  # after which TCP gives a connection up
HANDSHAKE_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)
_SAME_KEY = "both need the same key file, or encryption none"
_CLOSED = "the other side closed the connection before it stood"
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | HANDSHAKE_FAILURES

Chunks = Iterator[tuple[bytes, np.ndarray]]


def why_no_handshake(event: int) -> str:
    """Say what one of HANDSHAKE_FAILURES means.

    Where keys or encryption differ, the side that notices first closes the connection, and the other side may see
    nothing else.
    """
    if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
        return f"{_CLOSED}; unless it has ended, or is no replica of this run, {_SAME_KEY}"
    return _SAME_KEY


class Connection:
    """Sends frames to one rank. Used by one thread; never blocks: what cannot be sent now waits for `flush`.

    Args:
        poller: is set to report events on `monitor`, and room on `socket` while frames wait.
    """

    def __init__(
        self, context: "zmq.Context[Any]", poller: zmq.Poller, endpoint: str, keys: Keys | None
    ) -> None:
        self.endpoint = endpoint
        self._poller = poller
        self.socket = context.socket(zmq.PUSH)
        self.socket.linger = 0
        self.socket.sndhwm = _SEND_QUEUE
        self.socket.immediate = 1  # only a connection that is established takes messages
        self.socket.reconnect_ivl, self.socket.reconnect_ivl_max = _RECONNECT_MILLISECONDS
        # Not ZeroMQ's own heartbeats: libzmq 4.3.5 aborts a process that was stopped for as long as their time-out
        # (zeromq/libzmq issues 3937, 4364, 4767). HELLO frames show that a rank is there.
        self.socket.tcp_maxrt = _UNACKNOWLEDGED_MILLISECONDS
        if keys is not None:
            keys.connecting(self.socket)
        self.monitor = self.socket.get_monitor_socket(_EVENTS)
        poller.register(self.monitor, zmq.POLLIN)
        self.socket.connect(endpoint)
        self._hello = b""
        self._control: deque[tuple[bytes | np.ndarray, ...]] = deque()
        self._chunks: deque[tuple[int, Chunks]] = deque()
        self._next: tuple[bytes, np.ndarray] | None = None

    def hello(self, frame: bytes) -> None:
        """Send a HELLO; it replaces one that is not sent yet."""
        self._hello = frame
        self.flush()

    def control(self, *parts: bytes | np.ndarray) -> None:
        """Send a small frame, before all chunks."""
        self._control.append(parts)
        self.flush()

    def chunks(self, ticket: int, frames: Chunks) -> None:
        """Send the chunks of a ticket, after those that wait already."""
        self._chunks.append((ticket, frames))
        self.flush()

    def flush(self) -> None:
        """Send what can be sent now; `waiting` says whether anything is left."""
        self._poller.register(self.socket, zmq.POLLOUT)
        try:
            while self._control:
                self.socket.send_multipart(self._control[0], zmq.NOBLOCK)
                self._control.popleft()
            if self._hello:  # after the frames that it may declare void
                self.socket.send(self._hello, zmq.NOBLOCK)
                self._hello = b""
            for _ in range(_AT_ONCE):
                if not self._send_chunk():
                    self._poller.register(self.socket, 0)
                    return
        except zmq.Again:
            pass

    def _send_chunk(self) -> bool:
        while self._next is None:
            if not self._chunks:
                return False
            self._next = next(self._chunks[0][1], None)
            if self._next is None:
                self._chunks.popleft()
        self.socket.send_multipart(self._next, zmq.NOBLOCK, copy=False)
        self._next = None
        return True

    def drop(self, tickets: set[int]) -> None:
        """Send no more chunks of these tickets."""
        if self._chunks and self._chunks[0][0] in tickets:
            self._next = None
        self._chunks = deque(entry for entry in self._chunks if entry[0] not in tickets)

    def drop_all(self) -> None:
        """Send nothing of what waits: the connection was lost."""
        self._control.clear()
        self._chunks.clear()
        self._next, self._hello = None, b""
        self._poller.register(self.socket, 0)

    @property
    def waiting(self) -> bool:
        """Whether frames wait for room to be sent."""
        return self.socket in self._poller

    def events(self) -> Iterator[int]:
        """Yield what happened to the connection: it was established or lost, or the handshake failed."""
        with suppress(zmq.Again):
            while True:
                yield parse_monitor_message(self.monitor.recv_multipart(zmq.NOBLOCK))["event"]

    def close(self, linger_milliseconds: int = 0) -> None:
        """Close the socket; frames that ZeroMQ holds are still sent for `linger_milliseconds`."""
        self._poller.register(self.socket, 0)
        self._poller.unregister(self.monitor)
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(linger_milliseconds)
