"""Which jobs of a federation are known, for a program that is none of them."""

import socket
from collections.abc import Mapping
from contextlib import ExitStack

from megatron_noloco.federation.control import LARGEST, Address, Hello, heard, packed
from megatron_noloco.federation.network import Network
from megatron_noloco.federation.peers import greeting
from megatron_noloco.federation.rendezvous import split

_SECONDS = 10.0


def known_addresses(network: Network) -> dict[int, str]:
    """Return where jobs are reached that the rendezvous knows, or jobs there; "" where others cannot reach one."""
    found = network.rendezvous.look()
    addresses = dict(found.addresses)
    for endpoint in found.endpoints:
        try:
            hello = _asked(network, endpoint)
        except OSError:  # another one may answer
            continue
        addresses |= _newer({**hello.others, hello.slot: hello.address}, addresses)
    return {slot: address.endpoint for slot, address in addresses.items()}


def _newer(found: Mapping[int, Address], known: Mapping[int, Address]) -> dict[int, Address]:
    return {
        slot: address
        for slot, address in found.items()
        if slot not in known or known[slot].epoch < address.epoch
    }


def _asked(network: Network, endpoint: str) -> Hello:
    nobody = LARGEST  # a slot that no federation has
    question = Hello(network.run, nobody, nobody, Address("", 1), {}, {}, network.kind_number, True, 1)
    with ExitStack() as stack:
        wire = stack.enter_context(socket.create_connection(split(endpoint), timeout=_SECONDS))
        wire.sendall(greeting(network.keys))
        theirs = wire.recv(len(greeting(network.keys)), socket.MSG_WAITALL)
        if theirs != greeting(network.keys):
            raise ConnectionError("another protocol")
        if network.keys is not None:
            wire = stack.enter_context(network.keys.dials.wrap_socket(wire))
        wire.sendall(packed(question))
        script = heard(Hello)
        try:
            place = next(script)
            while True:
                _fill(wire, place)
                place = next(script)
        except StopIteration as end:
            hello: Hello = end.value
            return hello


def _fill(wire: socket.socket, place: memoryview) -> None:
    while place:
        if not (count := wire.recv_into(place)):
            raise ConnectionResetError("the connection was closed")
        place = place[count:]
