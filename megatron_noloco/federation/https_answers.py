"""Answers to requests of other members; see the table in `https_carrier`."""

import asyncio
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from typing import Any
from urllib.parse import unquote

from aiohttp import HttpVersion11, web

from megatron_noloco.federation.https_client import (
    CONNECTION_ERRORS,
    DIGESTS,
    MEMBER,
    difference,
    read_small,
)
from megatron_noloco.federation.https_presence import HIDDEN_GRACE_SECONDS, Presence, Stream
from megatron_noloco.federation.https_server import (
    BULK_BYTES,
    CHUNK_BYTES,
    Connection,
    receive,
    send,
    send_chunk,
)
from megatron_noloco.federation.keys import VISITOR
from megatron_noloco.federation.mesh import (
    MOST_NAME_CHARACTERS,
    MOST_PIECE_BYTES,
    PATIENCE_SECONDS,
    Member,
    RefusedError,
)
from megatron_noloco.federation.statuses import MOST_SIGNED_BYTES, SignedStatus, object_in

REFUSED = "Noloco-Refused"  # header with the reason why a piece never comes
MOST_PROBE_BYTES = 2**25
_POLL_SECONDS = 5.0
_REPLACED = "a later process has your slot"


class Answers:
    """Answers requests.

    Args:
        digests: of what all jobs of the run have alike.
        wishes: returns the pieces that a member is to bring, by number.
        refresh: is called when something about members has changed.
        fail: is told an error that is none of a connection, and a bug.
    """

    def __init__(
        self,
        presence: Presence,
        digests: Mapping[str, str],
        wishes: Callable[[Member], Mapping[str, str]],
        refresh: Callable[[], object],
        fail: Callable[[Exception], object],
    ) -> None:
        self._presence, self._digests, self._wishes = presence, digests, wishes
        self._mesh, self._refresh, self._fail = presence.mesh, refresh, fail

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
        path, _, query = request.raw_path.partition("?")
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
        if asker is None or connection.slot not in (None, asker.slot):
            return _refusal(403, f"the header {MEMBER} must name a member of the certificate's slot")
        if parts[2] != (run := f"{self._mesh.statuses.run:016x}"):
            with suppress(ValueError):
                theirs = object_in(request.headers.get(DIGESTS, "").encode())
                self._mesh.warn(difference(self._mesh.statuses, self._digests, str(asker), theirs))
            content = {"run": run, "member": str(self._mesh.me), "digests": dict(self._digests)}
            return web.json_response(content, status=409)
        connection.admit()
        is_get = request.method == "GET"
        if parts[3:] == ["status"]:
            return await (self._tell(request, asker, query) if is_get else self._meet(request, asker))
        if parts[3:] == ["probe"]:
            return await (_give_probe(request, query) if is_get else _take_probe(request))
        if len(parts) != 6 or not is_name(name := unquote(parts[5])):
            return _refusal(404, "no such page")
        other, own = (parts[4], parts[3]) if is_get else (parts[3], parts[4])
        if other != str(asker):
            return _refusal(403, "the piece is another member's")
        if own != str(self._mesh.me):
            return _refusal(410, "another process has this slot now")
        return await (self._give(request, asker, name) if is_get else self._get(request, asker, name))

    def _is_replaced(self, asker: Member) -> bool:
        latest = self._presence.peers.get(asker.slot)
        return latest is not None and latest.member > asker

    # Statuses

    async def _meet(self, request: web.BaseRequest, asker: Member) -> web.StreamResponse:
        """Take the status of the asking member."""
        if request.content_length is None or request.content_length > MOST_SIGNED_BYTES:
            return _refusal(413, f"a status has at most {MOST_SIGNED_BYTES} bytes, and says how many")
        try:
            signed = SignedStatus.parse(object_in(await read_small(request.content)))
            if signed.member != asker:
                raise ValueError("the status is another member's")
            self._presence.take(signed)
        except ValueError as error:
            return _refusal(400, str(error))
        if (peer := self._presence.peer_of(asker)) is not None:
            self._presence.hear(peer)
        self._refresh()
        return web.Response()

    async def _tell(self, request: web.BaseRequest, asker: Member, query: str) -> web.StreamResponse:
        """Write statuses, for as long as the asking member reads."""
        own = self._mesh.statuses.own
        if own is None:
            return _refusal(503, "not ready yet")
        if query.startswith("of="):
            found = self._presence.statuses_of(query.removeprefix("of=").split(","))
            return web.Response(body=b"".join(signed.line for signed in found))
        if query == "once":
            everyone = b"".join(signed.line for signed in (own, *self._mesh.statuses.newest()))
            return web.Response(body=everyone + _line({"seen": self._presence.sights({})}))
        if asker.slot == VISITOR:
            return _refusal(403, "only members hold a stream: ask for status?once")
        if self._is_replaced(asker):
            return _refusal(410, _REPLACED)
        answer = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        answer.enable_chunked_encoding()
        await answer.prepare(request)
        stream, streams = Stream(), self._presence.streams
        if (earlier := streams.get(asker.slot)) is not None:
            earlier.is_over = True
            earlier.wake.set()
        streams[asker.slot] = stream
        try:
            await self._write(answer, stream, asker)
            return answer
        finally:
            if streams.get(asker.slot) is stream:
                del streams[asker.slot]
            peer = self._presence.peer_of(asker)
            if peer is not None and peer.stream is stream:
                peer.stream = None
                if not peer.advertised:
                    self._presence.lose(peer, self._presence.clock(), HIDDEN_GRACE_SECONDS)

    async def _write(self, answer: web.StreamResponse, stream: Stream, asker: Member) -> None:
        clock, due = asyncio.get_running_loop().time, -math.inf
        while not stream.is_over:
            stream.wake.clear()
            if (peer := self._presence.peer_of(asker)) is not None:
                peer.stream = stream
            is_due = clock() >= due
            due = clock() + self._presence.pulse if is_due else due
            if text := b"".join(self._lines_for(stream, asker, is_due)):
                await send_chunk(text, answer.write)
            if peer is not None:
                peer.told = stream.own
            with suppress(TimeoutError):
                async with asyncio.timeout_at(due):
                    await stream.wake.wait()

    def _lines_for(self, stream: Stream, asker: Member, is_due: bool) -> Iterator[bytes]:
        """Yield the lines that a stream lacks."""
        own, wishes = self._mesh.statuses.own, self._wishes(asker)
        if own is not None and own is not stream.own:
            stream.own = own
            yield own.line
        if is_due:
            yield _line({"seen": self._presence.sights(stream.told)})
        if wishes != stream.wishes:
            stream.wishes = wishes
            yield _line({"wish": wishes})

    # Pieces

    async def _give(self, request: web.BaseRequest, taker: Member, name: str) -> web.StreamResponse:
        """Answer with a piece, once it is offered."""
        if self._is_replaced(taker):
            return _refusal(410, _REPLACED)
        peer = self._presence.peers.get(taker.slot)
        try:
            async with asyncio.timeout(_POLL_SECONDS):
                piece = await asyncio.wrap_future(self._mesh.offers.wish(name, taker))
        except TimeoutError:
            return web.Response(status=204)
        except RefusedError as error:
            return _refusal(410, str(error))
        async with peer.giving if peer is not None and piece.size > BULK_BYTES else nullcontext():
            response = web.StreamResponse()
            response.content_length = piece.size
            await response.prepare(request)
            await send(piece, response.write, lambda: self._mesh.note_bytes(taker))
            return response

    async def _get(self, request: web.BaseRequest, giver: Member, name: str) -> web.StreamResponse:
        """Take a piece that is brought."""
        peer = self._presence.peer_of(giver)
        if peer is None or peer.signed.has_left:
            latest = self._presence.peers.get(giver.slot)
            is_over = latest is not None and latest.member >= giver
            return _refusal(410 if is_over else 403, "no member that is there")
        if (reason := request.headers.get(REFUSED)) is not None:
            self._mesh.refuse(giver, name, unquote(reason))
            return web.Response()
        size = request.content_length
        if size is None or size > MOST_PIECE_BYTES:
            return _refusal(413, f"a piece has at most {MOST_PIECE_BYTES} bytes, and says how many")

        def note() -> None:
            if self._presence.peer_of(giver) is not peer:
                raise ConnectionError("a later process has the slot")
            self._mesh.note_bytes(giver)

        async with peer.taking if size > BULK_BYTES else nullcontext():
            blob = await receive(request.content, size, note)
        self._mesh.receive(giver, name, blob)
        return web.Response()


async def _give_probe(request: web.BaseRequest, query: str) -> web.StreamResponse:
    count = query.removeprefix("bytes=")
    if not (count.isascii() and count.isdecimal() and len(count) < 10 and int(count) <= MOST_PROBE_BYTES):
        return _refusal(400, f"probe?bytes=N, at most {MOST_PROBE_BYTES}")
    response = web.StreamResponse()
    response.content_length = left = int(count)
    await response.prepare(request)
    noise = os.urandom(min(left, CHUNK_BYTES))
    while left:
        await send_chunk(noise[:left], response.write)
        left -= min(left, CHUNK_BYTES)
    return response


async def _take_probe(request: web.BaseRequest) -> web.StreamResponse:
    left = request.content_length
    if left is None or left > MOST_PROBE_BYTES:
        return _refusal(413, f"at most {MOST_PROBE_BYTES} bytes")
    while left:
        async with asyncio.timeout(PATIENCE_SECONDS):
            chunk = await request.content.readany()
        if not chunk:
            raise ConnectionResetError
        left -= len(chunk)
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


def _line(content: dict[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode() + b"\n"


def _refusal(status: int, reason: str) -> web.Response:
    return web.Response(status=status, text=reason)
