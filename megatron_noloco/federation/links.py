"""A link: what one replica knows of another, and conversations of the two.

A link is a stream of small messages, opened by whoever can dial. Statuses say where its replica is: at each
change, and now and then at rest (`node`). A conversation (a round, a state, a final mean) is a stream of its own.
So nothing ends with a link, and two links at once do no harm. Only silence, or a later process of the other
replica, ends conversations.

The opener of a conversation dials, or asks over the link (`Open`) where it cannot. A round is opened by the higher
slot, and awaited by the lower one. All other conversations are opened by the replica that wants something.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from megatron_noloco.federation.directory import Directory
from megatron_noloco.federation.ledger import Ledger
from megatron_noloco.federation.messages import (
    Header,
    Hello,
    Known,
    Later,
    MalformedError,
    Message,
    Open,
    Prepared,
    Row,
    Status,
    Verdict,
    hear,
    say,
)
from megatron_noloco.federation.streams import IS_IT_THE_MTU, Changes, Stream, StreamEndedError, reason_of

ROUND = "round"  # the kind of conversation that both replicas begin
NO_PART = "has no part in this round"
TICK_SECONDS = 0.5
_OPEN_SECONDS = 10.0
_ASK_AGAIN_SECONDS = 5.0
_MOST_EARLY = 64  # streams that nobody here waits for yet
_MOST_ROWS = 64  # of metrics; earlier ones are thrown away
_LINKED_AGAIN_TICKS = 6  # in which a lost link may come back
_STALLED_SECONDS = 9.0  # a conversation that ends later is long
_ALIVE_TICKS = 8  # a link whose last message is not older is alive
_SILENCE_SECONDS, _SILENCE_PULSES = 10.0, 4  # the longer of both
_SMALL_BYTES = 1200  # pass on any route


class PeerStatus(NamedTuple):
    """What is known of another replica; for other threads.

    Attributes:
        incarnation: of the process that was linked last; 0: it was never heard of.
        present: whether there is a link.
        status: what it has said last.
    """

    incarnation: int = 0
    present: bool = False
    status: Status = Status()


@dataclass
class Told:
    """What this replica has told another over its link; all is told again over the next link.

    Attributes:
        status_is_due: whether a change is to be told in the next tick.
        ticks: since that status.
        directory: version of the directory.
        answered: version of the directory when the other replica sent its last status.
    """

    status_is_due: bool = False
    ticks: int = 0
    directory: int = 0
    answered: int = 0


class Dials(Protocol):
    """What a link needs to reach its replica; see `dialling.Dialling`."""

    def is_dialled_by(self, slot: int) -> bool: ...

    async def dial(self, slot: int) -> Stream: ...


class Owner(Protocol):
    """What links and dialling need of the node that has them; see `node.Node`."""

    slot: int
    directory: Directory
    links: "dict[int, Link]"
    serves: "dict[str, Serve]"

    @property
    def dialling(self) -> Dials: ...

    @property
    def who(self) -> tuple[int, int]: ...

    @property
    def is_leaving(self) -> bool: ...

    @property
    def pulse_seconds(self) -> float: ...

    def open_from(self, slot: int) -> int: ...

    def hello(self) -> Hello: ...

    async def run_link(self, stream: Stream, hello: Hello, dialled: bool = False) -> str: ...

    def status(self, link: "Link") -> Status: ...

    def heard(self, link: "Link", status: Status) -> None: ...

    def lost(self, link: "Link") -> None: ...

    def take_later(self, later: Later) -> None: ...

    def refuse(self, slot: int, incarnation: int) -> None: ...

    def spawn(self, work: Awaitable[Any]) -> "asyncio.Task[Any]": ...

    def end(self, stream: Stream) -> object: ...

    def warn(self, line: str) -> None: ...


class Link:
    """Another replica, as this one sees it. Used by one event loop, but for `seen` and `rows`.

    Attributes:
        ledger: of the rounds with the process that was linked last.
        rows: its newest rows of metrics that nobody has read.
        told: what the other replica was told.
        is_dialled: whether this process was dialled with success.
        silent_ticks: since the last message.
    """

    def __init__(self, node: Owner, peer: int) -> None:
        self.node, self.peer = node, peer
        self.seen = PeerStatus()
        self.ledger = Ledger()
        self.rows: deque[str] = deque(maxlen=_MOST_ROWS)
        self.is_dialled, self.silent_ticks = False, 0
        self.told = Told()
        self._streams: list[Stream] = []  # usually one
        self._sending = asyncio.Lock()
        self._changes = Changes()  # a message has come, or a stream was lost
        self._conversations = set[Stream]()
        self._asks = itertools.count()
        self._waiting: dict[tuple[str, int], asyncio.Future[_Conversation]] = {}  # by kind and number
        self._early: dict[int, _Conversation] = {}  # by round

    # The link

    async def run(self, stream: Stream, hello: Hello, dialled: bool = False) -> None:
        """Listen to a link until its end, or until the other replica says that it has left.

        Raises ConnectionError.
        """
        if hello.address.incarnation > self.seen.incarnation:
            self.end("was started anew")
            self.ledger, self.is_dialled, self.seen = Ledger(), False, PeerStatus(hello.address.incarnation)
        self.is_dialled |= dialled
        self._streams.append(stream)
        self.told = Told()
        self.silent_ticks = 0
        try:
            await self.say(self.node.status(self))
            while self.seen.status.phase != "left":
                message = await hear(stream, Status, Known, Open, Prepared, Verdict, Row, Later)
                self.silent_ticks = 0
                await self._take(message)
        except MalformedError as error:
            self.node.warn(f"the link to replica {self.peer} was closed: {error}")
            raise
        finally:
            self._lose(stream, "the link was closed")

    @property
    def is_linked(self) -> bool:
        """Whether there is a link; the other side may not have said its status yet."""
        return bool(self._streams)

    async def say(self, message: Message) -> None:
        """Say something over the link; it is lost where there is no link."""
        async with self._sending:
            if self._streams:
                stream = self._streams[-1]
                try:
                    await say(stream, message)
                except ConnectionError as error:
                    self._lose(stream, str(error))

    @property
    def is_silent(self) -> bool:
        """Whether nothing was heard for so long that a link would end."""
        silence = max(_SILENCE_SECONDS, _SILENCE_PULSES * self.seen.status.pulse)
        return self.silent_ticks * TICK_SECONDS > silence

    @property
    def _is_lost(self) -> bool:
        return not self._streams and self.silent_ticks > _LINKED_AGAIN_TICKS

    def tell_status(self) -> None:
        """Say where this replica is; if the last message is not sent yet, in a later tick."""
        self.told.status_is_due = self._sending.locked()
        if self._streams and not self._sending.locked():
            self.told.ticks = 0
            self.node.spawn(self.say(self.node.status(self)))

    def tick(self) -> None:
        """Say a status that is due. Count the silence, and end what it makes hopeless."""
        self.silent_ticks += 1
        self.told.ticks += 1
        if self.told.status_is_due or self.told.ticks * TICK_SECONDS >= self.node.pulse_seconds:
            self.tell_status()
        if self._is_lost:
            self._fail_waiting("is not there")
        if self.is_silent:
            self.end("has fallen silent")

    def end(self, reason: str) -> None:
        """End the link, and all conversations with this process."""
        self.end_conversations(reason)
        for stream in list(self._streams):
            self._lose(stream, reason)

    def end_conversations(self, reason: str) -> None:
        """End all conversations; the link stays."""
        for conversation in self._early.values():
            conversation.refuse(reason)
        self._early.clear()
        for stream in list(self._conversations):
            stream.abort(reason)
        self._fail_waiting(reason)

    def _fail_waiting(self, reason: str) -> None:
        for waiting in self._waiting.values():
            _fail(waiting, reason)

    def _lose(self, stream: Stream, reason: str) -> None:
        stream.abort(reason)
        if stream in self._streams:
            self._streams.remove(stream)
            self.told = Told()
            if not self._streams:
                self.seen = self.seen._replace(present=False)
                self.node.lost(self)
        self._changes.note()

    async def _take(self, message: Message) -> None:
        match message:
            case Status():
                for (kind, number), waiting in self._waiting.items():
                    if kind == ROUND and number < message.open_from:
                        _fail(waiting, NO_PART)
                self.node.heard(self, message)  # before other threads see the status
                self.seen = self.seen._replace(present=True, status=message)
            case Known():
                self.node.directory.merge(message.addresses)
            case Open():
                self.node.spawn(self._answer(message))
            case Prepared(number):
                self.ledger.hear(number)
                if (counts := self.ledger.verdict(number)) is not None:
                    await self.say(Verdict(number, counts))
            case Verdict(number, counts) if self.ledger.is_prepared(number):
                self.ledger.close(number, counts)
            case Later():
                self.node.take_later(message)
            case Row():
                self.rows.append(message.text)
        self._changes.note()

    # Conversations

    @asynccontextmanager
    async def meet(self, number: int) -> AsyncIterator[Stream]:
        """Give the stream of a round, which both replicas begin.

        Raises ConnectionError where the other replica has no part in the round, or is lost.
        """
        if self.seen.status.open_from > number:
            raise StreamEndedError(NO_PART)
        conversation = await (self._open if self.node.slot > self.peer else self._wait)(ROUND, number)
        async with self._converse(conversation) as stream:
            yield stream

    @asynccontextmanager
    async def open(self, kind: str) -> AsyncIterator[Stream]:
        """Give the stream of a conversation that the other replica serves (`Owner.serves`).

        Raises ConnectionError where the other replica is lost.
        """
        async with self._converse(await self._open(kind, next(self._asks))) as stream:
            yield stream

    async def settle(self, number: int, ledger: Ledger, seconds: float) -> None:
        """Find out whether a round counts for which this side is prepared; it may stay in doubt.

        Asks over the link until the other process answers, has left or was replaced by a later one, or the link
        was lost and does not come back.

        Args:
            ledger: of the process with which the round began.
        """

        def is_over() -> bool:
            is_gone = self.ledger is not ledger or self.seen.status.phase == "left" or self._is_lost
            return is_gone or ledger.verdict(number) is not None or self.node.is_leaving

        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not is_over():
                    await self.say(Prepared(number))
                    await self._changes.until(is_over, TICK_SECONDS)  # the question may be lost

    async def begin(self, header: Header, stream: Stream) -> None:
        """Run a conversation that the other replica has opened, to its end.

        Raises ConnectionError where nobody wants it.
        """
        conversation = _Conversation(stream)
        if not header.is_answer:
            await self._begin(header.kind, header.number, conversation)
        elif self._hand_over(header.kind, header.number, conversation):
            await conversation.over.wait()
        else:
            raise StreamEndedError("is not waited for any more")

    def close_rounds(self, before: int) -> None:
        """Refuse rounds before this number from now on."""
        for number in [number for number in self._early if number < before]:
            self._early.pop(number).refuse(NO_PART)

    async def _begin(self, kind: str, number: int, conversation: "_Conversation") -> None:
        if kind in self.node.serves:
            async with self._converse(conversation) as stream:
                await self.node.serves[kind](self, stream)
            return
        if kind == ROUND and self._hand_over(kind, number, conversation):
            pass
        elif kind != ROUND or number < self.node.open_from(self.peer) or len(self._early) >= _MOST_EARLY:
            conversation.refuse(NO_PART)
        else:
            if number in self._early:
                self._early.pop(number).refuse("was opened again")
            self._early[number] = conversation
        await conversation.over.wait()

    def _hand_over(self, kind: str, number: int, conversation: "_Conversation") -> bool:
        waiting = self._waiting.get((kind, number))
        if waiting is None or waiting.done():
            return False
        waiting.set_result(conversation)
        return True

    async def _wait(self, kind: str, number: int, asks: bool = False) -> "_Conversation":
        """Wait until the other side opens a stream."""
        if kind == ROUND and (early := self._early.pop(number, None)) is not None:
            return early
        waiting = self._waiting[kind, number] = asyncio.get_running_loop().create_future()
        try:
            while not waiting.done():
                if asks:  # again, since the question or its answer may be lost
                    await self.say(Open(kind, number))
                await asyncio.wait([waiting], timeout=_ASK_AGAIN_SECONDS)
            return waiting.result()
        except asyncio.CancelledError:
            if waiting.done() and waiting.exception() is None:
                waiting.result().refuse("is not waited for any more")
            raise
        finally:
            self._waiting.pop((kind, number))

    async def _open(self, kind: str, number: int) -> "_Conversation":
        if self.is_dialled:
            try:
                return _Conversation(await self._dial(Header(*self.node.who, kind, number)), dialled=True)
            except (ConnectionError, TimeoutError):
                self.is_dialled = False
        if not self.seen.present or not self.node.dialling.is_dialled_by(self.peer):
            raise StreamEndedError("is not there" if not self.seen.present else "cannot be dialled from here")
        return await self._wait(kind, number, asks=True)

    async def _answer(self, asked: Open) -> None:
        """Open the stream that the other side asks for, and run this side of it."""
        stream = await self._dial(Header(*self.node.who, asked.kind, asked.number, True))
        await self._begin(asked.kind, asked.number, _Conversation(stream, dialled=True))

    async def _dial(self, header: Header) -> Stream:
        async with asyncio.timeout(_OPEN_SECONDS):
            stream = await self.node.dialling.dial(self.peer)
            try:
                await say(stream, header)
            except BaseException:
                stream.abort("was not begun")
                raise
        self.is_dialled = True
        return stream

    @asynccontextmanager
    async def _converse(self, conversation: "_Conversation") -> AsyncIterator[Stream]:
        """End a conversation with the block, which does not wait until the other side has closed the stream."""
        stream, began = conversation.stream, asyncio.get_running_loop().time()
        before = stream.received
        self._conversations.add(stream)
        try:
            yield stream
        except BaseException as error:
            stream.abort(reason_of(error))
            if asyncio.get_running_loop().time() - began > _STALLED_SECONDS:
                self._name_lost_packets(stream.received - before)
            raise
        else:
            if conversation.dialled:
                self.node.end(stream)
        finally:
            self._conversations.discard(stream)
            conversation.over.set()

    def _name_lost_packets(self, came: int) -> None:
        """Say so where the link lives, and of a long conversation no more has come than small packets hold."""
        if 0 < came < _SMALL_BYTES and self._streams and self.silent_ticks <= _ALIVE_TICKS:
            self.node.warn(
                f"small messages of replica {self.peer} arrive, large ones do not: {IS_IT_THE_MTU}"
            )


Serve = Callable[[Link, Stream], Awaitable[None]]
"""Runs this side of a conversation that another replica has opened."""


class _Conversation:
    """The stream of a conversation.

    Attributes:
        dialled: whether this side has opened the stream, and closes it.
        over: set when the conversation is over here.
    """

    def __init__(self, stream: Stream, dialled: bool = False) -> None:
        self.stream, self.dialled = stream, dialled
        self.over = asyncio.Event()

    def refuse(self, reason: str) -> None:
        self.stream.abort(reason)
        self.over.set()


def _fail(waiting: "asyncio.Future[_Conversation]", reason: str) -> None:
    if not waiting.done():
        waiting.set_exception(StreamEndedError(reason))
