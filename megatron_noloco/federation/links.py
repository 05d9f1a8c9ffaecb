"""The connections of a rank: one for each pair of ranks, both ways, opened by a side that can reach the other.

A rank listens with one ROUTER socket, unless no other can reach it, and connects to others with a DEALER socket
each. A `Link` hides the difference.
"""

import errno
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import zmq
from zmq.utils.monitor import parse_monitor_message

from megatron_noloco.federation.keys import Keys

_SEND_QUEUE = 128  # messages that ZeroMQ holds for a link; more than the chunks and small frames under way
_RECEIVE_QUEUE = 4  # messages that ZeroMQ holds for each link; then TCP holds back the sender
_AT_ONCE = 8  # messages received before other work has its turn
_THREADS = 2  # of ZeroMQ, which encrypt and decrypt
_RECONNECT_MILLISECONDS = (100, 2000)
_MOST_SOCKETS = 65_536  # three for each link; ZeroMQ's default of 1023 would do for 340 of them
_UNACKNOWLEDGED_MILLISECONDS = 10_000  # after which TCP gives a connection up
_PORT_SECONDS = 20  # in which processes that a killed job has forked end, and free its port
_LINGER_MILLISECONDS = 2000
_NO_ADDRESS = "; it must be an address, or the name of an interface, of this host, or * for all"
_REMEDIES: dict[int | None, str] = {
    errno.EADDRINUSE: "; port 0 takes any that is free",
    errno.ENODEV: _NO_ADDRESS,
    errno.EADDRNOTAVAIL: _NO_ADDRESS,
}
_ENCRYPTED_MORE = 128  # bytes, at least those that encryption adds to a message
_ZAP = "inproc://zeromq.zap.01"
_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _FAILED
_SAME_KEY = "both need the same key file, or encryption none"
_OPEN: WeakSet["Links"] = WeakSet()  # that listen, in this process
_CLOSED = "the other side closed the connection before the handshake finished"


class Link:
    """One connection, through which messages pass both ways. Used by one thread; never blocks.

    Attributes:
        endpoint: to which this rank connects; "" where the other side opened the connection.
        up: whether messages can pass.
    """

    def __init__(self, socket: "zmq.Socket[Any]", endpoint: str = "", identity: bytes | None = None) -> None:
        self.endpoint = endpoint
        self.up = identity is not None
        self._socket = socket
        self._prefix: tuple[Any, ...] = () if identity is None else (identity,)

    def send(self, *parts: Any) -> bool:
        """Send a message; returns False where it cannot be sent now. `up` says whether it can be later."""
        try:
            self._socket.send_multipart((*self._prefix, *parts), zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self.up = False
            return False
        return True


class Links:
    """All sockets of a rank. Used by one thread.

    Args:
        listen: an endpoint of ZeroMQ, such as "tcp://*:0"; None: this rank only connects to others.
        longest: bytes; a connection that sends a longer message is closed.
        warn: is called with a line for the user.

    Attributes:
        endpoint: where the rank listens; "" where it does not.

    Raises ValueError when the socket cannot be bound.
    """

    def __init__(
        self, listen: str | None, longest: int, keys: Keys | None, warn: Callable[[str], None]
    ) -> None:
        self.endpoint = ""
        self._keys, self._warn = keys, warn
        self._longest = longest + _ENCRYPTED_MORE
        self._context: zmq.Context[Any] = zmq.Context(_THREADS)
        self._context.max_sockets = _MOST_SOCKETS
        self._poller = zmq.Poller()
        self._zap = self._context.socket(zmq.REP)  # asks whether a key is admitted; unused without keys
        self._zap.linger = 0
        self._zap.bind(_ZAP)
        self._poller.register(self._zap, zmq.POLLIN)
        self._dialled: dict[
            str, tuple[Link, zmq.Socket[Any], zmq.Socket[Any]]
        ] = {}  # with socket and monitor
        self._inbox: zmq.Socket[Any] | None = None
        if listen is not None:
            self._listen(listen)

    def _listen(self, listen: str) -> None:
        self._inbox = inbox = self._socket(zmq.ROUTER)
        inbox.router_mandatory = 1  # says so when the other side has gone
        if self._keys is not None:
            self._keys.listening(inbox)
        deadline = time.monotonic() + _PORT_SECONDS
        while not self.endpoint:
            try:
                inbox.bind(listen)
                self.endpoint = inbox.getsockopt_string(zmq.LAST_ENDPOINT)
            except zmq.ZMQError as error:
                problem = f"federation.listen: cannot listen at {listen}: {error}"
                if error.errno == errno.EADDRINUSE and any(other.holds(listen) for other in list(_OPEN)):
                    self._context.destroy(0)
                    raise ValueError(
                        f"{problem}, by this process: close() what attach returned before"
                    ) from None
                if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                    self._context.destroy(0)
                    raise ValueError(problem + _REMEDIES.get(error.errno, "")) from None
                self._warn(f"{problem}; trying for {_PORT_SECONDS} s")
                time.sleep(0.2)
        self._refusals = inbox.get_monitor_socket(_FAILED)
        for readable in (inbox, self._refusals):
            self._poller.register(readable, zmq.POLLIN)
        _OPEN.add(self)

    def holds(self, listen: str) -> bool:
        """Whether this is at the port of an endpoint."""
        return self.endpoint.rpartition(":")[2] == listen.rpartition(":")[2]

    def _socket(self, kind: int) -> "zmq.Socket[Any]":
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.sndhwm, socket.rcvhwm = _SEND_QUEUE, _RECEIVE_QUEUE
        socket.maxmsgsize = self._longest
        # Not ZeroMQ's own heartbeats: libzmq 4.3.5 aborts a process that was stopped for as long as their time-out
        # (zeromq/libzmq issues 3937, 4364, 4767). HELLO frames show that a rank is there.
        socket.tcp_maxrt = _UNACKNOWLEDGED_MILLISECONDS
        return socket

    def dial(self, endpoint: str) -> Link | None:
        """Return the link to an endpoint; it connects, again after each loss, until `hang_up`.

        Returns None while this process can open no more files: strangers may hold as many connections.
        """
        if endpoint in self._dialled:
            return self._dialled[endpoint][0]
        socket = None
        try:
            socket = self._socket(zmq.DEALER)
            monitor = socket.get_monitor_socket(_EVENTS)
        except zmq.ZMQError as error:
            if socket is not None:
                socket.close()
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            self._warn(f"other ranks cannot be joined now: {error} (ulimit -n; who connects to this rank?)")
            return None
        socket.immediate = 1  # only a connection that is established takes messages
        socket.reconnect_ivl, socket.reconnect_ivl_max = _RECONNECT_MILLISECONDS
        if self._keys is not None:
            self._keys.connecting(socket)
        for readable in (socket, monitor):
            self._poller.register(readable, zmq.POLLIN)
        socket.connect(endpoint)
        link = Link(socket, endpoint)
        self._dialled[endpoint] = link, socket, monitor
        return link

    def hang_up(self, link: Link) -> None:
        """Close a link that this rank opened; what ZeroMQ holds is still sent, for two seconds at most."""
        _, socket, monitor = self._dialled.pop(link.endpoint)
        for readable in (socket, monitor):
            self._poller.unregister(readable)
        socket.disable_monitor()
        monitor.close(0)
        socket.close(_LINGER_MILLISECONDS if link.up else 0)
        link.up = False

    def wait(self, seconds: float, wake: int) -> bool:
        """Wait for a message, an event, or for the file descriptor `wake`; return whether that is ready."""
        self._poller.register(wake, zmq.POLLIN)
        ready = dict(self._poller.poll(round(1000 * seconds)))
        if self._zap in ready and self._keys is not None:
            self._zap.send_multipart(self._keys.answer(self._zap.recv_multipart()))
        if self._inbox is not None and self._refusals in ready:
            event = parse_monitor_message(self._refusals.recv_multipart())["event"]
            self._warn(f"a connection to this rank failed: {_why_no_handshake(event)}")
        self._ready = ready
        return wake in ready

    def changed(self) -> Iterator[Link]:
        """Yield the links that this rank opened and that have been established, or lost, since the last call."""
        for link, _, monitor in list(self._dialled.values()):
            if monitor not in self._ready:
                continue
            for event in _events(monitor):
                if event & _FAILED:
                    self._warn(f"{link.endpoint} cannot be joined: {_why_no_handshake(event)}")
                else:
                    link.up = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
                    yield link

    def messages(self) -> Iterator[tuple[Link, Sequence[zmq.Frame]]]:
        """Yield some of the messages that have arrived, with the link to answer on."""
        for link, socket, _ in list(self._dialled.values()):
            if socket in self._ready:
                for parts in _received(socket):
                    yield link, parts
        if self._inbox is not None and self._inbox in self._ready:
            for identity, *parts in _received(self._inbox):
                yield Link(self._inbox, identity=identity.bytes), parts

    def close(self, linger: bool) -> None:
        """Close all sockets; with `linger`, what ZeroMQ holds is still sent, for two seconds at most."""
        _OPEN.discard(self)
        if self._inbox is not None:
            self._inbox.disable_monitor()
            self._inbox.close(_LINGER_MILLISECONDS if linger else 0)
        for link, *_ in list(self._dialled.values()):
            link.up &= linger
            self.hang_up(link)
        self._context.destroy()


def _received(socket: "zmq.Socket[Any]") -> Iterator[list[zmq.Frame]]:
    with suppress(zmq.Again):
        for _ in range(_AT_ONCE):
            yield socket.recv_multipart(zmq.NOBLOCK, copy=False)


def _events(monitor: "zmq.Socket[Any]") -> Iterator[int]:
    with suppress(zmq.Again):
        while True:
            yield parse_monitor_message(monitor.recv_multipart(zmq.NOBLOCK))["event"]


def _why_no_handshake(event: int) -> str:
    """Say what one of the events of a failed handshake means.

    Where keys or encryption differ, the side that notices first closes the connection, and the other side may see
    nothing else.
    """
    if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
        return f"{_CLOSED}; unless it has ended, or is no replica of this run, {_SAME_KEY}"
    return _SAME_KEY
