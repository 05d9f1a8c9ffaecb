"""Ranks of a federation in one process, for tests."""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import torch
from megatron_noloco.federation.commit import Choose, CommittedExchange, Guard, Replica
from megatron_noloco.federation.control import Address
from megatron_noloco.federation.moved_exchange import MovedExchange
from megatron_noloco.federation.passes import DEPTH
from megatron_noloco.federation.peers import CONNECTION_LOST

from megatron_noloco.federation.keys import Keys
from megatron_noloco.federation.movement import alone
from megatron_noloco.federation.network import FederationTransport, Network
from megatron_noloco.federation.partners import Patience
from megatron_noloco.federation.rendezvous import SharedFolder
from megatron_noloco.outer import Channel, Exchange
from megatron_noloco.plans.topology import Place
from megatron_noloco.transport.interface import Message
from tests.harness import free_port

RUN = 77
LOCAL = "tcp://127.0.0.1:0"
SECONDS = 20.0
PATIENCE = Patience(SECONDS, SECONDS)


@contextmanager
def transport(
    folder: Path, slot: int, slots: int = 2, run: int = RUN, keys: Keys | None = None, site: str = ""
) -> Iterator[FederationTransport]:
    network = Network(SharedFolder(folder, run), run, LOCAL, keys, site=site)
    with opened(network, slot=slot, slots=slots) as (made,):
        yield made


@contextmanager
def opened(*networks: Network, slot: int = 0, slots: int = 0) -> Iterator[list[FederationTransport]]:
    """Replicas with these networks, in slots from `slot` on, of `slots` or no more than these."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                closing(FederationTransport(Place(at, slots or slot + len(networks)), one, PATIENCE))
            )
            for at, one in enumerate(networks, slot)
        ]


@contextmanager
def connected(
    folder: Path, count: int = 2, slots: int = 0, keys: Keys | None = None
) -> Iterator[list[FederationTransport]]:
    """The first `count` replicas of a federation, of `slots` or as many, all connected."""
    with ExitStack() as stack:
        found = [
            stack.enter_context(transport(folder, slot, slots or count, keys=keys)) for slot in range(count)
        ]
        assert all(one.wait_for(count - 1, SECONDS) for one in found)
        yield found


@contextmanager
def members(folder: Path, listens: str) -> Iterator[list[FederationTransport]]:
    """Replicas that others can connect to ("p") or not ("h")."""
    listening = {"p": LOCAL, "h": None}
    with opened(*(Network(SharedFolder(folder, RUN), RUN, listening[one]) for one in listens)) as made:
        yield made


def ask_to_stop(rank: FederationTransport) -> None:
    rank.service.peers.stopped = lambda: True


def learn(rank: FederationTransport, addresses: Mapping[int, Address]) -> None:
    """Add addresses to the directory of a replica."""
    rank.service.do(rank.service.peers.directory.merge, addresses)


def lose(rank: FederationTransport, other: int) -> None:
    """Have a replica lose its connection to another one."""
    until(lambda: rank.service.peers.others[other].session is not None)
    session = rank.service.peers.others[other].session
    rank.service.do(rank.service.peers._end, session, CONNECTION_LOST)


class Wire:
    """A port of the loopback interface that leads to another one; its connections can be cut."""

    def __init__(self, to: int) -> None:
        self.port, self._to = free_port(), to
        self._ends: list[socket.socket] = []
        self._server = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        ends, self._ends = self._ends, []
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.cut()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                pair = self._server.accept()[0], socket.create_connection(("127.0.0.1", self._to))
                self._ends += pair
                for one, other in (pair, pair[::-1]):
                    threading.Thread(target=self._pass_on, args=(one, other), daemon=True).start()

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(1 << 16):
                other.sendall(data)
        for end in (one, other):
            end.close()


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that another thread does."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def swap(one: FederationTransport, other: FederationTransport, tag: int) -> None:
    """Exchange vectors between two replicas."""
    mine, theirs = torch.zeros(1000), torch.zeros(1000)
    flights = [
        one.post([Message(other.rank, torch.full((1000,), 1.0))], [Message(other.rank, mine)], tag),
        other.post([Message(one.rank, torch.full((1000,), 2.0))], [Message(one.rank, theirs)], tag),
    ]
    for flight in flights:
        flight.finish(SECONDS)
    assert (mine == 2.0).all()
    assert (theirs == 1.0).all()


def committed_with(
    transport: FederationTransport, choose: Choose, length: int, background: bool = True
) -> CommittedExchange:
    """Return the exchange of a replica of one rank with vectors of so many elements."""
    place, movement = Place(transport.rank, transport.world_size), alone(length)
    replica = Replica(movement, place, transport.partners, choose, [Guard()], lambda find: find())

    def make() -> list[Exchange]:
        channels = [Channel.SLABS + index for index in range(DEPTH)]
        return [Exchange(transport, place, channel, SECONDS, movement.slab) for channel in channels]

    return CommittedExchange(MovedExchange(movement, make, 0, background), replica)
