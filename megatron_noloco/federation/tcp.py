"""Streams over TCP, encrypted by TLS 1.3 of the standard library. A stream has a connection for itself.

A connection carries frames: a kind, the length of its content in three bytes, and the content.

| frame | content |
|---|---|
| begin | empty: a stream begins; the side that has connected sends it |
| data | the next bytes of the stream |
| close | empty: the stream has no more data in this direction |
| abort | the reason, UTF-8: the stream has ended, and the connection ends as well |

After a close in both directions the connection stays. The next stream to the same endpoint takes it, and
needs neither a handshake nor a slow start.

The first six bytes of a connection, both ways, are alike in all versions: `_MAGIC`, the version, and whether the
connection is encrypted after them.
"""

import asyncio
import errno
import os
import socket
import ssl
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from megatron_noloco.federation.directory import split
from megatron_noloco.federation.keys import Keys
from megatron_noloco.federation.streams import (
    IS_IT_THE_MTU,
    Buffer,
    Carrier,
    Changes,
    RefusedError,
    Serve,
    Stream,
    StreamEndedError,
)
from megatron_noloco.files import outside

VERSION = 15  # of the protocol
_MAGIC = b"nlco"
_BEGIN, _DATA, _CLOSE, _ABORT = range(4)
_HEADER_BYTES = 4
_FRAME_BYTES = 2**18  # of data; written as a whole, so that an abort never falls into a frame
_EARLY_BYTES = 2**18  # received before anybody wants them; then the sender waits
_SCRATCH_BYTES = 2**16
_REASON_BYTES = 2**10
_LENGTHS = {
    _BEGIN: range(1),
    _DATA: range(1, _FRAME_BYTES + 1),
    _CLOSE: range(1),
    _ABORT: range(1, _REASON_BYTES + 1),
}
_JOIN_BYTES = 2**12  # a small frame is one packet with its header
_OPEN_SECONDS = 10.0  # for handshake and first frame
_LINGER_SECONDS = 2.0  # for a reason to be delivered
_MOST_STRANGERS = 64  # connections of others on which no stream has begun
_ACCEPT_PAUSE_SECONDS = 0.5  # when this process has too many open files
_OTHER_KEY = "the process at {} has another key"
_NO_ANSWER = "no answer, nor a refusal: its host is off, or a firewall drops what is sent there"
_NO_JOB = "the process at {} is no job with a key, or of another version"


class _Connection(asyncio.BufferedProtocol):
    """A TCP connection. Data goes where `fill` wants it, without a copy.

    Attributes:
        error: why the connection has ended; None: it has not.
    """

    def __init__(self) -> None:
        self._arrived = 0  # bytes of data of the present stream
        self.error: StreamEndedError | None = None
        self._begun = self._served = self._closed = 0  # numbers of streams; closed by the other side
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None
        self._changes = Changes()
        self._writable = True
        self._header, self._kind, self._left = bytearray(), _DATA, 0
        self._place = memoryview(b"")
        self._early, self._reason = bytearray(), bytearray()
        self._scratch = memoryview(b"")

    # Called by the event loop.

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        # A write ends when the kernel has everything, since until then Python refers to the caller's buffer.
        # Python's TLS pauses at its limit, not above it.
        transport.set_write_buffer_limits(high=1 if transport.get_extra_info("sslcontext") else 0, low=0)
        # No TCP_USER_TIMEOUT: it would end a stream whose receiver is not ready for the next bytes.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def get_buffer(self, sizehint: int) -> memoryview:
        size = self._left or _HEADER_BYTES - len(self._header)
        if self.error is not None:
            size = _SCRATCH_BYTES  # thrown away
        elif self._left and self._kind == _DATA and self._place:
            return self._place[: self._left]
        # Not kept: a process has hundreds of connections, most of them idle.
        self._scratch = memoryview(bytearray(min(size, _SCRATCH_BYTES)))
        return self._scratch

    def buffer_updated(self, count: int) -> None:
        if self.error is not None:
            return
        if not self._left:
            self._header += self._scratch[:count]
            if len(self._header) == _HEADER_BYTES:
                self._kind, self._left = self._header[0], int.from_bytes(self._header[1:])
                self._header.clear()
                self._begin_frame()
            return
        self._left -= count
        self._arrived += count * (self._kind == _DATA)
        if self._kind == _ABORT:
            self._reason += self._scratch[:count]
            if not self._left:
                self._end(StreamEndedError(outside(self._reason.decode(errors="replace"))))
        elif self._place:
            self._place = self._place[count:]
            if not self._place:
                self._changes.note()
        else:
            self._early += self._scratch[:count]
            if len(self._early) >= _EARLY_BYTES:
                self._transport.pause_reading()

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        self._changes.note()

    def eof_received(self) -> None:
        self.connection_lost(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._end(StreamEndedError(f"the connection was lost{f' ({error})' if error else ''}"))

    # Called by streams.

    @property
    def certificate(self) -> bytes | None:
        """The certificate that the other side has shown, DER; None: it has shown no certificate."""
        encrypted = self._transport.get_extra_info("ssl_object")
        return None if encrypted is None else encrypted.getpeercert(binary_form=True)

    @property
    def received(self) -> int:
        """See `Stream.received`."""
        return self._arrived - len(self._early)

    async def write(self, *buffers: Buffer) -> None:
        for buffer in buffers:
            content = memoryview(buffer).cast("B")
            for start in range(0, len(content), _FRAME_BYTES):
                self._write_frame(_DATA, content[start : start + _FRAME_BYTES])
                await asyncio.sleep(0)  # asyncio drops what is written after an error, and only later says so
                await self._until(lambda: self._writable)
                self.check()

    async def fill(self, buffer: Buffer) -> None:
        place = memoryview(buffer).cast("B")
        if early := min(len(self._early), len(place)):
            place[:early] = self._early[:early]
            del self._early[:early]
            place = place[early:]
            self._transport.resume_reading()
        if place:
            self._place = place
            try:
                await self._until(lambda: not self._place or self._closed == self._begun)
            finally:
                complete, self._place = not self._place, memoryview(b"")
            if not complete:
                raise StreamEndedError("the other side closed the stream before its end")

    async def begin(self) -> None:
        """Begin a stream to the other side."""
        self._write_frame(_BEGIN)
        self._begun += 1
        self._arrived = 0

    async def wait_begin(self) -> None:
        """Wait until the other side begins a stream."""
        await self._until(lambda: self._begun > self._served)
        self._served += 1

    async def close_stream(self) -> None:
        self._write_frame(_CLOSE)
        stream = self._begun
        await self._until(lambda: self._closed >= stream)
        if self._early and self._begun == stream:
            raise StreamEndedError("the other side sends more than is received")

    def abort(self, reason: str, lingers: bool = False) -> None:
        """End the connection.

        Args:
            lingers: whether to read on, for two seconds at most, until the other side has read the reason. The
                kernel discards a reason whose sender closes with bytes that were not read.
        """
        if self.error is None:
            with suppress(StreamEndedError):
                self._write_frame(_ABORT, reason.encode()[:_REASON_BYTES] or b"?")
            self._transport.resume_reading()
            self._end(StreamEndedError(reason), lingers)

    def check(self) -> None:
        if self.error is not None:
            raise StreamEndedError(str(self.error))

    def _begin_frame(self) -> None:
        if self._left not in _LENGTHS.get(self._kind, ()):
            self._end(StreamEndedError("malformed frame"))
        elif self._kind in (_BEGIN, _CLOSE):
            self._begun += self._kind == _BEGIN
            self._closed += self._kind == _CLOSE
            if self._kind == _BEGIN:
                self._arrived = 0
            if self._closed not in (self._begun, self._begun - 1) or (self._kind == _BEGIN and self._early):
                self._end(StreamEndedError("unexpected frame"))
            self._changes.note()

    def _write_frame(self, kind: int, content: bytes | memoryview = b"") -> None:
        self.check()
        header = bytes([kind]) + len(content).to_bytes(3)
        if len(content) <= _JOIN_BYTES:
            self._transport.write(header + content)
        else:
            self._transport.write(header)
            self._transport.write(content)

    async def _until(self, condition: Callable[[], bool]) -> None:
        await self._changes.until(lambda: self.error is not None or condition())
        if not condition():
            self.check()

    def _end(self, error: StreamEndedError, lingers: bool = False) -> None:
        if self.error is None:
            self.error = error
            if not lingers:
                self._transport.close()  # sends what waits to be sent
            self._loop.call_later(_LINGER_SECONDS, self._transport.abort)
        self._changes.note()


class _TcpStream(Stream):
    """A stream on a connection.

    Args:
        is_member: see `Stream`.
        over: called once at the end; whether the connection may carry another stream.
        admit: see `Stream.admit`.
    """

    def __init__(
        self,
        connection: _Connection,
        is_member: bool = True,
        over: Callable[[bool], None] = lambda reusable: None,
        admit: Callable[[], None] = lambda: None,
    ) -> None:
        self._connection = connection
        self.is_member = is_member
        self._over = over
        self._admit = admit
        self._ended = ""

    @property
    def received(self) -> int:
        return self._connection.received

    def admit(self) -> None:
        self._admit()

    async def send(self, *buffers: Buffer) -> None:
        self._check()
        await self._connection.write(*buffers)

    async def fill(self, buffer: Buffer) -> None:
        self._check()
        await self._connection.fill(buffer)

    async def close(self) -> None:
        if not self._ended:
            await self._connection.close_stream()
            self._end("the stream is closed", True)

    def abort(self, reason: str) -> None:
        if not self._ended:
            self._connection.abort(reason, lingers=self.is_member)
            self._end(reason, False)

    def _check(self) -> None:
        if self._ended:
            raise StreamEndedError(self._ended)

    def _end(self, reason: str, reusable: bool) -> None:
        self._ended = reason
        self._over(reusable)


class TcpCarrier(Carrier):
    """Carries streams over TCP.

    Args:
        keys: of the federation; None: nothing is encrypted, and everybody who connects is accepted.
        listener: where this process listens, closed by `close`; None: nobody can connect to this process.
        tell: takes a line on a connection of another process that was refused.
    """

    def __init__(
        self,
        keys: Keys | None,
        listener: socket.socket | None = None,
        tell: Callable[[str], object] = lambda line: None,
    ) -> None:
        self._keys, self._listener, self._tell = keys, listener, tell
        self._idle: defaultdict[str, list[_Connection]] = defaultdict(list)  # by endpoint
        self._connections = set[_Connection]()
        self._visits = set[asyncio.Task[None]]()
        self._strangers = deque[asyncio.Task[None]]()
        self._accepting: asyncio.Task[None] | None = None

    async def listen(self, serve: Serve) -> None:
        if self._listener is not None:
            self._listener.setblocking(False)
            self._accepting = asyncio.create_task(self._accept(self._listener, serve))

    async def dial(self, endpoint: str) -> Stream:
        idle = self._idle[endpoint]
        while idle:
            if (connection := idle.pop()).error is None:
                break
        else:
            connection = await self._connect(endpoint)

        def over(reusable: bool) -> None:
            if reusable and connection.error is None:
                self._idle[endpoint].append(connection)
            else:
                self._connections.discard(connection)

        await connection.begin()
        return _TcpStream(connection, over=over)

    async def close(self) -> None:
        tasks = [*self._visits, *([self._accepting] if self._accepting else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for connection in list(self._connections):
            connection.abort("this process leaves")
        if self._listener is not None:
            self._listener.close()

    async def _connect(self, endpoint: str) -> _Connection:
        context = self._keys.dials if self._keys else None
        loop, nobody = asyncio.get_running_loop(), f"nobody answers at {endpoint}"
        late = f"{nobody}: {_NO_ANSWER}"
        try:
            async with asyncio.timeout(_OPEN_SECONDS):
                dialled = await _dialled(endpoint)
                try:
                    late = f"{endpoint} accepts connections, and says nothing"
                    await self._greet(dialled)
                    late = f"{endpoint} answers, and goes silent: {IS_IT_THE_MTU}"
                    _, connection = await loop.create_connection(
                        _Connection, sock=dialled, ssl=context, server_hostname="" if context else None
                    )
                except BaseException:
                    dialled.close()
                    raise
        except ssl.SSLCertVerificationError:
            raise RefusedError(_OTHER_KEY.format(endpoint)) from None
        except RefusedError as error:
            raise RefusedError(f"{endpoint} cannot be joined: {error}") from None
        except (ssl.SSLError, ConnectionResetError):  # in the handshake
            raise ConnectionError(_NO_JOB.format(endpoint)) from None
        except TimeoutError:
            raise ConnectionError(late) from None
        except OSError as error:
            # asyncio has a text of its own; numbers below 0 are those of name servers.
            number = error.errno or 0
            reason = os.strerror(number) if number > 0 else error.strerror
            raise ConnectionError(f"{nobody}: {reason or error}") from None
        if self._keys and not self._keys.matches(connection.certificate):
            connection.abort("another key")
            raise RefusedError(_OTHER_KEY.format(endpoint))
        self._connections.add(connection)
        return connection

    async def _greet(self, opened: socket.socket) -> None:
        """Send and receive the first bytes of a connection. Raises RefusedError where the sides differ."""
        loop = asyncio.get_running_loop()
        own, theirs = _MAGIC + bytes([VERSION, self._keys is not None]), b""
        await loop.sock_sendall(opened, own)
        while len(theirs) < len(own) and (more := await loop.sock_recv(opened, len(own) - len(theirs))):
            theirs += more
        if not theirs:
            raise ConnectionResetError
        if theirs[:4] != _MAGIC or len(theirs) < len(own):
            raise RefusedError("the other side is no job of megatron_noloco")
        if theirs[4] != VERSION:
            raise RefusedError(
                f"the other side speaks version {theirs[4]} of the protocol, this job version {VERSION}: install "
                "the same megatron_noloco for both"
            )
        if theirs != own:
            raise RefusedError(
                "only one of the two sides encrypts; both need the same key file, or encryption none"
            )

    async def _accept(self, listener: socket.socket, serve: Serve) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(listener)
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    await asyncio.sleep(_ACCEPT_PAUSE_SECONDS)
                continue
            visit = asyncio.create_task(self._visit(accepted, serve))
            self._visits.add(visit)
            visit.add_done_callback(self._visits.discard)
            self._strangers.append(visit)
            if len(self._strangers) > _MOST_STRANGERS:
                self._strangers.popleft().cancel()

    async def _visit(self, accepted: socket.socket, serve: Serve) -> None:
        """Serve the streams of a connection, one after the other."""
        task: Any = asyncio.current_task()
        connection = None

        def admit() -> None:
            if task in self._strangers:
                self._strangers.remove(task)
                limit.reschedule(None)

        try:
            async with asyncio.timeout(_OPEN_SECONDS) as limit:
                await self._greet(accepted)
                _, connection = await asyncio.get_running_loop().connect_accepted_socket(
                    _Connection, accepted, ssl=self._keys.admits if self._keys else None
                )
                self._connections.add(connection)
                is_member = self._keys is None or self._keys.matches(connection.certificate)
                while True:
                    await connection.wait_begin()
                    async with _TcpStream(connection, is_member, admit=admit) as stream:
                        await serve(stream)
        except RefusedError as error:
            self._tell(f"a connection to this replica was refused: {error}")
        except ssl.SSLCertVerificationError:
            self._tell("a connection to this replica was refused: the other side has another key file")
        except (OSError, TimeoutError):  # of this connection alone
            pass
        finally:
            if task in self._strangers:
                self._strangers.remove(task)
            if connection is None:
                accepted.close()
            else:
                connection.abort("this process ends the connection")
                self._connections.discard(connection)


async def _dialled(endpoint: str) -> socket.socket:
    """Return a socket that is connected to an endpoint, at the first address of its host that answers."""
    loop, failure = asyncio.get_running_loop(), OSError(errno.EHOSTUNREACH, "no address")
    try:
        found = await loop.getaddrinfo(*split(endpoint), type=socket.SOCK_STREAM)
    except UnicodeError as error:  # Python's, for a part of a name that is longer than 63 characters
        raise OSError(errno.EINVAL, str(error)) from None
    for family, kind, protocol, _, place in found:
        opened = socket.socket(family, kind, protocol)
        opened.setblocking(False)
        try:
            async with asyncio.timeout(_OPEN_SECONDS / len(found)):
                await loop.sock_connect(opened, place)
            return opened
        except (OSError, TimeoutError) as error:
            opened.close()
            failure = error
        except BaseException:
            opened.close()
            raise
    raise failure
