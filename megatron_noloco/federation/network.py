"""How a job reaches the others, and how they reach it: the settings of `federation`, as a mesh of members."""

import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from megatron_noloco.errors import UserError, prefix_errors_with
from megatron_noloco.federation.folder_carrier import FolderCarrier
from megatron_noloco.federation.https_carrier import HttpsCarrier
from megatron_noloco.federation.keys import Keys
from megatron_noloco.federation.members import Members, write_line
from megatron_noloco.federation.mesh import Carrier, Member, Mesh
from megatron_noloco.federation.statuses import PeerStatus, Statuses, is_address, split_address
from megatron_noloco.federation.store import Store
from megatron_noloco.job.world import reachable_address
from megatron_noloco.settings import TCP

PLACES = "with a HOST that is a name, an IPv4 address, or an IPv6 address in [], and a PORT from 1 to 65535"
ADVERTISE = "set federation.advertise of each job to an address at which the others reach it"
_ANY = "*"
_FIRST_SECONDS = 5.0  # to learn whether an earlier process of this slot had a later number
_FREE_PORT = (
    "end the process that has it, or choose another port (port 0 takes any that is free); if it is this process, "
    "close() what attach returned before, and attach several models, such as those of a GAN, at once, as one "
    "torch.nn.ModuleDict"
)
_NO_ADDRESS = "it must be an address of this host, or * for all"
_BACKLOG = 1024


@dataclass(frozen=True)
class Network:
    """How a job reaches the others, and how they reach it.

    Attributes:
        run: number of the run.
        digests: of what all jobs of the run have alike.
        keys: from which this job has its identity.
        seeds: addresses of members, "HOST:PORT"; none where the jobs meet in a folder.
        folder: where the jobs meet; None where they have addresses.
        listen: "HOST:PORT", HOST "*": all interfaces, PORT 0: any. None: no other job can dial this one.
        advertise: where the others reach this job; None: where it listens.
        first: what the others are told of this job.
    """

    run: int
    digests: Mapping[str, str]
    keys: Keys
    seeds: Sequence[str] = ()
    folder: Store | None = None
    listen: str | None = "*:0"
    advertise: str | None = None
    first: PeerStatus = field(default_factory=PeerStatus)

    def open(self, slot: int, stopped: Callable[[], bool] = lambda: False) -> Members:
        """Connect a replica to the others.

        Args:
            stopped: returns whether this job was asked to stop; from several threads.

        Raises UserError where it cannot listen, or the folder cannot be used.
        """
        incarnation = time.time_ns()
        while True:
            members = self._open(Member(slot, incarnation), stopped)
            mesh, later = members.mesh, members.mesh.statuses.of(slot)
            if later is None or later.member in mesh.members():
                threading.Thread(target=members.watch, name="noloco-members", daemon=True).start()
                return members
            members.close()  # the clock of an earlier process was ahead
            incarnation = later.member.incarnation + 1

    def _open(self, me: Member, stopped: Callable[[], bool]) -> Members:
        identity = self.keys.identity(me.slot)
        with ExitStack() as opened:
            listener = None
            if self.listen is not None:
                listener = opened.enter_context(closing(_listening(self.listen)))
            carriers: list[Carrier] = [HttpsCarrier(self.digests, listener, self.seeds)]
            if self.folder is not None:
                carriers.append(FolderCarrier(self.folder, self.digests))
            mesh = Mesh(Statuses(self.run, me, identity), carriers, partial(write_line, me.slot))
            opened.pop_all()
        addresses = self._addresses(listener)
        name = socket.gethostname()
        if self.advertise is None and any(split_address(address)[0] == name for address in addresses):
            mesh.warn(
                f"no address of this host is known, as it has no default route, so others look for {name}: "
                f"where they do not know that name, {ADVERTISE}"
            )
        is_hidden = not addresses and self.folder is None
        members = Members(mesh, replace(self.first, addresses=addresses, hidden=is_hidden), stopped)
        limit = mesh.clock() + _FIRST_SECONDS * bool(self.seeds)
        mesh.wait(lambda: any(one != me for one in mesh.known()), limit)
        return members

    def _addresses(self, listener: socket.socket | None) -> list[str]:
        """Return where the others reach this replica."""
        if listener is None:
            return []
        if self.advertise is not None:
            return [self.advertise]
        host, port = listener.getsockname()[:2]
        if host in ("0.0.0.0", "::"):
            host = reachable_address([split_address(seed)[0] for seed in self.seeds])
        return [address_of(host, port)]


def seeds_in(text: str) -> list[str]:
    """Return the addresses of "HOST:PORT,HOST:PORT". Raises UserError."""
    seeds = [entry.strip() for entry in text.split(",")]
    for entry in seeds:
        if not is_address(entry):
            raise UserError(f'federation.rendezvous: "{entry}" is not HOST:PORT, {PLACES}')
    return seeds


def meeting_place(text: str) -> tuple[list[str], Store | None]:
    """Return the addresses or the folder of `federation.rendezvous`. Raises UserError.

    Args:
        text: "tcp://HOST:PORT,...", or a folder ("file:///a/folder", "s3://bucket/run"); "~" is the home folder.
    """
    if text.startswith(TCP):
        return seeds_in(text.removeprefix(TCP)), None
    scheme, separator, path = text.partition("://")
    if not (scheme and separator and path):
        raise UserError(
            f'federation.rendezvous: "{text}" is neither "file://FOLDER" or "s3://BUCKET/FOLDER", which all '
            'jobs can write, nor "tcp://HOST:PORT,...", addresses of one or more replicas'
        )
    with prefix_errors_with("federation.rendezvous"):
        return [], Store.of(text)


def place_to_listen(text: str | None, seeds: Sequence[str]) -> str | None:
    """Return where to listen, "HOST:PORT"; None: nowhere. Raises UserError.

    Args:
        text: `federation.listen`.
    """
    if text == "off":
        return None
    if text is None:
        ports = sorted({split_address(seed)[1] for seed in seeds})
        if len(ports) > 1:
            raise UserError(
                f"federation.listen is missing: the addresses in federation.rendezvous have the ports {ports}, so "
                'say where this replica listens, such as "tcp://*:0" for any port'
            )
        return f"{_ANY}:{ports[0] if ports else 0}"
    if not can_listen(text):
        raise UserError(
            f'federation.listen: "{text}" is not "tcp://HOST:PORT", with a HOST that is a name, an IPv4 address, '
            "an IPv6 address in [], or * for all, and a PORT up to 65535, or 0 for any, such as "
            '"tcp://*:0"'
        )
    return text.removeprefix(TCP)


def place_to_advertise(text: str | None, listen: str | None) -> str | None:
    """Return the address that `federation.advertise` names. Raises UserError."""
    if text is None or listen is None:
        return None
    place = text.removeprefix(TCP)
    if not (text.startswith(TCP) and is_address(place)):
        raise UserError(f'federation.advertise: "{text}" is not "tcp://HOST:PORT", {PLACES}')
    if listen.endswith(":0"):
        raise UserError(
            f"federation.advertise {text} must lead to a known port, but this replica listens at any; set "
            'federation.listen, such as "tcp://*:29600"'
        )
    return place


def can_listen(text: str) -> bool:
    """Return whether a text is "tcp://HOST:PORT", or * for all hosts and 0 for any port."""
    host, _, port = text.removeprefix(TCP).rpartition(":")
    probe = f"{'any' if host == _ANY else host}:{'1' if port == '0' else port}"
    return text.startswith(TCP) and is_address(probe)


def address_of(host: str, port: int) -> str:
    """Return "HOST:PORT"."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens at a port: with the host "*" of IPv4, and of IPv6 where there is IPv6."""
    both = host == _ANY and socket.has_dualstack_ipv6()
    family: int = socket.AF_INET6 if both else socket.AF_INET
    place: Any = ("", port)
    if host != _ANY:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(place, family=family, backlog=_BACKLOG, dualstack_ipv6=both)


def _listening(place: str) -> socket.socket:
    """Listen at "HOST:PORT". Raises UserError."""
    try:
        return listening(*split_address(place))
    except OSError as error:
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        remedy = _FREE_PORT if error.errno == errno.EADDRINUSE else _NO_ADDRESS
        raise UserError(f"federation.listen: cannot listen at {TCP}{place}: {why}; {remedy}") from None
