"""This replica among the others: who is there, and what they are told.

All others are told a status at each change, and at rest every few seconds, 64 of them in a second at most.

Of two processes of one slot the later one wins, and the earlier one ends. Whoever knows the later one tells the
earlier one. Where the later one is there no more, the process that was told takes a later number: its clock, from
which processes have their numbers, is behind.
"""

import asyncio
import random
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from megatron_noloco.errors import UserError
from megatron_noloco.federation.compatibility import differences, fit
from megatron_noloco.federation.dialling import Carriers, Dialling
from megatron_noloco.federation.directory import Directory, is_sound
from megatron_noloco.federation.links import TICK_SECONDS, Link, PeerStatus, Serve
from megatron_noloco.federation.messages import (
    Address,
    Header,
    Hello,
    Known,
    Later,
    MalformedError,
    Member,
    Message,
    Phase,
    Status,
    Visit,
    hear,
    say,
)
from megatron_noloco.federation.streams import Stream, StreamEndedError
from megatron_noloco.files import outside

_LEAVE_SECONDS, _LOOK_SECONDS = 5.0, 0.02  # for others to hear that this replica has left
_STOP_TICKS = 2  # a round that is almost over may end before
MOST_TOLD = 4  # replicas that are told addresses in one tick
_MOST_PULSES = 64  # statuses in a second, at rest
_MOST_WARNINGS = 1000  # others may cause them


class Node:
    """This process among the replicas. Used by one event loop, but for what is read of `seen` and `addresses`.

    Args:
        member: what the others must have alike.
        stopped: returns whether this job was asked to stop.

    Attributes:
        links: to all replicas that were ever heard of, by slot.
        serves: this side of conversations that another replica opens, by kind.
        invites: this side of the conversation with a member that wants an invitation; None: there is no such.
        strangers: this side of the conversation with who has not shown the key; None: there is no such.
        phase: of this replica, as `begun` and `step`; see `Status`. `tell` tells them to the others.
        under_way: the partner in each round that is under way, by its number.
        dialling: reaches the others.
        failure: why this process can go on no more.
    """

    def __init__(
        self,
        slot: int,
        address: Address,
        member: Member,
        carriers: Carriers,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self.slot, self.member = slot, member
        self.directory = Directory(slot, address)
        self.links: dict[int, Link] = {}
        self.serves: dict[str, Serve] = {}
        self.invites: Callable[[Stream], Awaitable[None]] | None = None
        self.strangers: Callable[[Stream], Awaitable[None]] | None = None
        self.phase: Phase = "training"
        self.begun, self.step = -1, 0
        self.under_way: dict[int, int] = {}
        self._leaves_at = float("-inf")  # on the monotonic clock
        self.failure: BaseException | None = None
        self.dialling = Dialling(self, carriers)
        self._carriers, self._stopped = carriers, stopped
        self._stopped_ticks = 0
        self._warnings = set[str]()
        self._tasks = set[asyncio.Task[Any]]()
        self._closing = set[asyncio.Task[Any]]()  # of these

    async def start(self) -> None:
        """Accept streams, and begin to dial."""
        await self._carriers.listen(self._visited)
        self.spawn(self._run())

    async def close(self) -> None:
        """Say that this replica has left, and end all streams.

        Waits for others to read the end of conversations that are over here, and some seconds for them to hear
        that it has left, whereupon they end the links: some carriers take back what was not read.
        """
        self.go_on(self.begun, "left")
        await asyncio.sleep(0)
        if self._closing:
            await asyncio.wait(self._closing)
        with suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_SECONDS):
                while any(link.is_linked for link in self.links.values()):
                    await asyncio.sleep(_LOOK_SECONDS)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._carriers.close()

    def spawn(self, work: Awaitable[Any]) -> "asyncio.Task[Any]":
        """Run a coroutine beside. The end of a conversation is no error."""

        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._spawned)
        return task

    def _spawned(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, ConnectionError | TimeoutError):
            self.failure = self.failure or error

    def end(self, stream: Stream) -> "asyncio.Task[Any]":
        """Close the stream of a conversation that is over here, beside."""
        task = self.spawn(stream.end())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        return task

    def warn(self, line: str) -> None:
        """Write a line, which may quote others, to stderr, once; no more after many."""
        line = outside(line)
        if line not in self._warnings and len(self._warnings) < _MOST_WARNINGS:
            self._warnings.add(line)
            self.note(line)

    def note(self, line: str) -> None:
        """Write a line to stderr."""
        sys.stderr.write(f"replica {self.slot}: {line}\n")

    # For other threads

    def seen(self) -> dict[int, PeerStatus]:
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
        open_from, checksum = self.open_from(link.peer), self.directory.checksum
        return Status(self.phase, self.begun, open_from, self.step, checksum, self.pulse_seconds)

    def links_of_ended(self) -> dict[int, set[int]]:
        """Return the slots to which replicas at their end have links, as far as is known, with this replica's own.

        Some of the replicas may have no link to this one.
        """
        known = self.directory.addresses.items()
        return {slot: {*address.linked} for slot, address in known if address.is_at_end} | {
            self.slot: {*self.present()}
        }

    def _note_links(self) -> None:
        """Note to whom this replica has links, and tell all at once if that has changed."""
        present, hidden, is_at_end = self.present(), self.hidden(), self.phase == "ended"
        linked = [slot for slot in present if is_at_end or slot in hidden]
        if self.directory.note(is_at_end, linked):
            self.say_to_all(Known({self.slot: self.directory.own}))

    def tell(self) -> None:
        """Tell all others where this replica is now."""
        for link in self.links.values():
            link.close_rounds(self.open_from(link.peer))
            link.tell_status()

    @property
    def pulse_seconds(self) -> float:
        """Seconds in which all others are told a status."""
        return max(self._carriers.pulse_seconds, len(self.links) / _MOST_PULSES)

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
        self._note_links()
        self.tell()

    def say_to_all(self, message: Message) -> None:
        """Say something to all replicas that are there."""
        for link in self.links.values():
            self.spawn(link.say(message))

    def heard(self, link: Link, status: Status) -> None:
        """Act on a status of another replica."""
        self.dialling.heard(link.peer)
        link.told.answered = self.directory.version
        if status.directory == self.directory.checksum:
            link.told.directory = self.directory.version
        elif not link.told.directory:
            self._tell_addresses(link)

    def lost(self, link: Link) -> None:
        """Note that there is no link to a replica any more."""
        self.dialling.lost(link.peer)

    # The ticks

    async def _run(self) -> None:
        while True:
            self._tick()
            await asyncio.sleep(TICK_SECONDS)

    def _tick(self) -> None:
        """Do what is due twice a second.

        Silence is counted in ticks, not in seconds: a process that was suspended has heard from nobody meanwhile.
        """
        if self._carriers.is_replaced:
            self._end_as_earlier("")
        self._stopped_ticks = self._stopped_ticks + 1 if self.is_leaving else 0
        for link in self.links.values():
            link.tick()
            if self._stopped_ticks == _STOP_TICKS:
                link.end_conversations("a job was asked to stop")
        self._note_links()
        differ = [link for link in self.links.values() if self._knows_less(link)]
        for link in random.sample(differ, min(MOST_TOLD, len(differ))):
            self._tell_addresses(link)
        if self.phase != "left":
            self.dialling.dial_all()

    def _knows_less(self, link: Link) -> bool:
        """Whether news to a replica are older than its last status, which does not know them."""
        is_news = link.seen.present and link.told.directory < link.told.answered
        return is_news and link.seen.status.directory != self.directory.checksum

    def _tell_addresses(self, link: Link) -> None:
        news = self.directory.since(link.told.directory)
        link.told.directory = self.directory.version
        news.pop(link.peer, None)
        self.spawn(link.say(Known(news)))

    # Streams of others

    async def _visited(self, stream: Stream) -> None:
        """Run this side of a stream that another process has opened."""
        if not stream.is_member:
            if self.strangers is None:
                raise StreamEndedError("this job has invited nobody")
            await self.strangers(stream)
            return
        first = await hear(stream, Hello, Header, Visit, first=True)
        stream.admit()
        match first:
            case Hello():
                if (later := self._later_than(first)) is not None:
                    await say(stream, later)
                else:
                    await say(stream, self.hello())
                    await self.run_link(stream, first)
            case Header():
                await self._serve(first, stream)
                await self.end(stream)
            case Visit():
                if line := self._unfit("a visitor", first.member):
                    raise StreamEndedError(line)
                if self.invites is None:
                    raise StreamEndedError("this job makes no invitations")
                await self.invites(stream)

    async def _serve(self, header: Header, stream: Stream) -> None:
        link = self.links.get(header.slot)
        if link is None or link.seen.incarnation != header.incarnation:  # its Hello may be under way
            await asyncio.sleep(TICK_SECONDS)
            link = self.links.get(header.slot)
        if link is None or link.seen.incarnation != header.incarnation:
            raise StreamEndedError("there is no link to this process")
        await link.begin(header, stream)

    # Links

    def hello(self) -> Hello:
        """Return who this process is."""
        return Hello(self.slot, self.directory.own, self.member)

    async def run_link(self, stream: Stream, hello: Hello, dialled: bool = False) -> str:
        """Run a link on a stream on which both sides have said who they are, to its end.

        Returns why the two cannot exchange: the other side finds the same. Raises ConnectionError.
        """
        if hello.slot == self.slot:
            if hello.address.incarnation > self.directory.own.incarnation:
                self._end_as_earlier(f" at {hello.address.endpoint}" if hello.address.endpoint else "")
            return ""
        if not is_sound(hello.slot, hello.address):
            raise MalformedError(f"{hello.address.endpoint} of slot {hello.slot} is no address of a replica")
        if line := self._unfit(f"replica {hello.slot}", hello.member):
            self.refuse(hello.slot, hello.address.incarnation)
            return line
        if (later := self._later_than(hello)) is not None:
            await say(stream, later)
            return ""
        if hello.slot not in self.links:
            self.links[hello.slot] = Link(self, hello.slot)
        self.directory.accept(hello.slot, hello.address)
        await self.links[hello.slot].run(stream, hello, dialled)
        return ""

    def refuse(self, slot: int, incarnation: int) -> None:
        """Forget a process that cannot exchange with this one, unless another of its slot could."""
        if slot not in self.links:
            self.directory.refuse(slot, incarnation)

    def _unfit(self, who: str, member: Member) -> str:
        """Warn, and return why a process cannot exchange with this one; "": it can."""
        if fit(self.member, member):
            return ""
        names = differences(self.member.digests, member.digests)
        line = f"{who} differs from replica {self.slot} in {names or 'its run'}"
        self.warn(f"refused: {line}")
        return line

    def _later_than(self, hello: Hello) -> Later | None:
        """Return what the process is to know that says this; None: no later process of its slot was linked."""
        link = self.links.get(hello.slot)
        if link is None or link.seen.incarnation <= hello.address.incarnation:
            return None
        return Later(link.seen.incarnation, link.seen.present)

    def take_later(self, later: Later) -> None:
        """End where a later process of this slot is there, or take a later number than it had."""
        if later.incarnation < self.directory.own.incarnation:
            return
        if later.is_there:
            self._end_as_earlier("")
            return
        self.directory.follow(later.incarnation)
        for link in self.links.values():
            link.end("has another number now")  # it is dialled again

    def _end_as_earlier(self, where: str) -> None:
        self.failure = self.failure or UserError(
            f"another process of replica {self.slot} has begun{where}, and the others exchange with it: does "
            "another job have the same --replica? This job ends; started again, it goes on from its newest "
            "checkpoint"
        )
