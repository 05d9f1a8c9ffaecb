"""How a job that is one replica joins the others. Needs the extra `federation` (ZeroMQ)."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from megatron_noloco.attach.federation import Federation
from megatron_noloco.federation.frames import run_number
from megatron_noloco.federation.keeping_up import KeepingUp, Pace, wait_for_others
from megatron_noloco.federation.transport import FederationTransport, Network, Patience, join_federation
from megatron_noloco.job.join import reachable_address
from megatron_noloco.outer import OuterSettings
from megatron_noloco.plans.grouping import Grouping
from megatron_noloco.plans.topology import Place

__all__ = ["enter", "keeping_up", "run_of", "wait_for_others"]

# Of the settings, what jobs may have of their own.
_OWN = ("deadline_seconds", "delay_steps", "slow_weights")


def run_of(settings: OuterSettings, grouping: Grouping, ranks: Sequence[Any]) -> int:
    """Of what all jobs must have alike.

    Args:
        ranks: of each rank of this job, its weights: their lengths, and a digest of the first ones.
    """
    method = {name: value for name, value in asdict(settings).items() if name not in _OWN}
    alike = {"method": method, "gamma": settings.gamma, "grouping": asdict(grouping), "ranks": ranks}
    return run_number(alike)


def enter(federation: Federation, settings: OuterSettings, place: Place, run: int) -> FederationTransport:
    """The door of this rank to the others; all ranks of the job call it. Raises ValueError, OSError."""
    network = Network.of(
        federation.rendezvous,
        run,
        federation.key_file,
        listen=federation.listen,
        advertise=federation.advertise,
        host=reachable_address,
    )
    behind = federation.rounds_behind * settings.fragments
    patience = Patience(federation.shortest_deadline_seconds, settings.deadline_seconds, behind)
    return join_federation(place, network, patience)


def keeping_up(federation: Federation, settings: OuterSettings, transport: FederationTransport) -> KeepingUp:
    pace = Pace(
        local_steps=settings.local_steps,
        fragments=settings.fragments,
        rounds_behind=federation.rounds_behind,
        adapts=federation.local_steps == "auto",
        longest_seconds=settings.deadline_seconds,
    )
    return KeepingUp(transport, pace)
