"""Answers to requests of other members; see the table in `https_carrier`."""

import asyncio
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import Any
from urllib.parse import unquote

from aiohttp import HttpVersion11, web

from megatron_noloco.federation.https_client import (
    CONNECTION_ERRORS,
    DIGESTS,
    Job,
    read_small,
)
from megatron_noloco.federation.https_presence import HIDDEN_GRACE_SECONDS, Stream
from megatron_noloco.federation.https_server import BULK_BYTES, CHUNK_BYTES, Connection, receive, send
from megatron_noloco.federation.keys import VISITOR
from megatron_noloco.federation.mesh import (
    MOST_NAME_CHARACTERS,
    MOST_PIECE_BYTES,
    PATIENCE_SECONDS,
    Fetch,
    Member,
    Piece,
    RefusedError,
)
from megatron_noloco.federation.statuses import MOST_SIGNED_BYTES, SignedStatus, object_in
from megatron_noloco.federation.visit import MEMBER, MOST_PROBE_BYTES
from megatron_noloco.files import outside

REFUSED = "Noloco-Refused"  # header with the reason why a piece never comes
WISH = "Noloco-Wish"  # header with the number of the last wishes before a piece came
MOST_WISHES = 256
_POLL_SECONDS = 5.0
_REPLACED = "a later process has your slot"


class Wishes:
    """The fetches of this member, each with the task that asks for it; without a task it is a wish.

    Attributes:
        number: of the last line of wishes.
    """

    def __init__(self) -> None:
        self.tasks = dict[Fetch, asyncio.Task[None] | None]()
        self.number = 0

    def of(self, giver: Member) -> list[Fetch]:
        """Return what a member is to bring, and does not know."""
        wishes = [fetch for fetch, task in self.tasks.items() if task is None and not fetch.is_sent]
        return [fetch for fetch in wishes if fetch.giver == giver][:MOST_WISHES]


class Answers:
    """Answers requests.

    Args:
        refresh: is called when something about members has changed.
        fail: is told an error that is none of a connection, and a bug.
    """

    def __init__(
        self,
        job: Job,
        wishes: Wishes,
        refresh: Callable[[], object],
        fail: Callable[[Exception], object],
    ) -> None:
        self._job, self._wishes, self._refresh, self._fail = job, wishes, refresh, fail
        self._mesh, self._presence = job.mesh, job.presence

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
        if parts[2] != f"{self._job.run:016x}":
            with suppress(ValueError):
                self._job.warn_of_run(str(asker), object_in(request.headers.get(DIGESTS, "").encode()))
            run, digests = f"{self._job.run:016x}", dict(self._job.digests)
            content = {"run": run, "member": str(self._mesh.me), "digests": digests}
            return web.json_response(content, status=409)
        connection.admit()
        is_get = request.method == "GET"
        if parts[3:] == ["status"]:
            return await (self._tell(request, asker, query) if is_get else self._meet(request, asker))
        if parts[3:] == ["probe"]:
            return await (_give_probe(request, query) if is_get else _take_probe(request))
        if len(parts) != 6 or not is_name(name := unquote(parts[5])):
            return _refusal(404, "no such page")
        theirs, own = (parts[4], parts[3]) if is_get else (parts[3], parts[4])
        if theirs != str(asker):
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
        if self._presence.statuses.own is None:
            return _refusal(503, "not ready yet")
        if asker.slot == VISITOR and query != "once":
            return _refusal(403, "only members hold a stream: ask for status?once")
        if query != "once" and self._is_replaced(asker):
            return _refusal(410, _REPLACED)
        answer = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        answer.enable_chunked_encoding()
        await answer.prepare(request)
        stream, streams = Stream(asker), self._presence.streams
        if query == "once":
            await answer.write(b"".join(self._lines_for(stream, with_others=True)))
            return answer
        if (earlier := streams.get(asker.slot)) is not None:
            earlier.is_over = True
            earlier.wake.set()
        streams[asker.slot] = stream
        try:
            await self._write(answer, stream)
            return answer
        finally:
            if streams.get(asker.slot) is stream:
                del streams[asker.slot]
            self._end_stream(stream)

    async def _write(self, answer: web.StreamResponse, stream: Stream) -> None:
        clock, due, direct = asyncio.get_running_loop().time, -math.inf, frozenset[int]()
        while not stream.is_over:
            stream.wake.clear()
            if (peer := self._presence.peer_of(stream.member)) is not None:
                peer.stream = stream
                due = due if direct == peer.direct else -math.inf
                direct = peer.direct
            is_due = clock() >= due
            due = clock() + self._presence.pulse if is_due else due
            if text := b"".join(self._lines_for(stream, is_due)):
                async with asyncio.timeout(PATIENCE_SECONDS):
                    await answer.write(text)
            if peer is not None:
                peer.told = stream.own
            with suppress(TimeoutError):
                async with asyncio.timeout_at(due):
                    await stream.wake.wait()

    def _end_stream(self, stream: Stream) -> None:
        peer = self._presence.peer_of(stream.member)
        if peer is not None and peer.stream is stream:
            peer.stream = None
            if not peer.advertised:
                self._presence.lose(peer, self._presence.clock(), HIDDEN_GRACE_SECONDS)

    def _lines_for(self, stream: Stream, with_others: bool) -> Iterator[bytes]:
        """Yield the lines that a stream lacks."""
        for signed in self._presence.news_for(stream, with_others):
            yield signed.line
        if with_others:
            yield _line({"seen": self._presence.sights_for(stream)})
        wishes = self._wishes.of(stream.member)
        if wishes != stream.wishes:
            stream.wishes = wishes
            self._wishes.number += 1
            yield _line({"wish": [fetch.name for fetch in wishes], "number": self._wishes.number})

    # Pieces

    async def _give(self, request: web.BaseRequest, taker: Member, name: str) -> web.StreamResponse:
        """Answer with a piece, once it is offered."""
        if self._is_replaced(taker):
            return _refusal(410, _REPLACED)
        peer = self._presence.peers.get(taker.slot)
        piece = await self._wished(taker, name)
        if piece is None:
            return web.Response(status=204)
        if isinstance(piece, RefusedError):
            return _refusal(410, str(piece))
        async with peer.giving if peer is not None and piece.size > BULK_BYTES else nullcontext():
            response = web.StreamResponse()
            response.content_length = piece.size
            await response.prepare(request)
            await send(piece, response.write, lambda: self._mesh.note_bytes(taker))
            return response

    async def _wished(self, taker: Member, name: str) -> Piece | RefusedError | None:
        """Return a piece; None: it is not offered yet."""
        loop = asyncio.get_running_loop()
        found: asyncio.Future[Piece | RefusedError] = loop.create_future()

        def settle(piece: Piece | RefusedError) -> None:
            if not found.done():
                found.set_result(piece)

        def answer(piece: Piece | RefusedError) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(settle, piece)

        self._mesh.offers.wish(name, taker, answer)
        try:
            async with asyncio.timeout(_POLL_SECONDS):
                return await found
        except TimeoutError:
            return None
        finally:
            self._mesh.offers.unwish(name, taker, answer)

    async def _get(self, request: web.BaseRequest, giver: Member, name: str) -> web.StreamResponse:
        """Take a piece that is brought."""
        peer = self._presence.peer_of(giver)
        if peer is None or peer.has_left:
            latest = self._presence.peers.get(giver.slot)
            is_over = latest is not None and latest.member >= giver
            return _refusal(410 if is_over else 403, "no member that is there")
        if (reason := request.headers.get(REFUSED)) is not None:
            number = self._wishes.number
            for fetch in self._wishes.of(giver):
                if fetch.name == name:
                    self._mesh.refuse(fetch, RefusedError(outside(unquote(reason))))
            return web.Response(headers={WISH: str(number)})
        size = request.content_length
        if size is None or size > MOST_PIECE_BYTES:
            return _refusal(413, f"a piece has at most {MOST_PIECE_BYTES} bytes, and says how many")

        def note() -> None:
            if self._presence.peer_of(giver) is not peer:
                raise ConnectionError("a later process has the slot")
            self._mesh.note_bytes(giver)

        async with peer.taking if size > BULK_BYTES else nullcontext():
            blob = await receive(request.content, size, note)
        number = self._wishes.number
        self._mesh.receive(giver, name, blob)
        return web.Response(headers={WISH: str(number)})


async def _give_probe(request: web.BaseRequest, query: str) -> web.StreamResponse:
    count = query.removeprefix("bytes=")
    if not (count.isascii() and count.isdecimal() and len(count) < 10 and int(count) <= MOST_PROBE_BYTES):
        return _refusal(400, f"probe?bytes=N, at most {MOST_PROBE_BYTES}")
    response = web.StreamResponse()
    response.content_length = left = int(count)
    await response.prepare(request)
    noise = os.urandom(min(left, CHUNK_BYTES))
    while left:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await response.write(noise[:left])
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
