"""Answers to requests of other members; see the table in `https_carrier`."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any

from aiohttp import HttpVersion11, StreamReader, web

from megatron_noloco.federation.https_client import (
    CONNECTION_ERRORS,
    DIGESTS,
    MEMBER,
    difference,
    lines_of,
)
from megatron_noloco.federation.https_links import LEASE_SECONDS, Link, Links
from megatron_noloco.federation.https_server import Connection
from megatron_noloco.federation.https_transfers import MOST_STREAMS, json_line
from megatron_noloco.federation.mesh import PATIENCE_SECONDS
from megatron_noloco.federation.statuses import SignedStatus

Hear = Callable[[Link, AsyncIterator[Mapping[str, Any]], StreamReader], Coroutine[Any, Any, None]]


class Answers:
    """Answers requests.

    Args:
        digests: of what all jobs of the run have alike.
        hear: takes the lines of a link, or of a stream, that another member has opened.
        fail: is told an error that is none of a connection, and a bug.
    """

    def __init__(
        self,
        links: Links,
        digests: Mapping[str, str],
        hear: Hear,
        fail: Callable[[Exception], object],
    ) -> None:
        self._links, self._digests, self._hear = links, digests, hear
        self._mesh, self._fail = links.mesh, fail

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request; an error of the connection ends it."""
        try:
            return await self._answered(request)
        except CONNECTION_ERRORS:
            pass
        except Exception as error:
            self._fail(error)
        if request.transport is not None:
            request.transport.abort()
        return web.Response(status=500)

    async def _answered(self, request: web.BaseRequest) -> web.StreamResponse:
        path, _, _ = request.raw_path.partition("?")
        parts = path.split("/")
        connection = request.protocol
        assert isinstance(connection, Connection)
        if request.version < HttpVersion11:
            return _refusal(505, "HTTP/1.1 is needed")
        if len(parts) < 4 or parts[:2] != ["", "run"] or request.method not in ("GET", "PUT"):
            return _refusal(404, "no such page")
        if time.time() > connection.ends:
            return _refusal(403, "the certificate's time is over")
        if parts[2] != (run := f"{self._mesh.statuses.run:016x}"):
            if DIGESTS in request.headers:  # else a command asks
                slot, theirs = str(connection.slot), request.headers[DIGESTS]
                line = difference(self._mesh.statuses, self._digests, slot, theirs)
                self._mesh.warn(line, is_refusal=True)
            headers = {MEMBER: str(self._mesh.me), DIGESTS: json.dumps(dict(self._digests))}
            return web.json_response({"run": run}, status=409, headers=headers)
        if self._mesh.statuses.own is None:
            return _refusal(503, "not ready yet")
        match request.method, *parts[3:]:
            case "GET", "status":
                return self._tell()
            case "PUT", "link":
                return await self._link(request, connection.slot)
            case "PUT", "stream":
                return await self._stream(request, connection.slot)
        return _refusal(404, "no such page")

    # Statuses

    def _tell(self) -> web.Response:
        """Return what this member knows of all."""
        own, present = self._mesh.statuses.own, [*map(str, self._mesh.members())]
        assert own is not None
        lines = [signed.line for signed in (own, *self._mesh.statuses.newest())]
        return web.Response(body=b"".join([*lines, json_line({"present": present})]))

    async def _link(self, request: web.BaseRequest, slot: int) -> web.StreamResponse:
        """Hold a link that another member opens, until either side ends it."""
        link, lines = Link(is_own=False), lines_of(request.content, LEASE_SECONDS)
        try:
            signed = SignedStatus.parse(await anext(lines, None))
            if signed.member.slot != slot:
                raise ValueError("the status is another member's")
            self._links.take(signed)
        except ValueError as error:
            return _refusal(400, str(error))
        peer = self._links.peer_of(signed.member)
        if peer is None or peer.signed.status.has_left:
            return _refusal(410, "a later process has your slot, or you have left")
        if not self._links.open(peer, link):
            return _refusal(403, "there is a link already")
        hearing = asyncio.ensure_future(self._listen(link, lines, request))
        hearing.add_done_callback(lambda _: link.end())
        try:
            return await _answer(request, self._links.texts(link))
        finally:
            hearing.cancel()
            self._links.close(link)

    async def _stream(self, request: web.BaseRequest, slot: int) -> web.StreamResponse:
        """Carry large pieces of a link that another member has opened, until that one ends it."""
        peer = self._links.peers.get(slot)
        link = None if peer is None else peer.link
        if link is None or link.is_own or len(link.streams) >= MOST_STREAMS:
            return _refusal(403, "you have opened no link, or too many streams of it")
        hearing = asyncio.ensure_future(self._listen(link, lines_of(request.content, None), request))
        link.streams.add(hearing)
        try:
            return await _answer(request, link.transfers.texts(lambda: link.is_over or hearing.done()))
        finally:
            link.streams.discard(hearing)
            if not hearing.done():
                hearing.cancel()
                link.end()

    async def _listen(
        self, link: Link, lines: AsyncIterator[Mapping[str, Any]], request: web.BaseRequest
    ) -> None:
        """Take what a link or a stream brings; an error ends the link."""
        try:
            await self._hear(link, lines, request.content)
        except Exception as error:
            link.end()
            if not isinstance(error, CONNECTION_ERRORS):
                self._fail(error)
        link.transfers.has_large.set()


async def _answer(request: web.BaseRequest, texts: AsyncIterator[bytes]) -> web.StreamResponse:
    """Answer with texts as they come."""
    answer = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
    answer.enable_chunked_encoding()
    await answer.prepare(request)
    async for text in texts:
        async with asyncio.timeout(PATIENCE_SECONDS):  # nobody reads
            await answer.write(text)
    return answer


def _refusal(status: int, reason: str) -> web.Response:
    return web.Response(status=status, text=reason)
