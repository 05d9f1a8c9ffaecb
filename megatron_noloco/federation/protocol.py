"""Keeps what a rank has under way with its counterparts, and acts on each frame that arrives.

A message moves when both ends have posted it: the receiver asks for it (WANT), and then gets its chunks (DATA). So
nothing arrives that has no place, and messages that come early take no memory. Every frame is checked against what
was asked for. A frame that does not fit is dropped and counted; it never raises, and never makes memory grow.
"""

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from megatron_noloco.federation.counterpart import Counterpart, WithdrawnError
from megatron_noloco.federation.frames import (
    ANYONE,
    HANDOVER_TAG,
    LARGEST,
    SIZE,
    VERSION,
    Frame,
    Kind,
    Member,
    Receive,
    Send,
    another_version,
    read,
)
from megatron_noloco.federation.likeness import differences, of_one_kind_and_unlike, pack
from megatron_noloco.federation.links import Link
from megatron_noloco.federation.rendezvous import ADVERTISE, Directory, host_of
from megatron_noloco.transport.interface import EXCHANGE_TAGS, RankLostError

_MOST_WANTS = 1024  # of one rank, for messages that are not posted yet; further ones are dropped
_MOST_WARNINGS = 1000  # others may cause them
_SILENT_TICKS = 20  # 10 seconds, after which nothing is waited for any more
_STOP_TICKS = 2  # a round that is almost over may end before
_HANDOVERS = range(HANDOVER_TAG, LARGEST + 1)  # their tags
TAKES_OVER = "takes over a state"
_ALL_TAGS = range(LARGEST + 1)
_CONNECTION_LOST = "has gone: the connection was lost"


class FederationProtocol:
    """Runs the protocol of one rank. Used by one thread; other threads may read `Counterpart.seen`.

    Args:
        counterparts: the ranks at the same place in other replicas.

    Attributes:
        counterparts: by rank.
        dropped: how many frames were dropped, by reason.
        directory: the addresses of all ranks.
        when_asked: called with rank, tag and `chosen` of each ASK; answers with `offer`, now or later.
        stopped: whether this job was asked to stop.
    """

    def __init__(self, member: Member, counterparts: Iterable[int]) -> None:
        self.counterparts: Mapping[int, Counterpart] = {rank: Counterpart(rank) for rank in counterparts}
        self.dropped: Counter[str] = Counter()
        self.directory = Directory(member)
        self.when_asked: Callable[[int, int, bool], None] = lambda rank, tag, _: self.offer(
            rank, tag, b"", []
        )
        self.stopped: Callable[[], bool] = lambda: False
        self._stopped_ticks = 0
        self._receives: dict[int, Receive] = {}  # by ticket
        self._tickets = 0
        self._begun = -1
        self._under_way: dict[int, int | None] = {}  # the partner, by exchange
        self._warnings: set[str] = set()
        self._actions = {
            Kind.HELLO: self._take_hello,
            Kind.WANT: self._take_want,
            Kind.DATA: self._take_data,
            Kind.GOT: self._take_got,
            Kind.ASK: self._take_ask,
            Kind.OFFER: self._take_offer,
        }

    @property
    def member(self) -> Member:
        """This process, as the others know it."""
        return self.directory.member

    def warn(self, line: str) -> None:
        """Write a line to stderr, once; no more after many."""
        if line not in self._warnings and len(self._warnings) < _MOST_WARNINGS:
            self._warnings.add(line)
            sys.stderr.write(f"rank {self.member.rank}: {line}\n")

    # Connections

    def use(self, rank: int, link: Link) -> None:
        """Send to a counterpart over a link that is up, unless the one that is used is up as well."""
        counterpart = self.counterparts[rank]
        self.leave_broken_links(rank)
        if counterpart.outbox.link is None and link.up:
            counterpart.connections += 1
            counterpart.outbox.use(link)
            counterpart.update(connected=True)
            self.send_hello(rank)

    def leave_broken_links(self, *ranks: int) -> None:
        """End what is under way with those of these counterparts, or of all, whose link is down."""
        for counterpart in map(self.counterparts.__getitem__, ranks or self.counterparts):
            if not counterpart.linked and counterpart.outbox.link is not None:
                self.lost(counterpart)

    def lost(self, counterpart: Counterpart, why: str = _CONNECTION_LOST) -> None:
        """End whatever is under way with a counterpart, and use its link no more."""
        counterpart.update(connected=False)
        counterpart.directory_version, counterpart.apart_since = -1, time.monotonic()
        self.cancel(counterpart, failure=RankLostError(counterpart.rank, why))
        counterpart.outbox.use(None)

    def claim_rank(self) -> None:
        """Be the latest process of this rank for the others, or say which one is; see `Directory.claim`."""
        if self.directory.claim():
            for rank, counterpart in self.counterparts.items():
                link = counterpart.outbox.link
                self.lost(counterpart, "took this process for an earlier one")
                if link is not None:
                    self.use(rank, link)
        elif rival := self.directory.rival:
            self.warn(
                f"the others exchange with another process of this rank, at {rival.endpoint}: does another job "
                "have the same --replica? End one of the two; if this one is right, start it again"
            )

    def name_namesakes(self) -> None:
        """Name the ranks that announce this host's address, where nobody answers, and were never heard of."""
        own = self.directory.addresses.get(self.member.rank)
        for counterpart in self.counterparts.values():
            if own and counterpart.address and not counterpart.linked and not counterpart.seen.epoch:
                host = host_of(counterpart.address.endpoint)
                if host and host == host_of(own.endpoint):
                    self._name_namesake(counterpart.rank, "does not answer there")

    def _name_namesake(self, rank: int, what: str) -> None:
        address = self.directory.addresses.get(rank)
        self.warn(
            f"rank {rank} announces this host's address{f', {address.endpoint}' if address else ''}, and {what}: "
            f"if it is on another host, {ADVERTISE}"
        )

    # Messages that this rank posts

    def send(self, rank: int, send: Send) -> None:
        """Send a message to a counterpart as soon as it asks for it."""
        if self.counterparts[rank].outbox.link is None:
            send.report(_away(rank))
            return
        self.counterparts[rank].posted[send.tag].append(send)
        self._match(self.counterparts[rank], send.tag)

    def receive(self, receive: Receive) -> None:
        """Ask a counterpart for a message."""
        rank = receive.message.rank
        if self.counterparts[rank].outbox.link is None:
            receive.transfers.report(_away(rank))
            return
        self._tickets += 1
        self._receives[self._tickets] = receive
        want = self.member.frame(
            Kind.WANT,
            rank,
            tag=receive.tag,
            number=self._tickets,
            offset=self.counterparts[rank].connections_of_both,
            length=receive.message.buffer.nbytes,
            dtype=receive.dtype,
        )
        self.counterparts[rank].outbox.control(want)

    def _match(self, counterpart: Counterpart, tag: int) -> None:
        """Start what both sides have posted under a tag, in the order in which they did."""
        posted, wants = counterpart.posted[tag], counterpart.wants[tag]
        while posted and wants:
            send, want = posted.popleft(), wants.popleft()
            if (want.length, want.dtype) != (send.length, send.dtype):
                expects = f"expects {want.length} bytes where {send.length} are sent, or other numbers"
                problem = RankLostError(counterpart.rank, f"{expects} (tag {tag})")
                send.report(problem)
                self.warn(str(problem))
            elif want.number not in counterpart.unconfirmed:  # no ticket is given twice
                counterpart.unconfirmed[want.number] = send
                frames = send.frames(want, self.member)
                counterpart.outbox.chunks(want.number, frames)
        if not posted:
            del counterpart.posted[tag]
        if not wants:
            del counterpart.wants[tag]

    def cancel(
        self, counterpart: Counterpart, tags: range = _ALL_TAGS, failure: RankLostError | None = None
    ) -> None:
        """End what is under way with a counterpart under these tags, and report the failure, if one is given."""
        self._cancel_sends(counterpart, tags, failure)
        for ticket, receive in list(self._receives.items()):
            if receive.message.rank == counterpart.rank and receive.tag in tags:
                del self._receives[ticket]
                if failure is not None:
                    receive.transfers.report(failure)

    def _cancel_sends(
        self, counterpart: Counterpart, tags: range, failure: RankLostError | None = None
    ) -> None:
        """Forget our messages to a counterpart, and its wants, under these tags."""
        posted, wants, unconfirmed = counterpart.posted, counterpart.wants, counterpart.unconfirmed
        sends = [send for tag in list(posted) if tag in tags for send in posted.pop(tag)]
        for tag in [tag for tag in wants if tag in tags]:
            del wants[tag]
        if tickets := {ticket for ticket, send in unconfirmed.items() if send.tag in tags}:
            sends += [unconfirmed.pop(ticket) for ticket in sorted(tickets)]
            counterpart.outbox.drop(tickets)
        if failure is not None:
            for send in sends:
                send.report(failure)

    # Exchanges

    def begin(self, number: int, rank: int | None) -> None:
        """Tell all counterparts that this exchange has begun here, with `rank`; the others have no part in it."""
        self._begun = max(self._begun, number)
        self._under_way[number] = rank
        self._cancel_void()

    def leave_out(self, number: int) -> None:
        """Tell all counterparts that the exchanges up to this one, except those under way, never begin here."""
        self._begun = max(self._begun, number)
        self._cancel_void()

    def end(self, number: int, counts: bool = False) -> None:
        """Tell all counterparts that this exchange is over here, and its messages void; and whether it counts."""
        partner = self._under_way.pop(number, None)
        if counts and partner is not None:
            self.counterparts[partner].counted = number
        self._cancel_void()

    def send_hello(self, *ranks: int) -> None:
        """Send a HELLO, and the addresses if they have changed, to these ranks or to all that have a link."""
        for rank in ranks or self.counterparts:
            counterpart = self.counterparts[rank]
            outbox, open_from = counterpart.outbox, self._open_from(rank)
            if outbox.link is None:
                continue
            begun, counted = self._begun + 1, counterpart.counted + 1
            kind = self.member.kind_number
            hello = self.member.frame(
                Kind.HELLO, rank, to_epoch=kind, number=begun, offset=open_from, tag=counted
            )
            outbox.hello(hello._replace(length=counterpart.connections))
            if counterpart.directory_version != self.directory.version:
                outbox.control(*self.directory.frame(rank))
                counterpart.directory_version = self.directory.version

    def _open_from(self, rank: int) -> int:
        """Return the first exchange that this rank may have with a counterpart: under way, or the next."""
        with_it = (number for number, partner in self._under_way.items() if partner == rank)
        return min(with_it, default=self._begun + 1)

    def _cancel_void(self) -> None:
        """Cancel what is under way for exchanges that are not open any more, and tell the counterparts."""
        for counterpart in self.counterparts.values():
            self.cancel(counterpart, _before(self._open_from(counterpart.rank)))
        self.send_hello()

    def tick(self) -> None:
        """Fail what is under way with those that have fallen silent; with all, where this job is to stop.

        Called after each HELLO that is due. Silence is counted in these calls, not in seconds: a process that was
        stopped itself has heard from nobody meanwhile. A chunk may take longer than a HELLO over a slow link, so
        one that has been silent before, and came back, is waited for twice as long.
        """
        self._stopped_ticks += self.stopped()
        for rank, counterpart in self.counterparts.items():
            counterpart.silent_ticks += counterpart.outbox.link is not None
            why = ""
            if self._stopped_ticks >= _STOP_TICKS:
                why = "is not waited for: this job was asked to stop"
            elif counterpart.silent_ticks > max(_SILENT_TICKS, 2 * counterpart.longest_silence):
                why = "has fallen silent"
            if why:
                self.cancel(counterpart, failure=RankLostError(rank, why))

    # Handovers, see `handover`

    def ask(self, rank: int, tag: int, chosen: bool = False) -> None:
        """Ask a connected counterpart which state it can send, or, if it is chosen, to send it."""
        self.counterparts[rank].outbox.control(self.member.frame(Kind.ASK, rank, tag=tag, number=chosen))

    def offer(self, rank: int, tag: int, description: bytes, sends: Sequence[Send]) -> None:
        """Answer an ASK, and post the messages that the description is about; earlier ones are cancelled."""
        counterpart = self.counterparts[rank]
        again = RankLostError(rank, "has asked again")
        self._cancel_sends(counterpart, _HANDOVERS, again)
        for send in sends:
            self.send(rank, send)
        data = np.frombuffer(description, np.uint8)
        frame = self.member.frame(Kind.OFFER, rank, data, to_epoch=counterpart.seen.epoch, tag=tag)
        if counterpart.outbox.link is not None:
            counterpart.outbox.control(frame, data)

    # Frames that arrive

    def take(self, link: Link, parts: Sequence[Any]) -> None:
        """Act on the parts of a message that came over a link."""
        reason = self._take(link, bytes(parts[0].buffer[: SIZE + 1]), parts[1:])
        if reason:
            self.dropped[reason] += 1

    def _take(self, link: Link, header: bytes, parts: Sequence[Any]) -> str:
        """Act on a frame; returns why it is dropped, or an empty string."""
        frame = read(header)
        if frame is None:
            return self._refuse_version(link, header)
        if frame.kind == Kind.REFUSAL:
            return self._take_refusal(link, frame, parts)
        if frame.run != self.member.run or (
            frame.kind == Kind.HELLO and of_one_kind_and_unlike(frame.to_epoch, self.member.kind_number)
        ):
            if _is_question(frame):
                self._refuse(link, frame.sender, asks=True)
            return "another run"
        if frame.sender >= self.member.ranks:
            self.warn(
                f"rank {frame.sender} is not exchanged with: its job has more slots; give this one as many"
            )
            self._answer(frame, link)
            return "unknown sender"
        if len(parts) != (frame.kind in (Kind.DATA, Kind.ADDRESSES, Kind.OFFER)):
            return "wrong parts"
        if frame.receiver not in (self.member.rank, ANYONE):
            if (frame.sender, frame.epoch) == (self.member.rank, self.member.epoch):
                self._name_namesake(frame.receiver, "this rank itself answers there")
            return "for another rank"
        data = np.frombuffer(parts[0].buffer if parts else b"", np.uint8)
        if frame.kind == Kind.ADDRESSES:
            if 0 < frame.offset <= self.member.rank:
                fewer = "its job has fewer slots; give it as many"
                self.warn(f"rank {frame.sender} does not exchange with this one: {fewer}")
            reason = self.directory.take(frame, data)
            if frame.number and not reason:
                answer, addresses = self.directory.frame(frame.sender)
                link.send(answer.pack(), addresses)
            return reason
        counterpart = self.counterparts.get(frame.sender)
        if counterpart is None:
            return "unknown sender"
        if not self._admit(counterpart, frame, link):
            self._answer(frame, link, counterpart.seen.epoch)
            return "earlier process"
        self.use(frame.sender, link)
        counterpart.update(heard=time.monotonic())
        counterpart.note_sign_of_life()
        return self._actions[frame.kind](counterpart, frame, data)

    def _answer(self, frame: Frame, link: Link, latest: int = 0) -> None:
        """Tell the sender of a frame that is dropped why: fewer slots, or its `latest` process."""
        if _is_question(frame):
            header, data = self.directory.latest(frame.sender, latest)
            link.send(header.pack(), data)

    def _refuse(self, link: Link, rank: int, asks: bool) -> None:
        """Send what this job compares; with `asks` the other side answers with what it does."""
        data = np.frombuffer(pack(self.member.digests), np.uint8)
        link.send(self.member.frame(Kind.REFUSAL, rank, data, number=asks)._replace(run=0).pack(), data)

    def _take_refusal(self, link: Link, frame: Frame, parts: Sequence[Any]) -> str:
        """Say what another job has that this one has not."""
        data = np.frombuffer(parts[0].buffer if len(parts) == 1 else b"", np.uint8)
        if not frame.announces(data):
            return "wrong chunk"
        try:
            names = differences(self.member.digests, data.tobytes())
        except (ValueError, RecursionError):
            return "no digests"
        self.warn(f"rank {frame.sender} is refused: its job differs from this one in {names or 'its run'}")
        if frame.number:
            self._refuse(link, frame.sender, asks=False)
        return ""

    def _refuse_version(self, link: Link, header: bytes) -> str:
        """Name the version of a frame that is none in this one, and tell the other side this one."""
        found = another_version(header)
        if found is None:
            return "no frame"
        version, refuses = found
        self.warn(
            f"another job{f' at {link.endpoint}' * bool(link.endpoint)} speaks version {version} of the protocol, "
            f"this job version {VERSION}: install the same megatron_noloco for both"
        )
        if not refuses:
            self._refuse(link, ANYONE, asks=False)
        return "another version"

    def _admit(self, counterpart: Counterpart, frame: Frame, link: Link) -> bool:
        """Whether a frame is from the counterpart's latest process and, if it answers us, meant for this process.

        The first frame of a later process ends what is under way with the one before; there was none where the
        frame came over the link that is used, and was the first one ever.
        """
        if frame.kind not in (Kind.HELLO, Kind.WANT, Kind.ASK):
            return (frame.epoch, frame.to_epoch) == (counterpart.seen.epoch, self.member.epoch)
        if frame.epoch > counterpart.seen.epoch:
            if counterpart.seen.epoch or link is not counterpart.outbox.link:
                self.lost(counterpart, "was started anew")
                counterpart.its_connections = 0
            counterpart.update(epoch=frame.epoch, begun=-1, open_from=0, takes_over=False)
        return frame.epoch == counterpart.seen.epoch

    def _take_hello(self, counterpart: Counterpart, hello: Frame, _: np.ndarray) -> str:
        goes_on = hello.number - 1 > counterpart.seen.begun
        counterpart.update(begun=hello.number - 1, open_from=hello.offset)
        counts = RankLostError(counterpart.rank, "has used the mean, and this rank missed its token")
        self.cancel(counterpart, _before(min(hello.tag, hello.offset)), counts)
        withdrawn = WithdrawnError(counterpart.rank, "has no part in this exchange")
        self.cancel(counterpart, _before(hello.offset), withdrawn)
        if counterpart.its_connections < hello.length:  # what was under way is void there, so it is here
            counterpart.its_connections = hello.length
            self.cancel(counterpart, failure=RankLostError(counterpart.rank, _CONNECTION_LOST))
        if goes_on:  # it trains, and takes nothing over any more
            counterpart.update(takes_over=False)
            trains = RankLostError(counterpart.rank, "trains")
            self._cancel_sends(counterpart, _HANDOVERS, trains)
        return ""

    def _take_want(self, counterpart: Counterpart, want: Frame, _: np.ndarray) -> str:
        if want.tag in _before(self._open_from(counterpart.rank)):
            return "void"
        if want.offset != counterpart.connections_of_both:
            return "earlier connection"
        if counterpart.outbox.link is None:
            return "no way back"
        if counterpart.wants_waiting() >= _MOST_WANTS:
            return "too many wants"
        counterpart.wants[want.tag].append(want)
        self._match(counterpart, want.tag)
        return ""

    def _take_data(self, counterpart: Counterpart, frame: Frame, data: np.ndarray) -> str:
        receive = self._receives.get(frame.number)
        came = receive is not None and receive.take(frame, data)
        complete = came and receive is not None and receive.complete
        if complete:
            del self._receives[frame.number]
        got = self.member.frame(
            Kind.GOT,
            frame.sender,
            tag=frame.tag,
            number=frame.number,
            to_epoch=frame.epoch,
            offset=int(complete),
        )
        counterpart.outbox.control(got)
        if receive is None:
            return "unknown ticket"
        return "" if came else "wrong chunk"

    def _take_got(self, counterpart: Counterpart, frame: Frame, _: np.ndarray) -> str:
        counterpart.outbox.confirm()
        if frame.offset:
            send = counterpart.unconfirmed.pop(frame.number, None)
            if send is None:
                return "unknown ticket"
            send.report(None)
        return ""

    def _take_ask(self, counterpart: Counterpart, frame: Frame, _: np.ndarray) -> str:
        if frame.number:  # it gets the state between two local steps: neither may wait for the other before
            counterpart.update(takes_over=True)
            takes = WithdrawnError(counterpart.rank, TAKES_OVER)
            self.cancel(counterpart, _before(self._begun + 1), takes)
        self.when_asked(counterpart.rank, frame.tag, bool(frame.number))
        return ""

    def _take_offer(self, counterpart: Counterpart, frame: Frame, data: np.ndarray) -> str:
        if not frame.announces(data):
            return "wrong chunk"
        counterpart.offer = frame.tag, data.tobytes()
        return ""


def _is_question(frame: Frame) -> bool:
    """Whether a frame that is dropped is answered; an answer is not."""
    return frame.kind == Kind.HELLO or (frame.kind == Kind.ADDRESSES and frame.number > 0)


def _before(number: int) -> range:
    """Return the tags of all exchanges before this one."""
    return range(number * EXCHANGE_TAGS)


def _away(rank: int) -> RankLostError:
    return RankLostError(rank, "is not connected")
