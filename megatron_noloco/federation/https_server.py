"""Sockets and connections below `https_carrier`, and who may connect."""

import asyncio
import logging
import os
import random
import resource
import socket
import ssl
import weakref
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from aiohttp import web

from megatron_noloco.federation.keys import Identity
from megatron_noloco.federation.mesh import PATIENCE_SECONDS

WRITE_BYTES = 2**16  # that wait in this process; what a slow connection has, no other one can send
READ_BYTES = 2**20  # received before anybody reads them; then the sender waits
_MOST_STRANGERS = 256  # connections in their handshake
_MOST_OF_A_SLOT = 128  # connections
_ACCEPT_PAUSE_SECONDS = 0.2  # when this process has too many open files
MOST_FIELD_BYTES = 2**14  # of a header, such as the digests of a run
_QUIET = logging.getLogger("megatron_noloco.http")
_QUIET.disabled = True  # strangers must not write to the terminal
_OPTIONS = {
    socket.TCP_NODELAY: 1,
    25: 2**16,  # TCP_NOTSENT_LOWAT, which Python does not name
    socket.TCP_USER_TIMEOUT: round(1000 * PATIENCE_SECONDS),
}
_sockets = weakref.WeakSet[socket.socket]()


def _own(opened: socket.socket) -> None:
    """Set the options of a socket of this process, and have forked children close their copy."""
    _sockets.add(opened)
    opened.setblocking(False)
    for option, value in _OPTIONS.items():
        opened.setsockopt(socket.IPPROTO_TCP, option, value)


def open_socket(info: Any) -> socket.socket:
    """Return a socket for an address, as `getaddrinfo` has it."""
    opened = socket.socket(*info[:3])
    _own(opened)
    return opened


def _close_copies() -> None:
    """Close what a forked child holds: a port and connections must end with the process that they are of."""
    for opened in list(_sockets):
        with suppress(OSError):
            opened.close()


os.register_at_fork(after_in_child=_close_copies)


class Connection(web.RequestHandler):
    """A connection that another process has opened.

    Attributes:
        slot: that the certificate of the other side names.
        ends: Unix time after which that certificate is not good.
    """

    def __init__(self, server: "Server", manager: web.Server, **settings: Any) -> None:
        super().__init__(manager, **settings)
        self._server = server
        self.slot, self.ends = -1, 0.0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(WRITE_BYTES)
        certificate = transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
        self.slot, self.ends = self._server.identity.owner_of(certificate)
        self._server.connections.add(self)

    def connection_lost(self, error: BaseException | None) -> None:
        self._server.connections.discard(self)
        super().connection_lost(error)


class Server:
    """Accepts connections of members.

    Args:
        handle: answers a request.
        refuse: is told the host of a process that shows no certificate of the federation that is good, and why.
    """

    def __init__(
        self,
        identity: Identity,
        handle: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        refuse: Callable[[str, ssl.SSLError], object],
    ) -> None:
        self.identity, self._refuse = identity, refuse
        self._manager = web.Server(handle, handler_cancellation=True)
        self._strangers = set[asyncio.Task[None]]()
        self.connections = set[Connection]()

    async def accept(self, listener: socket.socket) -> None:
        """Accept connections, for ever."""
        loop = asyncio.get_running_loop()
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        listener.setblocking(False)
        _sockets.add(listener)
        listener.listen(2**12)
        while True:
            await asyncio.sleep(0)  # many at once hold nobody else up
            try:
                accepted, place = await loop.sock_accept(listener)
            except ConnectionError:
                continue
            except OSError:  # there are too many open files
                await asyncio.sleep(_ACCEPT_PAUSE_SECONDS)
                continue
            task = loop.create_task(self._admit(accepted, place[0]))
            self._strangers.add(task)
            task.add_done_callback(self._strangers.discard)
            if len(self._strangers) > _MOST_STRANGERS:
                random.choice(list(self._strangers)).cancel()  # so that a flood leaves some to members

    def close(self) -> None:
        """End all connections of members; those of strangers end with their tasks."""
        for connection in list(self.connections):
            if connection.transport is not None:
                connection.transport.abort()

    async def _admit(self, accepted: socket.socket, host: str) -> None:
        connection: Connection | None = None
        is_member = False
        try:
            _own(accepted)
            async with asyncio.timeout(PATIENCE_SECONDS):
                _, connection = await asyncio.get_running_loop().connect_accepted_socket(
                    self._connect, accepted, ssl=self.identity.server
                )
            is_member = sum(other.slot == connection.slot for other in self.connections) <= _MOST_OF_A_SLOT
        except ssl.SSLError as error:
            self._refuse(host, error)
        except (OSError, TimeoutError, ValueError):  # ValueError: a certificate of no slot
            pass
        finally:
            if connection is not None and connection.transport is not None and not is_member:
                connection.transport.abort()

    def _connect(self) -> Connection:
        return Connection(
            self,
            self._manager,
            loop=asyncio.get_running_loop(),
            tcp_keepalive=False,  # `_own` has set it
            logger=_QUIET,
            access_log=None,
            max_field_size=MOST_FIELD_BYTES,
            max_line_size=2**12,
            lingering_time=0.0,
            read_bufsize=READ_BYTES,
            auto_decompress=False,
        )
