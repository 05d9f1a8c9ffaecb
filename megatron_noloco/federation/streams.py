"""Conversations of two processes: an ordered stream of bytes in each direction, whose end ends both directions.

    async with await carrier.dial(endpoint) as stream, asyncio.timeout(seconds):
        await stream.send(header, bucket)
        await stream.fill(bucket)

Both sides of a conversation read from top to bottom. A block that ends without an error closes the stream: both
sides have sent and received everything. An error, a time-out or a cancellation aborts the stream with a reason,
which the next call on the other side raises. So nothing of a conversation outlives it, and no message says to
which conversation it belongs.

A `Carrier` opens streams: `tcp` between hosts, and the tests' carrier inside one process.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from types import TracebackType
from typing import Self, TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview

IS_IT_THE_MTU = "is the MTU of the route smaller than that of the interface on either host?"
_SKIPPED_BYTES = 2**18  # at a time
_REASONS = {
    TimeoutError: "the time is over",
    asyncio.CancelledError: "the other side has ended the conversation",
}


class StreamEndedError(ConnectionError):
    """The other side has ended the conversation, or the connection is lost. The message is the reason."""


class RefusedError(ConnectionError):
    """The process at an endpoint has another key or version. The message says what is to be done."""


class Stream(ABC):
    """One side of a conversation. At most one task sends, and one receives.

    Attributes:
        is_member: whether the other side has shown the key of the federation, or there is no key.
        close_seconds: so long a close may take.
    """

    is_member = True
    close_seconds = 5.0

    @property
    def received(self) -> int:
        """Bytes that were received, also by a `fill` that is under way; 0 where nothing is sent in packets."""
        return 0

    @abstractmethod
    async def send(self, *buffers: Buffer) -> None:
        """Send buffers, in order. When it returns, the buffers may be changed. Raises StreamEndedError."""

    @abstractmethod
    async def fill(self, buffer: Buffer) -> None:
        """Receive as many bytes as a writable buffer has. Raises StreamEndedError.

        After a cancellation the stream can only be aborted: a part of the bytes is lost.
        """

    @abstractmethod
    async def close(self) -> None:
        """End the conversation after its last byte; returns when the other side has closed, too.

        Raises StreamEndedError if the other side sends more than was received.
        """

    @abstractmethod
    def abort(self, reason: str) -> None:
        """End the conversation now. The other side raises the reason, at once, or after bytes under way.

        Does nothing after the end.
        """

    @abstractmethod
    def admit(self) -> None:
        """Note that the other side has shown that it is a member; before, it is a stranger with little time."""

    async def receive(self, length: int) -> bytes:
        """Return the next bytes. Raises StreamEndedError."""
        buffer = bytearray(length)
        await self.fill(buffer)
        return bytes(buffer)

    async def skip(self, length: int) -> None:
        """Receive bytes, and throw them away. Raises StreamEndedError."""
        block = memoryview(bytearray(min(length, _SKIPPED_BYTES)))
        for start in range(0, length, _SKIPPED_BYTES):
            await self.fill(block[: length - start])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.abort(reason_of(error))
        else:
            await self.end()

    async def end(self) -> None:
        """Close the stream, or abort it where the other side does not close it in five seconds."""
        try:
            async with asyncio.timeout(self.close_seconds):
                await self.close()
        except BaseException as failure:
            self.abort(f"was not closed: {reason_of(failure)}")
            if not isinstance(failure, TimeoutError | ConnectionError):
                raise


class Changes:
    """Lets tasks wait until something holds, which may hold after a change."""

    def __init__(self) -> None:
        self._waiting = set[asyncio.Future[None]]()

    def __bool__(self) -> bool:
        """Whether anybody waits."""
        return bool(self._waiting)

    def note(self) -> None:
        """Have all look again."""
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)

    async def until(self, condition: Callable[[], bool], seconds: float | None = None) -> None:
        """Wait until a condition holds, or so many seconds have passed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not condition():
                    waiting = asyncio.get_running_loop().create_future()
                    self._waiting.add(waiting)
                    try:
                        await waiting
                    finally:
                        self._waiting.discard(waiting)


@asynccontextmanager
async def within(seconds: float, why: str) -> AsyncIterator[None]:
    """Raise TimeoutError, which says why, where the block takes longer."""
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError as error:
        raise TimeoutError(why) if limit.expired() else error from None


def reason_of(error: BaseException) -> str:
    """Return why a conversation ends with this error, for the other side."""
    return str(error) or _REASONS.get(type(error), type(error).__name__)


Serve = Callable[[Stream], Awaitable[None]]
"""Runs this side of a stream that another process has opened. When it returns or raises, the stream has ended."""


class Carrier(ABC):
    """Opens streams to other processes, and accepts theirs. Used by one event loop.

    Attributes:
        pulse_seconds: between two small messages that are sent though nothing has changed; more where a message
            costs more.
        is_replaced: whether a later process has the place of this one, so that nobody can open a stream to it.
    """

    pulse_seconds = 2.0
    is_replaced = False

    @abstractmethod
    async def listen(self, serve: Serve) -> None:
        """Accept streams of other processes from now on."""

    @abstractmethod
    async def dial(self, endpoint: str) -> Stream:
        """Open a stream. Raises ConnectionError, which names the endpoint and the reason."""

    @abstractmethod
    async def close(self) -> None:
        """End all streams, and accept no more."""
