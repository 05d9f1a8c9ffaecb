"""A stream as numbered files, each of which appears whole in the inbox of its reader.

| file | content, after a head |
|---|---|
| `STREAM.d0`, `d1`, ... | the next bytes; the last one of a direction says that it is |
| `STREAM.c0`, `c1`, ... | no bytes: how many files were read; or the reason of an abort, which is the last one |

The head of each file has the number of data files of the other direction that its writer has read. So a writer
knows how many files nobody has read, and waits at the end of its window. Control files need no room there.

Small pieces gather while a file is being written, so that a slow store has few files.
"""

import asyncio
import struct
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Protocol

from megatron_noloco.federation.streams import Buffer, Changes, RefusedError, Stream, StreamEndedError
from megatron_noloco.files import outside

FILE_BYTES = 2**24  # of data
WINDOW = 4  # data files of a direction that are not read
HEAD = struct.Struct(">Q?")  # data files read; whether this file is the last one
_REASON_BYTES = 2**10
_PATIENCE = 4  # a look after a quarter of the time that nothing came


class Post(Protocol):
    """What a stream needs of its carrier."""

    async def write(self, inbox: str, name: str, *parts: Buffer) -> None:
        """Write a file; raises OSError."""

    async def discard(self, inbox: str, names: list[str]) -> None:
        """Remove files that nobody will read."""

    def leave(self, inbox: str, names: list[str]) -> None:
        """Remember files to a process that has not answered: at a later dial they are removed."""

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]: ...

    def over(self, stream: "FolderStream") -> None: ...

    def changed(self) -> None:
        """Note that `FolderStream.patience` may be shorter."""


class FolderStream(Stream):
    """A stream between this process and another one.

    Args:
        peer: the inbox of the other process.
        name: of the stream.
        dials: whether this side has opened the stream, so that it writes the first file.
    """

    close_seconds = 30.0

    def __init__(self, post: Post, peer: str, name: str, dials: bool) -> None:
        self.peer, self.name = peer, name
        self.heard = self.is_refused = False  # whether a file came; whether the first could not be opened
        self._post, self._loop = post, asyncio.get_running_loop()
        self._error = ""
        self._changes = Changes()
        # To the other side: data files written, and read there; control files.
        self._pending, self._begins = bytearray(), dials
        self._written = self._confirmed = self._controls = 0
        self._writes = set[asyncio.Task[None]]()
        self._closing = self._closed = False
        # From there: data files by number; how many are read, and what was said of that.
        self._arrived = dict[int, tuple[memoryview, bool]]()
        self._read = self._told = self._offset = 0
        self._control = -1
        self._since, self._pause = self._loop.time(), 0.0
        self._flush_soon()

    def admit(self) -> None:
        pass

    async def send(self, *buffers: Buffer) -> None:
        self._check()
        for buffer in buffers:
            content = memoryview(buffer).cast("B")
            while content:
                await self._until(lambda: len(self._pending) < FILE_BYTES)
                room = FILE_BYTES - len(self._pending)
                self._pending += content[:room]
                content = content[room:]
                if len(self._pending) == FILE_BYTES:
                    self._flush()
        self._flush_soon()

    async def fill(self, buffer: Buffer) -> None:
        self._check()
        rest = memoryview(buffer).cast("B")
        while rest:
            await self._until(lambda: self._read in self._arrived)
            content, is_last = self._arrived[self._read]
            part = content[self._offset : self._offset + len(rest)]
            rest[: len(part)] = part
            rest = rest[len(part) :]
            self._offset += len(part)
            if self._offset == len(content):
                if not is_last:
                    self._next_file()
                elif rest:
                    raise StreamEndedError("the other side closed the stream before its end")

    async def close(self) -> None:
        if self._error:
            return
        self._closing = True
        self._since, self._pause = self._loop.time(), 0.0  # the end of the other side comes soon
        self._flush()
        while True:
            await self._until(lambda: self._closed and not self._writes and self._read in self._arrived)
            content, is_last = self._arrived[self._read]
            if self._offset < len(content):
                raise StreamEndedError("the other side sends more than is received")
            if is_last:
                break
            self._next_file()
        self._end("the stream is closed")

    def abort(self, reason: str) -> None:
        if not self._error:
            is_known = not self._begins or self._written > 0 or len(self._pending) > 0
            self._end(reason)
            if is_known:
                self._post.spawn(self._leave(reason))

    # Called by the carrier.

    def wants(self, kind: str, number: int) -> bool:
        """Whether to read a file that is there."""
        if kind == "c":
            return number > self._control
        return number in range(self._read, self._read + WINDOW) and number not in self._arrived

    def is_read(self, kind: str, number: int) -> bool:
        return number <= self._control if kind == "c" else number < self._read or number in self._arrived

    def arrive(self, kind: str, number: int, content: bytes) -> None:
        """Take a file."""
        if self._error:
            return
        self.heard = True
        if len(content) < HEAD.size:
            self.abort("the other side writes a file that is too short")
            return
        read, is_last = HEAD.unpack_from(content)
        self._confirmed = max(self._confirmed, min(read, self._written))
        if kind == "c":
            self._control = max(self._control, number)
            if is_last:
                self._end(outside(content[HEAD.size :].decode(errors="replace")))
        else:
            self._arrived[number] = (memoryview(content)[HEAD.size :], is_last)
        now = self._loop.time()
        self._since, self._pause = now, now - self._since
        self._flush()
        self._changes.note()

    @property
    def patience(self) -> float:
        """Seconds between two looks for files, by the time that nothing came; infinity if nobody waits."""
        silence = max(self._loop.time() - self._since, self._pause)
        return silence / _PATIENCE if self._changes else float("inf")

    # To the other side.

    def _flush_soon(self) -> None:
        self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Write what waits, as far as the window lets."""
        while self._may_write():
            content, self._pending = self._pending, bytearray()
            self._closed = self._closing
            self._write(f"d{self._written}", content, self._closing)
            self._written += 1

    def _may_write(self) -> bool:
        if self._error or self._closed or self._written - self._confirmed >= WINDOW:
            return False
        begins = self._begins and not self._written
        return len(self._pending) == FILE_BYTES or (
            not self._writes and bool(self._pending or self._closing or begins)
        )

    def _write(self, which: str, content: Buffer, is_last: bool) -> None:
        head = HEAD.pack(self._read, is_last)
        self._told = self._read

        async def write() -> None:
            try:
                await self._post.write(self.peer, f"{self.name}.{which}", head, content)
            except OSError as error:
                self.abort(str(error))

        def written(task: asyncio.Task[None]) -> None:
            self._writes.discard(task)
            self._flush()
            self._changes.note()

        task = self._post.spawn(write())
        self._writes.add(task)
        task.add_done_callback(written)

    def _next_file(self) -> None:
        """Go on to the next data file; the other side is told before its window is full."""
        del self._arrived[self._read]
        self._read += 1
        self._offset = 0
        if self._read - self._told >= WINDOW // 2:
            self._write(f"c{self._controls}", b"", False)
            self._controls += 1

    async def _leave(self, reason: str) -> None:
        """Tell the other side why the stream has ended, and take away what it has not read."""
        first, control = f"{self.name}.d0", f"{self.name}.c{self._controls}"
        with suppress(OSError):
            if self._begins and not self._written:
                await self._post.write(self.peer, first, HEAD.pack(0, False))
            text = reason.encode()[:_REASON_BYTES] or b"?"
            await self._post.write(self.peer, control, HEAD.pack(self._read, True), text)
        if not self.heard:
            self._post.leave(self.peer, [first, control])
        await asyncio.gather(*self._writes, return_exceptions=True)
        unread = range(max(self._confirmed, 1), self._written)  # without the first, the reason is not read
        await self._post.discard(self.peer, [f"{self.name}.d{number}" for number in unread])

    # Both ways.

    async def _until(self, condition: Callable[[], bool]) -> None:
        self._post.changed()
        await self._changes.until(lambda: bool(self._error) or condition())
        self._check()

    def _check(self) -> None:
        if self._error:
            raise (RefusedError if self.is_refused else StreamEndedError)(self._error)

    def _end(self, reason: str) -> None:
        self._error = reason
        self._pending.clear()
        self._arrived.clear()
        self._post.over(self)
        self._changes.note()
