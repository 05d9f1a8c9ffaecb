"""Messages between ranks of separate jobs."""

import atexit
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch.distributed as dist

from megatron_noloco.federation.counterparts import Agree, Counterparts, Patience, agreement_of_replica
from megatron_noloco.federation.directory import Address, is_endpoint
from megatron_noloco.federation.frames import DTYPE_CODES, Member
from megatron_noloco.federation.keys import Keys
from megatron_noloco.federation.peer import Receive, Send
from megatron_noloco.federation.rendezvous import Rendezvous, listen_at, reachable, rendezvous_of
from megatron_noloco.federation.service import Service
from megatron_noloco.job.agreement import of_all_ranks
from megatron_noloco.plans.topology import Place
from megatron_noloco.transport.chunks import (
    DEFAULT_CHUNK_BYTES,
    Chunk,
    Landing,
    LandingFlight,
    check_messages,
    cut,
)
from megatron_noloco.transport.protocol import Arrival, Message

_LOOK_SECONDS = 1.0  # between two looks for addresses


@dataclass(frozen=True)
class Network:
    """How a rank reaches the others.

    Attributes:
        run: a number of the run; see `desk.Member`.
        listen: where the first rank of a replica listens, the others at the ports that follow; 0: at any.
        keys: None: nothing is authenticated or encrypted.
        host: gives the address of this host, where it listens at all of them.
        advertise: where the others reach the first rank of a replica, its others at the ports that follow; None:
            where it listens.
        chunk_bytes: the same on all ranks.

    Raises ValueError for an address to advertise that cannot be one.
    """

    rendezvous: Rendezvous
    run: int
    listen: str = "tcp://*:0"
    keys: Keys | None = None
    host: Callable[[], str] = socket.gethostname
    advertise: str | None = None
    chunk_bytes: int = DEFAULT_CHUNK_BYTES

    @classmethod
    def of(
        cls,
        rendezvous: str,
        run: int,
        key_file: str | Path | None,
        *,
        listen: str | None,
        advertise: str | None,
        host: Callable[[], str],
    ) -> "Network":
        """As a user says it; `listen` None: where the rendezvous has its ranks listen.

        Raises ValueError, with one clear line, for a rendezvous or a key file that is none.
        """
        found = rendezvous_of(rendezvous, run)
        keys = None if key_file is None else Keys.read(Path(key_file))
        return cls(found, run, listen or found.listen, keys, host, advertise)

    def __post_init__(self) -> None:
        if self.advertise is None:
            return
        if not is_endpoint(self.advertise):
            raise ValueError(f'federation.advertise: "{self.advertise}" is not "tcp://HOST:PORT"')
        if not self.listen.rpartition(":")[2].strip("0*"):
            raise ValueError(
                f"federation.advertise {self.advertise} must lead to a known port, but this replica listens at "
                'any; set federation.listen, such as "tcp://*:29500"'
            )


class FederationTransport:
    """One rank's connections to its counterparts in other jobs.

    A rank has a number in the federation: slot * ranks of a replica + its rank in its job. It exchanges with the
    ranks at the same place in other slots only. A counterpart that is lost, or was never there, fails the flights
    that need it, with a ConnectionError, and nothing else. A send is over when the other side has confirmed that
    it has all of it.

    Attributes:
        address: where the others reach it.
        chunk_bytes: of the longest chunk.

    Args:
        place: of this rank; its replica is the slot.
        patience, agree: see `Counterparts`.

    Raises ValueError when it cannot listen, OSError when its address cannot be made known.
    """

    name = "federation"
    device_buffers = False
    connects_lazily = False  # connections are opened as soon as an address is known
    progress = "threads of the federation's transport"

    def __init__(
        self,
        place: Place,
        network: Network,
        patience: Patience,
        agree: Agree | None = None,
    ) -> None:
        self.rank = place.rank
        self.world_size = place.replicas * place.ranks_per_replica
        self._network = network
        self.chunk_bytes = network.chunk_bytes
        self._others = [place.rank_of(slot) for slot in range(place.replicas) if slot != place.replica]
        member = Member(self.rank, network.run, time.time_ns(), self.world_size)
        listen = listen_at(network.listen, self.rank % place.ranks_per_replica)
        self.service = Service(member, self._others, listen, network.chunk_bytes, network.keys)
        self.partners = Counterparts(self.service, patience, agree)
        endpoint = reachable(self.service.endpoint, network.host)
        if network.advertise is not None:
            endpoint = listen_at(network.advertise, self.rank % place.ranks_per_replica)
        self.address = Address(endpoint, member.epoch)
        self.service.learn({self.rank: self.address})
        network.rendezvous.publish(self.rank, self.address)
        self._closing = threading.Event()
        self._looking = threading.Thread(target=self._look, name="rendezvous", daemon=True)
        self._looking.start()
        atexit.register(self.close)

    def post(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> LandingFlight:
        check_messages([*sends, *receives], self.rank, self.world_size)
        unknown = {message.rank for message in [*sends, *receives]} - set(self._others)
        if unknown:
            raise ValueError(f"rank {self.rank} is no counterpart of rank {min(unknown)}")
        for message in [*sends, *receives]:
            if message.buffer.dtype not in DTYPE_CODES:
                raise ValueError(f"{message.buffer.dtype} cannot be sent; the types are {list(DTYPE_CODES)}")
        wanted = cut(receives, self.chunk_bytes)
        whole = [
            Chunk(Arrival(index, 0, message.buffer.numel()), message.rank, message.buffer)
            for index, message in enumerate(sends)
        ]
        received, sent = Landing(wanted, tag), Landing(whole, tag)
        for index, message in enumerate(receives):
            chunks = [chunk for chunk in wanted if chunk.arrival.message == index]
            receive = Receive(message.rank, tag, message, chunks, received)
            self.service.do(partial(self.service.desk.receive, receive))
        for message, entire in zip(sends, whole, strict=True):
            send = Send.of(tag, message, self.chunk_bytes, sent, entire.arrival)
            self.service.do(partial(self.service.desk.send, message.rank, send))
        return LandingFlight(received, sent)

    def present(self) -> list[int]:
        """The counterparts that are there, in ascending order."""
        return [rank for rank, peer in self.service.desk.peers.items() if peer.connected and peer.epoch]

    def begun(self) -> list[int]:
        """The exchange that each counterpart that is there began last."""
        return [self.service.desk.peers[rank].begun for rank in self.present()]

    def wait_for(self, others: int, seconds: float) -> bool:
        """Until so many counterparts are there; False when they are not in time."""
        deadline = time.monotonic() + seconds
        while len(self.present()) < others:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def close(self) -> None:
        """Leave the federation; what has been handed over is still sent, within two seconds."""
        self._closing.set()
        self.service.close()
        atexit.unregister(self.close)

    def _look(self) -> None:
        """What does not answer, a file system or a name server, must not stop messages: a thread of its own."""
        while not self._closing.is_set():
            try:
                self._network.rendezvous.look(self.service, alone=not self.present())
            except OSError as error:  # known addresses stay in use
                self.service.do(partial(self.service.desk.say, f"federation.rendezvous: {error}"))
            self._closing.wait(_LOOK_SECONDS)


def join_federation(place: Place, network: Network, patience: Patience) -> FederationTransport:
    """What connects this rank to the others; all ranks of the job, which is one replica, call it.

    Raises as `FederationTransport` does.
    """
    if not dist.is_initialized():
        return FederationTransport(place, network, patience)
    transport = FederationTransport(place, network, patience, agreement_of_replica())
    addresses = of_all_ranks((place.rank, transport.address))
    transport.service.learn(dict(addresses))  # who meets one rank learns where all ranks of its replica are
    return transport
