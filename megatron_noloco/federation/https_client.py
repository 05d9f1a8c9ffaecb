"""Requests to members, of members and of commands; and the search for the first member."""

import asyncio
import json
import os
import socket
import ssl
import time
import weakref
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from itertools import count
from typing import Any

import aiohttp
from aiohttp import ClientResponse, ClientSession, ClientTimeout, StreamReader, web
from aiohttp.http_exceptions import HttpProcessingError
from yarl import URL

from megatron_noloco.federation.compatibility import differences, refusal
from megatron_noloco.federation.https_links import RARE_SECONDS, Links
from megatron_noloco.federation.https_server import (
    MOST_FIELD_BYTES,
    READ_BYTES,
    open_socket,
)
from megatron_noloco.federation.keys import ANY_MEMBER, host_name
from megatron_noloco.federation.mesh import PATIENCE_SECONDS, Member
from megatron_noloco.federation.statuses import (
    MOST_SIGNED_BYTES,
    SignedStatus,
    Statuses,
    object_in,
    split_address,
)

MEMBER = "Noloco-Member"  # header with the name of a member that refuses to answer
DIGESTS = "Noloco-Digests"  # header with what a job has that asks, or refuses to answer; JSON
CONNECTION_ERRORS = (
    aiohttp.ClientError,
    OSError,
    TimeoutError,
    web.RequestPayloadError,
    asyncio.IncompleteReadError,
)
_LOOK_SECONDS, _SELDOM = 1.0, 10
_MOST_NAMED = 3
_MOST_REASON_BYTES = 2**10


class RefusalError(ConnectionError):
    """The other side refuses this one: it is a job of another run, or a clock is wrong. The message is a line."""


class OwnAddressError(ConnectionError):
    """This process itself has answered."""


class Client:
    """Sends requests; made in the thread of the loop.

    Args:
        statuses: of who sends them.
        digests: of what all jobs of the run have alike; None: of no job.
    """

    def __init__(self, statuses: Statuses, digests: Mapping[str, str] | None) -> None:
        self._statuses, self._digests = statuses, digests or {}
        self._headers = {} if digests is None else {DIGESTS: json.dumps(digests, separators=(",", ":"))}
        self._sockets = weakref.WeakSet[socket.socket]()
        connector = aiohttp.TCPConnector(
            limit=0,
            force_close=True,
            socket_factory=self._open_socket,
            ssl=statuses.identity.client,
        )
        self._session = ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            read_bufsize=READ_BYTES,
            max_field_size=MOST_FIELD_BYTES,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            timeout=ClientTimeout(total=None, sock_connect=PATIENCE_SECONDS, sock_read=PATIENCE_SECONDS),
        )

    def request(
        self, method: str, address: str, slot: int | None, path: str, **options: Any
    ) -> AbstractAsyncContextManager[ClientResponse]:
        """Send a request to a member of a slot; None: to any member. Raises `CONNECTION_ERRORS`."""
        options["server_hostname"] = ANY_MEMBER if slot is None else host_name(slot)
        url = URL(f"https://{address}/run/{self._statuses.run:016x}/{path}", encoded=True)
        return self._session.request(method, url, allow_redirects=False, headers=self._headers, **options)

    async def statuses(self, address: str) -> AsyncGenerator[dict[str, Any]]:
        """Yield what a member says of all."""
        async with self.request("GET", address, None, "status") as answer:
            await self.check(answer)
            async for line in lines_of(answer.content):
                yield line

    async def check(self, answer: ClientResponse) -> None:
        """Raise ConnectionError for an answer other than 200."""
        if answer.status == 409:
            slot, _, _ = answer.headers.get(MEMBER, "").partition(".")
            theirs = answer.headers.get(DIGESTS, "")
            raise RefusalError(difference(self._statuses, self._digests, slot, theirs))
        if answer.status == 400:
            reason = await answer.content.read(_MOST_REASON_BYTES)
            raise RefusalError(
                f"{answer.url.authority} refuses this replica: {reason.decode(errors='replace')}"
            )
        if answer.status != 200:
            raise ConnectionError(f"status {answer.status}")

    async def close(self) -> None:
        """End all connections; to be called when no request is under way."""
        await self._session.close()
        for opened in list(self._sockets):  # some wait for the other side to end the encryption
            opened.close()

    def _open_socket(self, info: Any) -> socket.socket:
        opened = open_socket(info)
        self._sockets.add(opened)
        return opened


class Seeds:
    """The search for members at addresses of the rendezvous, HOST:PORT."""

    def __init__(self, links: Links, client: Client, addresses: Sequence[str]) -> None:
        self._links, self._client, self._addresses = links, client, addresses
        self._unanswered = dict[str, tuple[float, str]]()  # since when, and why
        self._has_answers = False

    async def look(self) -> None:
        """Look for members, without end."""
        await asyncio.gather(*map(self._look_at, set(self._addresses)))

    async def _look_at(self, address: str) -> None:
        """Look for members at an address, often while there are none."""
        for looks in count():
            peers = self._links.peers.values()
            is_linked = any(peer.link is not None and address in peer.addresses for peer in peers)
            if not is_linked and (self._is_alone() or looks % _SELDOM == 0):
                try:
                    await self._meet(address)
                    self._has_answers = True
                    self._unanswered.pop(address, None)
                except OwnAddressError:
                    return
                except RefusalError as error:
                    self._has_answers = True
                    self._links.mesh.warn(str(error), is_refusal=True)
                    await asyncio.sleep(RARE_SECONDS)
                except CONNECTION_ERRORS as error:
                    since, _ = self._unanswered.get(address, (time.monotonic(), ""))
                    self._unanswered[address] = since, await why_not(address, error)
                    self._warn_of_nobody()
            await asyncio.sleep(_LOOK_SECONDS)

    async def _meet(self, address: str) -> None:
        async with aclosing(self._client.statuses(address)) as lines:
            first = first_status(await anext(lines, {}), self._links.mesh.me)
            async for line in lines:
                self._links.take_line(line)
        with suppress(ValueError):
            self._links.take(first)  # who waits for anybody knows all by now
        if (peer := self._links.peer_of(first.member)) is not None:
            peer.address, peer.dial_at = address, time.monotonic()  # it may not know of this one

    def _is_alone(self) -> bool:
        return len(self._links.mesh.members()) == 1

    def _warn_of_nobody(self) -> None:
        now = time.monotonic()
        reasons = [why for since, why in self._unanswered.values() if now - since >= PATIENCE_SECONDS]
        if reasons and not self._has_answers and self._is_alone():
            self._links.mesh.warn(
                f"federation.rendezvous: {'; '.join(reasons[:_MOST_NAMED])}; does a job listen there, and is the "
                "port open?"
            )


def first_status(line: Mapping[str, Any], me: Member) -> SignedStatus:
    """Return the status of who answers. Raises ConnectionError."""
    try:
        signed = SignedStatus.parse(line)
    except ValueError:
        raise ConnectionError("the first line is no status") from None
    if signed.member == me:
        raise OwnAddressError
    return signed


def difference(statuses: Statuses, own: Mapping[str, str], slot: str, digests: str) -> str:
    """Return a line on in what a job of another run differs, from the digests that it sends."""
    theirs = dict[str, Any]()
    with suppress(ValueError):
        theirs = object_in(digests)
    return refusal(slot, statuses.me.slot, differences(own, theirs) or "its run")


async def why_not(address: str, error: Exception) -> str:
    """Return why no job of this federation answers at an address."""
    has_connected, nobody = True, f"nobody answers at {address}"
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return f"{nobody}: its name is unknown ({error.os_error.strerror})"
    if isinstance(error, aiohttp.ClientConnectorError):
        has_connected = isinstance(error.os_error, ssl.SSLError)
        error = error.os_error
    elif isinstance(error, aiohttp.ConnectionTimeoutError):  # before or in the handshake
        host, port = split_address(address)
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                _, writer = await asyncio.open_connection(host, port)
            writer.transport.abort()
        except (OSError, TimeoutError):
            has_connected = False
    if isinstance(error, TimeoutError):
        if has_connected:
            return f"{address} answers, and goes silent: is the MTU of the route smaller than that of either host?"
        return f"{nobody}: no answer, nor a refusal: its host is off, or a firewall drops what is sent there"
    if isinstance(error, OSError) and error.errno and not has_connected:
        return f"{nobody}: {os.strerror(error.errno)}"
    return f"the process at {address} is another program, has another key, or is of megatron_noloco 0.4 or earlier"


async def lines_of(
    content: StreamReader, seconds: float | None = PATIENCE_SECONDS
) -> AsyncGenerator[dict[str, Any]]:
    """Yield the objects of lines; raises ConnectionError for other content. What else follows a line may be read.

    Args:
        seconds: for a line, after which TimeoutError is raised.
    """
    while True:
        try:
            async with asyncio.timeout(seconds):
                line = await content.readline()
            if len(line) > MOST_SIGNED_BYTES:
                raise ValueError
        except (ValueError, HttpProcessingError):
            raise ConnectionError("a line is too long") from None
        if not line:
            return
        try:
            yield object_in(line)
        except ValueError:
            raise ConnectionError("a line is no JSON object") from None
        await asyncio.sleep(0)  # many lines at once hold nobody else up
