"""Streams inside one process. A fault may cut any of them at any byte."""

import asyncio
import itertools
from collections.abc import Callable

from megatron_noloco.federation.streams import Buffer, Carrier, Changes, Serve, Stream, StreamEndedError

_WINDOW = 2**16  # bytes under way in one direction


class Direction:
    """Bytes from one side to the other.

    Attributes:
        passed: bytes that have arrived.
        limit: after so many bytes the connection is lost, in both directions; None: never.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.passed = 0
        self.limit = limit
        self.content = bytearray()
        self.closed = False
        self.reason = ""
        self._changes = Changes()

    @property
    def is_cut(self) -> bool:
        return self.limit is not None and self.passed >= self.limit

    async def until(self, condition: Callable[[], bool]) -> None:
        await self._changes.until(lambda: bool(self.reason) or condition())
        if not condition():
            raise StreamEndedError(self.reason)

    def change(self) -> None:
        self._changes.note()

    def end(self, reason: str) -> None:
        self.reason = self.reason or reason
        self.content.clear()
        self.change()


class MemoryStream(Stream):
    def __init__(self, out: Direction, into: Direction) -> None:
        self.out = out
        self.into = into
        self._closed = False

    @property
    def received(self) -> int:
        return self.into.passed

    def admit(self) -> None:
        pass

    async def send(self, *buffers: Buffer) -> None:
        for buffer in buffers:
            content = memoryview(buffer).cast("B")
            for start in range(0, len(content), _WINDOW):
                await self.out.until(lambda: not self.out.reason and len(self.out.content) < _WINDOW)
                self.out.content += content[start : start + _WINDOW]
                self.out.change()

    async def fill(self, buffer: Buffer) -> None:
        rest = memoryview(buffer).cast("B")
        while rest:
            await self.into.until(lambda: bool(self.into.content) or self.into.closed)
            if not self.into.content:
                raise StreamEndedError("the other side closed the stream before its end")
            most = (
                len(rest) if self.into.limit is None else min(len(rest), self.into.limit - self.into.passed)
            )
            part = self.into.content[:most]
            del self.into.content[:most]
            rest[: len(part)] = part
            rest = rest[len(part) :]
            self.into.passed += len(part)
            self.into.change()
            if self.into.is_cut:
                self.abort("the connection was lost")

    async def close(self) -> None:
        if not self._closed:
            await self.out.until(lambda: True)
            self.out.closed = True
            self.out.change()
            await self.into.until(lambda: self.into.closed)
            if self.into.content:
                raise StreamEndedError("the other side sends more than is received")
            self._closed = True

    def abort(self, reason: str) -> None:
        if not self._closed:
            self._closed = True
            self.out.end(reason)
            self.into.end(reason)


Faults = Callable[[int], tuple[int | None, int | None]]
"""faults(number) returns how many bytes of a stream pass: from the side that dialled, and to it."""


class MemoryCarrier(Carrier):
    """Carries streams between the carriers that share `places`, which has what each endpoint serves."""

    def __init__(
        self, places: dict[str, Serve], endpoint: str, faults: Faults = lambda number: (None, None)
    ) -> None:
        self._places = places
        self._endpoint = endpoint
        self._faults = faults
        self._numbers = itertools.count()
        self._streams: list[MemoryStream] = []
        self._tasks = set[asyncio.Task[None]]()

    async def listen(self, serve: Serve) -> None:
        self._places[self._endpoint] = serve

    async def dial(self, endpoint: str) -> Stream:
        if endpoint not in self._places:
            raise ConnectionError(f"nobody answers at {endpoint}")
        there, back = map(Direction, self._faults(next(self._numbers)))
        near, far = MemoryStream(there, back), MemoryStream(back, there)
        self._streams += [near, far]

        async def served() -> None:
            async with far:
                await self._places[endpoint](far)

        task = asyncio.create_task(served())
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return near

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and not isinstance(task.exception(), ConnectionError | TimeoutError | None):
            raise task.exception() or AssertionError

    async def close(self) -> None:
        self._places.pop(self._endpoint, None)
        for stream in self._streams:
            stream.abort("this process leaves")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
