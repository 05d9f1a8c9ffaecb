"""Where the replicas are, and how a replica finds the first one of the others.

Every replica keeps a directory of all. Two replicas that connect send each other theirs, so a new one learns all
addresses from any other, and its own reaches all. Any entry may be lost: each replica announces its own address
again to every one that it connects to. A replica that knows no other yet looks in a folder that all can write, or
asks the addresses in its config.
"""

import json
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from megatron_noloco.errors import UserError
from megatron_noloco.federation.control import LARGEST, VERSION, Address
from megatron_noloco.federation.likeness import differences
from megatron_noloco.federation.wires import SocketAddress
from megatron_noloco.files import write_text

_HOST = r"(?:[A-Za-z0-9][A-Za-z0-9_.-]*|\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?\])"
_LISTENING = re.compile(rf"tcp://(?:\*|{_HOST}):([0-9]{{1,5}})")
_ENDPOINT = re.compile(rf"tcp://{_HOST}:([0-9]{{1,5}})")
_LONGEST_ENDPOINT = 255  # characters
PLACES = "with a HOST that is a name, an IPv4 address, or an IPv6 address in [], and a PORT from 1 to 65535"
ADVERTISE = "set federation.advertise of each job to an address at which the others reach it"
_EPOCHS = 2**30  # nanoseconds: a second
_FOLDER, _SEEDS = "file://", "tcp://"
# Every tenth look is taken although others are there, so that two halves find each other again. This look also
# looks up the names of hosts again, whose addresses may change.
SELDOM = 10


def is_endpoint(text: str) -> bool:
    """Whether the text is "tcp://HOST:PORT"."""
    match = _ENDPOINT.fullmatch(text)
    return match is not None and 0 < int(match[1]) < 2**16 and len(text) <= _LONGEST_ENDPOINT


def can_listen(text: str) -> bool:
    """Whether the text is "tcp://HOST:PORT", or * for all hosts and 0 for any port."""
    match = _LISTENING.fullmatch(text)
    return match is not None and int(match[1]) < 2**16


def endpoint_of(host: str, port: int) -> str:
    """Return "tcp://HOST:PORT"."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def split(endpoint: str) -> tuple[str, int]:
    """Return host and port of an endpoint."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


def host_of(endpoint: str) -> str:
    """Return the host of an endpoint; "" for none."""
    return split(endpoint)[0] if endpoint else ""


def reachable(endpoint: str, host: Callable[[], str]) -> str:
    """Return an endpoint that others can use: the address of this host replaces "all interfaces"."""
    everywhere = host_of(endpoint) in ("0.0.0.0", "::")
    return endpoint_of(host(), split(endpoint)[1]) if everywhere else endpoint


def numeric(endpoint: str) -> list[SocketAddress]:
    """Return where an endpoint is, if it has the address of a host, and not its name; nowhere for ""."""
    with suppress(OSError, ValueError):
        return _places(endpoint, socket.AI_NUMERICHOST)
    return []


def look_up(
    endpoints: Iterable[str], tell: Callable[[str], object]
) -> Iterator[tuple[str, list[SocketAddress]]]:
    """Yield each endpoint, and where it is; call `tell` for a name that has no address. May block."""
    for endpoint in endpoints:
        try:
            yield endpoint, _places(endpoint)
        except OSError as error:  # another one may do
            tell(f"{host_of(endpoint)}: {error.strerror}")
        except UnicodeError as error:  # Python's, for a part of a name that is longer than 63 characters
            tell(f"{host_of(endpoint)}: {error}")


def _places(endpoint: str, flags: int = 0) -> list[SocketAddress]:
    found = socket.getaddrinfo(*split(endpoint), type=socket.SOCK_STREAM, flags=flags)
    return [(family, place) for family, _, _, _, place in found]


class Directory:
    """The addresses of all replicas, as far as this one knows them. Used by one thread, but for `addresses`.

    Args:
        slot, slots: see `Member`.

    Attributes:
        own: the address of this process.
        addresses: by slot. A change replaces it, so other threads read one moment of it.
    """

    def __init__(self, slot: int, slots: int, own: Address) -> None:
        self.own = own
        self.addresses: Mapping[int, Address] = {slot: own}
        self._slot, self._slots = slot, slots
        self._claimed = False

    @property
    def rival(self) -> Address | None:
        """The address of a later process of this slot, which counts for the others; None: there is none."""
        latest = self.addresses[self._slot]
        return latest if latest.epoch > self.own.epoch else None

    def answers(self, rival: Address) -> bool:
        """Whether a rival has claimed the slot because this process is there, so that it runs."""
        return rival.epoch - self.own.epoch <= _EPOCHS

    def claim(self) -> bool:
        """Become the latest process of this slot where there is a `rival`; returns whether it did.

        Once, and again after `may_claim`.

        The rival may have ended: its epoch is of a clock that was ahead. A rival that runs claims the slot as
        well, so that of two processes the later one stays the latest.
        """
        rival = self.rival
        if rival is None or self._claimed:
            return False
        epoch = rival.epoch + 1 + self.own.epoch % _EPOCHS  # which no other process takes
        if epoch > LARGEST:
            return False
        self._claimed = True
        self.own = replace(self.own, epoch=epoch)
        self.merge({self._slot: self.own})
        return True

    def may_claim(self) -> None:
        """Let this process claim its slot again, since the rival has ended."""
        self._claimed = False

    def merge(self, addresses: Mapping[int, Address]) -> None:
        """Keep the latest address of each slot; leave out those that are invalid, or of slots not known here."""
        newer = {
            slot: address
            for slot, address in addresses.items()
            if 0 <= slot < self._slots
            and (not address.endpoint or is_endpoint(address.endpoint))
            and (slot not in self.addresses or self.addresses[slot].epoch < address.epoch)
        }
        if newer:
            self.addresses = {**self.addresses, **newer}


class Found(NamedTuple):
    """The result of a look for addresses.

    Attributes:
        addresses: of slots.
        endpoints: of replicas that can be asked for all addresses.
        missing: why others were not found; "": none is missing.
    """

    addresses: Mapping[int, Address]
    endpoints: Sequence[str]
    missing: str = ""


@dataclass(frozen=True)
class SharedFolder:
    """A folder with a file for each replica, named after slot and run; files of other runs are ignored.

    Attributes:
        digests: of what the jobs of the run have alike; see `likeness`.
        listen: where replicas listen by default; see `Network`.
        hosts: that all can reach; see `job.join.reachable_address`.
    """

    folder: Path
    run: int
    digests: Mapping[str, str] = field(default_factory=dict)
    listen = "tcp://*:0"
    hosts = ()

    def publish(self, slot: int, address: Address) -> None:
        """Write the file of a slot, over that of an earlier process. Raises OSError."""
        content = asdict(address) | {"version": VERSION, "alike": self.digests}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_text(self.folder / f"rank_{slot:05d}{self._ending}", json.dumps(content) + "\n")
        except OSError as error:
            reason = f"cannot write in {self.folder}: {error.strerror}"
            raise OSError(f"federation.rendezvous: {reason}") from None

    def look(self) -> Found:
        """Read the files of all slots; files with other content are ignored."""
        found, unreadable = {}, list[str]()
        for path in sorted(self.folder.glob(f"rank_*{self._ending}")):
            try:
                content = json.loads(path.read_text())
                slot = int(path.name.removeprefix("rank_").removesuffix(self._ending))
                # An older version wrote no site: it is met, and told so.
                found[slot] = Address(content["endpoint"], content["epoch"], content.get("site", ""))
            except (ValueError, KeyError, TypeError, RecursionError):
                continue
            except OSError as error:
                unreadable.append(f"{path}: {error.strerror}")
        return Found(found, (), "; ".join(unreadable))

    def other_runs(self) -> str:
        """Return a line on the newest address of other runs; "" where there is none."""
        others = [path for path in self.folder.glob("rank_*.json") if not path.name.endswith(self._ending)]
        if not others:
            return ""
        newest = max(others, key=lambda path: path.stat().st_mtime)
        return (
            f"no other job of this run is found, only {newest} of another run: {self._difference(newest)}, or the "
            "file is old"
        )

    def _difference(self, path: Path) -> str:
        """Say what the job that has written a file has otherwise than this one."""
        try:
            content = json.loads(path.read_text())
            alike = dict(content["alike"])
            if content["version"] == VERSION and (names := differences(self.digests, alike)):
                return f"its job differs from this one in {names}"
        except (ValueError, KeyError, TypeError, RecursionError):
            pass
        return "its job speaks another version of the protocol: install the same megatron_noloco for both"

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
            places.append(split(entry))
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
        """Do nothing: those that are asked are sent the address."""

    def other_runs(self) -> str:
        """Return "": of another run, the replica that is asked says so."""
        return ""

    def look(self) -> Found:
        """Look up the names of the seeds' hosts."""
        names, unknown = (endpoint_of(host, port) for host, port in self._places), list[str]()
        found = [place[:2] for _, places in look_up(names, unknown.append) for _, place in places]
        return Found({}, [endpoint_of(*place) for place in found], "; ".join(unknown))


Rendezvous = SharedFolder | Seeds


def rendezvous_of(text: str, run: int, digests: Mapping[str, str]) -> Rendezvous:
    """Make a rendezvous from the config: "file:///a/folder" (or "file://from/here") or "tcp://host:port,host:port".

    "~" is the home folder. Raises UserError for any other text.
    """
    if text.startswith(_FOLDER) and text != _FOLDER:
        folder = Path(text.removeprefix(_FOLDER))
        try:
            return SharedFolder(folder.expanduser(), run, digests)
        except RuntimeError:
            home = f'there is no home folder of "{folder.parts[0]}"'
            raise UserError(f'federation.rendezvous: "{text}": {home}') from None
    if text.startswith(_SEEDS):
        return Seeds.of(text.removeprefix(_SEEDS))
    raise UserError(
        f'federation.rendezvous: "{text}" is neither "file://FOLDER", a folder that all replicas can write, nor '
        '"tcp://HOST:PORT,...", addresses of one or more replicas'
    )
