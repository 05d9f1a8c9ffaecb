"""Replicas as a federation, for measurements: each could as well be a job of its own."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from megatron_noloco.federation.gather import Gather
from megatron_noloco.federation.keys import Keys
from megatron_noloco.federation.members import Members
from megatron_noloco.federation.movement import alone
from megatron_noloco.federation.network import Network
from megatron_noloco.federation.pairing import Pairing
from megatron_noloco.federation.partners import Partners
from megatron_noloco.federation.rounds import Replica
from megatron_noloco.federation.store import Store
from megatron_noloco.outer import OuterOptimizer, Weights
from megatron_noloco.plans.topology import Place
from megatron_noloco.settings import FederationSettings, NolocoSettings

DEADLINE_SECONDS = 300.0
SEED = 0
_RUN = 1


def open_replica(slot: int, listen: str, seeds: Sequence[str], keys: Keys) -> Members:
    """Connect a replica to the others. See `wait_for_all`.

    Args:
        listen: see `Network`.
        seeds: where others listen; the first replica needs none.
    """
    return Network(_RUN, {}, keys, seeds, listen=listen).open(slot)


def open_in_store(slot: int, url: str, key: Path) -> tuple[Members, Counter[str]]:
    """Connect a replica without a port to the others, through a folder or a bucket; return also its requests."""
    store = Store.of(url)
    return Network(_RUN, {}, Keys.read(key), folder=store, listen=None).open(slot), store.calls


def wait_for_all(members: Members, replicas: int) -> None:
    """Wait until this replica can exchange with all others."""

    def is_complete() -> bool:
        return sum(peer.reached for peer in members.peers().values()) >= replicas - 1

    if not members.wait(is_complete, DEADLINE_SECONDS):
        raise SystemExit(f"replica {members.slot}: not all of the {replicas - 1} others are there")


def outer_of(members: Members, weights: Weights, settings: NolocoSettings) -> OuterOptimizer:
    """Return the outer optimizer of a replica of one rank."""
    place, deadline = Place(members.slot, None), settings.deadline_seconds
    behind = FederationSettings().rounds_behind * settings.fragments
    partners = Partners(members, deadline, deadline, behind)
    replica = Replica(Gather(alone(weights.length)), place, Pairing(settings, SEED), partners)
    return OuterOptimizer(weights, None, place, settings, SEED, replica)
