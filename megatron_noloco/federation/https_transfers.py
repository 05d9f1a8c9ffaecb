"""The pieces of a link: what each side wishes of the other, and sends.

| line, both ways | says |
|---|---|
| {"wish": {NUMBER: [NAME, IS_LARGE]}} | which pieces the writing member wants of the other |
| {"unwish": [NUMBER, ...]} | which it does not want any more |
| {"piece": NUMBER, "size": BYTES, "at": BYTE} | 2^16 bytes of a wished piece follow, or its last ones |
| {"piece": NAME, ...} | the same, of a small piece that is not wished yet; the reading member may forget it |
| {"refused": NUMBER, "why": TEXT} | a wish is never granted |

Small pieces pass on the link itself, between its lines. Large ones pass on *streams*: connections of the link for
pieces alone, so that nothing waits for them. The parts of a piece pass on any of them: each stream takes the next
part when it has sent one, so a slow one holds nothing up. A link and its streams end together; what is still
wished is said again on the next link.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any

import numpy
from aiohttp import StreamReader

from megatron_noloco.federation.mesh import (
    BULK_BYTES,
    MOST_NAME_CHARACTERS,
    MOST_PIECE_BYTES,
    MOST_WISHES,
    PATIENCE_SECONDS,
    Fetch,
    Member,
    Mesh,
    Piece,
    RefusedError,
)

MOST_STREAMS = 8  # of a link: where packets are lost, each connection is slow
MALFORMED = (ValueError, TypeError, LookupError, AttributeError, OverflowError)  # of what a line holds
_PART_BYTES = 2**16
_MOST_UNWISHED = 16  # pieces that are kept before they are wished

_Queue = dict[int | str, Iterator[bytes]]  # what to send, by number or name


class Transfers:
    """The pieces that pass over a link; used by the thread of the links.

    Args:
        member: the other side.
        wake: has the lines of the link written.

    Attributes:
        has_large: set when there may be something to send on a stream, or a stream is to end.
    """

    def __init__(self, mesh: Mesh, member: Member, wake: asyncio.Event) -> None:
        self._mesh, self._member, self._wake = mesh, member, wake
        self._told = set[int]()
        # Pieces that are coming; whether a missing part, by where it begins, is under way
        self._coming = dict[int | str, tuple[memoryview, dict[int, bool]]]()
        self._unwished = dict[str, memoryview]()  # pieces that have come, by name
        self._granting = dict[int | str, tuple[asyncio.Future[Piece], bool]]()  # and whether it is large
        self._small, self._large = _Queue(), _Queue()
        self.has_large = asyncio.Event()

    def end(self) -> None:
        """Forget what the other side wishes."""
        for wish, _ in self._granting.values():
            wish.cancel()
        self._granting.clear()
        self.has_large.set()

    def streams(self) -> int:
        """Return how many streams are of use."""
        large = [fetch for fetch in self._asked.values() if fetch.is_large]
        return min(MOST_STREAMS, len(large) + sum(is_large for _, is_large in self._granting.values()))

    @property
    def _asked(self) -> dict[int, Fetch]:
        return self._mesh.awaited(self._member)

    # What is written

    def lines(self) -> Iterator[bytes]:
        """Yield what is new of the own wishes, and the next part of a small piece."""
        for fetch in self._asked.values():
            if (blob := self._unwished.pop(fetch.name, None)) is not None:
                self._mesh.receive(self._member, fetch.name, blob)
        asked = dict(islice(self._asked.items(), MOST_WISHES))
        if gone := self._told - asked.keys():
            self._told -= gone
            self._coming = {number: coming for number, coming in self._coming.items() if number not in gone}
            yield json_line({"unwish": list(gone)})
        if new := asked.keys() - self._told:
            self._told |= new
            wishes = {
                number: [fetch.name, fetch.is_large] for number, fetch in asked.items() if number in new
            }
            yield json_line({"wish": wishes})
        if part := _part(self._small):
            self._wake.set()  # there may be more
            yield part

    async def texts(
        self, is_over: Callable[[], bool], idle_seconds: float | None = None
    ) -> AsyncIterator[bytes]:
        """Yield what to write to a stream, until it is over, or idle for so many seconds."""
        yield json_line({})  # aiohttp sends the head of a request or an answer with its first bytes
        while not is_over():
            self.has_large.clear()
            if part := _part(self._large):
                yield part
                await asyncio.sleep(0)  # asyncio drops what is written after an error, and only later says so
                continue
            try:
                async with asyncio.timeout(idle_seconds):
                    await self.has_large.wait()
            except TimeoutError:
                if not self.streams():
                    return

    def send(self, name: str, piece: Piece) -> None:
        """Send a piece that the other side has not wished for yet, if it is small."""
        if piece.size <= BULK_BYTES:
            self._push(name, self._parts(name, piece))

    def _push(self, key: int | str, parts: Iterator[bytes], is_large: bool = False) -> None:
        (self._large if is_large else self._small)[key] = parts
        (self.has_large if is_large else self._wake).set()

    def _parts(self, key: int | str, piece: Piece) -> Iterator[bytes]:
        """Yield a piece; less of it where it is withdrawn."""
        for start in range(0, max(1, piece.size), _PART_BYTES):
            try:
                content = piece.read(start, start + _PART_BYTES)
            except RefusedError as error:
                yield from self._refusal(key, error)
                return
            if start + _PART_BYTES >= piece.size:
                self._granting.pop(key, None)
            yield json_line({"piece": key, "size": piece.size, "at": start}) + content
            self._mesh.note_bytes(self._member)

    def _refusal(self, key: int | str, error: BaseException) -> Iterator[bytes]:
        self._granting.pop(key, None)
        yield json_line({"refused": key, "why": str(error)})

    # What is read

    async def hear(self, line: Mapping[str, Any], content: StreamReader) -> bool:
        """Take a line, and what follows it; return whether it is of a kind of the table.

        Raises `MALFORMED`, ConnectionError and TimeoutError.
        """
        if "piece" in line:
            await self._receive(line["piece"], line["size"], line["at"], content)
        elif "refused" in line:
            self._told.discard(line["refused"])
            self._coming.pop(line["refused"], None)
            if (fetch := self._asked.get(line["refused"])) is not None:
                self._mesh.refuse(self._member, fetch.name, str(line["why"]))
        elif "unwish" in line:
            for number in line["unwish"]:
                if (granting := self._granting.pop(number, None)) is not None:
                    granting[0].cancel()
                    self._small.pop(number, None)
                    self._large.pop(number, None)
        elif "wish" in line:
            for number, (name, is_large) in line["wish"].items():
                if not is_name(name) or len(self._granting) >= MOST_WISHES:
                    raise ValueError("not a name, or too many wishes")
                self._grant(int(number), name, is_large is True)
        else:
            return False
        return True

    async def _receive(self, key: int | str, size: int, at: int, content: StreamReader) -> None:
        if not 0 <= at <= size <= (BULK_BYTES if isinstance(key, str) else MOST_PIECE_BYTES):
            raise ValueError("too large a piece")
        if key not in self._coming and (key in self._told or is_name(key)):
            missing = dict.fromkeys(range(0, max(1, size), _PART_BYTES), False)
            self._coming[key] = numpy.empty(size, numpy.uint8).data, missing
        blob, missing = self._coming.get(key, (None, {at: False}))  # None: it is not wished any more
        if (blob is not None and size != len(blob)) or missing.get(at, True):
            raise ValueError("another size than before, or a part that has come, or is coming")
        missing[at] = True
        start, stop, loop = at, min(at + _PART_BYTES, size), asyncio.get_running_loop()
        async with asyncio.timeout(PATIENCE_SECONDS) as limit:
            while at < stop:
                if not (part := await content.read(stop - at)):
                    raise ConnectionError("the connection has ended in a piece")
                if blob is not None:
                    blob[at : at + len(part)] = part
                at += len(part)
                self._mesh.note_bytes(self._member)
                limit.reschedule(loop.time() + PATIENCE_SECONDS)
        del missing[start]
        if not missing and key in self._coming:
            self._take(key, self._coming.pop(key)[0])

    def _take(self, key: int | str, blob: memoryview) -> None:
        if isinstance(key, str):
            self._unwished[key] = blob
            if len(self._unwished) > _MOST_UNWISHED:
                del self._unwished[next(iter(self._unwished))]
            self._wake.set()  # it may be wished by now
        else:
            self._told.discard(key)
            if (fetch := self._asked.get(key)) is not None:
                self._mesh.receive(self._member, fetch.name, blob)

    def _grant(self, number: int, name: str, is_large: bool) -> None:
        """Send a piece once it is offered, or why it never comes."""
        if number not in self._granting:
            wish = asyncio.wrap_future(self._mesh.offers.wish(name, self._member))
            self._granting[number] = wish, is_large
            wish.add_done_callback(partial(self._granted, number, is_large))

    def _granted(self, number: int, is_large: bool, wish: "asyncio.Future[Piece]") -> None:
        if wish.cancelled() or self._granting.get(number, (None,))[0] is not wish:
            return
        if (error := wish.exception()) is not None:
            self._push(number, self._refusal(number, error))
        else:
            self._push(number, self._parts(number, wish.result()), is_large)


def _part(queue: _Queue) -> bytes | None:
    """Return the next part of the first piece; None: there is none."""
    while queue:
        key, parts = next(iter(queue.items()))
        if (part := next(parts, None)) is not None:
            return part
        del queue[key]
    return None


def is_name(name: Any) -> bool:
    """Return whether a piece may have this name."""
    return isinstance(name, str) and 0 < len(name) <= MOST_NAME_CHARACTERS and name.isprintable()


def json_line(content: dict[str, Any]) -> bytes:
    """Return an object as a line of JSON."""
    return json.dumps(content, separators=(",", ":")).encode() + b"\n"
