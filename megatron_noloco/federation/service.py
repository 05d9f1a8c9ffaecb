"""The thread of a rank that moves messages while the rank computes."""

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

from megatron_noloco.federation.frames import SIZE, Member
from megatron_noloco.federation.keys import Keys
from megatron_noloco.federation.links import Link, Links
from megatron_noloco.federation.protocol import FederationProtocol
from megatron_noloco.federation.rendezvous import Address, is_numeric, look_up

_HELLO_SECONDS = 0.5  # between two HELLO frames
_BACK_SECONDS = 3.0  # for the rank that connects to this one, before this one tries
_KEPT = 31 * 2**20  # bytes; glibc learns from blocks below 32 MiB only
_MOST_QUESTIONS = 64  # for addresses, at a time
_ANSWER_SECONDS = 10.0


class ServiceFailedError(RuntimeError):
    """The thread has ended with an error, which is the cause: no message moves any more."""


class Service:
    """Connects to the counterparts and runs the protocol in a thread, from construction to `close`.

    Of two ranks that both can be reached the one with the higher number opens the connection; if it does not come
    in three seconds, the other one does.

    Args:
        counterparts: the ranks at the same place in other replicas.
        listen: an endpoint of ZeroMQ, such as "tcp://*:0"; None: no other rank can connect to this one.
        longest_chunk: bytes; a connection that sends more is closed.

    Attributes:
        endpoint: where the socket is bound; "" where there is none.
        protocol: its methods are work for `do`.

    Raises ValueError when the socket cannot be bound.
    """

    def __init__(
        self,
        member: Member,
        counterparts: Iterable[int],
        listen: str | None,
        longest_chunk: int,
        keys: Keys | None = None,
    ) -> None:
        self.protocol = FederationProtocol(member, counterparts)
        longest = max(longest_chunk, SIZE, self.protocol.directory.longest)
        self._links = Links(listen, longest, keys, self.protocol.warn)
        self.endpoint = self._links.endpoint
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)  # -1: closed
        self._wake_lock = threading.Lock()
        self._dialled: dict[int, Link] = {}  # by rank
        self._asking: dict[Link, float] = {}  # and when to give up
        self._apart: set[str] = set()  # endpoints with the name of a host, of counterparts not connected
        self._found: dict[str, str] = {}  # such endpoints with the host's address; "": has none
        self._closing = False
        self._failure: Exception | None = None
        self._followed = -1  # the version of the directory that the links are of
        # A large block that is freed, untouched, makes glibc keep as much for the next one. Otherwise it gives the
        # memory of each chunk back, and the kernel clears it again: a tenth of what an exchange costs.
        np.empty(_KEPT, np.uint8)
        self._thread = threading.Thread(target=self._run, name="federation", daemon=True)
        self._thread.start()

    def do(self, work: Callable[..., None], *arguments: Any) -> None:
        """Have the thread of the service call `work`, soon and in the order of these calls. From any thread.

        Raises ServiceFailedError as `check` does.
        """
        self.check()
        self._work.put(partial(work, *arguments))
        with self._wake_lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def check(self) -> None:
        """Raise ServiceFailedError if the thread has ended with an error: nobody can be reached any more."""
        if self._failure is not None:
            raise ServiceFailedError(
                f"the thread that exchanges with other replicas has failed: {self._failure!r}; started again, "
                "this job continues from its newest checkpoint"
            ) from self._failure

    def close(self) -> None:
        """Stop; what was posted before is still sent, for two seconds at most."""
        if self._thread.is_alive() and self._failure is None:
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
        self.do(self._ask, endpoint)

    def look_up(self, again: bool) -> None:
        """Look up hosts to connect to, with `again` also those looked up before. In a thread that may block."""
        names = [name for name in self._apart if again or name not in self._found]
        self._found = dict.fromkeys(names, "") | self._found
        for name, endpoint in look_up(names, lambda why: self.protocol.warn(f"no connection to {why}")):
            self._found[name] = endpoint

    def _close(self) -> None:
        self._closing = True

    def _ask(self, endpoint: str) -> None:
        if len(self._asking) < _MOST_QUESTIONS and (link := self._links.dial(endpoint)) is not None:
            self._asking[link] = time.monotonic() + _ANSWER_SECONDS
            self._send_addresses(link)

    def _send_addresses(self, link: Link) -> None:
        header, addresses = self.protocol.directory.frame(asks=True)
        if link in self._asking and link.up:
            link.send(header.pack(), addresses)

    def _end_questions(self) -> None:
        """Close the links over which addresses were asked for, but for those to counterparts."""
        for link, deadline in list(self._asking.items()):
            if time.monotonic() > deadline:
                del self._asking[link]
                if link not in self._dialled.values():
                    self._links.hang_up(link)

    def _follow_directory(self) -> None:
        """Connect to counterparts where they are now."""
        directory = self.protocol.directory
        own, addresses = self.protocol.member.rank, directory.addresses
        if directory.version != self._followed:
            self._followed = directory.version
            self.protocol.claim_rank()
        apart = set[str]()
        for rank, counterpart in self.protocol.counterparts.items():
            if rank not in addresses:
                continue
            if counterpart.address != addresses[rank]:
                counterpart.address, counterpart.apart_since = addresses[rank], time.monotonic()
            name = addresses[rank].endpoint
            endpoint = name if is_numeric(name) else self._found.get(name, "")
            if rank in self._dialled and self._dialled[rank].endpoint != endpoint:
                self._hang_up(rank)
            late = time.monotonic() - counterpart.apart_since > _BACK_SECONDS
            if endpoint != name and not counterpart.linked:
                apart.add(name)
            if not endpoint:
                continue
            if rank not in self._dialled:
                if counterpart.linked or not (own > rank or not self.endpoint or late):
                    continue
                link = self._links.dial(endpoint)
                if link is not None:  # else tried again at the next HELLO
                    self._dialled[rank] = link
                    self.protocol.use(rank, link)
            elif counterpart.linked and not self._dialled[rank].up:  # the other side has connected
                self._hang_up(rank)
            else:  # the one that the other side has opened may be lost
                self.protocol.use(rank, self._dialled[rank])
        self._apart = apart

    def _hang_up(self, rank: int) -> None:
        link, counterpart = self._dialled.pop(rank), self.protocol.counterparts[rank]
        if counterpart.outbox.link is link:
            self.protocol.lost(counterpart)
        if link not in self._dialled.values():  # else it leads to another rank, and stays
            self._asking.pop(link, None)
            self._links.hang_up(link)

    def _run(self) -> None:
        try:
            next_hello = 0.0
            while not self._closing:
                if (now := time.monotonic()) >= next_hello:
                    self._follow_directory()
                    self.protocol.leave_broken_links()
                    self.protocol.send_hello()
                    self.protocol.tick()
                    self._end_questions()
                    next_hello = now + _HELLO_SECONDS
                self._turn(max(0.0, next_hello - now))
        except Exception as error:
            self._failure = error
            sys.stderr.write(f"rank {self.protocol.member.rank}: the federation's thread has failed\n")
            traceback.print_exc()
        finally:
            for counterpart in self.protocol.counterparts.values():
                self.protocol.lost(counterpart, "cannot be reached: this rank's messages have stopped")
            self._links.close(linger=self._closing)

    def _turn(self, seconds: float) -> None:
        """Wait for something to do, and do it."""
        if self._links.wait(seconds, self._wake):
            os.eventfd_read(self._wake)
            while not self._work.empty():
                self._work.get()()
        for link in self._links.changed():
            self._send_addresses(link)
            for rank in [rank for rank, dialled in self._dialled.items() if dialled is link]:
                self.protocol.use(rank, link)
        for link, parts in self._links.messages():
            self.protocol.take(link, parts)
        if self.protocol.directory.version != self._followed:
            self._follow_directory()
