"""How a rank comes to know the first others: a folder that all can write, or the addresses of some members.

From one that it knows it learns of all the others (`directory`). Neither coordinates anything, and what is lost is
told again by its owner.
"""

import json
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Protocol

from megatron_noloco.federation.directory import Address, is_endpoint
from megatron_noloco.files import write_text

_FOLDER, _SEEDS = "file://", "tcp://"
_SELDOM = 10  # looks, of which one asks the seeds though others are there: two halves find each other again


class Door(Protocol):
    """What a rendezvous needs of a `Service`."""

    def learn(self, addresses: Mapping[int, Address]) -> None: ...

    def ask(self, endpoint: str) -> None: ...


class Rendezvous(Protocol):
    """See `rendezvous_of`.

    Attributes:
        listen: where ranks listen by default; see `Network`.
    """

    @property
    def listen(self) -> str: ...

    def publish(self, rank: int, address: Address) -> None:
        """Tell where this rank is. Raises OSError."""
        ...

    def look(self, door: Door, alone: bool) -> None:
        """Find out where others are; `alone`: none is there yet. Called again and again. Raises OSError."""
        ...


@dataclass(frozen=True)
class SharedFolder:
    """A file for each rank, named after it and its run: those of other runs are not seen.

    A rank of another process replaces that of the one before.
    """

    folder: Path
    run: int
    listen = "tcp://*:0"

    def publish(self, rank: int, address: Address) -> None:
        content = {"endpoint": address.endpoint, "epoch": address.epoch}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_text(self.folder / f"rank_{rank:05d}{self._ending}", json.dumps(content) + "\n")
        except OSError as error:
            reason = f"cannot write in {self.folder}: {error.strerror}"
            raise OSError(f"federation.rendezvous: {reason}") from None

    def look(self, door: Door, alone: bool) -> None:
        """What is no such file is left out."""
        found = {}
        for path in sorted(self.folder.glob(f"rank_*{self._ending}")):
            try:
                content = json.loads(path.read_text())
                address = Address(str(content["endpoint"]), int(content["epoch"]))
                found[int(path.name.removeprefix("rank_").removesuffix(self._ending))] = address
            except (ValueError, KeyError, TypeError):
                continue
        door.learn(found)

    @property
    def _ending(self) -> str:
        return f"_{self.run:016x}.json"


class Seeds:
    """Addresses of any ranks of any members, of which one that answers is enough; one's own may be among them."""

    def __init__(self, places: list[tuple[str, int]]) -> None:
        self._places = places
        self._looks = count()

    @classmethod
    def of(cls, text: str) -> "Seeds":
        """From "host:port,host:port"; raises ValueError."""
        places = []
        for entry in text.split(","):
            host, _, port = entry.strip().rpartition(":")
            if not is_endpoint(f"tcp://{entry.strip()}"):
                raise ValueError(f'federation.rendezvous: "{entry.strip()}" is not HOST:PORT')
            places.append((host, int(port)))
        return cls(places)

    @property
    def listen(self) -> str:
        """At the port that all seeds have. Raises ValueError where they have several."""
        ports = sorted({port for _, port in self._places})
        if len(ports) > 1:
            raise ValueError(
                f"federation.listen is missing: the addresses in federation.rendezvous have the ports {ports}, so "
                'say where this replica listens, such as "tcp://*:0" for any port'
            )
        return f"tcp://*:{ports[0]}"

    def publish(self, rank: int, address: Address) -> None:
        """Whoever is asked is told."""

    def look(self, door: Door, alone: bool) -> None:
        """Names are looked up here: in ZeroMQ's own thread that would hold up all messages."""
        if not alone and next(self._looks) % _SELDOM:
            return
        unknown = []
        for host, port in self._places:
            try:
                door.ask(f"tcp://{socket.gethostbyname(host)}:{port}")
            except OSError as error:  # another one may do
                unknown.append(f"{host}: {error.strerror}")
        if unknown:
            raise OSError("; ".join(unknown))


def rendezvous_of(text: str, run: int) -> Rendezvous:
    """From the config: "file:///a/folder" (or "file://from/here") or "tcp://host:port,host:port".

    Raises ValueError for anything else.
    """
    if text.startswith(_FOLDER) and text != _FOLDER:
        return SharedFolder(Path(text.removeprefix(_FOLDER)), run)
    if text.startswith(_SEEDS):
        return Seeds.of(text.removeprefix(_SEEDS))
    raise ValueError(
        f'federation.rendezvous: "{text}" is neither "file://FOLDER", a folder that all replicas can write, nor '
        '"tcp://HOST:PORT,...", addresses of one or more replicas'
    )


def listen_at(endpoint: str, rank: int) -> str:
    """Where a rank of a replica (from 0) listens when the first listens at `endpoint`: as many ports further."""
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + rank}" if port.isdecimal() and int(port) else endpoint


def reachable(endpoint: str, host: Callable[[], str]) -> str:
    """An endpoint as others can use it: one that listens everywhere gets the address of this host."""
    for everywhere in ("tcp://0.0.0.0:", "tcp://*:", "tcp://[::]:"):
        if endpoint.startswith(everywhere):
            return f"tcp://{host()}:{endpoint.removeprefix(everywhere)}"
    return endpoint
