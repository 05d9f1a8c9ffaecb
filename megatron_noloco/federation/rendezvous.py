"""Who is there: the addresses of all ranks, how ranks tell each other, and how a rank finds the first one.

Every rank keeps a directory of all ranks. Two ranks that connect send each other theirs, so a new rank learns all
addresses from any one rank, and its own reaches all. Any entry may be lost: each rank announces its own address
again to every rank that it connects to. A rank that knows no other yet looks in a folder that all can write, or
asks the addresses in its config.
"""

import json
import re
import socket
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron_noloco.federation.frames import ANYONE, LARGEST, VERSION, Frame, Kind, Member
from megatron_noloco.federation.likeness import differences
from megatron_noloco.files import write_text

_ENTRY = struct.Struct("!IQB")  # rank, epoch, length of the endpoint that follows
_LONGEST_ENDPOINT = 255  # bytes
_LISTENING = re.compile(r"tcp://(?:\*|[A-Za-z0-9][A-Za-z0-9_.-]*):([0-9]{1,5})")
_ENDPOINT = re.compile(r"tcp://[A-Za-z0-9][A-Za-z0-9_.-]*:([0-9]{1,5})")  # ZeroMQ raises for others
PLACES = "with a HOST that is a name or an IPv4 address (IPv6 is not supported), and a PORT from 1 to 65535"
ADVERTISE = "set federation.advertise of each job to an address at which the others reach it"
_EPOCHS = 2**30  # nanoseconds: a second
_FOLDER, _SEEDS = "file://", "tcp://"
# Every tenth look is taken although others are there, so that two halves find each other again. This look also
# looks up the names of hosts again, whose addresses may change.
SELDOM = 10


@dataclass(frozen=True)
class Address:
    """Where a rank is reached; a later process of the rank has a larger epoch.

    Attributes:
        endpoint: "" where no other rank can connect to it.
    """

    endpoint: str
    epoch: int


def is_endpoint(text: str) -> bool:
    """Whether the text is "tcp://HOST:PORT", as ZeroMQ connects to it."""
    match = _ENDPOINT.fullmatch(text)
    return match is not None and 0 < int(match[1]) < 2**16 and len(text) <= _LONGEST_ENDPOINT


def can_listen(text: str) -> bool:
    """Whether the text is "tcp://HOST:PORT", or * for all hosts and 0 for any port, as ZeroMQ listens at it."""
    match = _LISTENING.fullmatch(text)
    return match is not None and int(match[1]) < 2**16


def listen_at(endpoint: str, rank: int) -> str:
    """Return where a rank of a replica (from 0) listens if the first listens at `endpoint`: as many ports on."""
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + rank}" if port.isdecimal() and int(port) else endpoint


def reachable(endpoint: str, host: Callable[[], str]) -> str:
    """Return an endpoint that others can use: the address of this host replaces "all interfaces"."""
    for everywhere in ("tcp://0.0.0.0:", "tcp://*:"):
        if endpoint.startswith(everywhere):
            return f"tcp://{host()}:{endpoint.removeprefix(everywhere)}"
    return endpoint


def is_numeric(endpoint: str) -> bool:
    """Whether an endpoint has the address of a host, and not its name."""
    try:
        socket.inet_aton(_split(endpoint)[0])
    except OSError:
        return False
    return True


def look_up(endpoints: Iterable[str], tell: Callable[[str], object]) -> Iterator[tuple[str, str]]:
    """Yield each endpoint, and the same with its host's address; call `tell` for a name that has none.

    May block; ZeroMQ would look up names in its own thread, and that would block all messages.
    """
    for endpoint in endpoints:
        host, port = _split(endpoint)
        try:
            yield endpoint, f"tcp://{socket.gethostbyname(host)}:{port}"
        except OSError as error:  # another one may do
            tell(f"{host}: {error.strerror}")
        except UnicodeError as error:  # Python's, for a part of a name that is longer than 63 characters
            tell(f"{host}: {error}")


def host_of(endpoint: str) -> str:
    """Return the host of an endpoint; "" for none."""
    return _split(endpoint)[0]


def _split(endpoint: str) -> tuple[str, str]:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host, port


class Directory:
    """The addresses of all ranks, as far as this rank knows them. Used by one thread.

    Attributes:
        addresses: by rank.
        version: grows with each change.
        member: this process.
    """

    def __init__(self, member: Member) -> None:
        self.addresses: dict[int, Address] = {}
        self.version = 0
        self.member = member
        self._own: Address | None = None
        self._claimed = False

    def announce(self, own: Address) -> None:
        """Add the address of this process."""
        self._own = own
        self.merge({self.member.rank: own})

    @property
    def rival(self) -> Address | None:
        """The address of a later process of this rank, which counts for the others; None: there is none."""
        latest = self.addresses.get(self.member.rank)
        return None if latest is None or latest.epoch <= self.member.epoch else latest

    def claim(self) -> bool:
        """Become the latest process of this rank where there is a `rival`, once; returns whether it did.

        The rival may have ended: its epoch is of a clock that was ahead. A rival that runs claims the rank as
        well, so that of two processes the later one stays the latest.
        """
        rival = self.rival
        if rival is None or self._own is None or self._claimed:
            return False
        epoch = rival.epoch + 1 + self.member.epoch % _EPOCHS  # which no other process takes
        if epoch > LARGEST:
            return False
        self._claimed = True
        self.member = replace(self.member, epoch=epoch)
        self.announce(replace(self._own, epoch=epoch))
        return True

    def merge(self, addresses: Mapping[int, Address]) -> None:
        """Keep the latest address of each rank; leave out those that are invalid, or of slots not known here."""
        for rank, address in addresses.items():
            known = self.addresses.get(rank)
            if not (0 <= rank < self.member.ranks and self._is_valid(address)):
                continue
            if known is None or known.epoch < address.epoch:
                self.addresses[rank] = address
                self.version += 1

    def frame(self, receiver: int = ANYONE, asks: bool = False) -> tuple[Frame, np.ndarray]:
        """Return header and content of the frame that sends all addresses, and may ask for the receiver's."""
        data = np.frombuffer(self.pack(), np.uint8)
        return self.member.frame(Kind.ADDRESSES, receiver, data, number=asks, offset=self.member.ranks), data

    def latest(self, rank: int, epoch: int) -> tuple[Frame, np.ndarray]:
        """Return as `frame` the address of a rank alone, whose latest process has this epoch; 0: of no rank."""
        single = Directory(self.member)
        if epoch:
            known = self.addresses.get(rank, Address("", epoch))
            single.addresses[rank] = replace(known, epoch=max(known.epoch, epoch))
        return single.frame(rank)

    def take(self, frame: Frame, data: np.ndarray) -> str:
        """Merge the addresses that another rank has sent; returns why they are dropped, or an empty string."""
        if frame.sender == self.member.rank:  # it asked all addresses in the config, its own among them
            return ""
        if not frame.announces(data):
            return "wrong chunk"
        addresses = self.unpack(data.tobytes())
        if addresses is None:
            return "no addresses"
        self.merge(addresses)
        return ""

    def pack(self) -> bytes:
        """Return all addresses as bytes, in the order of ranks."""
        entries = []
        for rank, address in sorted(self.addresses.items()):
            endpoint = address.endpoint.encode()
            entries.append(_ENTRY.pack(rank, address.epoch, len(endpoint)) + endpoint)
        return b"".join(entries)

    def unpack(self, data: bytes) -> dict[int, Address] | None:
        """Read what another rank has packed; returns None for anything else."""
        found: dict[int, Address] = {}
        start, last = 0, -1
        while start < len(data):
            stop = start + _ENTRY.size
            if stop > len(data):
                return None
            rank, epoch, length = _ENTRY.unpack(data[start:stop])
            start = stop + length
            address = Address(data[stop:start].decode("ascii", "replace"), epoch)
            if start > len(data) or rank <= last or not self._is_valid(address):
                return None
            found[rank], last = address, rank
        return found

    @property
    def longest(self) -> int:
        """The largest number of bytes that `pack` can return."""
        return self.member.ranks * (_ENTRY.size + _LONGEST_ENDPOINT)

    def _is_valid(self, address: Address) -> bool:
        valid = is_endpoint(address.endpoint) or not address.endpoint
        return 0 < address.epoch <= LARGEST and valid


class Found(NamedTuple):
    """The result of a look for addresses.

    Attributes:
        addresses: of ranks.
        endpoints: of ranks that can be asked for all addresses.
        missing: why others were not found; "": none is missing.
    """

    addresses: Mapping[int, Address]
    endpoints: Sequence[str]
    missing: str = ""


@dataclass(frozen=True)
class SharedFolder:
    """A folder with a file for each rank, named after the rank and its run; files of other runs are ignored.

    Attributes:
        digests: of what the jobs of the run have alike; see `likeness`.
        listen: where ranks listen by default; see `Network`.
        hosts: that all ranks can reach; see `job.join.reachable_address`.
    """

    folder: Path
    run: int
    digests: Mapping[str, str] = field(default_factory=dict)
    listen = "tcp://*:0"
    hosts = ()

    def publish(self, rank: int, address: Address) -> None:
        """Write the file of a rank, over that of an earlier process. Raises OSError."""
        content = asdict(address) | {"version": VERSION, "alike": self.digests}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_text(self.folder / f"rank_{rank:05d}{self._ending}", json.dumps(content) + "\n")
        except OSError as error:
            reason = f"cannot write in {self.folder}: {error.strerror}"
            raise OSError(f"federation.rendezvous: {reason}") from None

    def look(self) -> Found:
        """Read the files of all ranks; files with other content are ignored."""
        found, unreadable = {}, list[str]()
        for path in sorted(self.folder.glob(f"rank_*{self._ending}")):
            try:
                content = json.loads(path.read_text())
                address = Address(str(content["endpoint"]), int(content["epoch"]))
                found[int(path.name.removeprefix("rank_").removesuffix(self._ending))] = address
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
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
            version, alike = content["version"], json.dumps(content["alike"]).encode()
            if version == VERSION and (names := differences(self.digests, alike)):
                return f"its job differs from this one in {names}"
        except (ValueError, KeyError, TypeError, RecursionError):
            pass
        return "its job speaks another version of the protocol: install the same megatron_noloco for both"

    @property
    def _ending(self) -> str:
        return f"_{self.run:016x}.json"


class Seeds:
    """Addresses of ranks of any replicas. One rank that answers is enough; this rank's own may be among them."""

    def __init__(self, places: list[tuple[str, int]]) -> None:
        self._places = places

    @classmethod
    def of(cls, text: str) -> "Seeds":
        """Parse "host:port,host:port"; raises ValueError."""
        places = []
        for entry in text.split(","):
            host, _, port = entry.strip().rpartition(":")
            if not is_endpoint(f"tcp://{entry.strip()}"):
                raise ValueError(f'federation.rendezvous: "{entry.strip()}" is not HOST:PORT, {PLACES}')
            places.append((host, int(port)))
        return cls(places)

    @property
    def hosts(self) -> list[str]:
        return [host for host, _ in self._places]

    @property
    def listen(self) -> str:
        """The port that all seeds have, on all interfaces. Raises ValueError if their ports differ."""
        ports = sorted({port for _, port in self._places})
        if len(ports) > 1:
            raise ValueError(
                f"federation.listen is missing: the addresses in federation.rendezvous have the ports {ports}, so "
                'say where this replica listens, such as "tcp://*:0" for any port'
            )
        return f"tcp://*:{ports[0]}"

    def publish(self, rank: int, address: Address) -> None:
        """Do nothing: those that are asked are sent the address."""

    def other_runs(self) -> str:
        """Return "": of another run, the rank that is asked says so."""
        return ""

    def look(self) -> Found:
        """Look up the names of the seeds' hosts."""
        names, unknown = (f"tcp://{host}:{port}" for host, port in self._places), list[str]()
        endpoints = [endpoint for _, endpoint in look_up(names, unknown.append)]
        return Found({}, endpoints, "; ".join(unknown))


Rendezvous = SharedFolder | Seeds


def rendezvous_of(text: str, run: int, digests: Mapping[str, str]) -> Rendezvous:
    """Make a rendezvous from the config: "file:///a/folder" (or "file://from/here") or "tcp://host:port,host:port".

    "~" is the home folder. Raises ValueError for any other text.
    """
    if text.startswith(_FOLDER) and text != _FOLDER:
        folder = Path(text.removeprefix(_FOLDER))
        try:
            return SharedFolder(folder.expanduser(), run, digests)
        except RuntimeError:
            home = f'there is no home folder of "{folder.parts[0]}"'
            raise ValueError(f'federation.rendezvous: "{text}": {home}') from None
    if text.startswith(_SEEDS):
        return Seeds.of(text.removeprefix(_SEEDS))
    raise ValueError(
        f'federation.rendezvous: "{text}" is neither "file://FOLDER", a folder that all replicas can write, nor '
        '"tcp://HOST:PORT,...", addresses of one or more replicas'
    )
