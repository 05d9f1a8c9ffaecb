"""What a rank has under way with its counterparts in other jobs, and what it does with each frame that arrives.

All that arrives is checked against what was asked for. What does not fit is dropped and counted; it never raises
and never makes memory grow.
"""

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from megatron_noloco.federation.commit import WithdrawnError
from megatron_noloco.federation.directory import Directory
from megatron_noloco.federation.frames import HANDOVER_TAG, Frame, Kind, Member, checksum_of, read
from megatron_noloco.federation.peer import MOST_WANTS, Peer, Receive, Send, Way
from megatron_noloco.transport.protocol import EXCHANGE_TAGS


class Desk:
    """Used by one thread; others may read `peers`.

    Args:
        ways: to the counterparts whose address is known, by rank; grows.

    Attributes:
        peers: by rank.
        dropped: how often something arrived that was not wanted, by reason.
        directory: where all ranks are.
        when_asked: called with rank and tag of each ASK; answers with `offer`, now or later.
    """

    def __init__(self, member: Member, counterparts: Iterable[int], ways: Mapping[int, Way]) -> None:
        self.member = member
        self.peers: Mapping[int, Peer] = {rank: Peer(rank) for rank in counterparts}
        self.dropped: Counter[str] = Counter()
        self.directory = Directory(member)
        self.when_asked: Callable[[int, int], None] = lambda rank, tag: self.offer(rank, tag, b"", [])
        self._ways = ways
        self._receives: dict[int, Receive] = {}  # by ticket
        self._tickets = 0
        self._begun = -1
        self._under_way: dict[int, int | None] = {}  # the partner, by the exchange's number
        self._told: set[str] = set()

    # What this rank does

    def send(self, rank: int, send: Send) -> None:
        if rank not in self._ways:
            send.told.report(_unknown(rank))
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
        want = self.member.frame(
            Kind.WANT, tag=receive.tag, number=self._tickets, length=length, dtype=receive.dtype
        )
        self._ways[receive.rank].control(want.pack())

    def begin(self, number: int, rank: int | None) -> None:
        """Tell the others that this exchange has begun here, with that rank; they have no part in it."""
        self._begun = max(self._begun, number)
        self._under_way[number] = rank
        self._drop_void()

    def leave_out(self, number: int) -> None:
        """Tell the others that the exchanges up to this one, but for those that have begun here, never will."""
        self._begun = max(self._begun, number)
        self._drop_void()

    def end(self, number: int) -> None:
        """Tell the others that this exchange is over here, and what is under way for it void."""
        self._under_way = {later: rank for later, rank in self._under_way.items() if later > number}
        self._drop_void()

    def greet(self, *ranks: int) -> None:
        """Tell them, or all that can be reached, which exchanges are void, and what they do not know of others."""
        for rank, way in self._ways.items():
            if rank in ranks or (not ranks and self.peers[rank].connected):
                open_from = self._open_from(rank)
                way.hello(self.member.frame(Kind.HELLO, number=self._begun + 1, offset=open_from).pack())
                if self.peers[rank].informed != self.directory.version:
                    way.control(*self.directory.frame())
                    self.peers[rank].informed = self.directory.version

    def _open_from(self, rank: int) -> int:
        """The first exchange in which this rank may meet that one: one under way with it, or one to come."""
        with_it = (number for number, partner in self._under_way.items() if partner == rank)
        return min(with_it, default=self._begun + 1)

    def _drop_void(self) -> None:
        for peer in self.peers.values():
            self.drop(peer, self._open_from(peer.rank) * EXCHANGE_TAGS)
        self.greet()

    def drop(self, peer: Peer, below_tag: int | None = None, failure: ConnectionError | None = None) -> None:
        """End what is under way with a peer under smaller tags (None: all); who waits for it gets `failure`."""

        def gone(tag: int) -> bool:
            return below_tag is None or tag < below_tag

        self._drop_sends(peer, gone, failure)
        for ticket, receive in list(self._receives.items()):
            if receive.rank == peer.rank and gone(receive.tag):
                del self._receives[ticket]
                if failure is not None:
                    receive.landing.report(failure)

    def _drop_sends(
        self, peer: Peer, gone: Callable[[int], bool], failure: ConnectionError | None = None
    ) -> None:
        sends, tickets = peer.drop_sends(gone)
        if tickets:
            self._ways[peer.rank].drop(tickets)
        if failure is not None:
            for send in sends:
                send.told.report(failure)

    # Handovers, see `handover`

    def ask(self, rank: int, tag: int) -> None:
        """Ask a counterpart that is there what it has to give."""
        self._ways[rank].control(self.member.frame(Kind.ASK, tag=tag).pack())

    def offer(self, rank: int, tag: int, description: bytes, sends: Sequence[Send]) -> None:
        """Answer who has asked, and post what is described, in the place of what it was offered before."""
        peer, checksum = self.peers[rank], checksum_of(np.frombuffer(description, np.uint8))
        again = ConnectionError(f"rank {rank} has asked again")
        self._drop_sends(peer, lambda tag: tag >= HANDOVER_TAG, again)
        for send in sends:
            self.send(rank, send)
        if rank in self._ways:
            sizes = {"length": len(description), "checksum": checksum}
            frame = self.member.frame(Kind.OFFER, to_epoch=peer.epoch, tag=tag, **sizes)
            self._ways[rank].control(frame.pack(), description)

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
        if frame.sender >= self.member.ranks:
            return "unknown sender"
        if frame.run != self.member.run:
            other = (
                "its job has another seed, model, layout, method or number of slots, or other first weights"
            )
            self.say(f"rank {frame.sender} is refused: {other}")
            return "another run"
        if len(data) != (frame.kind in (Kind.DATA, Kind.HERE, Kind.OFFER)):
            return "wrong parts"
        if frame.kind == Kind.HERE:
            return self.directory.take(frame, np.frombuffer(data[0].buffer, np.uint8))
        peer = self.peers.get(frame.sender)
        if peer is None:
            return "unknown sender"
        asks = frame.kind in (Kind.HELLO, Kind.WANT, Kind.ASK)
        if frame.epoch < peer.epoch or not (
            asks or (frame.epoch, frame.to_epoch) == (peer.epoch, self.member.epoch)
        ):
            return "earlier process"
        if frame.epoch > peer.epoch:
            self.drop(peer, failure=ConnectionError(f"rank {peer.rank} was started anew"))
            peer.epoch, peer.begun, peer.open_from = frame.epoch, -1, 0
        peer.heard = time.monotonic()
        match frame.kind:
            case Kind.HELLO:
                peer.begun, peer.open_from = frame.number - 1, frame.offset
                withdrawn = WithdrawnError(f"rank {peer.rank} has no part in this exchange")
                self.drop(peer, frame.offset * EXCHANGE_TAGS, withdrawn)
                if peer.begun >= 0:  # it has taken over what it wanted: files need not stay open for it
                    trains = ConnectionError(f"rank {peer.rank} trains")
                    self._drop_sends(peer, lambda tag: tag >= HANDOVER_TAG, trains)
                return ""
            case Kind.WANT:
                return self._take_want(peer, frame)
            case Kind.DATA:
                return self._take_data(frame, np.frombuffer(data[0].buffer, np.uint8))
            case Kind.DONE:
                return self._take_done(peer, frame)
            case Kind.ASK:
                self.when_asked(peer.rank, frame.tag)
                return ""
            case Kind.OFFER:
                return _take_offer(peer, frame, np.frombuffer(data[0].buffer, np.uint8))

    def _take_want(self, peer: Peer, want: Frame) -> str:
        if want.tag < self._open_from(peer.rank) * EXCHANGE_TAGS:
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
            done = self.member.frame(Kind.DONE, tag=frame.tag, number=frame.number, to_epoch=frame.epoch)
            self._ways[frame.sender].control(done.pack())
        return ""

    def _take_done(self, peer: Peer, frame: Frame) -> str:
        send = peer.unconfirmed.pop(frame.number, None)
        if send is None:
            return "unknown ticket"
        send.told.report(send.whole)
        return ""

    def _match(self, peer: Peer, tag: int) -> None:
        for send, want in peer.match(tag):
            if (want.length, want.dtype) != (send.length, send.dtype):
                problem = (
                    f"expects {want.length} bytes where {send.length} are sent, or other numbers (tag {tag})"
                )
                send.told.report(ConnectionError(f"rank {peer.rank} {problem}"))
                self.say(f"rank {peer.rank} {problem}")
            elif want.number not in peer.unconfirmed:  # no ticket is given twice
                peer.unconfirmed[want.number] = send
                self._ways[peer.rank].chunks(want.number, send.frames(want, self.member))


def _take_offer(peer: Peer, frame: Frame, data: np.ndarray) -> str:
    if (frame.length, frame.checksum) != (len(data), checksum_of(data)):
        return "wrong chunk"
    peer.offer = frame.tag, data.tobytes()
    return ""


def _unknown(rank: int) -> ConnectionError:
    return ConnectionError(f"rank {rank} has not been heard of: its address is not known")
