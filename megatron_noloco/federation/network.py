"""How a replica reaches the others, and how they reach it."""

import errno
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from megatron_noloco.errors import UserError
from megatron_noloco.federation.dialling import Carriers
from megatron_noloco.federation.directory import (
    can_listen,
    endpoint_of,
    host_of,
    is_endpoint,
    split,
)
from megatron_noloco.federation.keys import Keys
from megatron_noloco.federation.messages import Address, Member
from megatron_noloco.federation.node import Node
from megatron_noloco.federation.node_thread import NodeThread
from megatron_noloco.federation.rendezvous import (
    ADVERTISE,
    PLACES,
    Folder,
    Rendezvous,
    Seeds,
    check_not_link_local,
    reachable,
)
from megatron_noloco.federation.tcp import TcpCarrier
from megatron_noloco.job.join import is_link_local, reachable_address

_PORT_SECONDS = 20  # in which processes that a killed job has forked end, and free its port
_NO_ADDRESS = "; it must be an address of this host, or * for all"
_LINK_LOCAL = ", a link-local address, which leads there from the same cable or switch only"
_BACKLOG = 1024
_LISTENERS = WeakSet[socket.socket]()  # of this process


@dataclass(frozen=True)
class Network:
    """How a replica reaches the others, and how they reach it.

    Attributes:
        member: what the others must have alike.
        site: see `Address`.
        listen: port 0: any. None: no other job can connect to this one.
        keys: None: nothing is authenticated or encrypted.
        advertise: where the others reach this replica; None: where it listens.

    Raises UserError for an address to listen at or to advertise that is not one, or leads to no known port.
    """

    rendezvous: Rendezvous
    member: Member
    listen: str | None = "tcp://*:0"
    keys: Keys | None = None
    advertise: str | None = None
    site: str = ""

    def __post_init__(self) -> None:
        if self.listen is not None and not can_listen(self.listen):
            raise UserError(
                f'federation.listen: "{self.listen}" is not "tcp://HOST:PORT", with a HOST that is a name, an '
                "IPv4 address, an IPv6 address in [], or * for all, and a PORT up to 65535, or 0 for any, such as "
                '"tcp://*:0"'
            )
        for field, endpoint in (("listen", self.listen), ("advertise", self.advertise)):
            check_not_link_local(field, host_of(endpoint or ""))
        if self.advertise is None or self.listen is None:
            return
        if not is_endpoint(self.advertise):
            raise UserError(f'federation.advertise: "{self.advertise}" is not "tcp://HOST:PORT", {PLACES}')
        if not split(self.listen)[1]:
            raise UserError(
                f"federation.advertise {self.advertise} must lead to a known port, but this replica listens at "
                'any; set federation.listen, such as "tcp://*:29600"'
            )


def open_node(network: Network, slot: int, stopped: Callable[[], bool] = lambda: False) -> NodeThread:
    """Connect a replica to the others.

    Args:
        stopped: returns whether this job was asked to stop; from several threads.

    Raises UserError when it cannot listen, OSError when its address cannot be published.
    """
    listener = None if network.listen is None else _listening(network, network.listen, slot)
    endpoint = _announced(network, listener)

    def make() -> Node:
        def tell(line: str) -> None:  # a connection may come before `open_node` has the thread
            node.warn(line)

        carriers = Carriers(TcpCarrier(network.keys, listener, tell))
        own = endpoint
        if listener is None and isinstance(network.rendezvous, Folder):
            folder = network.rendezvous.carrier(slot, network.keys, tell)
            carriers, own = carriers._replace(folder=folder), folder.endpoint
        address = Address(own, time.time_ns(), network.site)
        node = Node(slot, address, network.member, carriers, stopped)
        return node

    thread = NodeThread(make, network.rendezvous)
    for line in _doubts(network, endpoint):
        thread.node.warn(line)
    try:
        network.rendezvous.publish(slot, thread.node.directory.own)
    except BaseException:
        thread.close()
        raise
    return thread


def _doubts(network: Network, endpoint: str) -> Iterator[str]:
    """Yield a line for each address that may not lead where it should.

    Args:
        endpoint: where the others reach this replica.
    """
    for host in filter(is_link_local, network.rendezvous.hosts):
        yield f"federation.rendezvous has {host}{_LINK_LOCAL}"
    host, name = host_of(endpoint), socket.gethostname()
    if is_link_local(host):
        yield f"others look for this job at {host}{_LINK_LOCAL}; where they are elsewhere, {ADVERTISE}"
    if host == name and network.advertise is None:
        yield (
            f"no address of this host is known, as it has no default route, so others look for {name}: where "
            f"they do not know that name, {ADVERTISE}"
        )


def _announced(network: Network, listener: socket.socket | None) -> str:
    """Return where the others reach this replica; "" where they do not."""
    if listener is None:
        return ""
    listens = endpoint_of(*listener.getsockname()[:2])
    return network.advertise or reachable(listens, lambda: reachable_address(network.rendezvous.hosts))


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
                    ", by this process: close() what attach returned before; attach several models, such as those "
                    "of a GAN, at once, as one torch.nn.ModuleDict"
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
        return (
            '; if another job of this federation has it, set federation.listen to "tcp://*:0"; else end the '
            "process that has it, or give federation.rendezvous of all jobs another port"
        )
    if network.advertise is not None:
        return "; end the process that has it, or choose another port, which federation.advertise leads to"
    return "; port 0 takes any that is free"


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens at a port: with the host "*" of IPv4, and of IPv6 where there is IPv6."""
    both = host == "*" and socket.has_dualstack_ipv6()
    family: int = socket.AF_INET6 if both else socket.AF_INET
    place: Any = ("", port)
    if host != "*":
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    made = socket.create_server(place, family=family, backlog=_BACKLOG, dualstack_ipv6=both)
    _LISTENERS.add(made)
    return made


def _port_of(listener: socket.socket) -> int:
    return listener.getsockname()[1] if listener.fileno() >= 0 else -1
