"""The thread of a rank that owns its sockets: it moves messages while the rank computes."""

import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import zmq
from zmq.utils.monitor import parse_monitor_message

from megatron_noloco.federation.connection import HANDSHAKE_FAILURES, Link, why_no_handshake
from megatron_noloco.federation.directory import Address
from megatron_noloco.federation.frames import SIZE, Member
from megatron_noloco.federation.keys import Keys
from megatron_noloco.federation.protocol import Desk

HELLO_SECONDS = 0.5  # between two
_THREADS = 2  # of ZeroMQ, which encrypt and decrypt: one for what leaves, one for what comes
_AT_ONCE = 8  # frames received before other work has its turn
_RECEIVE_QUEUE = 4  # frames that ZeroMQ holds for each connection; then TCP holds back the sender
_ENCRYPTED_MORE = 64  # bytes, at least those that CURVE adds to a message
_KEPT = 31 * 2**20  # bytes; glibc learns from blocks below 32 MiB only
_LINGER_MILLISECONDS = 2000
_MOST_ERRANDS = 64  # at a time
_ERRAND_SECONDS = 10.0  # after which one is given up
_ZAP = "inproc://zeromq.zap.01"


class Service:
    """Starts on construction; `close` ends it.

    Args:
        counterparts: the ranks of other jobs that this one exchanges with.
        listen: an endpoint of ZeroMQ, such as "tcp://*:0".
        longest_chunk: bytes; who sends more is cut off.

    Attributes:
        endpoint: where it is bound.
        desk: its methods are work for `do`.

    Raises ValueError when it cannot be bound.
    """

    def __init__(
        self, member: Member, counterparts: Iterable[int], listen: str, longest_chunk: int, keys: Keys | None
    ) -> None:
        self._links: dict[int, Link] = {}
        self.desk = Desk(member, counterparts, self._links)
        self._keys = keys
        self._context: zmq.Context[Any] = zmq.Context(_THREADS)
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK)  # -1: closed
        self._bell_in_use = threading.Lock()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.linger = 0
        self._inbox.rcvhwm = _RECEIVE_QUEUE
        self._inbox.maxmsgsize = max(longest_chunk, SIZE, self.desk.directory.longest) + _ENCRYPTED_MORE
        self._gate = self._context.socket(zmq.REP)  # asks whether a key may come in; never without keys
        self._gate.linger = 0
        self._gate.bind(_ZAP)
        if keys is not None:
            keys.listening(self._inbox)
        try:
            self._inbox.bind(listen)
        except zmq.ZMQError as error:
            self._context.destroy(0)
            raise ValueError(
                f"federation.listen: cannot listen at {listen}: {error}; port 0 takes any that is free"
            ) from None
        self.endpoint = self._inbox.getsockopt_string(zmq.LAST_ENDPOINT)
        self._refusals = self._inbox.get_monitor_socket(HANDSHAKE_FAILURES)
        self._poller = zmq.Poller()
        for readable in (self._bell, self._inbox, self._refusals, self._gate):
            self._poller.register(readable, zmq.POLLIN)
        self._errands: dict[str, tuple[Link, float]] = {}  # by endpoint; and when each is given up
        self._closing = False
        self._followed = 0  # version of the directory
        # A large block that is freed, untouched, makes glibc keep as much for the next one. Otherwise it gives the
        # memory of each chunk back, and the kernel clears it again: a tenth of what an exchange costs.
        np.empty(_KEPT, np.uint8)
        self._thread = threading.Thread(target=self._run, name="federation", daemon=True)
        self._thread.start()

    def do(self, work: Callable[[], None]) -> None:
        """Have something done by the thread of the service, soon and in the order of the calls. For any thread."""
        self._work.put(work)
        with self._bell_in_use:
            if self._bell >= 0:
                os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """What has been handed over is still sent, for two seconds at most."""
        if self._thread.is_alive():
            self.do(self._close)
            self._thread.join()
        with self._bell_in_use:
            if self._bell >= 0:
                os.close(self._bell)
                self._bell = -1

    def learn(self, addresses: Mapping[int, Address]) -> None:
        """These ranks are there. For any thread."""
        self.do(partial(self.desk.directory.merge, addresses))

    def ask(self, endpoint: str) -> None:
        """Whoever listens there is told what this rank knows of all ranks, and asked for the same."""
        self.do(lambda: self._tell(endpoint, asks=True))

    def _close(self) -> None:
        self._closing = True

    def _tell(self, endpoint: str, asks: bool = False) -> None:
        """Our directory, on a connection for it alone: the rank there need not be a counterpart."""
        if endpoint not in self._errands and len(self._errands) < _MOST_ERRANDS:
            link = Link(self._context, self._poller, endpoint, self._keys)
            link.control(*self.desk.directory.frame(asks))
            self._errands[endpoint] = link, time.monotonic() + _ERRAND_SECONDS

    def _run_errands(self) -> None:
        for endpoint, (link, given_up) in list(self._errands.items()):
            for event in link.events():
                if event & HANDSHAKE_FAILURES:
                    self.desk.say(f"{endpoint} cannot be joined: {why_no_handshake(event)}")
            link.flush()
            if not link.waiting or time.monotonic() > given_up:
                link.close(0 if link.waiting else _LINGER_MILLISECONDS)
                del self._errands[endpoint]

    def _all_links(self) -> list[Link]:
        return [*self._links.values(), *(link for link, _ in self._errands.values())]

    def _follow_directory(self) -> None:
        """Reach counterparts where they are now, and answer who has asked."""
        directory = self.desk.directory
        if directory.version == self._followed and not directory.asked:
            return
        self._followed, addresses = directory.version, directory.addresses
        for rank in self.desk.peers.keys() & addresses.keys():
            link = self._links.get(rank)
            if link is not None and link.endpoint == addresses[rank].endpoint:
                continue  # a new process at the same place is noticed by its frames
            if link is not None:
                self._lost(rank, "has another address now")
                link.close()
            self._links[rank] = Link(self._context, self._poller, addresses[rank].endpoint, self._keys)
        own = self.desk.member
        other = addresses.get(own.rank)
        if other is not None and other.epoch > own.epoch:
            self.desk.say(
                f"another process of this rank, at {other.endpoint}, counts for the others: is --replica that of "
                "another job, or the clock of this host behind?"
            )
        while directory.asked:
            rank = directory.asked.pop()
            if rank in addresses:
                self._tell(addresses[rank].endpoint)

    def _run(self) -> None:
        try:
            next_hello = 0.0
            while not self._closing:
                if (now := time.monotonic()) >= next_hello:
                    self.desk.greet()
                    next_hello = now + HELLO_SECONDS
                self._turn(max(0.0, next_hello - now))
        except Exception:
            sys.stderr.write(f"rank {self.desk.member.rank}: the federation's thread has failed\n")
            traceback.print_exc()
        finally:
            for rank in self._links:
                self._lost(rank, "cannot be reached: this rank's messages have stopped", drop_link=False)
            self._inbox.disable_monitor()
            for link in self._all_links():
                link.close(_LINGER_MILLISECONDS if self._closing else 0)
            self._context.destroy()

    def _turn(self, seconds: float) -> None:
        """Wait for something to do, and do it."""
        ready = dict(self._poller.poll(round(1000 * seconds)))
        if self._bell in ready:
            os.eventfd_read(self._bell)
            while not self._work.empty():
                self._work.get()()
        if self._keys is not None and self._gate in ready:
            self._gate.send_multipart(self._keys.answer(self._gate.recv_multipart()))
        for rank, link in self._links.items():
            if link.monitor in ready:
                for event in link.events():
                    self._notice(rank, event)
            if link.socket in ready:
                link.flush()
        self._run_errands()
        if self._refusals in ready:
            event = parse_monitor_message(self._refusals.recv_multipart())["event"]
            self.desk.say(f"a connection to this rank failed: {why_no_handshake(event)}")
        if self._inbox in ready:
            self._read_inbox()
        self._follow_directory()

    def _notice(self, rank: int, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.desk.peers[rank].connected = True
            self.desk.greet(rank)
        elif event == zmq.EVENT_DISCONNECTED:
            self._lost(rank, "has gone: the connection was lost")
        else:
            self.desk.say(f"rank {rank} cannot be joined: {why_no_handshake(event)}")

    def _lost(self, rank: int, why: str, drop_link: bool = True) -> None:
        """Whatever is under way with it has failed."""
        peer = self.desk.peers[rank]
        peer.connected, peer.informed = False, -1
        self.desk.drop(peer, failure=ConnectionError(f"rank {rank} {why}"))
        if drop_link:
            self._links[rank].drop_all()

    def _read_inbox(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                header, *data = self._inbox.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self.desk.take(header.bytes if len(header) == SIZE else b"", data)
