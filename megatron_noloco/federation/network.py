"""Messages between ranks of separate jobs; which of them can be a partner, and how long to wait for it."""

import atexit
import socket
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from megatron_noloco.federation.counterpart import Seen, Standing, is_far_behind
from megatron_noloco.federation.frames import DTYPE_CODES, LARGEST, Member, Receive, Send
from megatron_noloco.federation.keys import Keys
from megatron_noloco.federation.protocol import TAKES_OVER
from megatron_noloco.federation.rendezvous import (
    ADVERTISE,
    PLACES,
    SELDOM,
    Address,
    Rendezvous,
    can_listen,
    host_of,
    is_endpoint,
    listen_at,
    reachable,
)
from megatron_noloco.federation.service import Service, ServiceFailedError
from megatron_noloco.job.activity import now
from megatron_noloco.plans.topology import Place
from megatron_noloco.transport.chunks import DEFAULT_CHUNK_BYTES, ReportedTransfers, check_messages, cut
from megatron_noloco.transport.interface import Arrival, Flight, Message, RankLostError

_REMEMBERED = 32  # exchanges
_FEWEST = 4  # of them, to have a median
_DEVIATIONS = 8  # median absolute deviations beyond the median; a normal distribution's 5 sigma
_LOOK_SECONDS = 1.0  # between two looks for addresses
_WAIT_SECONDS = 0.05


@dataclass(frozen=True)
class Network:
    """How a rank reaches the others, and how they reach it.

    Attributes:
        run, digests, kind_number: see `Member`.
        listen: where the first rank of a replica listens, its other ranks at the ports that follow; port 0: any.
            None: no other job can connect to this one.
        keys: None: nothing is authenticated or encrypted.
        host: returns the address of this host; needed where ranks listen on all interfaces.
        advertise: where the others reach the first rank of a replica, its other ranks at the ports that follow;
            None: where it listens.
        chunk_bytes: the same on all ranks.

    Raises ValueError for an address to listen at or to advertise that is not one, or leads to no known port.
    """

    rendezvous: Rendezvous
    run: int
    listen: str | None = "tcp://*:0"
    keys: Keys | None = None
    host: Callable[[], str] = socket.gethostname
    advertise: str | None = None
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    digests: Mapping[str, str] = field(default_factory=dict)
    kind_number: int = 0

    def __post_init__(self) -> None:
        if self.listen is not None and not can_listen(self.listen):
            raise ValueError(
                f'federation.listen: "{self.listen}" is not "tcp://HOST:PORT", with a HOST that is a name, an '
                "IPv4 address (IPv6 is not supported), or * for all, and a PORT up to 65535, or 0 for any, such "
                'as "tcp://*:0"'
            )
        if self.advertise is None or self.listen is None:
            return
        if not is_endpoint(self.advertise):
            raise ValueError(f'federation.advertise: "{self.advertise}" is not "tcp://HOST:PORT", {PLACES}')
        if not self.listen.rpartition(":")[2].strip("0"):
            raise ValueError(
                f"federation.advertise {self.advertise} must lead to a known port, but this replica listens at "
                'any; set federation.listen, such as "tcp://*:29600"'
            )

    def check_ports(self, ranks: int) -> None:
        """Raise ValueError where the ports of the ranks of a replica go beyond the last port."""
        for name, endpoint in (("listen", self.listen), ("advertise", self.advertise)):
            if endpoint is not None and not can_listen(listen_at(endpoint, ranks - 1)):
                raise ValueError(
                    f"federation.{name}: from {endpoint} on there are no {ranks} ports, one for each rank of a "
                    f"replica; {2**16 - ranks} is the largest port for the first rank"
                )


@dataclass(frozen=True)
class Patience:
    """How late a partner may be.

    Attributes:
        shortest_seconds, longest_seconds: bounds of the deadline; the longest counts where they contradict.
        behind: a counterpart that was more exchanges than this behind the last one is not waited for.
    """

    shortest_seconds: float
    longest_seconds: float
    behind: int = 3

    def deadline_seconds(self, waits: Sequence[float]) -> float:
        """Return the median of past waits plus 8 median absolute deviations; with fewer than 4, the longest."""
        if len(waits) < _FEWEST:
            return self.longest_seconds
        median = statistics.median(waits)
        deviation = statistics.median(abs(wait - median) for wait in waits)
        return min(self.longest_seconds, max(self.shortest_seconds, median + _DEVIATIONS * deviation))


class FederationPartners:
    """The counterparts in other jobs, which come and go: which can be the partner, and how long to wait for it.

    An exchange has a number, the same for its members; the tags of its messages start at number * EXCHANGE_TAGS. A
    rank begins and ends its exchanges in ascending order.

    A counterpart cannot be a partner when it is not connected, takes over this rank's state, is avoided, has ended
    the exchange or has another partner in it, or is too many exchanges behind.
    """

    def __init__(self, service: Service, patience: Patience) -> None:
        self._service = service
        self._protocol = service.protocol
        self._patience = patience
        self._waits: deque[float] = deque(maxlen=_REMEMBERED)
        self._avoided: dict[int, tuple[int, int, str]] = {}  # epoch of its process, until which exchange, why

    @property
    def deadline_seconds(self) -> float:
        """Seconds to wait for the partner in the next exchange."""
        return self._patience.deadline_seconds(self._waits)

    def record(self, seconds: float) -> None:
        """Record how many seconds a successful exchange waited for its partner."""
        self._waits.append(seconds)

    def stopped(self) -> bool:
        """Return whether this job was asked to stop, as far as this rank knows: it then waits for nobody."""
        return self._protocol.stopped()

    def standing(self, number: int, rank: int) -> tuple[Standing, str]:
        """Return how available a counterpart is for an exchange, and why if it is not."""
        self._service.check()
        seen = self._protocol.counterparts[rank].seen
        reason = self._why_away(rank, seen, number)
        if reason:
            return Standing.AWAY, reason
        if seen.open_from > number:
            return Standing.BUSY, "is ahead" if seen.begun > number else "is not free"
        waits = seen.begun >= number and seen.open_from == number
        return (Standing.WAITING if waits else Standing.FREE), ""

    def reachable(self, rank: int) -> bool:
        """Whether others can connect to a rank, which may be this one; True if nothing is known of it."""
        address = self._protocol.directory.addresses.get(rank)
        return address is None or bool(address.endpoint)

    def _why_away(self, rank: int, seen: Seen, number: int) -> str:
        if not seen.present:
            return "is not there"
        if seen.takes_over:
            return TAKES_OVER
        epoch, until, why = self._avoided.get(rank, (-1, 0, ""))
        if epoch == seen.epoch and seen.begun < until:
            return why
        # Compare with the exchange before: a replica near it does not skip ahead. A replica that has begun none
        # may be about to take over a state.
        before = number - 1 if seen.begun >= 0 else number
        return "is behind" if is_far_behind(seen.begun, before, self._patience.behind) else ""

    def avoid(self, rank: int, exchanges: int, why: str) -> None:
        """Treat a counterpart as away until it has begun so many more exchanges, or has restarted."""
        seen = self._protocol.counterparts[rank].seen
        self._avoided[rank] = seen.epoch, seen.begun + exchanges, why

    def begin(self, number: int, rank: int | None) -> None:
        """Announce that this rank begins an exchange with `rank`; None: that it skips it.

        Messages that other counterparts have under way for this exchange fail with a WithdrawnError.
        """
        self._service.do(self._protocol.begin, number, rank)

    def end(self, number: int, counts: bool = False) -> None:
        """Announce that the exchange is over; its messages still under way become void on both sides.

        Args:
            counts: whether this rank uses the mean. The partner's messages then do not fail with a WithdrawnError.
        """
        self._service.do(self._protocol.end, number, counts)

    def leave_out(self, number: int) -> None:
        """Tell the others that this rank skips the exchanges up to this one; those under way go on."""
        self._service.do(self._protocol.leave_out, number)


class FederationTransport:
    """Sends messages between a rank and its counterparts in other jobs.

    The number of a rank in the federation is slot * ranks of a replica + its rank in its job. A rank exchanges
    only with the ranks at the same place in other slots. Messages to or from a counterpart that is lost, or not
    there, fail with a RankLostError; others go on. A send ends when the receiver has confirmed all of it.

    Args:
        place: of this rank; its replica is the slot.
        stopped: returns whether this job was asked to stop, as far as this rank knows; from several threads.

    Attributes:
        address: where the others reach it.
        chunk_bytes: of the longest chunk.

    Raises ValueError when it cannot listen, OSError when its address cannot be published.
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
        self.rank = place.rank
        self.world_size = place.replicas * place.ranks_per_replica
        self._network = network
        self.chunk_bytes = network.chunk_bytes
        self._others = [place.rank_of(slot) for slot in range(place.replicas) if slot != place.replica]
        member = Member(
            self.rank,
            network.run,
            time.time_ns(),
            self.world_size,
            network.digests,
            network.kind_number,
        )
        network.check_ports(place.ranks_per_replica)
        at = self.rank % place.ranks_per_replica
        listen = None if network.listen is None else listen_at(network.listen, at)
        self.service = Service(member, self._others, listen, network.chunk_bytes, network.keys)
        self._protocol = self.service.protocol
        self.partners = FederationPartners(self.service, patience)
        self._protocol.stopped = stopped
        try:
            self.address = self._announce(network, at, member.epoch)
        except BaseException:
            self.service.close()
            raise
        self._closing = threading.Event()
        self._looking = threading.Thread(target=self._look, name="rendezvous", daemon=True)
        self._looking.start()
        atexit.register(self.close)

    def _announce(self, network: Network, at: int, epoch: int) -> Address:
        """Publish the address of this rank, number `at` of its replica; raises OSError."""
        endpoint = reachable(self.service.endpoint, network.host)
        if network.advertise is not None:
            endpoint = listen_at(network.advertise, at)
        elif host_of(endpoint) == (name := socket.gethostname()):
            self._protocol.warn(
                f"no address of this host is known, as it has no default route, so others look for {name}: where "
                f"they do not know that name, {ADVERTISE}"
            )
        address = Address(endpoint, epoch)
        self.service.do(self._protocol.directory.announce, address)
        network.rendezvous.publish(self.rank, address)
        return address

    def post(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Flight:
        check_messages([*sends, *receives], self.rank, self.world_size)
        for message in (*sends, *receives):
            if message.rank not in self._others:
                raise ValueError(f"rank {self.rank} is no counterpart of rank {message.rank}")
            if message.buffer.dtype not in DTYPE_CODES:
                raise ValueError(f"{message.buffer.dtype} cannot be sent; the types are {list(DTYPE_CODES)}")
        pieces, whole = cut(receives, self.chunk_bytes), cut(sends, LARGEST)
        received, sent = ReportedTransfers(pieces, tag), ReportedTransfers(whole, tag)
        for index, message in enumerate(receives):
            chunks = [chunk for chunk in pieces if chunk.arrival.message == index]
            self.service.do(self._protocol.receive, Receive(tag, message, chunks, received))
        for message, (arrival, *_) in zip(sends, whole, strict=True):
            send = Send.of(tag, message, self.chunk_bytes, partial(_report_send, sent, arrival))
            self.service.do(self._protocol.send, message.rank, send)
        return Flight(received, sent)

    # Handovers, see `state`

    def ask(self, slot: int, tag: int, chosen: bool = False) -> None:
        """Ask a connected counterpart which state it can give, or, if it is chosen, to give it."""
        self.service.do(self._protocol.ask, slot, tag, chosen)

    def offer(self, slot: int, tag: int, description: bytes) -> None:
        """Answer what a counterpart has asked under a tag; b"": there is nothing to give."""
        self.service.do(self._protocol.offer, slot, tag, description, [])

    def offered(self, slot: int) -> tuple[int, bytes] | None:
        """Return tag and description of the last answer of a counterpart."""
        return self._protocol.counterparts[slot].offer

    @property
    def when_asked(self) -> Callable[[int, int, bool], None]:
        """Called with slot, tag and `chosen` of each question, by another thread; answers with `offer`."""
        return self._protocol.when_asked

    @when_asked.setter
    def when_asked(self, answer: Callable[[int, int, bool], None]) -> None:
        self._protocol.when_asked = answer

    def present(self) -> list[int]:
        """Return the counterparts that are connected, in ascending order."""
        self.service.check()
        return [rank for rank, at in self._protocol.counterparts.items() if at.seen.present]

    def seen(self) -> dict[int, Seen]:
        """Return what is known of the counterparts that were ever heard of, by rank."""
        self.service.check()
        return {rank: at.seen for rank, at in self._protocol.counterparts.items() if at.seen.epoch}

    def begun(self) -> dict[int, int]:
        """Return the exchange that each connected counterpart began last, by rank."""
        return {rank: seen.begun for rank, seen in self.seen().items() if seen.present}

    def wait_for(self, others: int, seconds: float, trained: bool = False) -> bool:
        """Wait until this many counterparts are there, or this job is to stop; returns False when time is up.

        Those count that are connected, and those that announced themselves but cannot connect to this one, as
        both only connect to others.

        Args:
            trained: whether one that is past its first exchange ends the wait as well.
        """
        deadline = time.monotonic() + seconds
        while (there := self._there()) < others and not self.partners.stopped():
            if trained and any(begun > 0 for begun in self.begun().values()):
                return True
            if time.monotonic() > deadline:
                return False
            now.part(f"{there + 1} of {others + 1} replicas are there")
            time.sleep(_WAIT_SECONDS)
        return True

    def _there(self) -> int:
        present, hidden = self.present(), not self.partners.reachable(self.rank)
        return sum(rank in present or (hidden and not self.partners.reachable(rank)) for rank in self._others)

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
            self.service.look_up(again=look == 0)
            try:
                if (alone := not self.present()) or look == 0:
                    found = rendezvous.look()
                    self.service.learn(found.addresses)
                    for endpoint in found.endpoints:
                        self.service.ask(endpoint)
                    if found.missing:
                        raise OSError(found.missing)
                if alone and look == SELDOM - 1:
                    if line := rendezvous.other_runs():
                        self._protocol.warn(f"federation.rendezvous: {line}")
                    self.service.do(self._protocol.name_namesakes)
            except OSError as error:  # known addresses stay in use
                self._protocol.warn(f"federation.rendezvous: {error}")
            except ServiceFailedError:  # the main thread learns of it, too
                return
            self._closing.wait(_LOOK_SECONDS)


def _report_send(sent: ReportedTransfers, arrival: Arrival, failure: RankLostError | None) -> None:
    sent.report(failure or arrival)
