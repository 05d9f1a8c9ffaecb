"""Answers to requests of other members; see the table in `https_carrier`."""

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import nullcontext, suppress
from typing import Any
from urllib.parse import unquote

from aiohttp import HttpVersion11, web

from megatron_noloco.federation.https_client import (
    CONNECTION_ERRORS,
    DIGESTS,
    MEMBER,
    difference,
    lines_of,
)
from megatron_noloco.federation.https_links import LEASE_SECONDS, Link, Links
from megatron_noloco.federation.https_server import (
    Connection,
    receive,
    send,
    send_chunk,
)
from megatron_noloco.federation.keys import VISITOR
from megatron_noloco.federation.mesh import (
    BULK_BYTES,
    MOST_NAME_CHARACTERS,
    MOST_PIECE_BYTES,
    Member,
    RefusedError,
)
from megatron_noloco.federation.statuses import SignedStatus

REFUSED = "Noloco-Refused"  # header with the reason why a piece never comes
_POLL_SECONDS = 5.0
_MOST_TAKEN = 4  # pieces of bulk at a time, of one member


class Answers:
    """Answers requests.

    Args:
        digests: of what all jobs of the run have alike.
        hear: takes the lines of a link that another member has opened.
        fail: is told an error that is none of a connection, and a bug.
    """

    def __init__(
        self,
        links: Links,
        digests: Mapping[str, str],
        hear: Callable[[Link, AsyncIterator[Mapping[str, Any]]], Coroutine[Any, Any, None]],
        fail: Callable[[Exception], object],
    ) -> None:
        self._links, self._digests, self._hear = links, digests, hear
        self._mesh, self._fail = links.mesh, fail
        self._taking = defaultdict[int, asyncio.Semaphore](lambda: asyncio.Semaphore(_MOST_TAKEN))  # by slot

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request; an error of the connection, or a piece that is withdrawn, ends the connection."""
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
        parts = path.split("/", 5)
        asker = _member_in(request.headers.get(MEMBER, ""))
        connection = request.protocol
        assert isinstance(connection, Connection)
        if request.version < HttpVersion11:
            return _refusal(505, "HTTP/1.1 is needed")
        if len(parts) < 4 or parts[:2] != ["", "run"] or request.method not in ("GET", "PUT"):
            return _refusal(404, "no such page")
        if time.time() > connection.ends:
            return _refusal(403, "the certificate's time is over")
        if asker is None or connection.slot != asker.slot:
            return _refusal(403, f"the header {MEMBER} must name a member of the certificate's slot")
        if parts[2] != (run := f"{self._mesh.statuses.run:016x}"):
            if DIGESTS in request.headers:  # else a command asks
                line = difference(self._mesh.statuses, self._digests, request.headers)
                self._mesh.warn(line, is_refusal=True)
            headers = {MEMBER: str(self._mesh.me), DIGESTS: json.dumps(dict(self._digests))}
            return web.json_response({"run": run}, status=409, headers=headers)
        is_get = request.method == "GET"
        if parts[3:] == ["status"] and is_get:
            return self._tell()
        if self._mesh.is_followed(asker):
            return _refusal(410, "a later process has your slot")
        if parts[3:] == ["link"] and not is_get:
            return await self._link(request, asker)
        if len(parts) != 6 or not is_name(name := unquote(parts[5])):
            return _refusal(404, "no such page")
        other, own = (parts[4], parts[3]) if is_get else (parts[3], parts[4])
        if other != str(asker):
            return _refusal(403, "the piece is another member's")
        if own != str(self._mesh.me):
            return _refusal(410, "another process has this slot now")
        return await (self._give(request, asker, name) if is_get else self._get(request, asker, name))

    # Statuses

    def _tell(self) -> web.Response:
        """Return what this member knows of all."""
        own, present = self._mesh.statuses.own, [str(self._mesh.me), *map(str, self._links.present)]
        if own is None:
            return _refusal(503, "not ready yet")
        lines = [signed.line for signed in (own, *self._mesh.statuses.newest())]
        return web.Response(body=b"".join([*lines, json.dumps({"present": present}).encode(), b"\n"]))

    async def _link(self, request: web.BaseRequest, asker: Member) -> web.StreamResponse:
        """Hold a link that another member opens, until either side ends it."""
        link, lines = Link(is_own=False), lines_of(request.content, LEASE_SECONDS)
        try:
            signed = SignedStatus.parse(await anext(lines, None))
            if signed.member != asker:
                raise ValueError("the status is another member's")
            self._links.take(signed)
        except ValueError as error:
            return _refusal(400, str(error))
        peer = self._links.peer_of(asker)
        if self._mesh.statuses.own is None:
            return _refusal(503, "not ready yet")
        if peer is None or peer.signed.status.has_left:
            return _refusal(410, "a later process has your slot, or you have left")
        if not self._links.open(peer, link):
            return _refusal(403, "there is a link already")
        answer = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        answer.enable_chunked_encoding()
        hearing = asyncio.ensure_future(self._hear(link, lines))
        hearing.add_done_callback(lambda _: link.end())
        try:
            await answer.prepare(request)
            async for text in self._links.texts(link):
                await send_chunk(text, answer.write)
            return answer
        finally:
            hearing.cancel()
            self._links.close(link)

    # Pieces

    async def _give(self, request: web.BaseRequest, taker: Member, name: str) -> web.StreamResponse:
        """Answer with a piece, once it is offered."""
        wish = self._mesh.offers.wish(name, taker)
        if wish.cancelled():
            return _refusal(503, "too many requests wait; ask again")
        try:
            async with asyncio.timeout(_POLL_SECONDS):
                piece = await asyncio.wrap_future(wish)
        except TimeoutError:
            return web.Response(status=204)
        except RefusedError as error:
            return _refusal(410, str(error))
        response = web.StreamResponse()
        response.content_length = piece.size
        await response.prepare(request)
        await send(piece, response.write, lambda: self._mesh.note_bytes(taker))
        return response

    async def _get(self, request: web.BaseRequest, giver: Member, name: str) -> web.StreamResponse:
        """Take a piece that is brought."""
        if not self._mesh.awaits(giver, name):
            return _refusal(410, "nobody waits for it")
        if (reason := request.headers.get(REFUSED)) is not None:
            self._mesh.refuse(giver, name, unquote(reason))
            return web.Response()
        size = request.content_length
        if size is None or size > MOST_PIECE_BYTES:
            return _refusal(413, f"a piece has at most {MOST_PIECE_BYTES} bytes, and says how many")

        def note() -> None:
            if not self._mesh.may_come(giver):
                raise ConnectionError("the giver has left")
            self._mesh.note_bytes(giver)

        async with self._taking[giver.slot] if size > BULK_BYTES else nullcontext():
            blob = await receive(request.content, size, note)
        self._mesh.receive(giver, name, blob)
        return web.Response()


def _member_in(name: str) -> Member | None:
    """Return the member or the visitor of a name."""
    slot, _, incarnation = name.partition(".")
    with suppress(ValueError):
        member = Member.parse(f"0.{incarnation}" if slot == str(VISITOR) else name)
        return Member(VISITOR, member.incarnation) if slot == str(VISITOR) else member
    return None


def is_name(name: Any) -> bool:
    """Return whether a piece may have this name."""
    return isinstance(name, str) and 0 < len(name) <= MOST_NAME_CHARACTERS and name.isprintable()


def _refusal(status: int, reason: str) -> web.Response:
    return web.Response(status=status, text=reason)
