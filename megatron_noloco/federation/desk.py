"""What a rank has under way with its counterparts in other jobs, and what it does with each frame that arrives.

All that arrives is checked against what was asked for. What does not fit is dropped and counted; it never raises
and never makes memory grow.
"""

import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from megatron_noloco.federation.frames import Frame, Kind, read
from megatron_noloco.federation.link import Chunks
from megatron_noloco.federation.peer import MOST_WANTS, Peer, Receive, Send
from megatron_noloco.transport.protocol import WithdrawnError


@dataclass(frozen=True)
class Member:
    """This process, as the others know it.

    Attributes:
        rank: unique in the federation.
        run: a number of the run: jobs of another run, or another model, have another one.
        epoch: of the process; a later process of the same rank has a larger one.
    """

    rank: int
    run: int
    epoch: int


class Way(Protocol):
    """The way to a counterpart: what the desk needs of a `Link`."""

    def hello(self, frame: bytes) -> None: ...

    def control(self, frame: bytes) -> None: ...

    def chunks(self, ticket: int, frames: Chunks) -> None: ...

    def drop(self, tickets: set[int]) -> None: ...


class Desk:
    """Used by one thread; others may read `peers`.

    Args:
        ways: to the counterparts whose address is known, by rank; grows.

    Attributes:
        peers: by rank.
        dropped: how often something arrived that was not wanted, by reason.
    """

    def __init__(self, member: Member, counterparts: Iterable[int], ways: Mapping[int, Way]) -> None:
        self.member = member
        self.peers: Mapping[int, Peer] = {rank: Peer(rank) for rank in counterparts}
        self.dropped: Counter[str] = Counter()
        self._ways = ways
        self._receives: dict[int, Receive] = {}  # by ticket
        self._tickets = 0
        self._begun = self._over = -1
        self._void_below = 0  # tag
        self._told: set[str] = set()

    # What this rank does

    def send(self, rank: int, send: Send) -> None:
        if rank not in self._ways:
            send.landing.report(_unknown(rank))
            return
        self.peers[rank].posted[send.tag].append(send)
        self._match(self.peers[rank], send.tag)

    def receive(self, receive: Receive) -> None:
        if receive.rank not in self._ways:
            receive.landing.report(_unknown(receive.rank))
            return
        self._tickets += 1
        self._receives[self._tickets] = receive
        length = receive.message.buffer.nbytes
        want = self._frame(
            Kind.WANT, tag=receive.tag, number=self._tickets, length=length, dtype=receive.dtype
        )
        self._ways[receive.rank].control(want.pack())

    def begin(self, number: int) -> None:
        """Tell the others that this exchange has begun here."""
        self._begun = max(self._begun, number)
        self.greet()

    def end(self, number: int, void_below: int) -> None:
        """Tell the others that this exchange is over here, and that what has a smaller tag is void."""
        self._over, self._void_below = max(self._over, number), max(self._void_below, void_below)
        for peer in self.peers.values():
            self.drop(peer, self._void_below)
        self.greet()

    def greet(self, *ranks: int) -> None:
        """Tell them, or all that can be reached, that this rank is there."""
        hello = self._frame(
            Kind.HELLO, tag=self._void_below, number=self._begun + 1, offset=self._over + 1
        ).pack()
        for rank, way in self._ways.items():
            if rank in ranks or (not ranks and self.peers[rank].connected):
                way.hello(hello)

    def drop(self, peer: Peer, below_tag: int | None = None, failure: ConnectionError | None = None) -> None:
        """End what is under way with a peer under smaller tags (None: all); who waits for it gets `failure`."""
        sends, tickets = peer.drop_sends(below_tag)
        if tickets:
            self._ways[peer.rank].drop(tickets)
        landings = [send.landing for send in sends]
        for ticket, receive in list(self._receives.items()):
            if receive.rank == peer.rank and (below_tag is None or receive.tag < below_tag):
                del self._receives[ticket]
                landings.append(receive.landing)
        if failure is not None:
            for landing in landings:
                landing.report(failure)

    def say(self, line: str) -> None:
        """Tell a person, once."""
        if line not in self._told:
            self._told.add(line)
            sys.stderr.write(f"rank {self.member.rank}: {line}\n")

    # What arrives

    def take(self, header: bytes, data: Sequence[Any]) -> None:
        """Act on the parts of a message; those after the header have a `buffer`."""
        reason = self._take(header, data)
        if reason:
            self.dropped[reason] += 1

    def _take(self, header: bytes, data: Sequence[Any]) -> str:
        """Returns why it is dropped, if it is."""
        frame = read(header)
        if frame is None:
            return "no frame"
        peer = self.peers.get(frame.sender)
        if peer is None:
            return "unknown sender"
        if frame.run != self.member.run:
            other = (
                "its job has another seed, model, layout, method or number of slots, or other first weights"
            )
            self.say(f"rank {frame.sender} is refused: {other}")
            return "another run"
        if len(data) != (frame.kind == Kind.DATA):
            return "wrong parts"
        asks = frame.kind in (Kind.HELLO, Kind.WANT)
        if frame.epoch < peer.epoch or not (
            asks or (frame.epoch, frame.to_epoch) == (peer.epoch, self.member.epoch)
        ):
            return "earlier process"
        if frame.epoch > peer.epoch:
            self.drop(peer, failure=ConnectionError(f"rank {peer.rank} was started anew"))
            peer.epoch, peer.begun, peer.over = frame.epoch, -1, -1
        peer.heard = time.monotonic()
        match frame.kind:
            case Kind.HELLO:
                peer.begun, peer.over = frame.number - 1, frame.offset - 1
                self.drop(peer, frame.tag, WithdrawnError(f"rank {peer.rank} has ended this exchange"))
                return ""
            case Kind.WANT:
                return self._take_want(peer, frame)
            case Kind.DATA:
                return self._take_data(frame, np.frombuffer(data[0].buffer, np.uint8))
            case Kind.DONE:
                return self._take_done(peer, frame)

    def _take_want(self, peer: Peer, want: Frame) -> str:
        if want.tag < self._void_below:
            return "void"
        if want.sender not in self._ways:
            return "no way back"
        if peer.wants_waiting() >= MOST_WANTS:
            return "too many wants"
        peer.wants[want.tag].append(want)
        self._match(peer, want.tag)
        return ""

    def _take_data(self, frame: Frame, data: np.ndarray) -> str:
        receive = self._receives.get(frame.number)
        if receive is None:
            return "unknown ticket"
        if not receive.take(frame, data):
            return "wrong chunk"
        if receive.complete:
            del self._receives[frame.number]
            done = self._frame(Kind.DONE, tag=frame.tag, number=frame.number, to_epoch=frame.epoch)
            self._ways[frame.sender].control(done.pack())
        return ""

    def _take_done(self, peer: Peer, frame: Frame) -> str:
        send = peer.unconfirmed.pop(frame.number, None)
        if send is None:
            return "unknown ticket"
        send.landing.report(send.whole.arrival)
        return ""

    def _match(self, peer: Peer, tag: int) -> None:
        for send, want in peer.match(tag):
            length = send.message.buffer.nbytes
            if (want.length, want.dtype) != (length, send.dtype):
                problem = f"expects {want.length} bytes where {length} are sent, or other numbers (tag {tag})"
                send.landing.report(ConnectionError(f"rank {peer.rank} {problem}"))
                self.say(f"rank {peer.rank} {problem}")
            elif want.number not in peer.unconfirmed:  # no ticket is given twice
                peer.unconfirmed[want.number] = send
                member = self.member
                frames = send.frames(want, member.run, member.rank, member.epoch)
                self._ways[peer.rank].chunks(want.number, frames)

    def _frame(self, kind: Kind, **fields: int) -> Frame:
        return Frame(kind, self.member.run, self.member.rank, self.member.epoch, **fields)


def _unknown(rank: int) -> ConnectionError:
    return ConnectionError(f"rank {rank} has not been heard of: its address is not known")
