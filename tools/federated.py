"""Replicas of one rank each as a federation, for measurements: each could as well be a job of its own."""

from collections.abc import Callable
from pathlib import Path

from megatron_noloco.federation.keys import Keys
from megatron_noloco.federation.network import CHUNK_BYTES, FederationTransport, Network
from megatron_noloco.federation.partners import Patience
from megatron_noloco.federation.rendezvous import SharedFolder
from megatron_noloco.plans.topology import Place

DEADLINE_SECONDS = 300.0
_LOOPBACK = "tcp://127.0.0.1:0"
_RUN = 1


def open_transport(
    place: Place,
    folder: Path,
    listen: str = _LOOPBACK,
    keys: Keys | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> FederationTransport:
    """Open the transport of a replica; all replicas give the same folder. See `wait_for_all`."""
    network = Network(SharedFolder(folder, _RUN), _RUN, listen, keys, chunk_bytes=chunk_bytes)
    return FederationTransport(place, network, Patience(DEADLINE_SECONDS, DEADLINE_SECONDS))


def wait_for_all(transport: FederationTransport, replicas: int) -> None:
    """Wait until this replica is connected to the others."""
    if not transport.wait_for(replicas - 1, DEADLINE_SECONDS):
        raise SystemExit(f"rank {transport.rank}: not all of the {replicas - 1} others are there")


def join_as_jobs(rank: int, size: int, folder: Path, barrier: Callable[[], object]) -> FederationTransport:
    """Connect the ranks of one job with keys; all of them call it, and return when all are connected.

    Args:
        folder: empty, and the same for all ranks; not needed later.
        barrier: returns when all ranks have called it.
    """
    if rank == 0:
        Keys.make(folder / "key")
    barrier()
    transport = open_transport(Place(rank, size), folder, "tcp://*:0", Keys.read(folder / "key"))
    wait_for_all(transport, size)
    barrier()
    return transport
