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

from megatron_noloco.federation.connection import HANDSHAKE_FAILURES, Connection, why_no_handshake
from megatron_noloco.federation.frames import SIZE, Member
from megatron_noloco.federation.keys import Keys
from megatron_noloco.federation.protocol import FederationProtocol
from megatron_noloco.federation.rendezvous import Address

HELLO_SECONDS = 0.5  # between two HELLO frames
_THREADS = 2  # of ZeroMQ, which encrypt and decrypt: one for what leaves, one for what comes
_AT_ONCE = 8  # frames received before other work has its turn
_RECEIVE_QUEUE = 4  # frames that ZeroMQ holds for each connection; then TCP holds back the sender
_ENCRYPTED_MORE = 64  # bytes, at least those that CURVE adds to a message
_KEPT = 31 * 2**20  # bytes; glibc learns from blocks below 32 MiB only
_LINGER_MILLISECONDS = 2000
_MOST_ANNOUNCEMENTS = 64  # at a time
_ANNOUNCEMENT_SECONDS = 10.0  # after which one is given up
_ZAP = "inproc://zeromq.zap.01"


class Service:
    """Connects to the counterparts and runs the protocol in a thread, from construction to `close`.

    Args:
        counterparts: the ranks at the same place in other replicas.
        listen: an endpoint of ZeroMQ, such as "tcp://*:0".
        longest_chunk: bytes; a connection that sends more is closed.

    Attributes:
        endpoint: where the socket is bound.
        protocol: its methods are work for `do`.

    Raises ValueError when the socket cannot be bound.
    """

    def __init__(
        self, member: Member, counterparts: Iterable[int], listen: str, longest_chunk: int, keys: Keys | None
    ) -> None:
        self._connections: dict[int, Connection] = {}
        self.protocol = FederationProtocol(member, counterparts, self._connections)
        self._keys = keys
        self._context: zmq.Context[Any] = zmq.Context(_THREADS)
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)  # -1: closed
        self._wake_lock = threading.Lock()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.linger = 0
        self._inbox.rcvhwm = _RECEIVE_QUEUE
        longest = max(longest_chunk, SIZE, self.protocol.directory.longest)
        self._inbox.maxmsgsize = longest + _ENCRYPTED_MORE
        self._zap = self._context.socket(zmq.REP)  # asks whether a key is admitted; unused without keys
        self._zap.linger = 0
        self._zap.bind(_ZAP)
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
        for readable in (self._wake, self._inbox, self._refusals, self._zap):
            self._poller.register(readable, zmq.POLLIN)
        self._announcements: dict[str, tuple[Connection, float]] = {}  # by endpoint, with the time to give up
        self._closing = False
        self._followed = 0  # the version of the directory that the connections are of
        # A large block that is freed, untouched, makes glibc keep as much for the next one. Otherwise it gives the
        # memory of each chunk back, and the kernel clears it again: a tenth of what an exchange costs.
        np.empty(_KEPT, np.uint8)
        self._thread = threading.Thread(target=self._run, name="federation", daemon=True)
        self._thread.start()

    def do(self, work: Callable[..., None], *arguments: Any) -> None:
        """Have the thread of the service call `work`, soon and in the order of these calls. From any thread."""
        self._work.put(partial(work, *arguments))
        with self._wake_lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Stop; what was posted before is still sent, for two seconds at most."""
        if self._thread.is_alive():
            self.do(self._close)
            self._thread.join()
        with self._wake_lock:
            if self._wake >= 0:
                os.close(self._wake)
                self._wake = -1

    def learn(self, addresses: Mapping[int, Address]) -> None:
        """Add addresses of ranks to the directory. From any thread."""
        self.do(self.protocol.directory.merge, addresses)

    def ask(self, endpoint: str) -> None:
        """Send all addresses to the rank at an endpoint, and ask for those that it knows. From any thread."""
        self.do(self._announce, endpoint, True)

    def _close(self) -> None:
        self._closing = True

    def _announce(self, endpoint: str, asks: bool = False) -> None:
        """Send our directory over a connection of its own: the rank there need not be a counterpart."""
        if endpoint not in self._announcements and len(self._announcements) < _MOST_ANNOUNCEMENTS:
            connection = Connection(self._context, self._poller, endpoint, self._keys)
            connection.control(*self.protocol.directory.frame(asks))
            self._announcements[endpoint] = connection, time.monotonic() + _ANNOUNCEMENT_SECONDS

    def _end_announcements(self) -> None:
        """Close the connections of those that are sent, or take too long."""
        for endpoint, (connection, deadline) in list(self._announcements.items()):
            for event in connection.events():
                if event & HANDSHAKE_FAILURES:
                    self.protocol.warn(f"{endpoint} cannot be joined: {why_no_handshake(event)}")
            connection.flush()
            if not connection.waiting or time.monotonic() > deadline:
                connection.close(0 if connection.waiting else _LINGER_MILLISECONDS)
                del self._announcements[endpoint]

    def _follow_directory(self) -> None:
        """Connect to counterparts where they are now, and answer ranks that asked for addresses."""
        directory = self.protocol.directory
        if directory.version == self._followed and not directory.asked:
            return
        self._followed, addresses = directory.version, directory.addresses
        for rank in self.protocol.counterparts.keys() & addresses.keys():
            connection = self._connections.get(rank)
            if connection is not None and connection.endpoint == addresses[rank].endpoint:
                continue  # a new process at the same place is noticed by its frames
            if connection is not None:
                self._lost(rank, "has another address now")
                connection.close()
            self._connections[rank] = Connection(
                self._context, self._poller, addresses[rank].endpoint, self._keys
            )
        own = self.protocol.member
        other = addresses.get(own.rank)
        if other is not None and other.epoch > own.epoch:
            self.protocol.warn(
                f"another process of this rank, at {other.endpoint}, counts for the others: is --replica that of "
                "another job, or the clock of this host behind?"
            )
        while directory.asked:
            rank = directory.asked.pop()
            if rank in addresses:
                self._announce(addresses[rank].endpoint)

    def _run(self) -> None:
        try:
            next_hello = 0.0
            while not self._closing:
                if (now := time.monotonic()) >= next_hello:
                    self.protocol.send_hello()
                    next_hello = now + HELLO_SECONDS
                self._turn(max(0.0, next_hello - now))
        except Exception:
            sys.stderr.write(f"rank {self.protocol.member.rank}: the federation's thread has failed\n")
            traceback.print_exc()
        finally:
            for rank in self._connections:
                self._lost(rank, "cannot be reached: this rank's messages have stopped", drop_waiting=False)
            self._inbox.disable_monitor()
            announcing = (connection for connection, _ in self._announcements.values())
            for connection in (*self._connections.values(), *announcing):
                connection.close(_LINGER_MILLISECONDS if self._closing else 0)
            self._context.destroy()

    def _turn(self, seconds: float) -> None:
        """Wait for something to do, and do it."""
        ready = dict(self._poller.poll(round(1000 * seconds)))
        if self._wake in ready:
            os.eventfd_read(self._wake)
            while not self._work.empty():
                self._work.get()()
        if self._keys is not None and self._zap in ready:
            self._zap.send_multipart(self._keys.answer(self._zap.recv_multipart()))
        for rank, connection in self._connections.items():
            if connection.monitor in ready:
                for event in connection.events():
                    self._notice(rank, event)
            if connection.socket in ready:
                connection.flush()
        self._end_announcements()
        if self._refusals in ready:
            event = parse_monitor_message(self._refusals.recv_multipart())["event"]
            self.protocol.warn(f"a connection to this rank failed: {why_no_handshake(event)}")
        if self._inbox in ready:
            self._read_inbox()
        self._follow_directory()

    def _notice(self, rank: int, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.protocol.counterparts[rank].connected = True
            self.protocol.send_hello(rank)
        elif event == zmq.EVENT_DISCONNECTED:
            self._lost(rank, "has gone: the connection was lost")
        else:
            self.protocol.warn(f"rank {rank} cannot be joined: {why_no_handshake(event)}")

    def _lost(self, rank: int, why: str, drop_waiting: bool = True) -> None:
        """End whatever is under way with a counterpart."""
        counterpart = self.protocol.counterparts[rank]
        counterpart.connected, counterpart.informed = False, -1
        self.protocol.cancel(counterpart, failure=ConnectionError(f"rank {rank} {why}"))
        if drop_waiting:
            self._connections[rank].drop_all()

    def _read_inbox(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                header, *data = self._inbox.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self.protocol.take(header.bytes if len(header) == SIZE else b"", data)
