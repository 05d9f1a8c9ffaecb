"""Messages between replicas that are separate jobs."""

import atexit
import errno
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count, groupby
from typing import Any
from weakref import WeakSet

from megatron_noloco.errors import UserError
from megatron_noloco.federation.control import LARGEST, LONGEST, LONGEST_ROW, Address, Member, Offer, packed
from megatron_noloco.federation.exchanges import Seen, is_at_end
from megatron_noloco.federation.keys import Keys
from megatron_noloco.federation.partners import FederationPartners, Patience
from megatron_noloco.federation.rendezvous import (
    ADVERTISE,
    PLACES,
    SELDOM,
    Rendezvous,
    Seeds,
    can_listen,
    endpoint_of,
    host_of,
    is_endpoint,
    look_up,
    reachable,
    split,
)
from megatron_noloco.federation.service import Service, ServiceFailedError
from megatron_noloco.federation.session import DTYPES, Receive, Send
from megatron_noloco.job.activity import now
from megatron_noloco.plans.topology import Place
from megatron_noloco.settings import MOST_SLOTS
from megatron_noloco.transport.chunks import ReportedTransfers, check_messages, cut
from megatron_noloco.transport.interface import Arrival, Flight, Message, RankLostError

CHUNK_BYTES = 2**21
_LOOK_SECONDS = 1.0  # between two looks for addresses
_WAIT_SECONDS = 0.02
_PORT_SECONDS = 20  # in which processes that a killed job has forked end, and free its port
_NO_ADDRESS = "; it must be an address of this host, or * for all"
_BACKLOG = 1024
_LISTENERS = WeakSet[socket.socket]()  # of this process


@dataclass(frozen=True)
class Network:
    """How a replica reaches the others, and how they reach it.

    Attributes:
        run, digests, kind, streams: see `Member`.
        site: see `Address`.
        listen: port 0: any. None: no other job can connect to this one.
        keys: None: nothing is authenticated or encrypted.
        host: returns the address of this host; needed where a replica listens on all interfaces.
        advertise: where the others reach this replica; None: where it listens.
        chunk_bytes: the same for all replicas.

    Raises UserError for an address to listen at or to advertise that is not one, or leads to no known port.
    """

    rendezvous: Rendezvous
    run: int
    listen: str | None = "tcp://*:0"
    keys: Keys | None = None
    host: Callable[[], str] = socket.gethostname
    advertise: str | None = None
    chunk_bytes: int = CHUNK_BYTES
    digests: Mapping[str, str] = field(default_factory=dict)
    kind: str = ""
    streams: int = 1
    site: str = ""

    def __post_init__(self) -> None:
        if self.listen is not None and not can_listen(self.listen):
            raise UserError(
                f'federation.listen: "{self.listen}" is not "tcp://HOST:PORT", with a HOST that is a name, an '
                "IPv4 address, an IPv6 address in [], or * for all, and a PORT up to 65535, or 0 for any, such as "
                '"tcp://*:0"'
            )
        if self.advertise is None or self.listen is None:
            return
        if not is_endpoint(self.advertise):
            raise UserError(f'federation.advertise: "{self.advertise}" is not "tcp://HOST:PORT", {PLACES}')
        if not split(self.listen)[1]:
            raise UserError(
                f"federation.advertise {self.advertise} must lead to a known port, but this replica listens at "
                'any; set federation.listen, such as "tcp://*:29600"'
            )


class FederationTransport:
    """Sends messages between this replica and others, which are separate jobs. The rank of a replica is its slot.

    Messages to or from a replica that is lost, or not there, fail with a RankLostError; others go on. A send ends
    when the receiver has confirmed all of it.

    Args:
        place: its replica is the slot.
        stopped: returns whether this job was asked to stop; from several threads.

    Attributes:
        address: where the others reach it.
        chunk_bytes: of the longest chunk.

    Raises UserError when it cannot listen, OSError when its address cannot be published.
    """

    name = "federation"
    connects_lazily = False  # connections are opened as soon as an address is known

    def __init__(
        self,
        place: Place,
        network: Network,
        patience: Patience,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self.place = place
        self.rank = place.replica
        self.world_size = place.replicas or MOST_SLOTS
        self.chunk_bytes = network.chunk_bytes
        self._network = network
        alike = network.run, dict(network.digests), network.kind
        member = Member(self.rank, self.world_size, *alike, network.streams)
        listener = None if network.listen is None else _listening(network, network.listen, self.rank)
        own = Address(_announced(network, listener), time.time_ns(), network.site)
        self.service = Service(member, own, listener, network.keys)
        self._peers = self.service.peers
        self._peers.stopped = stopped
        self.partners = FederationPartners(self.service, patience)
        self.address = self._peers.directory.own
        if host_of(self.address.endpoint) == (name := socket.gethostname()) and network.advertise is None:
            self._peers.warn(
                f"no address of this host is known, as it has no default route, so others look for {name}: where "
                f"they do not know that name, {ADVERTISE}"
            )
        try:
            network.rendezvous.publish(self.rank, self.address)
        except BaseException:
            self.service.close()
            raise
        self._closing = threading.Event()
        self._looking = threading.Thread(target=self._look, name="rendezvous", daemon=True)
        self._looking.start()
        atexit.register(self.close)

    def post(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Flight:
        check_messages([*sends, *receives], self.rank, self.world_size)
        for message in (*sends, *receives):
            if message.buffer.dtype not in DTYPES:
                raise UserError(f"{message.buffer.dtype} cannot be sent; the types are {DTYPES}")
        pieces, whole = cut(receives, self.chunk_bytes), cut(sends, LARGEST)
        received, sent = ReportedTransfers(pieces, tag), ReportedTransfers(whole, tag)
        of_each = groupby(pieces, lambda chunk: chunk.arrival.message)
        awaited = [
            Receive(tag, message, list(chunks), received)
            for message, (_, chunks) in zip(receives, of_each, strict=True)
        ]
        waiting = [
            Send(tag, message, self.chunk_bytes, partial(_report_send, sent, chunk.arrival))
            for message, chunk in zip(sends, whole, strict=True)
        ]
        self.service.do(self._peers.exchanges.post, waiting, awaited)
        return Flight(received, sent)

    def present(self) -> list[int]:
        """Return the other replicas that are connected, in ascending order."""
        self.service.check()
        return [slot for slot, peer in self._peers.others.items() if peer.seen.present]

    @property
    def refusal(self) -> str:
        """Why this job can exchange with none that the rendezvous led to; "" where it can, or none answered."""
        return "" if self.present() else self._peers.refusal

    def seen(self) -> dict[int, Seen]:
        """Return what is known of the replicas that were ever heard of, by slot."""
        self.service.check()
        return {slot: peer.seen for slot, peer in self._peers.others.items() if peer.seen.epoch}

    def links(self) -> dict[int, set[int]]:
        """Return to whom this replica is connected, and each other one that is at its end and connected to it."""
        seen = {slot: seen for slot, seen in self.seen().items() if seen.present}
        ended = {slot: set(one.state.sees) for slot, one in seen.items() if is_at_end(one.state.begun)}
        return ended | {self.rank: {*seen}}

    def begun(self) -> dict[int, int]:
        """Return the exchange that each connected replica began last, by slot."""
        return {slot: seen.state.begun for slot, seen in self.seen().items() if seen.present}

    def wait_for(self, others: int, seconds: float, trained: bool = False) -> bool:
        """Wait until this many replicas are there, or this job is to stop; returns False when time is up.

        Those count that are connected, and those that announced themselves but cannot connect to this one, as
        both only connect to others.

        Args:
            trained: whether one that is past its first exchange ends the wait as well.
        """

        def enough() -> bool:
            there = self._there()
            now.part(f"{there + 1} of {others + 1} replicas are there")
            return there >= others or (trained and any(begun > 0 for begun in self.begun().values()))

        return self.wait(enough, seconds) or self.partners.stopped()

    def wait(self, condition: Callable[[], object], seconds: float) -> bool:
        """Wait until a condition holds; returns False when time is up, or this job is to stop."""
        deadline = time.monotonic() + seconds
        while not condition():
            if self.partners.stopped() or time.monotonic() > deadline:
                return False
            time.sleep(_WAIT_SECONDS)
        return True

    def _there(self) -> int:
        present, hidden = set(self.present()), self.partners.hidden()
        return len(present | hidden - {self.rank} if self.rank in hidden else present)

    def tell_row(self, row: Mapping[str, Any]) -> None:
        """Send a row of this replica's metrics to the others, unless it is too long or the service has failed."""
        if len(text := json.dumps(row)) <= LONGEST_ROW:
            with suppress(ServiceFailedError):  # which the next round reports
                self.service.do(self._peers.exchanges.tell_row, text)

    def rows(self) -> Iterator[tuple[int, str]]:
        """Yield the rows that came since the last call, each with the slot of its replica."""
        for slot, peer in self._peers.others.items():
            while peer.rows:
                yield slot, peer.rows.popleft()

    # States that are handed over. Their parts are messages with tags from HANDOVER_TAG on, which no exchange makes
    # void, but the next question of the same replica, and the next exchange that it begins.

    def ask(self, slot: int, tag: int) -> None:
        """Ask a replica for its state; see `offered`."""
        self.service.do(self._peers.exchanges.ask, slot, tag)

    def offered(self, slot: int, tag: int) -> Offer | None:
        """Return the answer of a replica to what it was asked under a tag; None: there is none yet."""
        offer = self._peers.others[slot].offer
        return offer if offer is not None and offer.tag == tag else None

    def give(self, step: int) -> None:
        """Say after how many local steps this replica gives its state; 0: no more, also to those that wait."""
        self.service.do(self._peers.exchanges.give, step)

    def asked(self) -> dict[int, int]:
        """Return the tags of the replicas that wait for the state of this one, by slot."""
        sessions = [peer.session for peer in self._peers.others.values()]
        return {one.slot: one.asked for one in sessions if one is not None and one.waits}

    def offer(self, slot: int, offer: Offer) -> None:
        """Answer a replica that waits for the state."""
        assert len(packed(offer)) <= LONGEST
        self.service.do(self._peers.exchanges.offer, slot, offer)

    def close(self) -> None:
        """Leave the federation; what was posted before is still sent, for two seconds at most."""
        self._closing.set()
        self.service.close()
        atexit.unregister(self.close)

    def _look(self) -> None:
        """Look for addresses in a thread of its own: file systems and name servers may block."""
        looks = count()
        while not self._closing.is_set():
            look, rendezvous = next(looks) % SELDOM, self._network.rendezvous
            self._look_up_names(again=look == 0)
            try:
                if (alone := not self.present()) or look == 0:
                    found = rendezvous.look()
                    self.service.do(self._peers.directory.merge, found.addresses)
                    for endpoint in found.endpoints:
                        self.service.do(self._peers.ask_for_addresses, endpoint)
                    if found.missing:
                        raise OSError(found.missing)
                if alone and look == SELDOM - 1:
                    if line := rendezvous.other_runs():
                        self._peers.warn(f"federation.rendezvous: {line}")
                    self.service.do(self._peers.name_namesakes)
                    self.service.do(self._peers.name_silent, found.endpoints)
            except OSError as error:  # known addresses stay in use
                self._peers.warn(f"federation.rendezvous: {error}")
            except ServiceFailedError:  # the main thread learns of it, too
                return
            self._closing.wait(_LOOK_SECONDS)

    def _look_up_names(self, again: bool) -> None:
        """Look up hosts to connect to, with `again` also those looked up before."""
        found = self._peers.found
        names = [name for name in self._peers.names() if again or name not in found]
        for name, places in look_up(names, lambda why: self._peers.warn(f"no connection to {why}")):
            found[name] = places


def _report_send(sent: ReportedTransfers, arrival: Arrival, failure: RankLostError | None) -> None:
    sent.report(failure or arrival)


def _announced(network: Network, listener: socket.socket | None) -> str:
    """Return where the others reach this replica; "" where they do not."""
    if listener is None:
        return ""
    return network.advertise or reachable(endpoint_of(*listener.getsockname()[:2]), network.host)


def _listening(network: Network, endpoint: str, slot: int) -> socket.socket:
    """Listen at an endpoint; waits for a port that a job holds which was killed. Raises UserError."""
    host, port = split(endpoint)
    deadline, told = time.monotonic() + _PORT_SECONDS, False
    while True:
        try:
            return listening(host, port)
        except OSError as error:
            why = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
            problem = f"federation.listen: cannot listen at {endpoint}: {why}"
            if error.errno == errno.EADDRINUSE and any(_port_of(one) == port for one in _LISTENERS):
                problem += (
                    ", by this process: close() what attach returned before; for two models, such as those of a "
                    "GAN, give each a federation with a rendezvous and a port of its own"
                )
                raise UserError(problem) from None
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                remedy = _free_port(network, port) if error.errno == errno.EADDRINUSE else _NO_ADDRESS
                raise UserError(problem + remedy) from None
            if not told:
                sys.stderr.write(f"replica {slot}: {problem}; trying for {_PORT_SECONDS} s\n")
                told = True
            time.sleep(0.2)


def _free_port(network: Network, port: int) -> str:
    """Return the remedy for a port that is in use: others may know this replica by it."""
    if isinstance(network.rendezvous, Seeds) and port in network.rendezvous.ports:
        return "; end the process that has it, or give federation.rendezvous of all jobs another port"
    if network.advertise is not None:
        return "; end the process that has it, or choose another port, which federation.advertise leads to"
    return "; port 0 takes any that is free"


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens at a port: with the host "*" of IPv4, and of IPv6 where there is IPv6."""
    both = host == "*" and socket.has_dualstack_ipv6()
    family, place = socket.AF_INET6 if both else socket.AF_INET, ("", port)
    if host != "*":
        family, _, _, _, found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        place = (str(found[0]), port)
    made = socket.create_server(place, family=family, backlog=_BACKLOG, dualstack_ipv6=both)
    made.setblocking(False)
    _LISTENERS.add(made)
    return made


def _port_of(listener: socket.socket) -> int:
    return listener.getsockname()[1] if listener.fileno() >= 0 else -1
