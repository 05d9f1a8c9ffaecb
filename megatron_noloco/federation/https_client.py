"""Requests of a member to others, and the search for the first of them."""

import asyncio
import json
import socket
import ssl
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import ClientResponse, ClientSession, ClientTimeout, StreamReader, web
from yarl import URL

from megatron_noloco.federation.compatibility import differences
from megatron_noloco.federation.https_presence import Presence
from megatron_noloco.federation.https_server import KEEP_ALIVE_SECONDS, READ_BYTES, open_socket
from megatron_noloco.federation.keys import ANY_MEMBER, Identity, host_name
from megatron_noloco.federation.mesh import PATIENCE_SECONDS, Mesh
from megatron_noloco.federation.statuses import MOST_SIGNED_BYTES, SignedStatus, object_in, split_address
from megatron_noloco.federation.visit import MEMBER, why_not
from megatron_noloco.files import outside

DIGESTS = "Noloco-Digests"  # header with what the asking job has, JSON
RARE_RETRY_SECONDS = 30.0
CONNECTION_ERRORS = (
    aiohttp.ClientError,
    OSError,
    TimeoutError,
    web.RequestPayloadError,
    asyncio.IncompleteReadError,
)
_CONNECT_SECONDS = 10.0
_MOST_CONNECTIONS = {
    "bulk": 4,
    "pieces": 0,
    "small": 0,
}  # to a member, by their use; 0: as many as are needed
_CLOSE_SECONDS = 0.5
_LOOK_SECONDS, _SELDOM = 1.0, 10
_MOST_NAMED = 3
_MOST_WARNINGS = 256


class OtherRunError(ConnectionError):
    """The other side is a job of another run."""


class OwnAddressError(ConnectionError):
    """This process itself has answered."""


@dataclass
class Job:
    """What the parts of a carrier share.

    Attributes:
        warn_user: writes a line for the user.
        spawn: runs a coroutine beside the others.
    """

    run: int
    digests: Mapping[str, str]
    identity: Identity | None
    mesh: Mesh
    presence: Presence
    warn_user: Callable[[str], object]
    spawn: Callable[[Any], "asyncio.Task[None]"]
    _warnings: set[str] = field(default_factory=set)

    def warn(self, line: str) -> None:
        """Write a line, once."""
        if line not in self._warnings and len(self._warnings) < _MOST_WARNINGS:
            self._warnings.add(line)
            self.warn_user(line)

    def warn_of_run(self, name: str, digests: Any) -> None:
        """Say in what a member of another run differs."""
        differing = differences(self.digests, digests if isinstance(digests, dict) else {}) or "its run"
        who = f"replica {outside(name).partition('.')[0]}"
        self.warn(f"refused: {who} differs from replica {self.mesh.me.slot} in {differing}")


class Client:
    """Sends requests; made in the thread of the loop.

    A connection that was idle is slow at first, and aiohttp takes the one that was idle for longest. So each use
    has connections of its own, and bulk has few.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._sockets = weakref.WeakSet[socket.socket]()
        self._sessions = {use: self._session(most) for use, most in _MOST_CONNECTIONS.items()}

    def _session(self, most: int) -> ClientSession:
        identity = self._job.identity
        connector = aiohttp.TCPConnector(
            limit=0,
            limit_per_host=most,
            keepalive_timeout=KEEP_ALIVE_SECONDS - 20,  # or a request could meet the end from the other side
            socket_factory=self._open_socket,
            ssl=True if identity is None else identity.client,
        )
        return ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            read_bufsize=READ_BYTES,
            headers={MEMBER: str(self._job.mesh.me)},
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            timeout=ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=PATIENCE_SECONDS),
        )

    def request(
        self, method: str, address: str, slot: int | None, path: str, use: str = "small", **options: Any
    ) -> AbstractAsyncContextManager[ClientResponse]:
        """Send a request to a member of a slot; None: to any member. Raises `CONNECTION_ERRORS`.

        Args:
            use: "bulk" for pieces that are brought, "pieces" for those that are asked for, or "small".
        """
        scheme = "http" if self._job.identity is None else "https"
        if self._job.identity is not None:
            options["server_hostname"] = ANY_MEMBER if slot is None else host_name(slot)
        if path.startswith("status"):
            options["headers"] = {DIGESTS: json.dumps(self._job.digests, separators=(",", ":"))}
        url = URL(f"{scheme}://{address}/run/{self._job.run:016x}/{path}", encoded=True)
        return self._sessions[use].request(method, url, allow_redirects=False, **options)

    async def check(self, answer: ClientResponse) -> None:
        """Raise ConnectionError for an answer other than 200."""
        if answer.status == 409:
            with suppress(ValueError):
                content = object_in(await read_small(answer.content))
                self._job.warn_of_run(str(content.get("member")), content.get("digests"))
            raise OtherRunError
        if answer.status != 200:
            raise ConnectionError(f"status {answer.status}")

    async def introduce(self, address: str, slot: int | None) -> SignedStatus:
        """Bring the own status to a member, and return it."""
        own = self._job.presence.statuses.own
        assert own is not None
        async with self.request("PUT", address, slot, "status", data=own.line) as answer:
            await self.check(answer)
        return own

    async def close(self) -> None:
        """End all connections; to be called when no request is under way."""
        for session in self._sessions.values():
            await session.close()
        for opened in self._sockets:  # some wait for the other side to end the encryption
            with suppress(OSError):
                opened.shutdown(socket.SHUT_RDWR)
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_SECONDS):
                while any(opened.fileno() >= 0 for opened in self._sockets):
                    await asyncio.sleep(0.001)

    def _open_socket(self, info: Any) -> socket.socket:
        opened = open_socket(info)
        self._sockets.add(opened)
        return opened


class Seeds:
    """The search for members at addresses of the rendezvous.

    Args:
        addresses_to_try: returns addresses, HOST:PORT; may block, may raise OSError.
        refresh: is called when members were found.
    """

    def __init__(
        self,
        job: Job,
        client: Client,
        addresses_to_try: Callable[[], Sequence[str]],
        refresh: Callable[[], object],
    ) -> None:
        self._job, self._client, self._refresh = job, client, refresh
        self._addresses_to_try = addresses_to_try
        self._own, self._visits = set[str](), set[str]()
        self._unanswered = dict[str, tuple[float, str]]()  # since when, and why
        self._has_answers = False

    async def look(self) -> None:
        """Look for members, often while there are none. File systems and name servers may block."""
        presence, looks = self._job.presence, 0
        while True:
            if not presence.present or looks % _SELDOM == 0:
                try:
                    found = await asyncio.get_running_loop().run_in_executor(None, self._addresses_to_try)
                except OSError as error:
                    self._job.warn(f"federation.rendezvous: {outside(str(error))}")
                    found = ()
                in_use = {peer.address for peer in presence.peers.values() if peer.is_followed}
                for address in set(found) - self._own - self._visits - in_use:
                    self._job.spawn(self._visit(address))
                self._warn_of_nobody()
            looks += 1
            await asyncio.sleep(_LOOK_SECONDS)

    async def _visit(self, address: str) -> None:
        """Learn who answers at an address, and introduce this member there."""
        self._visits.add(address)
        try:
            await self._meet(address)
            self._has_answers = True
            self._unanswered.pop(address, None)
            self._refresh()
        except OwnAddressError:
            self._own.add(address)
        except OtherRunError:
            self._has_answers = True
            await asyncio.sleep(RARE_RETRY_SECONDS)
        except CONNECTION_ERRORS as error:
            since, _ = self._unanswered.get(address, (self._job.presence.clock(), ""))
            self._unanswered[address] = since, await self._why(address, error)
        finally:
            self._visits.discard(address)

    async def _meet(self, address: str) -> None:
        presence, first = self._job.presence, None
        async with self._client.request("GET", address, None, "status?once") as answer:
            await self._client.check(answer)
            async for line in lines_of(answer.content):
                first = first or line.get("member")
                if first == str(presence.me):
                    raise OwnAddressError
                presence.take_line(line)
        await self._client.introduce(address, None)
        for peer in presence.peers.values():
            if str(peer.member) == first:
                peer.seed = address
                presence.hear(peer)

    def _warn_of_nobody(self) -> None:
        now = self._job.presence.clock()
        reasons = [why for since, why in self._unanswered.values() if now - since >= PATIENCE_SECONDS]
        if reasons and not self._has_answers and not self._job.presence.present:
            self._job.warn(
                f"federation.rendezvous: {'; '.join(reasons[:_MOST_NAMED])}; does a job listen there, and is the "
                "port open?"
            )

    async def _why(self, address: str, error: Exception) -> str:
        """Return why no member answers at an address."""
        has_connected = True
        if isinstance(error, aiohttp.ClientConnectorError):
            error, is_name = error.os_error, isinstance(error, aiohttp.ClientConnectorDNSError)
            has_connected = isinstance(error, ssl.SSLError)
            error = socket.gaierror(0, error.strerror or str(error)) if is_name else error
        elif isinstance(error, aiohttp.ConnectionTimeoutError):  # before or in the handshake
            host, port = split_address(address)
            try:
                async with asyncio.timeout(_CONNECT_SECONDS):
                    _, writer = await asyncio.open_connection(host, port)
                writer.transport.abort()
            except (OSError, TimeoutError):
                has_connected = False
        return why_not(address, error, has_connected, self._job.identity is not None)


async def lines_of(content: StreamReader) -> AsyncIterator[dict[str, Any]]:
    """Yield the objects of a stream of lines; raises ConnectionError for another stream."""
    text = b""
    async for chunk in content.iter_any():
        *lines, text = (text + chunk).split(b"\n")
        if len(text) > MOST_SIGNED_BYTES:
            raise ConnectionError("a line is too long")
        for line in lines:
            try:
                yield object_in(line)
            except ValueError:
                raise ConnectionError("a line is no JSON object") from None
            await asyncio.sleep(0)  # many lines at once hold nobody else up


async def read_small(content: StreamReader) -> bytes:
    """Return a small body. Raises ConnectionError for a large one, TimeoutError when it comes too slowly."""
    text = b""
    async with asyncio.timeout(PATIENCE_SECONDS):
        async for chunk in content.iter_any():
            text += chunk
            if len(text) > MOST_SIGNED_BYTES:
                raise ConnectionError("the body is too long")
    return text
