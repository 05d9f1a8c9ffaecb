"""What a rank has under way with its counterparts, and what it does with each frame that arrives.

A message moves when both ends have posted it: the receiver asks for it (WANT), and then gets its chunks (DATA). So
nothing arrives that has no place, and messages that come early take no memory. Every frame is checked against what
was asked for. A frame that does not fit is dropped and counted; it never raises, and never makes memory grow.
"""

import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_noloco.federation.commit import WithdrawnError
from megatron_noloco.federation.connection import Connection
from megatron_noloco.federation.frames import HANDOVER_TAG, LARGEST, Frame, Kind, Member, Receive, Send, read
from megatron_noloco.federation.rendezvous import Directory
from megatron_noloco.transport.protocol import EXCHANGE_TAGS

_MOST_WANTS = 1024  # of one rank, for messages that are not posted yet; further ones are dropped
_HANDOVERS = range(HANDOVER_TAG, LARGEST + 1)  # their tags
_ALL_TAGS = range(LARGEST + 1)


@dataclass
class Counterpart:
    """What this rank knows about the rank at the same place in another replica, and has under way with it.

    Attributes:
        epoch: of its process; 0: it was never heard of.
        begun: the exchange that it began last; -1: none.
        open_from: the first exchange in which it may exchange with this rank.
        heard: the time of its last frame, on the monotonic clock; -inf: never.
        connected: whether our frames can reach it.
        informed: the version of our directory that it was sent last; -1: none.
        offer: its last answer to an ASK, tag and description; None: none yet.
        posted: our messages that it has not asked for, oldest first, by tag.
        wants: what it has asked for and we have not posted, likewise.
        unconfirmed: our messages that it has asked for and not confirmed, by its ticket.
    """

    rank: int
    epoch: int = 0
    begun: int = -1
    open_from: int = 0
    heard: float = float("-inf")
    connected: bool = False
    informed: int = -1
    offer: tuple[int, bytes] | None = None
    posted: defaultdict[int, deque[Send]] = field(default_factory=lambda: defaultdict(deque))
    wants: defaultdict[int, deque[Frame]] = field(default_factory=lambda: defaultdict(deque))
    unconfirmed: dict[int, Send] = field(default_factory=dict)

    def wants_waiting(self) -> int:
        return sum(map(len, self.wants.values()))


class FederationProtocol:
    """Runs the protocol of one rank. Used by one thread; other threads may read `counterparts`.

    Args:
        counterparts: the ranks at the same place in other replicas.
        connections: to the counterparts whose address is known, by rank; the caller adds to it.

    Attributes:
        counterparts: by rank.
        dropped: how many frames were dropped, by reason.
        directory: the addresses of all ranks.
        when_asked: called with rank and tag of each ASK; answers with `offer`, now or later.
    """

    def __init__(
        self, member: Member, counterparts: Iterable[int], connections: Mapping[int, Connection]
    ) -> None:
        self.member = member
        self.counterparts: Mapping[int, Counterpart] = {rank: Counterpart(rank) for rank in counterparts}
        self.dropped: Counter[str] = Counter()
        self.directory = Directory(member)
        self.when_asked: Callable[[int, int], None] = lambda rank, tag: self.offer(rank, tag, b"", [])
        self._connections = connections
        self._receives: dict[int, Receive] = {}  # by ticket
        self._tickets = 0
        self._begun = -1
        self._under_way: dict[int, int | None] = {}  # the partner, by the exchange's number
        self._warnings: set[str] = set()
        self._actions = {
            Kind.HELLO: self._take_hello,
            Kind.WANT: self._take_want,
            Kind.DATA: self._take_data,
            Kind.DONE: self._take_done,
            Kind.ASK: self._take_ask,
            Kind.OFFER: self._take_offer,
        }

    def warn(self, line: str) -> None:
        """Write a line to stderr, once."""
        if line not in self._warnings:
            self._warnings.add(line)
            sys.stderr.write(f"rank {self.member.rank}: {line}\n")

    # Messages that this rank posts

    def send(self, rank: int, send: Send) -> None:
        """Send a message to a counterpart as soon as it asks for it."""
        if rank not in self._connections:
            send.report(_unknown(rank))
            return
        self.counterparts[rank].posted[send.tag].append(send)
        self._match(self.counterparts[rank], send.tag)

    def receive(self, receive: Receive) -> None:
        """Ask a counterpart for a message."""
        if receive.message.rank not in self._connections:
            receive.transfers.report(_unknown(receive.message.rank))
            return
        self._tickets += 1
        self._receives[self._tickets] = receive
        fields = {"length": receive.message.buffer.nbytes, "dtype": receive.dtype}
        want = self.member.frame(Kind.WANT, tag=receive.tag, number=self._tickets, **fields)
        self._connections[receive.message.rank].control(want.pack())

    def _match(self, counterpart: Counterpart, tag: int) -> None:
        """Start what both sides have posted under a tag, in the order in which they did."""
        posted, wants = counterpart.posted[tag], counterpart.wants[tag]
        while posted and wants:
            send, want = posted.popleft(), wants.popleft()
            if (want.length, want.dtype) != (send.length, send.dtype):
                problem = (
                    f"rank {counterpart.rank} expects {want.length} bytes where {send.length} are sent, or "
                    f"other numbers (tag {tag})"
                )
                send.report(ConnectionError(problem))
                self.warn(problem)
            elif want.number not in counterpart.unconfirmed:  # no ticket is given twice
                counterpart.unconfirmed[want.number] = send
                frames = send.frames(want, self.member)
                self._connections[counterpart.rank].chunks(want.number, frames)
        if not posted:
            del counterpart.posted[tag]
        if not wants:
            del counterpart.wants[tag]

    def cancel(
        self, counterpart: Counterpart, tags: range = _ALL_TAGS, failure: ConnectionError | None = None
    ) -> None:
        """End what is under way with a counterpart under these tags, and report the failure, if one is given."""
        self._cancel_sends(counterpart, tags, failure)
        for ticket, receive in list(self._receives.items()):
            if receive.message.rank == counterpart.rank and receive.tag in tags:
                del self._receives[ticket]
                if failure is not None:
                    receive.transfers.report(failure)

    def _cancel_sends(
        self, counterpart: Counterpart, tags: range, failure: ConnectionError | None = None
    ) -> None:
        """Forget our messages to a counterpart, and its wants, under these tags."""
        posted, wants, unconfirmed = counterpart.posted, counterpart.wants, counterpart.unconfirmed
        sends = [send for tag in list(posted) if tag in tags for send in posted.pop(tag)]
        for tag in [tag for tag in wants if tag in tags]:
            del wants[tag]
        if tickets := {ticket for ticket, send in unconfirmed.items() if send.tag in tags}:
            sends += [unconfirmed.pop(ticket) for ticket in sorted(tickets)]
            self._connections[counterpart.rank].drop(tickets)
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

    def end(self, number: int) -> None:
        """Tell all counterparts that this exchange is over here, and its messages void."""
        self._under_way = {later: rank for later, rank in self._under_way.items() if later > number}
        self._cancel_void()

    def send_hello(self, *ranks: int) -> None:
        """Send a HELLO, and the addresses if they have changed, to these ranks or to all that are connected."""
        for rank, connection in self._connections.items():
            if rank in ranks or (not ranks and self.counterparts[rank].connected):
                open_from = self._open_from(rank)
                connection.hello(
                    self.member.frame(Kind.HELLO, number=self._begun + 1, offset=open_from).pack()
                )
                if self.counterparts[rank].informed != self.directory.version:
                    connection.control(*self.directory.frame())
                    self.counterparts[rank].informed = self.directory.version

    def _open_from(self, rank: int) -> int:
        """Return the first exchange in which this rank may exchange with that one: under way, or the next."""
        with_it = (number for number, partner in self._under_way.items() if partner == rank)
        return min(with_it, default=self._begun + 1)

    def _cancel_void(self) -> None:
        """Cancel what is under way for exchanges that are not open any more, and tell the counterparts."""
        for counterpart in self.counterparts.values():
            self.cancel(counterpart, _before(self._open_from(counterpart.rank)))
        self.send_hello()

    # Handovers, see `handover`

    def ask(self, rank: int, tag: int) -> None:
        """Ask a connected counterpart which state it can send."""
        self._connections[rank].control(self.member.frame(Kind.ASK, tag=tag).pack())

    def offer(self, rank: int, tag: int, description: bytes, sends: Sequence[Send]) -> None:
        """Answer an ASK, and post the messages that the description is about; earlier ones are cancelled."""
        counterpart = self.counterparts[rank]
        again = ConnectionError(f"rank {rank} has asked again")
        self._cancel_sends(counterpart, _HANDOVERS, again)
        for send in sends:
            self.send(rank, send)
        if rank in self._connections:
            data = np.frombuffer(description, np.uint8)
            frame = self.member.frame_with(data, Kind.OFFER, to_epoch=counterpart.epoch, tag=tag)
            self._connections[rank].control(*frame)

    # Frames that arrive

    def take(self, header: bytes, data: Sequence[Any]) -> None:
        """Act on the parts of a message; those after the header have a `buffer`."""
        reason = self._take(header, data)
        if reason:
            self.dropped[reason] += 1

    def _take(self, header: bytes, parts: Sequence[Any]) -> str:
        """Act on a frame; returns why it is dropped, or an empty string."""
        frame = read(header)
        if frame is None:
            return "no frame"
        if frame.sender >= self.member.ranks:
            return "unknown sender"
        if frame.run != self.member.run:
            other = (
                "its job has another seed, model, layout, method or number of slots, or other first weights"
            )
            self.warn(f"rank {frame.sender} is refused: {other}")
            return "another run"
        if len(parts) != (frame.kind in (Kind.DATA, Kind.ADDRESSES, Kind.OFFER)):
            return "wrong parts"
        data = np.frombuffer(parts[0].buffer if parts else b"", np.uint8)
        if frame.kind == Kind.ADDRESSES:
            return self.directory.take(frame, data)
        counterpart = self.counterparts.get(frame.sender)
        if counterpart is None:
            return "unknown sender"
        if not self._admit(counterpart, frame):
            return "earlier process"
        counterpart.heard = time.monotonic()
        return self._actions[frame.kind](counterpart, frame, data)

    def _admit(self, counterpart: Counterpart, frame: Frame) -> bool:
        """Whether a frame is from the counterpart's latest process and, if it answers us, meant for this process.

        The first frame of a later process ends what is under way with the one before.
        """
        if frame.kind not in (Kind.HELLO, Kind.WANT, Kind.ASK):
            return (frame.epoch, frame.to_epoch) == (counterpart.epoch, self.member.epoch)
        if frame.epoch > counterpart.epoch:
            restarted = ConnectionError(f"rank {counterpart.rank} was started anew")
            self.cancel(counterpart, failure=restarted)
            counterpart.epoch, counterpart.begun, counterpart.open_from = frame.epoch, -1, 0
        return frame.epoch == counterpart.epoch

    def _take_hello(self, counterpart: Counterpart, hello: Frame, _: np.ndarray) -> str:
        counterpart.begun, counterpart.open_from = hello.number - 1, hello.offset
        withdrawn = WithdrawnError(f"rank {counterpart.rank} has no part in this exchange")
        self.cancel(counterpart, _before(hello.offset), withdrawn)
        if counterpart.begun >= 0:  # it trains, and takes nothing over any more
            trains = ConnectionError(f"rank {counterpart.rank} trains")
            self._cancel_sends(counterpart, _HANDOVERS, trains)
        return ""

    def _take_want(self, counterpart: Counterpart, want: Frame, _: np.ndarray) -> str:
        if want.tag in _before(self._open_from(counterpart.rank)):
            return "void"
        if want.sender not in self._connections:
            return "no way back"
        if counterpart.wants_waiting() >= _MOST_WANTS:
            return "too many wants"
        counterpart.wants[want.tag].append(want)
        self._match(counterpart, want.tag)
        return ""

    def _take_data(self, _: Counterpart, frame: Frame, data: np.ndarray) -> str:
        receive = self._receives.get(frame.number)
        if receive is None:
            return "unknown ticket"
        if not receive.take(frame, data):
            return "wrong chunk"
        if receive.complete:
            del self._receives[frame.number]
            done = self.member.frame(Kind.DONE, tag=frame.tag, number=frame.number, to_epoch=frame.epoch)
            self._connections[frame.sender].control(done.pack())
        return ""

    def _take_done(self, counterpart: Counterpart, frame: Frame, _: np.ndarray) -> str:
        send = counterpart.unconfirmed.pop(frame.number, None)
        if send is None:
            return "unknown ticket"
        send.report(None)
        return ""

    def _take_ask(self, counterpart: Counterpart, frame: Frame, _: np.ndarray) -> str:
        self.when_asked(counterpart.rank, frame.tag)
        return ""

    def _take_offer(self, counterpart: Counterpart, frame: Frame, data: np.ndarray) -> str:
        if not frame.announces(data):
            return "wrong chunk"
        counterpart.offer = frame.tag, data.tobytes()
        return ""


def _before(number: int) -> range:
    """Return the tags of all exchanges before this one."""
    return range(number * EXCHANGE_TAGS)


def _unknown(rank: int) -> ConnectionError:
    return ConnectionError(f"rank {rank} has not been heard of: its address is not known")
