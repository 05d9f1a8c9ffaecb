"""Streams between processes that share nothing but a folder, or a bucket of an object store.

Each process has an inbox, a folder of that name: its slot, and a number that it draws. Who writes to a process
writes files there. Only their reader looks into it, for all its streams at once, so a process at rest makes one
request every few seconds, however many streams it has. See `store` for what is relied on.

A stream has the name of the inbox of the process that dials, and a number which that process counts. Its files in
both directions have this name, see `folder_stream`. So nothing of a stream that has ended is read by another one.

Where the federation has a key, files are encrypted together with their names (see `keys`), and a stream begins
once: who owns the folder can end a stream, by removing a file, and can neither read, forge, repeat nor reorder.

A reader removes a file when it has it in memory. Files that no stream wants stay until the reader leaves. What a
process that died has left is removed by the next process of its slot. No clock of the folder is read.

A file that cannot be read is tried again at the next look. A file that cannot be written ends its stream: the
packages for buckets have tried several times by then. Who uses a stream decides how long it waits for the other
side, which may be dead, or for a file, which somebody may have removed.
"""

import asyncio
import itertools
import re
import secrets
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from megatron_noloco.federation.folder_stream import FILE_BYTES, HEAD, FolderStream
from megatron_noloco.federation.keys import MOST_ADDED, Sealing
from megatron_noloco.federation.store import Caller, Store
from megatron_noloco.federation.streams import Buffer, Carrier, Serve, Stream

_SCHEME = "folder://"
_INBOX = r"\d{5}-[0-9a-f]{16}"
_FILE = re.compile(rf"({_INBOX})\.(\d{{1,12}})\.([cd])(\d{{1,12}})")
_OPEN = "open"  # is in an inbox while its process reads it
_MOST_BYTES = FILE_BYTES + HEAD.size + MOST_ADDED
_LOCAL_PACE, _BUCKET_PACE = (0.002, 0.25), (0.1, 2.0)  # seconds between two looks, at least and at most
_UNANSWERED_SECONDS = 60.0
_LEAVE_SECONDS = 5.0
_REMEMBERED = 1000  # streams of a process


def is_folder_endpoint(text: str) -> bool:
    """Whether a text is "folder://INBOX"."""
    return re.fullmatch(_SCHEME + _INBOX, text) is not None


class _Begun:
    """The numbers of the streams that another process has begun here. Each begins once."""

    def __init__(self) -> None:
        self._numbers, self._lowest = set[int](), 0

    def __contains__(self, number: int) -> bool:
        return number < self._lowest or number in self._numbers

    def add(self, number: int) -> None:
        self._numbers.add(number)
        if len(self._numbers) > _REMEMBERED:
            self._lowest = min(self._numbers) + 1
            self._numbers.discard(self._lowest - 1)


class FolderCarrier(Carrier):
    """Carries streams through a folder.

    Args:
        folder: of the streams of this run; all processes of the run have the same, maybe by other URLs.
        slot: of this process.
        sealing: what files are wrapped in; the same for all processes.
        tell: takes a line on what is wrong with the folder, or with files of others in there.

    Attributes:
        endpoint: where this process listens, which is the same text for each process that dials.
    """

    pulse_seconds = 5.0

    def __init__(self, folder: Store, slot: int, sealing: Sealing, tell: Callable[[str], object]) -> None:
        self._name = f"{slot:05d}-{secrets.token_hex(8)}"
        self.endpoint = f"{_SCHEME}{self._name}"
        self._folder, self._inbox, self._calls = folder, folder.below(self._name), Caller()
        self._sealing, self._tell, self._told = sealing, tell, set[str]()
        self._pace = _LOCAL_PACE if folder.is_local else _BUCKET_PACE
        self._serve: Serve | None = None
        self._opening = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None
        self._tasks = set[asyncio.Task[None]]()
        self._visits = set[asyncio.Task[None]]()
        self._change = asyncio.Event()
        self._numbers = itertools.count()
        self._streams = dict[str, FolderStream]()
        self._begun = defaultdict[str, _Begun](_Begun)
        self._reading, self._done = set[str](), set[str]()  # files of the inbox; done: to be removed
        self._unanswered = deque[tuple[float, str, list[str]]]()

    async def listen(self, serve: Serve) -> None:
        """See `Carrier`. Raises OSError, with one line, for a folder that cannot be used."""
        self._serve = serve
        await self._open()

    async def dial(self, endpoint: str) -> Stream:
        peer = endpoint.removeprefix(_SCHEME)
        if not is_folder_endpoint(endpoint) or peer == self._name:
            raise ConnectionError(f"{endpoint}: no other process is there")
        try:
            await self._open()
        except OSError as error:
            raise ConnectionError(f"{endpoint}: {error}") from None
        self._forget_unanswered()
        number = next(self._numbers)
        self._begun[self._name].add(number)
        return self._add(FolderStream(self, peer, f"{self._name}.{number}", dials=True))

    async def close(self) -> None:
        for stream in list(self._streams.values()):
            stream.abort("this process leaves")
        ending = [*self._visits, *([self._watching] if self._watching else [])]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        with suppress(TimeoutError, OSError):
            async with asyncio.timeout(_LEAVE_SECONDS):
                await asyncio.gather(*self._tasks, return_exceptions=True)
                if self._watching is not None:
                    await self._calls.call(self._inbox.remove_all)
        self._calls.close()

    # Called by streams.

    async def write(self, inbox: str, name: str, *parts: Buffer) -> None:
        path = f"{inbox}/{name}"
        sealed = await self._calls.call(lambda: self._sealing.seal(path, b"".join(parts)))
        try:
            await self._calls.call(self._folder.put, path, sealed)
        except FileNotFoundError:
            raise FileNotFoundError(f"nobody listens at {_SCHEME}{inbox}") from None
        except OSError as error:  # such as a full disk; the other side may not be told
            self._say(str(error))
            raise

    async def discard(self, inbox: str, names: list[str]) -> None:
        with suppress(OSError):
            await self._calls.call(self._folder.below(inbox).remove, names)

    def leave(self, inbox: str, names: list[str]) -> None:
        self._unanswered.append((self._now(), inbox, names))

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def over(self, stream: FolderStream) -> None:
        self._streams.pop(stream.name, None)

    def changed(self) -> None:
        self._change.set()

    # The inbox.

    def _add(self, stream: FolderStream) -> FolderStream:
        self._streams[stream.name] = stream
        return stream

    def _forget_unanswered(self) -> None:
        """Remove what was left for processes that did not answer, and have not read it by now."""
        while self._unanswered and self._now() - self._unanswered[0][0] > _UNANSWERED_SECONDS:
            _, inbox, names = self._unanswered.popleft()
            self.spawn(self.discard(inbox, names))

    async def _open(self) -> None:
        """Begin to read the inbox."""
        async with self._opening:
            if self._watching is None:
                if await self._calls.call(self._make_inbox):
                    self._say(
                        f"a process of replica {int(self._name[:5])} was here before, and has not left: it was "
                        "killed, or another job has the same --replica, which ends now"
                    )
                self._watching = asyncio.create_task(self._watch())

    def _make_inbox(self) -> bool:
        """Make the inbox, and remove those of earlier processes of this slot; return whether there were any."""
        self._folder.create()
        earlier = self._others_of_slot()
        for name in earlier:
            self._folder.below(name).remove_all()
        self._inbox.create()
        self._inbox.put(_OPEN, b"-")
        return bool(earlier)

    def _others_of_slot(self) -> list[str]:
        """Return the inboxes of other processes of this slot."""
        return [
            name
            for name in self._folder.names()
            if re.fullmatch(_INBOX, name) and name[:5] == self._name[:5] and name != self._name
        ]

    async def _watch(self) -> None:
        while True:
            began = self._now()
            try:
                await self._look()
            except OSError as error:
                self._say(str(error))
            while (left := began + self._interval() - self._now()) > 0:
                self._change.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        await self._change.wait()

    def _interval(self) -> float:
        least, most = self._pace
        return max(least, min([most, *(stream.patience for stream in self._streams.values())]))

    async def _look(self) -> None:
        """Remove the files that were read, and begin to read those that have come."""
        done = set(self._done)
        await self._calls.call(self._inbox.remove, done)
        names = set(await self._calls.call(self._inbox.names))
        self._done -= done
        if _OPEN not in names:
            self.is_replaced = bool(await self._calls.call(self._others_of_slot))
            why = "a later process of this slot has begun" if self.is_replaced else "another program did it"
            self._fail(f"{self._inbox.url} was removed: {why}")
        for name in names - {_OPEN} - self._reading - self._done:
            if not (found := _FILE.fullmatch(name)):
                if not _FILE.match(name):  # else it is being written
                    self._say(f"{self._inbox.url}/{name} is no file of an exchange, and is left alone")
                continue
            dialler, number, kind, place = found[1], int(found[2]), found[3], int(found[4])
            stream = self._streams.get(f"{dialler}.{number}")
            if stream is not None:
                if stream.wants(kind, place):
                    self._reading.add(name)
                    self.spawn(self._receive(stream, name, kind, place))
                elif stream.is_read(kind, place):
                    self._done.add(name)
            elif number in self._begun[dialler]:
                self._done.add(name)
            elif (kind, place) == ("d", 0) and self._serve is not None:
                self._reading.add(name)
                self.spawn(self._begin(dialler, number, name))

    async def _receive(self, stream: FolderStream, name: str, kind: str, place: int) -> None:
        try:
            stream.arrive(kind, place, await self._take(name))
        except FileNotFoundError:
            pass
        except OSError as error:
            self._say(str(error))
        except ValueError as error:
            stream.is_refused = not stream.heard
            stream.abort(str(error))
        finally:
            self._reading.discard(name)
            self.changed()

    async def _begin(self, dialler: str, number: int, name: str) -> None:
        """Begin a stream with its first file, or refuse it."""
        stream_name = f"{dialler}.{number}"
        try:
            content = await self._take(name)
        except FileNotFoundError:
            return
        except OSError as error:
            self._say(str(error))
            return
        except ValueError as error:
            self._say(f"a process is refused: {error}")
            with suppress(OSError):
                refusal = HEAD.pack(0, True) + str(error).encode()
                await self.write(dialler, f"{stream_name}.c0", refusal)
            return
        finally:
            self._reading.discard(name)
        self._begun[dialler].add(number)
        stream = self._add(FolderStream(self, dialler, stream_name, dials=False))
        stream.arrive("d", 0, content)
        visit = asyncio.create_task(self._visit(stream))
        self._visits.add(visit)
        visit.add_done_callback(self._visits.discard)

    async def _visit(self, stream: FolderStream) -> None:
        assert self._serve is not None
        with suppress(OSError, TimeoutError):  # of this stream alone
            async with stream:
                await self._serve(stream)

    async def _take(self, name: str) -> bytes:
        """Return the content of a file of the inbox, which will be removed. Raises OSError and ValueError."""
        sealed = await self._calls.call(self._inbox.get, name, _MOST_BYTES)
        self._done.add(name)
        try:
            return await self._calls.call(self._sealing.open, f"{self._name}/{name}", sealed)
        except ValueError as error:
            raise ValueError(f"{self._inbox.url}/{name} {error}") from None

    def _fail(self, reason: str) -> None:
        self._say(reason)
        for stream in list(self._streams.values()):
            stream.abort(reason)

    def _say(self, line: str) -> None:
        """Tell a line, unless it is like one before."""
        kind = re.sub(_FILE, "", line)
        if kind not in self._told:
            self._told.add(kind)
            self._tell(line)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
