"""This replica among the others: who is there, who dials whom, and what they are told.

Of two replicas that can dial each other, the higher slot opens the link; if no link comes in three seconds, the
lower slot dials as well. A replica that does not answer is dialled again after pauses that double up to a minute.

Of two processes of one slot the later one wins, and the earlier one ends.
"""

import asyncio
import random
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from megatron_noloco.errors import UserError
from megatron_noloco.federation.compatibility import differences, fit
from megatron_noloco.federation.directory import Directory, is_sound
from megatron_noloco.federation.folder import is_folder_endpoint
from megatron_noloco.federation.links import TICK_SECONDS, Link, Seen, Serve
from megatron_noloco.federation.messages import (
    Address,
    Hello,
    Known,
    MalformedError,
    Member,
    Message,
    Phase,
    Status,
    Talk,
    Visit,
    hear,
    say,
)
from megatron_noloco.federation.streams import Carrier, RefusedError, Stream, StreamEndedError
from megatron_noloco.files import outside

_SILENCE_SECONDS = 10.0
_OPEN_SECONDS = 10.0
_BACK_SECONDS = 3.0  # for the side that dials, before the other side tries
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 60.0  # between two attempts to dial
_UNANSWERED_SECONDS = 5.0  # after which an address is named
_STOP_TICKS = 2  # a round that is almost over may end before
_MOST_TOLD = 4  # replicas that are told addresses in one tick
_FAREWELL_SECONDS = 2.0  # and four pulses, for others to read the end of a conversation
_MOST_WARNINGS = 1000  # others may cause them
_REFUSED = "refused: "
_REPLACED = "a later process of this replica is there"


class Identity(NamedTuple):
    """Who this process is."""

    slot: int
    address: Address
    member: Member


class Carriers(NamedTuple):
    """What carries streams: between hosts, and where this process has no port, through a folder."""

    network: Carrier
    folder: Carrier | None = None


@dataclass
class _Dialling:
    """The attempts to dial an address. Times are those of the loop.

    Attributes:
        apart_since: when the address became known, or the link was lost.
        again: when the next attempt may begin.
        task: the attempt under way.
    """

    address: Address
    apart_since: float
    again: float = 0.0
    pause: float = _FIRST_PAUSE
    task: "asyncio.Task[None] | None" = None


class Node:
    """This process among the replicas. Used by one event loop, but for what is read of `seen` and `addresses`.

    Args:
        stopped: returns whether this job was asked to stop.

    Attributes:
        links: to all replicas that were ever heard of, by slot.
        serves: this side of conversations that another replica opens, by kind.
        visitors: this side of conversations with members that are no replicas, by kind.
        strangers: this side of the conversation with who has not shown the key; None: there is no such.
        phase: of this replica, as `begun` and `step`; see `Status`. `tell` tells them to the others.
        under_way: the partner in each round that is under way, by its number.
        refusal: why a process that was dialled by its endpoint cannot exchange with this one; "": all can.
        has_answers: whether any process has answered that was dialled by its endpoint, maybe this one.
        failure: why this process can go on no more.
    """

    def __init__(
        self, identity: Identity, carriers: Carriers, stopped: Callable[[], bool] = lambda: False
    ) -> None:
        self.slot, self.member = identity.slot, identity.member
        self.directory = Directory(identity.slot, identity.address)
        self.links: dict[int, Link] = {}
        self.serves: dict[str, Serve] = {}
        self.visitors: dict[str, Callable[[Stream], Awaitable[None]]] = {}
        self.strangers: Callable[[Stream], Awaitable[None]] | None = None
        self.phase: Phase = "training"
        self.begun, self.step = -1, 0
        self.under_way: dict[int, int] = {}
        self._leaves_at = float("-inf")  # on the monotonic clock
        self.refusal, self.has_answers = "", False
        self.failure: BaseException | None = None
        self._carriers, self._stopped = carriers, stopped
        self._pulse_ticks = max(1, round(self._pulse_seconds / TICK_SECONDS))
        self._ticks = self._stopped_ticks = 0
        self._dialling: dict[int, _Dialling] = {}
        self._answered = set[str]()  # endpoints
        self._ended: dict[int, tuple[int, list[int]]] = {}  # see `Status.ended`
        self._warnings = set[str]()
        self._tasks = set[asyncio.Task[Any]]()
        self._ending = set[asyncio.Task[Any]]()  # of these

    async def start(self) -> None:
        """Accept streams, and begin to dial."""
        await self._carriers.network.listen(self._visited)
        if self._carriers.folder is not None:
            await self._carriers.folder.listen(self._visited)
        self.spawn(self._run())

    async def close(self) -> None:
        """Say that this replica has left, and end all streams.

        Waits a while for others to read the end of conversations that are over here: some carriers take back what
        was not read.
        """
        self.phase = "left"
        self.tell()
        await asyncio.sleep(0)
        if self._ending:
            await asyncio.wait(self._ending, timeout=_FAREWELL_SECONDS + 4 * self._pulse_seconds)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for carrier in filter(None, self._carriers):
            await carrier.close()

    def spawn(self, work: Awaitable[Any]) -> "asyncio.Task[Any]":
        """Run a coroutine beside. The end of a conversation is no error."""

        async def safely() -> None:
            try:
                await work
            except (ConnectionError, TimeoutError):
                pass
            except Exception as error:
                self.failure = self.failure or error

        task = asyncio.ensure_future(safely())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def end(self, stream: Stream) -> "asyncio.Task[Any]":
        """Close the stream of a conversation that is over here, beside."""
        task = self.spawn(stream.end())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        return task

    def warn(self, line: str) -> None:
        """Write a line, which may quote others, to stderr, once; no more after many."""
        line = outside(line)
        if line not in self._warnings and len(self._warnings) < _MOST_WARNINGS:
            self._warnings.add(line)
            sys.stderr.write(f"replica {self.slot}: {line}\n")

    # For other threads

    def seen(self) -> dict[int, Seen]:
        """Return what is known of the other replicas that were ever heard of, by slot."""
        return {slot: link.seen for slot, link in list(self.links.items()) if link.seen.incarnation}

    def present(self) -> dict[int, Status]:
        """Return the status of each other replica with a link, by slot, in ascending order."""
        return {slot: seen.status for slot, seen in sorted(self.seen().items()) if seen.present}

    def hidden(self) -> set[int]:
        """Return the replicas that no other can dial, as far as is known; this replica may be among them."""
        return {slot for slot, address in self.directory.addresses.items() if not address.endpoint}

    @property
    def is_leaving(self) -> bool:
        """Whether this job was asked to stop, and waits for nobody."""
        return self._stopped() and time.monotonic() > self._leaves_at

    def leave_in(self, seconds: float) -> None:
        """Take part in one more round for so long, although this job was asked to stop. From any thread."""
        self._leaves_at = time.monotonic() + seconds

    @property
    def seconds_to_leave(self) -> float:
        """Seconds that a round may still take though this job was asked to stop; 0.0: no such time was set."""
        return max(0.0, self._leaves_at - time.monotonic())

    # What others are told

    @property
    def who(self) -> tuple[int, int]:
        """Slot and incarnation of this process."""
        return self.slot, self.directory.own.incarnation

    def open_from(self, slot: int) -> int:
        """Return the first round that this replica may have with another: under way, or the next."""
        under_way = (number for number, partner in self.under_way.items() if partner == slot)
        return min(under_way, default=self.begun + 1)

    def status(self, link: Link) -> Status:
        """Return what another replica is to know of this one."""
        sees = list[int]()
        if not self.directory.addresses[link.slot].endpoint:
            sees = sorted(self.hidden() & self.present().keys() - {link.slot})
        return Status(
            self.phase,
            self.begun,
            self.open_from(link.slot),
            self.step,
            sees,
            self._ended_unknown_to(link.slot),
            self.directory.checksum,
        )

    def links_of_ended(self) -> dict[int, set[int]]:
        """Return the slots to which replicas at their end have links, as far as is known, with this replica's own.

        Some of the replicas may have no link to this one.
        """
        return {slot: {*sees} for slot, (_, sees) in self._ended.items()} | {self.slot: {*self.present()}}

    def _ended_unknown_to(self, receiver: int) -> dict[int, tuple[int, list[int]]]:
        if self.phase != "ended":
            return {}
        version, sees = self._ended.get(self.slot, (0, []))
        if sees != (now := list(self.present())):
            self._ended[self.slot] = version + 1, now
        return {
            slot: known
            for slot, known in self._ended.items()
            if slot == self.slot or receiver not in known[1]
        }

    def tell(self) -> None:
        """Tell all others where this replica is now."""
        for link in self.links.values():
            link.close_rounds(self.open_from(link.slot))
            self.spawn(link.tell_status())

    def begin_round(self, number: int, partner: int | None) -> None:
        """Begin a round, and tell all; None: this replica skips it."""
        if partner is not None:
            self.under_way[number] = partner
        self.begun = max(self.begun, number)
        self.tell()

    def end_round(self, number: int) -> None:
        """Tell all that a round is over here."""
        del self.under_way[number]
        self.tell()

    def go_on(self, begun: int, phase: Phase = "training") -> None:
        """Tell all that this replica has no part in rounds up to this one, but for rounds under way."""
        self.begun, self.phase = max(self.begun, begun), phase
        self.tell()

    def say_to_all(self, message: Message) -> None:
        """Say something to all replicas that are there."""
        for link in self.links.values():
            self.spawn(link.say(message))

    def heard(self, link: Link) -> None:
        """Act on a status of another replica."""
        if link.slot in self._dialling:
            self._dialling[link.slot].pause = _FIRST_PAUSE
        for slot, known in link.seen.status.ended.items():
            if slot != self.slot and known[0] > self._ended.get(slot, (0, []))[0]:
                self._ended[slot] = known
        if not link.told:
            self._tell_addresses(link)

    def lost(self, link: Link) -> None:
        """Note that there is no link to a replica any more."""
        if (dialling := self._dialling.get(link.slot)) is not None:
            dialling.apart_since = dialling.again = asyncio.get_running_loop().time()

    # The ticks

    async def _run(self) -> None:
        while True:
            self._tick()
            await asyncio.sleep(TICK_SECONDS)

    def _tick(self) -> None:
        """Do what is due twice a second.

        Silence is counted in ticks, not in seconds: a process that was suspended has heard from nobody meanwhile.
        """
        self._ticks += 1
        self._stopped_ticks = self._stopped_ticks + 1 if self.is_leaving else 0
        silent = round(max(_SILENCE_SECONDS, 4 * self._pulse_seconds) / TICK_SECONDS)
        for link in self.links.values():
            link.tick(silent)
            if self._stopped_ticks == _STOP_TICKS:
                link.end_talks("is not waited for: a job was asked to stop")
            if self._ticks % self._pulse_ticks == 0:
                self.spawn(link.tell_status())
        differ = [link for link in self.links.values() if self._knows_less(link)]
        for link in random.sample(differ, min(_MOST_TOLD, len(differ))):
            self._tell_addresses(link)
        for slot in self.directory.addresses:
            if slot != self.slot:
                self._dial_if_due(slot)

    @property
    def _pulse_seconds(self) -> float:
        return max(carrier.pulse_seconds for carrier in filter(None, self._carriers))

    def _knows_less(self, link: Link) -> bool:
        directory = self.directory
        return (
            link.seen.present
            and link.seen.status.directory != directory.checksum
            and link.told < directory.version
        )

    def _tell_addresses(self, link: Link) -> None:
        news, link.told = self.directory.since(link.told), self.directory.version
        news.pop(link.slot, None)
        self.spawn(link.say(Known(news)))

    # Dialling

    async def dial(self, slot: int) -> Stream:
        """Open a stream to a replica. Raises ConnectionError."""
        endpoint = self.directory.addresses[slot].endpoint
        if (carrier := self._carrier_to(endpoint)) is None:
            raise StreamEndedError("cannot be dialled from here")
        return await carrier.dial(endpoint)

    def is_dialled_by(self, slot: int) -> bool:
        """Return whether another replica can dial this one, as far as the addresses say."""
        own, theirs = self.directory.own.endpoint, self.directory.addresses[slot].endpoint
        return is_folder_endpoint(theirs) if is_folder_endpoint(own) else bool(own)

    def _carrier_to(self, endpoint: str) -> Carrier | None:
        if is_folder_endpoint(endpoint):
            return self._carriers.folder
        return self._carriers.network if endpoint else None

    def _dial_if_due(self, slot: int) -> None:
        now, address = asyncio.get_running_loop().time(), self.directory.addresses[slot]
        dialling = self._dialling.get(slot)
        if dialling is None or dialling.address != address:
            dialling = self._dialling[slot] = _Dialling(address, now)
        link = self.links.get(slot)
        has_left = link is not None and link.seen.status.phase == "left"
        if (link is not None and link.is_linked) or self._carrier_to(address.endpoint) is None or has_left:
            return
        is_theirs = self.is_dialled_by(slot) and slot > self.slot
        is_due = now >= dialling.again and (dialling.task is None or dialling.task.done())
        if is_due and not (is_theirs and now - dialling.apart_since < _BACK_SECONDS):
            dialling.again = now + dialling.pause * random.uniform(0.8, 1.2)
            dialling.pause = min(2 * dialling.pause, _LONGEST_PAUSE)
            dialling.task = self.spawn(self._link_to(slot, dialling))

    async def _link_to(self, slot: int, dialling: _Dialling) -> None:
        try:
            await self._link_on(partial(self.dial, slot), slot)
        except (ConnectionError, TimeoutError) as error:
            late = asyncio.get_running_loop().time() - dialling.apart_since > _UNANSWERED_SECONDS
            if late and dialling.address.endpoint not in self._answered:
                self.warn(
                    f"no link to replica {slot} at {dialling.address.endpoint}: {error}; is its job there, and "
                    "that port open to this host?"
                )
            raise

    async def visit(self, endpoint: str) -> None:
        """Open a link to the process at an endpoint, whatever its slot. Raises ConnectionError, TimeoutError."""
        await self._link_on(partial(self._carriers.network.dial, endpoint), None)

    async def _link_on(self, dial: Callable[[], Awaitable[Stream]], slot: int | None) -> None:
        """Open a stream, and run a link on it to its end."""
        try:
            async with asyncio.timeout(_OPEN_SECONDS):
                stream = await dial()
            async with stream:
                async with asyncio.timeout(_OPEN_SECONDS):
                    await say(stream, self._hello())
                    hello = await hear(stream, Hello)
                self.has_answers |= slot is None
                link = self._linked(hello)
                if slot is not None or not link.is_linked:
                    await link.run(stream, hello, dialled=True)
        except RefusedError as error:
            self._note_refusal(str(error), asked=slot is None)
            raise
        except StreamEndedError as error:
            if str(error) == _REPLACED:
                self._end_as_earlier("")
            elif str(error).startswith(_REFUSED):
                self._note_refusal(str(error), asked=slot is None)
            raise

    def _note_refusal(self, line: str, asked: bool) -> None:
        self.warn(line)
        if asked:
            self.refusal, self.has_answers = line, True

    # Streams of others

    async def _visited(self, stream: Stream) -> None:
        """Run this side of a stream that another process has opened."""
        if not stream.is_member:
            if self.strangers is None:
                raise StreamEndedError("this job has invited nobody")
            await self.strangers(stream)
            return
        first = await hear(stream, Hello, Talk, Visit, first=True)
        stream.admit()
        match first:
            case Hello():
                link = self._linked(first)
                await say(stream, self._hello())
                await link.run(stream, first)
            case Talk():
                await self._talk_to(first, stream)
                await self.end(stream)
            case Visit():
                self._check_fit("a visitor", first.member)
                if first.kind not in self.visitors:
                    raise MalformedError(f"there are no visits of the kind {first.kind}")
                await self.visitors[first.kind](stream)

    async def _talk_to(self, talk: Talk, stream: Stream) -> None:
        link = self.links.get(talk.slot)
        if link is None or link.seen.incarnation != talk.incarnation:  # its Hello may be under way
            await asyncio.sleep(TICK_SECONDS)
            link = self.links.get(talk.slot)
        if link is None or link.seen.incarnation != talk.incarnation:
            raise StreamEndedError("there is no link to this process")
        await link.begin(talk, stream)

    def _hello(self) -> Hello:
        return Hello(self.slot, self.directory.own, self.member)

    def _linked(self, hello: Hello) -> Link:
        """Return the link of a process that may exchange with this one. Raises StreamEndedError."""
        own, theirs = self.directory.own.incarnation, hello.address.incarnation
        if hello.slot == self.slot:
            if theirs > own:
                self._end_as_earlier(f" at {hello.address.endpoint}" if hello.address.endpoint else "")
            raise StreamEndedError("this is the process itself" if theirs == own else _REPLACED)
        self._check_fit(f"replica {hello.slot}", hello.member)
        if not is_sound(hello.slot, hello.address):
            raise MalformedError(f"{hello.address.endpoint} of slot {hello.slot} is no address of a replica")
        if hello.slot not in self.links:
            self.links[hello.slot] = Link(self, hello.slot)
        link = self.links[hello.slot]
        if link.seen.present and theirs < link.seen.incarnation:
            raise StreamEndedError(_REPLACED)
        self._answered.add(hello.address.endpoint)
        self.directory.merge({hello.slot: hello.address})
        return link

    def _check_fit(self, who: str, member: Member) -> None:
        """Raise StreamEndedError where a process cannot exchange with this one, and say why; so does its side."""
        if not fit(self.member, member):
            names = differences(self.member.digests, member.digests)
            line = f"{_REFUSED}{who} differs from replica {self.slot} in {names or 'its run'}"
            self.warn(line)
            raise StreamEndedError(outside(line))

    def _end_as_earlier(self, where: str) -> None:
        self.failure = self.failure or UserError(
            f"another process of replica {self.slot} has begun{where}, and the others exchange with it: does "
            "another job have the same --replica? This job ends; started again, it goes on from its newest "
            "checkpoint"
        )
