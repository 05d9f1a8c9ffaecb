"""How the jobs of a federation learn of each other's addresses: a folder that all can write, or a list.

Neither coordinates anything. What is lost is written again by its owner, and connections that stand need neither.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megatron_noloco.federation.link import Address
from megatron_noloco.files import write_text

_FOLDER, _LIST = "file://", "tcp://"


class Rendezvous(Protocol):
    """See `rendezvous_of`."""

    def listen(self, rank: int) -> str:
        """Where this rank is to listen: an endpoint of ZeroMQ."""
        ...

    def publish(self, rank: int, address: Address) -> None:
        """Tell where this rank is. Raises OSError."""
        ...

    def find(self) -> Mapping[int, Address]:
        """The addresses known by now, of all ranks. Raises OSError."""
        ...


@dataclass(frozen=True)
class SharedFolder:
    """A file for each rank. A rank of another process replaces that of the one before."""

    folder: Path
    endpoint: str  # to listen at
    run: int

    def listen(self, rank: int) -> str:
        return self.endpoint

    def publish(self, rank: int, address: Address) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        content = {"run": f"{self.run:016x}", "endpoint": address.endpoint, "epoch": address.epoch}
        write_text(self.folder / f"rank_{rank:05d}.json", json.dumps(content) + "\n")

    def find(self) -> Mapping[int, Address]:
        """Files of other runs are left out, and what is no such file."""
        found = {}
        for path in sorted(self.folder.glob("rank_*.json")):
            try:
                content = json.loads(path.read_text())
                if int(content["run"], 16) == self.run:
                    address = Address(str(content["endpoint"]), int(content["epoch"]))
                    found[int(path.stem.removeprefix("rank_"))] = address
            except (ValueError, KeyError, TypeError):
                continue
        return found


@dataclass(frozen=True)
class FixedList:
    """An address for each slot, at which its first rank listens; its other ranks at the ports that follow.

    Or one for each rank of each slot, for replicas on several hosts.
    """

    places: tuple[tuple[str, int], ...]  # host and port, by rank

    @classmethod
    def of(cls, addresses: str, slots: int, replica_size: int) -> "FixedList":
        """From "host:port,host:port,..."; raises ValueError for anything else."""
        places = []
        for entry in addresses.split(","):
            host, colon, port = entry.strip().rpartition(":")
            if not (host and colon and port.isdecimal() and 0 < int(port) < 2**16):
                raise ValueError(f'federation.rendezvous: "{entry.strip()}" is not HOST:PORT')
            places.append((host, int(port)))
        if len(places) == slots * replica_size:
            return cls(tuple(places))
        if len(places) != slots:
            raise ValueError(
                f"federation.rendezvous: {len(places)} addresses, but there are {slots} slots (and {replica_size} "
                f"ranks in each); give {slots}" + (f" or {slots * replica_size}" if replica_size > 1 else "")
            )
        return cls(tuple((host, port + rank) for host, port in places for rank in range(replica_size)))

    def listen(self, rank: int) -> str:
        return f"tcp://*:{self.places[rank][1]}"

    def publish(self, rank: int, address: Address) -> None:
        """Everybody has the list."""

    def find(self) -> Mapping[int, Address]:
        return {rank: Address(f"tcp://{host}:{port}") for rank, (host, port) in enumerate(self.places)}


def rendezvous_of(text: str, listen: str, run: int, sizes: tuple[int, int]) -> Rendezvous:
    """From the config: "file:///a/folder" (or "file://from/here") or "tcp://host:port,host:port".

    Args:
        sizes: slots, and ranks of a replica.

    Raises ValueError for anything else.
    """
    if text.startswith(_FOLDER) and text != _FOLDER:
        return SharedFolder(Path(text.removeprefix(_FOLDER)), listen, run)
    if text.startswith(_LIST):
        return FixedList.of(text.removeprefix(_LIST), *sizes)
    raise ValueError(
        f'federation.rendezvous: "{text}" is neither "file://FOLDER", a folder that all replicas can write, nor '
        '"tcp://HOST:PORT,HOST:PORT", one for each slot'
    )


def reachable(endpoint: str, host: Callable[[], str]) -> str:
    """An endpoint as others can use it: one that listens everywhere gets the address of this host."""
    for everywhere in ("tcp://0.0.0.0:", "tcp://*:", "tcp://[::]:"):
        if endpoint.startswith(everywhere):
            return f"tcp://{host()}:{endpoint.removeprefix(everywhere)}"
    return endpoint
