"""How a replica finds the first of the others: in a folder that all can write, or at addresses in its config."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from megatron_noloco.errors import UserError
from megatron_noloco.federation.compatibility import differences
from megatron_noloco.federation.directory import endpoint_of, host_of, is_endpoint, split
from megatron_noloco.federation.folder import FolderCarrier
from megatron_noloco.federation.keys import Checksum, Cipher, Keys
from megatron_noloco.federation.messages import Address
from megatron_noloco.federation.store import Store
from megatron_noloco.federation.tcp import VERSION
from megatron_noloco.job.join import is_link_local
from megatron_noloco.settings import TCP

PLACES = "with a HOST that is a name, an IPv4 address, or an IPv6 address in [], and a PORT from 1 to 65535"
ADVERTISE = "set federation.advertise of each job to an address at which the others reach it"
_MOST_BYTES = 2**16  # of a file


def check_not_link_local(field: str, host: str) -> None:
    """Raise UserError for an IPv6 address that leads to another host from each interface."""
    if is_link_local(host) and ":" in host:
        raise UserError(
            f"federation.{field}: {host} is an IPv6 link-local address, which leads elsewhere from each network "
            "interface, so other jobs cannot use it; give another address of that host"
        )


def reachable(endpoint: str, host: Callable[[], str]) -> str:
    """Return an endpoint that others can use: the address of this host replaces "all interfaces"."""
    everywhere = host_of(endpoint) in ("0.0.0.0", "::")
    return endpoint_of(host(), split(endpoint)[1]) if everywhere else endpoint


class Found(NamedTuple):
    """The result of a look for addresses.

    Attributes:
        addresses: of slots.
        endpoints: of replicas that can be dialled, and know all addresses.
        missing: why others were not found; "": nothing is missing.
    """

    addresses: Mapping[int, Address]
    endpoints: Sequence[str]
    missing: str = ""

    @property
    def all_endpoints(self) -> list[str]:
        """All endpoints of ports."""
        return [
            *self.endpoints,
            *(one.endpoint for one in self.addresses.values() if is_endpoint(one.endpoint)),
        ]


@dataclass(frozen=True)
class Folder:
    """A folder, or a prefix of a bucket, with a file for each replica, named after slot and run.

    Attributes:
        digests: of what the jobs of the run have alike; see `compatibility`.
        listen: where replicas listen by default; see `Network`.
        hosts: that all can reach; see `job.join.reachable_address`.
    """

    store: Store
    run: int
    digests: Mapping[str, str] = field(default_factory=dict)
    listen = "tcp://*:0"
    hosts = ()

    def publish(self, slot: int, address: Address) -> None:
        """Write the file of a slot, over that of an earlier process. Raises OSError."""
        content = asdict(address) | {"version": VERSION, "alike": self.digests}
        try:
            self.store.create()
            self.store.put(self._name(slot), json.dumps(content).encode())
        except OSError as error:
            raise type(error)(f"federation.rendezvous: {error}") from None

    def withdraw(self, slot: int, address: Address) -> None:
        """Remove the file of a slot, unless it is of a later process by now."""
        with suppress(OSError):
            if self._content(self._name(slot)).get("incarnation") == address.incarnation:
                self.store.remove([self._name(slot)])

    def look(self) -> Found:
        """Read the files of all slots; files with other content are ignored. Raises OSError."""
        found, missing = dict[int, Address](), ""
        for name in self.store.names():
            if name.startswith("rank_") and name.endswith(self._ending):
                try:
                    content = self._content(name)
                    slot = int(name.removeprefix("rank_").removesuffix(self._ending))
                    found[slot] = Address(*(content[key] for key in ("endpoint", "incarnation", "site")))
                except OSError as error:
                    missing = str(error)
                except (ValueError, KeyError):
                    continue
        return Found(found, (), missing)

    def carrier(self, slot: int, keys: Keys | None, tell: Callable[[str], object]) -> FolderCarrier:
        """Return what carries streams through the folder."""
        sealing = Checksum() if keys is None else Cipher.read(keys.path)
        return FolderCarrier(self.store.below(f"streams_{self.run:016x}"), slot, sealing, tell)

    def why_alone(self) -> str:
        """Return why this job may find no other: the newest address is of another run, or there is none.

        Returns "" where the run has addresses of others.
        """
        names = [name for name in self.store.names() if name.startswith("rank_") and name.endswith(".json")]
        others = {name: self._content(name) for name in names if not name.endswith(self._ending)}
        if not others:
            is_alone = len(names) <= 1
            question = "if another was started, do both see the same folder?"
            return f"no other job has come to {self.store.url} so far; {question}" if is_alone else ""
        newest = max(others, key=lambda name: str(others[name].get("incarnation", "")))
        return (
            f"no other job of this run is found, only {self.store.url}/{newest} of another run: "
            f"{self._difference(others[newest])}, or the file is old"
        )

    def _content(self, name: str) -> dict[str, Any]:
        try:
            content = json.loads(self.store.get(name, _MOST_BYTES))
        except (ValueError, RecursionError, FileNotFoundError):
            return {}
        return content if isinstance(content, dict) else {}

    def _difference(self, content: Mapping[str, Any]) -> str:
        """Say what the job that has written a file has otherwise than this one."""
        alike = content.get("alike")
        names = differences(self.digests, alike) if isinstance(alike, dict) else ""
        if content.get("version") == VERSION and names:
            return f"its job differs from this one in {names}"
        return "its job speaks another version of the protocol: install the same megatron_noloco for both"

    def _name(self, slot: int) -> str:
        return f"rank_{slot:05d}{self._ending}"

    @property
    def _ending(self) -> str:
        return f"_{self.run:016x}.json"


class Seeds:
    """Addresses of any replicas. A single one that answers is enough; this one's own may be among them."""

    def __init__(self, places: list[tuple[str, int]]) -> None:
        self._places = places

    @classmethod
    def of(cls, text: str) -> "Seeds":
        """Parse "host:port,host:port"; raises UserError."""
        places = []
        for entry in map(str.strip, text.split(",")):
            if not is_endpoint(f"tcp://{entry}"):
                raise UserError(f'federation.rendezvous: "{entry}" is not HOST:PORT, {PLACES}')
            host, port = split(entry)
            check_not_link_local("rendezvous", host)
            places.append((host, port))
        return cls(places)

    @property
    def hosts(self) -> list[str]:
        return [host for host, _ in self._places]

    @property
    def ports(self) -> list[int]:
        return sorted({port for _, port in self._places})

    @property
    def listen(self) -> str:
        """The port that all seeds have, on all interfaces. Raises UserError if their ports differ."""
        ports = self.ports
        if len(ports) > 1:
            raise UserError(
                f"federation.listen is missing: the addresses in federation.rendezvous have the ports {ports}, so "
                'say where this replica listens, such as "tcp://*:0" for any port'
            )
        return f"tcp://*:{ports[0]}"

    def publish(self, slot: int, address: Address) -> None:
        """Do nothing: who is dialled is told the address."""

    withdraw = publish

    def why_alone(self) -> str:
        """Return "": a replica that is dialled says so, and one that does not answer is named."""
        return ""

    def look(self) -> Found:
        """Return the addresses."""
        return Found({}, [endpoint_of(host, port) for host, port in self._places])


Rendezvous = Folder | Seeds


def rendezvous_of(text: str, run: int, digests: Mapping[str, str]) -> Rendezvous:
    """Make a rendezvous from the config: a folder ("file:///a/folder", "s3://bucket/run"), or "tcp://host:port,...".

    "~" is the home folder. Raises UserError for any other text.
    """
    if text.startswith(TCP):
        return Seeds.of(text.removeprefix(TCP))
    scheme, separator, path = text.partition("://")
    if not (scheme and separator and path):
        raise UserError(
            f'federation.rendezvous: "{text}" is neither "file://FOLDER" or "s3://BUCKET/FOLDER", which all '
            'jobs can write, nor "tcp://HOST:PORT,...", addresses of one or more replicas'
        )
    try:
        return Folder(Store.of(text), run, digests)
    except UserError as error:
        raise UserError(f"federation.rendezvous: {error}") from None
