"""Connections that one thread reads and writes; none of them makes it wait.

A script says what happens on a connection: a generator that yields one place in memory after the other, and goes
on when the bytes that arrive have filled it. The end of the connection is raised in the script.
"""

import errno
import os
import selectors
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from typing import Any, TypeAlias

Script: TypeAlias = Generator[memoryview, None, None]
SocketAddress: TypeAlias = tuple[socket.AddressFamily, tuple[Any, ...]]

_OPENING_SECONDS = 10.0  # for all that comes before the first use of a connection
_MOST_STRANGERS = 64  # connections of others that have not shown that they are members
_AT_ONCE = 2 * 2**20  # bytes that one connection reads, or writes, before others have their turn
_UNACKNOWLEDGED_MILLISECONDS = 10_000  # after which TCP gives a connection up
_LINGER_SECONDS = 2.0
_MOST_WAITING = 4096  # messages to another process that reads none
_PIECE = 2**18  # bytes that are encrypted at a time

_sink = memoryview(bytearray(2**16))  # for bytes that nobody wants


class Wire:
    """A connection to another process. Used by one thread.

    Attributes:
        endpoint, to: to which this process has connected; "" and None where the other one did.
        refill: returns the next bytes to send, when all before are sent; nothing where there are none.
        deadline: when the connection is given up, on the monotonic clock.
        error: why it has ended, or will when its turn comes; None: it has not.
        blocked: whether it waits until the network takes more.
        bulk: whether others have their turn first.
    """

    def __init__(
        self, wires: "Wires", socket: socket.socket, endpoint: str = "", to: SocketAddress | None = None
    ) -> None:
        self.endpoint, self.to = endpoint, to
        self.refill: Callable[[], Iterable[Any]] = tuple
        self.deadline = time.monotonic() + _OPENING_SECONDS
        self.error: OSError | None = None
        self.blocked = self.bulk = False
        self.file = socket.fileno()
        self._wires, self._socket = wires, socket
        self._leaving = False
        self._out = deque[memoryview]()
        self._script, self._place = _discard(), _sink

    def run(self, script: Script) -> None:
        """Have this script say what happens."""
        self._script, self._place = script, next(script)
        self.touch()

    def write(self, *parts: Any) -> None:
        """Send bytes, which must not change before, after all others."""
        self._out += (memoryview(part) for part in parts if len(part))
        if len(self._out) > _MOST_WAITING:
            self.end(ConnectionAbortedError(errno.ECONNABORTED, "the other side reads nothing"))
        self.touch()

    def touch(self) -> None:
        """Have it look soon for something to send, or to read."""
        self._wires.ready.add(self)

    def encrypt(self, context: ssl.SSLContext) -> None:
        """Have all that follows encrypted, both ways. Where the keys differ, the end is an ssl.SSLError."""
        self._socket = context.wrap_socket(
            self._socket, server_side=not self.endpoint, do_handshake_on_connect=False
        )

    @property
    def encrypted(self) -> bool:
        return isinstance(self._socket, ssl.SSLSocket)

    def divert(self) -> None:
        """Throw away the rest of the bytes for the present place; then the script goes on as if they had come."""
        self._place = memoryview(bytearray(len(self._place)))

    def leave(self) -> None:
        """Send what waits to be sent, and nothing after it."""
        self._script, self._place, self._leaving = _discard(), _sink, True
        self.deadline = min(self.deadline, time.monotonic() + _LINGER_SECONDS)
        self.touch()

    def end(self, error: OSError) -> None:
        """Close the connection soon, and raise the error in its script."""
        self.error = self.error or error
        self.touch()

    def advance(self) -> None:
        """Move what can be moved now."""
        self.blocked = False
        try:
            self._flush()
            with suppress(BlockingIOError, ssl.SSLWantReadError):
                self._fill()
            if self._out and not self.blocked:  # it waited for the handshake, which may have ended in reading
                self._flush()
        except ssl.SSLWantWriteError:
            self.blocked = True
        except ssl.SSLEOFError:
            self.end(_closed())
        except OSError as error:
            self.end(error)

    def close(self) -> None:
        """Close the socket, and have the script end."""
        assert self.error is not None
        self._socket.close()
        script, self._script = self._script, _discard()
        with suppress(StopIteration, OSError):
            script.throw(self.error)
        self.error.__traceback__ = None  # refers to this connection, whose memory would be kept

    def _flush(self) -> None:
        sent = 0
        while self._out or self._refilled():
            if sent >= _AT_ONCE:
                self.touch()
                return
            try:
                count = self._socket.send(self._out[0][:_PIECE])
            except (BlockingIOError, ssl.SSLWantWriteError):
                self.blocked = True
                return
            except ssl.SSLWantReadError:  # the handshake waits for the other side
                return
            sent += count
            if rest := self._out.popleft()[count:]:
                self._out.appendleft(rest)
        if self._leaving:
            self._leaving = False
            self._socket.shutdown(socket.SHUT_WR)

    def _refilled(self) -> bool:
        self._out += (memoryview(part) for part in self.refill() if len(part))
        return bool(self._out)

    def _fill(self) -> None:
        """Read what has come; raises BlockingIOError, or ssl.SSLWantReadError, at its end."""
        read = 0
        while read < _AT_ONCE:
            if not (count := self._socket.recv_into(self._place)):
                raise _closed()
            self._place = self._place[count:]
            self._go_on()
            read += count
        self.touch()

    def _go_on(self) -> None:
        """Let the script go on where its place is full."""
        while not self._place:
            try:
                self._place = next(self._script)
            except StopIteration:
                self.leave()


def _closed() -> OSError:
    return ConnectionResetError(errno.ECONNRESET, "the other side closed the connection")


def _discard() -> Script:
    while True:
        yield _sink


class Wires:
    """All connections of a process. Used by one thread, but for `wake`.

    Args:
        listener: takes the connections of others; None: nobody can connect to this process.
        visit: returns the script of a connection of another process.
    """

    def __init__(self, listener: socket.socket | None, visit: Callable[[Wire], Script]) -> None:
        self.ready = set[Wire]()  # to be advanced whatever the kernel says
        self._visit = visit
        self._all = dict[Wire, int]()  # with the events that are waited for
        self._strangers = deque[Wire]()
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._listener = listener
        for end in (self._wake, self._woken):
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._listens(True)

    def wake(self) -> None:
        """Have `turn` return soon. From any thread."""
        with suppress(OSError):  # it is full, or closed
            self._wake.send(b"x")

    def dial(self, endpoint: str, to: SocketAddress, script: Callable[[Wire], Script]) -> Wire:
        """Connect to another process; raises OSError where that cannot even begin."""
        dialled = socket.socket(to[0], socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            if (error := dialled.connect_ex(to[1])) not in (0, errno.EINPROGRESS):
                raise OSError(error, os.strerror(error))
            return self._add(Wire(self, dialled, endpoint, to), dialled, script)
        except BaseException:
            dialled.close()
            raise

    def welcome(self, wire: Wire) -> None:
        """Note that the other side of a connection is a member, and may stay."""
        wire.deadline = float("inf")
        if wire in self._strangers:
            self._strangers.remove(wire)

    def turn(self, seconds: float) -> None:
        """Wait for bytes, for so long at most, and move them."""
        for key, _ in self._selector.select(0 if self.ready else seconds):
            if key.fileobj is self._woken:
                self._woken.recv(2**12)
            elif key.fileobj is self._listener:
                self._accept()
            else:
                self.ready.add(key.data)
        wires = sorted(self.ready, key=lambda wire: wire.bulk)
        self.ready.clear()
        for wire in wires:
            if wire.error is None:
                wire.advance()
            if wire.error is not None:
                self._remove(wire)
            elif self._all[wire] != (events := _events(wire)):
                self._all[wire] = events
                self._selector.modify(wire.file, events, wire)

    def end_late(self) -> None:
        """End the connections whose deadline is over; accept others again."""
        now = time.monotonic()
        for wire in self._all:
            if now > wire.deadline:
                wire.end(TimeoutError(errno.ETIMEDOUT, "there was no answer"))
        self._listens(True)

    def close(self, linger: bool) -> None:
        """Close all connections; with `linger` what waits is still sent, for two seconds at most."""
        self._listens(False)
        if self._listener is not None:
            self._listener.close()
        deadline = time.monotonic() + _LINGER_SECONDS
        for wire in self._all:
            wire.leave()
        while self._all and linger and time.monotonic() < deadline:
            self.turn(0.1)
        for wire in list(self._all):
            wire.end(ConnectionAbortedError(errno.ECONNABORTED, "this process leaves"))
            self._remove(wire)
        for one in (self._selector, self._wake, self._woken):
            one.close()

    def _listens(self, accepts: bool) -> None:
        if self._listener is not None and accepts != (self._listener.fileno() in self._selector.get_map()):
            if accepts:
                self._selector.register(self._listener, selectors.EVENT_READ)
            else:
                self._selector.unregister(self._listener)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            accepted, _ = self._listener.accept()
            accepted.setblocking(False)
            self._strangers.append(self._add(Wire(self, accepted), accepted, self._visit))
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # until the next `end_late`
                self._listens(False)
        if len(self._strangers) > _MOST_STRANGERS:
            self._strangers.popleft().end(ConnectionAbortedError(errno.ECONNABORTED, "others came"))

    def _add(self, wire: Wire, made: socket.socket, script: Callable[[Wire], Script]) -> Wire:
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MILLISECONDS)
        self._all[wire] = _events(wire)
        self._selector.register(wire.file, self._all[wire], wire)
        wire.run(script(wire))
        return wire

    def _remove(self, wire: Wire) -> None:
        if self._all.pop(wire, None) is not None:
            self._selector.unregister(wire.file)
            if wire in self._strangers:
                self._strangers.remove(wire)
            wire.close()


def _events(wire: Wire) -> int:
    return selectors.EVENT_READ | (selectors.EVENT_WRITE if wire.blocked else 0)
