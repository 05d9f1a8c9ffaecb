"""What a config says about a federation, as the packages below take it."""

from typing import Any

import torch.distributed as dist

from megatron_noloco.config import RunConfig
from megatron_noloco.federation.frames import run_number
from megatron_noloco.federation.keeping_up import KeepingUp, Pace, wait_for_others
from megatron_noloco.federation.transport import FederationTransport, Network, Patience, join_federation
from megatron_noloco.job.join import reachable_address
from megatron_noloco.plans.topology import Topology

_FIRST_SECONDS = 5.0  # to find one that is there
_ALIKE = ("local_steps", "pairing", "payload", "fragments", "outer_momentum", "outer_lr")


def slot_of(config: RunConfig, replica: int | None) -> int:
    """The slot of this job; 0 where there is no federation. Raises ValueError when `--replica` does not fit."""
    slots = config.federation.slots
    if slots is None:
        if replica is not None:
            raise ValueError(
                "--replica: the config has no federation.slots; without, all replicas are one job"
            )
        return 0
    if replica is None or not 0 <= replica < slots:
        asked = "is missing" if replica is None else f"{replica} is not there"
        raise ValueError(
            f"--replica {asked}: federation.slots {slots} are 0 to {slots - 1}, one for each job"
        )
    return replica


def run_of(config: RunConfig) -> int:
    """Of what all jobs of a federation must have alike: seed, slots, model, layout of a replica, method."""
    noloco = config.noloco.model_dump()
    alike: dict[str, Any] = {
        "seed": config.training.seed,
        "slots": config.federation.slots,
        "model": config.model.model_dump(),
        "parallel": config.parallel.model_dump(exclude={"replicas"}),
        "noloco": {name: noloco[name] for name in _ALIKE} | {"gamma": config.noloco.gamma},
    }
    return run_number(alike)


def check_network(config: RunConfig) -> None:
    """Raises ValueError when rendezvous or key are no such thing; nothing is opened."""
    if config.federation.slots is not None:
        _network(config)


def enter(config: RunConfig, topology: Topology) -> FederationTransport:
    """What connects this rank to the others; all ranks of the job call it. Raises ValueError, OSError."""
    behind = config.federation.rounds_behind * config.noloco.fragments
    patience = Patience(config.federation.shortest_deadline_seconds, config.noloco.deadline_seconds, behind)
    return join_federation(topology.place(dist.get_rank()), _network(config), patience)


def keeping_up(config: RunConfig, transport: FederationTransport) -> KeepingUp:
    noloco, federation = config.noloco, config.federation
    pace = Pace(
        local_steps=noloco.local_steps,
        fragments=noloco.fragments,
        rounds_behind=federation.rounds_behind,
        adapts=federation.local_steps == "auto",
        longest_seconds=noloco.deadline_seconds,
        steps=config.training.train_iters,
    )
    return KeepingUp(transport, pace)


def wait_for_start(config: RunConfig, transport: FederationTransport) -> list[str]:
    """Until there are enough to start with; shortly for any that may have a state to give. All ranks call it.

    Returns a line where they did not come in time.
    """
    wanted = config.federation.start_with - 1
    if not wanted:
        transport.wait_for(1, _FIRST_SECONDS)
    if wait_for_others(transport, wanted, config.noloco.deadline_seconds):
        return []
    return ["fewer replicas than federation.start_with are there; starting without"]


def _network(config: RunConfig) -> Network:
    federation = config.federation
    assert federation.rendezvous is not None
    return Network.of(
        federation.rendezvous,
        run_of(config),
        federation.key_file if federation.encryption == "curve" else None,
        listen=federation.listen,
        advertise=federation.advertise,
        host=reachable_address,
    )
