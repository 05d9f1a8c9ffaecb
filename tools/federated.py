"""Replicas as a federation, for measurements: each could as well be a job of its own."""

from collections import Counter
from pathlib import Path

from megatron_noloco.federation.gather import Gather
from megatron_noloco.federation.keys import Keys
from megatron_noloco.federation.messages import Member
from megatron_noloco.federation.movement import alone
from megatron_noloco.federation.network import Network, open_node
from megatron_noloco.federation.node_thread import NodeThread
from megatron_noloco.federation.pairing import Pairing
from megatron_noloco.federation.partners import Partners
from megatron_noloco.federation.rendezvous import Folder, rendezvous_of
from megatron_noloco.federation.rounds import Leading, Replica
from megatron_noloco.federation.store import Store
from megatron_noloco.outer import OuterOptimizer, Weights
from megatron_noloco.plans.topology import Place
from megatron_noloco.settings import FederationSettings, NolocoSettings

DEADLINE_SECONDS = 300.0
_LOOPBACK = "tcp://127.0.0.1:0"
_RUN = 1
SEED = 0


def open_replica(slot: int, folder: Path, listen: str = _LOOPBACK, keys: Keys | None = None) -> NodeThread:
    """Connect a replica to the others; all give the same folder. See `wait_for_all`."""
    return open_node(Network(rendezvous_of(f"file://{folder}", _RUN, {}), Member(_RUN), listen, keys), slot)


def open_in_store(slot: int, url: str, key: Path) -> tuple[NodeThread, Counter[str]]:
    """Connect a replica without a port to the others, through a folder or a bucket; return also its requests."""
    store = Store.of(url)
    network = Network(Folder(store, _RUN), Member(_RUN), None, Keys.read(key))
    return open_node(network, slot), store.calls


def wait_for_all(thread: NodeThread, replicas: int) -> None:
    """Wait until this replica is connected to the others."""
    if not thread.wait(lambda: len(thread.node.present()) >= replicas - 1, DEADLINE_SECONDS):
        raise SystemExit(f"replica {thread.node.slot}: not all of the {replicas - 1} others are there")


def outer_of(thread: NodeThread, weights: Weights, settings: NolocoSettings) -> OuterOptimizer:
    """Return the outer optimizer of a replica of one rank."""
    place, deadline = Place(thread.node.slot, None), settings.deadline_seconds
    behind = FederationSettings().rounds_behind * settings.fragments
    leading = Leading(thread, Partners(thread.node, deadline, deadline, behind))
    movement = Gather(alone(weights.length))
    replica = Replica(movement, place, Pairing(settings, SEED), leading)
    return OuterOptimizer(weights, None, place, settings, SEED, replica)
