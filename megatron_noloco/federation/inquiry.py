"""Which jobs of a federation are known, for a program that is none of them."""

import socket
import ssl
from contextlib import ExitStack, suppress

from megatron_noloco.errors import UserError
from megatron_noloco.federation.control import LARGEST, LONGEST, Address, Hello, Member, packed, unpacked
from megatron_noloco.federation.likeness import fit
from megatron_noloco.federation.network import Network
from megatron_noloco.federation.peers import greeting
from megatron_noloco.federation.rendezvous import Directory, split

_SECONDS = 10.0


def known_addresses(network: Network) -> dict[int, str]:
    """Return where jobs of this run are reached that the rendezvous knows, or jobs there; "" for nowhere.

    Raises UserError where no job is found but a job with another key.
    """
    # Of a slot that no federation has, so that nobody takes it for a job.
    member = Member(LARGEST, LARGEST, network.run, dict(network.digests), network.kind)
    known = Directory(LARGEST, LARGEST, Address("", 1))
    found = network.rendezvous.look()
    known.merge(found.addresses)
    refused = ""
    for endpoint in found.endpoints:
        with suppress(OSError):  # another one may answer
            try:
                hello = _asked(network, endpoint, Hello(member, known.own, {}, question=True))
            except ssl.SSLError:
                refused = endpoint
                continue
            if fit(member, hello.member):
                known.merge({**hello.others, hello.member.slot: hello.address})
    addresses = {slot: address.endpoint for slot, address in known.addresses.items() if slot != LARGEST}
    if refused and not addresses:
        raise UserError(
            f"the job at {refused} has another key than the key file here: it must be the same file"
        )
    return addresses


def _asked(network: Network, endpoint: str, question: Hello) -> Hello:
    first = greeting(network.keys)
    with ExitStack() as stack:
        wire = stack.enter_context(socket.create_connection(split(endpoint), timeout=_SECONDS))
        wire.sendall(first)
        if wire.recv(len(first), socket.MSG_WAITALL) != first:
            raise ConnectionError("another protocol")
        if network.keys is not None:
            wire = stack.enter_context(network.keys.dials.wrap_socket(wire))
        wire.sendall(packed(question))
        with wire.makefile("rb") as answer:
            length = int.from_bytes(answer.read(4), "big")
            return unpacked(answer.read(min(length, LONGEST)), Hello)
