"""What a config says about a federation, as the rooms below take it."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_noloco.config import RunConfig
from megatron_noloco.federation.counterparts import Deadline, Patience, agreement_of_replica
from megatron_noloco.federation.keeping_up import KeepingUp, Pace
from megatron_noloco.federation.keys import Keys
from megatron_noloco.federation.rendezvous import Rendezvous, rendezvous_of
from megatron_noloco.federation.transport import FederationTransport, Network
from megatron_noloco.job.join import reachable_address
from megatron_noloco.plans.topology import Topology

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


def run_number(config: RunConfig) -> int:
    """Of what all jobs of a federation must have alike: seed, slots, model, layout of a replica, method."""
    noloco = config.noloco.model_dump()
    alike: dict[str, Any] = {
        "seed": config.training.seed,
        "slots": config.federation.slots,
        "model": config.model.model_dump(),
        "parallel": config.parallel.model_dump(exclude={"replicas"}),
        "noloco": {name: noloco[name] for name in _ALIKE} | {"gamma": config.noloco.gamma},
    }
    digest = hashlib.sha256(json.dumps(alike, sort_keys=True).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def check_network(config: RunConfig) -> None:
    """Raises ValueError when rendezvous or key are no such thing; nothing is opened."""
    if config.federation.slots is not None:
        _network(config, config.replica_size)


def enter(config: RunConfig, topology: Topology) -> FederationTransport:
    """The door of this rank to the others; all ranks of the job call it. Raises ValueError, OSError."""
    deadline = Deadline(config.federation.shortest_deadline_seconds, config.noloco.deadline_seconds)
    patience = Patience(deadline, config.federation.rounds_behind * config.noloco.fragments)
    place, network = topology.place(dist.get_rank()), _network(config, topology.replica_size)
    return FederationTransport(place, network, patience, agreement_of_replica())


def keeping_up(config: RunConfig, transport: FederationTransport) -> KeepingUp:
    noloco, federation = config.noloco, config.federation
    pace = Pace(
        local_steps=noloco.local_steps,
        fragments=noloco.fragments,
        rounds_behind=federation.rounds_behind,
        start_with=federation.start_with,
        longest_seconds=noloco.deadline_seconds,
        steps=config.training.train_iters,
    )
    return KeepingUp(transport, pace)


def _network(config: RunConfig, replica_size: int) -> Network:
    federation, run = config.federation, run_number(config)
    assert federation.slots is not None
    assert federation.rendezvous is not None
    rendezvous: Rendezvous = rendezvous_of(
        federation.rendezvous, federation.listen, run, (federation.slots, replica_size)
    )
    keys = None
    if federation.encryption == "curve":
        assert federation.key_file is not None
        keys = Keys.read(Path(federation.key_file))
    return Network(rendezvous, run, keys, reachable_address)
