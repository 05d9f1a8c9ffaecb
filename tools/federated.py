"""The ranks of one job as replicas of a federation, for measurements: each could as well be a job of its own."""

from collections.abc import Callable
from pathlib import Path

from megatron_noloco.federation.counterparts import Deadline, Patience
from megatron_noloco.federation.keys import Keys
from megatron_noloco.federation.rendezvous import SharedFolder
from megatron_noloco.federation.transport import FederationTransport, Network
from megatron_noloco.plans.topology import Place

DEADLINE_SECONDS = 300.0
_RUN = 1


def join_as_jobs(rank: int, size: int, folder: Path, barrier: Callable[[], object]) -> FederationTransport:
    """With keys; all ranks call it. Returns when all have met.

    Args:
        folder: empty, and the same for all ranks; not needed later.
        barrier: returns when all ranks have called it.
    """
    if rank == 0:
        Keys.make(folder / "key")
    barrier()
    network = Network(SharedFolder(folder, _RUN), _RUN, keys=Keys.read(folder / "key"))
    patience = Patience(Deadline(DEADLINE_SECONDS, DEADLINE_SECONDS))
    transport = FederationTransport(Place(rank, size), network, patience)
    if not transport.wait_for(size - 1, DEADLINE_SECONDS):
        raise SystemExit(f"rank {rank}: not all of the {size - 1} others are there")
    barrier()
    return transport
