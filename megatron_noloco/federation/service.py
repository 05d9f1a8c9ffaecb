"""The thread of a rank that owns its sockets: it moves messages while the rank computes.

All that arrives is checked against what was asked for. What does not fit is dropped and counted; it never raises
and never makes memory grow. Other threads ask for work with `do`, and read `peers` without changing anything.
"""

import os
import queue
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import zmq

from megatron_noloco.federation.frames import SIZE, Frame, Kind, read
from megatron_noloco.federation.keys import Keys
from megatron_noloco.federation.link import Address, Link
from megatron_noloco.federation.peer import MOST_WANTS, Peer, Receive, Send

HELLO_SECONDS = 0.5  # between two
_AT_ONCE = 16  # frames received before other work has its turn
_RECEIVE_QUEUE = 16  # frames that ZeroMQ holds for each connection; then TCP holds back the sender
_ENCRYPTED_MORE = 64  # bytes, at least those that CURVE adds to a message
_UNKNOWN = "has not been heard of: its address is not known"
_ZAP = "inproc://zeromq.zap.01"


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


class Service:
    """Starts on construction; `close` ends it.

    Args:
        counterparts: the ranks of other jobs that this one exchanges with.
        listen: an endpoint of ZeroMQ, such as "tcp://*:0".
        longest_chunk: bytes; who sends more is cut off.

    Attributes:
        endpoint: where it is bound.
        peers: by rank.
        dropped: how often something arrived that was not wanted, by reason.

    Raises ValueError when it cannot be bound.
    """

    def __init__(
        self, member: Member, counterparts: list[int], listen: str, longest_chunk: int, keys: Keys | None
    ) -> None:
        self.peers: Mapping[int, Peer] = {rank: Peer(rank) for rank in counterparts}
        self.dropped: Counter[str] = Counter()
        self._member = member
        self._keys = keys
        self._context: zmq.Context[Any] = zmq.Context()
        self._links: dict[int, Link] = {}
        self._receives: dict[int, Receive] = {}  # by ticket
        self._tickets = 0
        self._begun = self._over = -1
        self._void_below = 0  # tag
        self._told: set[str] = set()
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK)
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.linger = 0
        self._inbox.rcvhwm = _RECEIVE_QUEUE
        self._inbox.maxmsgsize = max(longest_chunk, SIZE) + _ENCRYPTED_MORE
        self._gate: zmq.Socket[Any] | None = None
        if keys is not None:
            self._gate = self._context.socket(zmq.REP)
            self._gate.linger = 0
            self._gate.bind(_ZAP)
            keys.listening(self._inbox)
        try:
            self._inbox.bind(listen)
        except zmq.ZMQError as error:
            self._context.destroy(0)
            raise ValueError(f"federation.listen: cannot listen at {listen}: {error}") from None
        self.endpoint = self._inbox.getsockopt_string(zmq.LAST_ENDPOINT)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="federation", daemon=True)
        self._thread.start()

    # For other threads

    def do(self, work: Callable[[], None]) -> None:
        """Have something done by the thread of the service, soon and in the order of the calls."""
        self._work.put(work)
        os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """What has been handed over is still sent, for two seconds at most."""
        if self._thread.is_alive():
            self.do(self._close)
            self._thread.join()

    # Work for `do`

    def connect(self, rank: int, address: Address) -> None:
        """Reach a counterpart there; nothing changes where that is known."""
        link = self._links.get(rank)
        if link is not None and link.address == address:
            return
        if link is not None:
            self._lost(self.peers[rank], "has another address now")
            link.close()
        self._links[rank] = Link(self._context, address, self._keys)

    def send(self, rank: int, send: Send) -> None:
        if rank not in self._links:
            send.landing.report(ConnectionError(f"rank {rank} {_UNKNOWN}"))
            return
        peer = self.peers[rank]
        peer.posted[send.tag].append(send)
        self._match(peer, send.tag)

    def receive(self, receive: Receive) -> None:
        if receive.rank not in self._links:
            receive.landing.report(ConnectionError(f"rank {receive.rank} {_UNKNOWN}"))
            return
        self._tickets += 1
        self._receives[self._tickets] = receive
        self._control(
            receive.rank,
            self._frame(
                Kind.WANT,
                tag=receive.tag,
                number=self._tickets,
                length=receive.message.buffer.nbytes,
                dtype=receive.dtype,
            ),
        )

    def begin(self, number: int) -> None:
        """Tell the others that this exchange has begun here."""
        self._begun = number
        self._hello_all()

    def end(self, number: int, void_below: int) -> None:
        """Tell the others that this exchange is over here, and that what has a smaller tag is void."""
        self._over, self._void_below = number, max(self._void_below, void_below)
        for peer in self.peers.values():
            self._drop(peer, self._void_below, "")
        self._hello_all()

    # The thread

    def _run(self) -> None:
        try:
            next_hello = 0.0
            while not self._closing:
                if (now := time.monotonic()) >= next_hello:
                    self._hello_all()
                    next_hello = now + HELLO_SECONDS
                self._turn(max(0.0, next_hello - now))
        except Exception:
            sys.stderr.write(f"rank {self._member.rank}: the federation's thread has failed\n")
            traceback.print_exc()
        finally:
            for peer in self.peers.values():
                self._lost(peer, "cannot be reached: this rank's messages have stopped")
            for link in self._links.values():
                link.close(2000 if self._closing else 0)
            self._context.destroy()

    def _turn(self, seconds: float) -> None:
        """Wait for something to do, and do it."""
        poller = zmq.Poller()
        gates = [self._gate] if self._gate is not None else []
        for readable in (self._bell, self._inbox, *gates, *(link.monitor for link in self._links.values())):
            poller.register(readable, zmq.POLLIN)
        for link in self._links.values():
            if link.waiting:
                poller.register(link.socket, zmq.POLLOUT)
        ready = dict(poller.poll(round(1000 * seconds)))
        if self._bell in ready:
            os.eventfd_read(self._bell)
            while not self._work.empty():
                self._work.get()()
        if self._keys is not None and self._gate is not None and self._gate in ready:
            self._gate.send_multipart(self._keys.answer(self._gate.recv_multipart()))
        for rank, link in self._links.items():
            for connected in link.events():
                self._connected(self.peers[rank], link, connected)
            if link.waiting and link.socket in ready:
                link.flush()
        if self._inbox in ready:
            self._read_inbox()

    def _connected(self, peer: Peer, link: Link, connected: bool) -> None:
        peer.connected = connected
        if connected:
            link.hello(self._hello())
        else:
            self._lost(peer, "has gone: the connection was lost")

    def _read_inbox(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                header, *data = self._inbox.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            reason = self._take(header.bytes, data) if len(header) == SIZE else "no frame"
            if reason:
                self.dropped[reason] += 1

    def _take(self, header: bytes, data: list[Any]) -> str:
        """Act on what has arrived; returns why it is dropped, if it is."""
        frame = read(header)
        if frame is None:
            return "no frame"
        peer = self.peers.get(frame.sender)
        if peer is None:
            return "unknown sender"
        if frame.run != self._member.run:
            self._say(
                f"rank {frame.sender} is refused: its job has another seed, model, method or number of slots"
            )
            return "another run"
        if len(data) != (frame.kind == Kind.DATA):
            return "wrong parts"
        if frame.epoch < peer.epoch:
            return "earlier process"
        if frame.kind in (Kind.HELLO, Kind.WANT):
            if frame.epoch > peer.epoch:
                self._lost(peer, "was started anew")
                peer.epoch, peer.begun, peer.over = frame.epoch, -1, -1
            peer.heard = time.monotonic()
            return self._take_hello(peer, frame) if frame.kind == Kind.HELLO else self._take_want(peer, frame)
        if (frame.epoch, frame.to_epoch) != (peer.epoch, self._member.epoch):
            return "earlier process"
        peer.heard = time.monotonic()
        if frame.kind == Kind.DONE:
            send = peer.unconfirmed.pop(frame.number, None)
            if send is None:
                return "unknown ticket"
            send.landing.report(send.whole.arrival)
            return ""
        return self._take_data(frame, np.frombuffer(data[0].buffer, np.uint8))

    def _take_hello(self, peer: Peer, frame: Frame) -> str:
        peer.begun, peer.over = frame.number - 1, frame.offset - 1
        self._drop(peer, frame.tag, "has ended this exchange")
        return ""

    def _take_want(self, peer: Peer, frame: Frame) -> str:
        if frame.tag < self._void_below:
            return "void"
        if peer.wants_waiting() >= MOST_WANTS:
            return "too many wants"
        peer.wants[frame.tag].append(frame)
        self._match(peer, frame.tag)
        return ""

    def _take_data(self, frame: Frame, data: np.ndarray) -> str:
        receive = self._receives.get(frame.number)
        if receive is None:
            return "unknown ticket"
        if not receive.take(frame, data):
            return "wrong chunk"
        if receive.complete:
            del self._receives[frame.number]
            self._control(
                frame.sender,
                self._frame(Kind.DONE, tag=frame.tag, number=frame.number, to_epoch=frame.epoch),
            )
        return ""

    def _match(self, peer: Peer, tag: int) -> None:
        for send, want in peer.match(tag):
            if (want.length, want.dtype) != (send.message.buffer.nbytes, send.dtype):
                problem = (
                    f"expects {want.length} bytes where {send.message.buffer.nbytes} are sent (tag {tag})"
                )
                send.landing.report(ConnectionError(f"rank {peer.rank} {problem}"))
                self._say(f"rank {peer.rank} {problem}, or another type of numbers")
                continue
            if want.number in peer.unconfirmed:  # no ticket is given twice
                continue
            peer.unconfirmed[want.number] = send
            member = self._member
            self._links[peer.rank].chunks(
                want.number, send.frames(want, member.run, member.rank, member.epoch)
            )

    def _lost(self, peer: Peer, why: str) -> None:
        """Whatever is under way with it has failed."""
        peer.connected = peer.connected and why.startswith("was started")
        self._drop(peer, None, why)
        if peer.rank in self._links and not peer.connected:
            self._links[peer.rank].drop_all()

    def _drop(self, peer: Peer, below_tag: int | None, why: str) -> None:
        """End what is under way with a peer under smaller tags (None: all); `why` is told to who waits for it."""
        error = ConnectionError(f"rank {peer.rank} {why}")
        sends, tickets = peer.drop_sends(below_tag)
        if tickets and peer.rank in self._links:
            self._links[peer.rank].drop(tickets)
        for ticket, receive in list(self._receives.items()):
            if receive.rank == peer.rank and (below_tag is None or receive.tag < below_tag):
                del self._receives[ticket]
                if why:
                    receive.landing.report(error)
        for send in sends:
            if why:
                send.landing.report(error)

    def _control(self, rank: int, frame: Frame) -> None:
        if (link := self._links.get(rank)) is not None:
            link.control(frame.pack())

    def _hello(self) -> bytes:
        return self._frame(
            Kind.HELLO, tag=self._void_below, number=self._begun + 1, offset=self._over + 1
        ).pack()

    def _hello_all(self) -> None:
        for rank, link in self._links.items():
            if self.peers[rank].connected:
                link.hello(self._hello())

    def _frame(self, kind: Kind, **fields: int) -> Frame:
        member = self._member
        return Frame(kind, member.run, member.rank, member.epoch, **fields)

    def _say(self, line: str) -> None:
        """Once."""
        if line not in self._told:
            self._told.add(line)
            sys.stderr.write(f"rank {self._member.rank}: {line}\n")

    def _close(self) -> None:
        self._closing = True
