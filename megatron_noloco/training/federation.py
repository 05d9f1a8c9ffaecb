"""A job of a federation: how it enters, and how it keeps up with the others."""

import hashlib
import json
import statistics
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_noloco.config import RunConfig
from megatron_noloco.federation.counterparts import Deadline, Patience, agreement_of_replica
from megatron_noloco.federation.keys import Keys
from megatron_noloco.federation.rendezvous import rendezvous_of
from megatron_noloco.federation.transport import FederationTransport, Network
from megatron_noloco.job.join import reachable_address
from megatron_noloco.plans.fragments import due_after, next_after
from megatron_noloco.plans.topology import Topology

_FIRST_SECONDS = 5.0  # to find one that is there
_TRAINED_ROUNDS = 10  # after so many, weights are not to be averaged with fresh ones
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
        _network(config)


def enter(config: RunConfig, topology: Topology) -> FederationTransport:
    """The door of this rank to the others; all ranks of the job call it. Raises ValueError, OSError."""
    deadline = Deadline(config.federation.shortest_deadline_seconds, config.noloco.deadline_seconds)
    patience = Patience(deadline, config.federation.rounds_behind * config.noloco.fragments)
    place = topology.place(dist.get_rank())
    transport = FederationTransport(place, _network(config), patience, agreement_of_replica())
    if topology.world_size > 1:  # who meets one rank learns where all ranks of its replica are
        addresses: list[Any] = [None] * topology.world_size
        dist.all_gather_object(addresses, (place.rank, transport.address))
        transport.service.learn(dict(addresses))
    return transport


def _network(config: RunConfig) -> Network:
    federation, run = config.federation, run_number(config)
    assert federation.slots is not None
    assert federation.rendezvous is not None
    rendezvous = rendezvous_of(federation.rendezvous, run)
    keys = None
    if federation.encryption == "curve":
        assert federation.key_file is not None
        keys = Keys.read(Path(federation.key_file))
    return Network(rendezvous, run, federation.listen or rendezvous.listen, keys, reachable_address)


def wait_for_others(config: RunConfig, transport: FederationTransport) -> list[str]:
    """Until there are enough to start with; shortly for any that may have a state to give. All ranks call it.

    Returns a line where they did not come in time.
    """
    wanted = config.federation.start_with - 1
    if not wanted:
        transport.wait_for(1, _FIRST_SECONDS)
    came = transport.wait_for(wanted, config.noloco.deadline_seconds)
    if transport.partners.agree([came]) == [True]:
        return []
    return ["fewer replicas than federation.start_with are there; starting without"]


class UntrainedError(RuntimeError):
    """A replica has no weights with which it could join the others."""


class KeepingUp:
    """Which local step comes next, in a federation.

    A replica that was away would meet nobody, since the others are at later rounds; one that is slower than the
    others would let its partners wait. So it looks at the others now and then. Where half of them, at least, have
    come to an exchange that is more than a few local steps away, it leaves out all of these but the last. A few
    are a quarter of the steps from one exchange to the next; with `federation.local_steps` "all" those of
    `federation.rounds_behind` rounds, so that no step is left out for being slow.

    Local steps, learning rate and samples are those of the number of the step. The samples of steps that are left
    out are not read. The weights are the replica's own, and rounds pull them to those of the others.

    Attributes:
        local_steps: k.
    """

    def __init__(self, transport: FederationTransport, config: RunConfig) -> None:
        self._transport = transport
        self.local_steps = config.noloco.local_steps
        self._fragments = config.noloco.fragments
        self._train_iters = config.training.train_iters
        self._few = config.federation.rounds_behind * self.local_steps
        self._look_interval = self.local_steps
        if config.federation.local_steps == "auto":
            self._few = self.local_steps // (4 * self._fragments)
            self._look_interval = max(1, self._few)
        self._untrained = False

    def start(self, done: int) -> None:
        """Before the first local step: tell where this rank is."""
        self._untrained = done == 0
        self._tell(done)

    def next_step(self, step: int) -> int:
        """The local step (from 0) that follows when `step` would; the same on all ranks of the replica.

        Raises UntrainedError for a replica that began anew, and finds that the others have trained long before.
        """
        if step % self._look_interval:
            return step
        holder = [self._due_of_others()]
        if dist.get_world_size() > 1:
            dist.broadcast_object_list(holder, src=0)
        if holder[0] is None:
            return step
        left_out = holder[0] - 1 - step
        if self._untrained and left_out >= _TRAINED_ROUNDS * self.local_steps:
            raise UntrainedError(
                "the others have trained already, and this replica has no checkpoint: its weights would spoil "
                "theirs; start it again when one of those that it can reach has saved a checkpoint"
            )
        self._untrained = False  # or as little as the others
        if left_out <= self._few:
            return step
        self._tell(step + left_out)
        return step + left_out

    def _tell(self, done: int) -> None:
        """This replica does not come to exchanges before this step: nobody is to wait for it in one."""
        round_index, fragment = next_after(done, self.local_steps, self._fragments)
        over = round_index * self._fragments + fragment - 1
        self._transport.partners.leave_out(over)

    def _due_of_others(self) -> int | None:
        """The local steps before the exchange that half of the others have come to; None where nobody is there."""
        begun = [number for number in self._transport.begun() if number >= 0]
        if not begun:
            return None
        at = divmod(statistics.median_low(begun), self._fragments)
        return min(due_after(*at, self.local_steps, self._fragments), self._train_iters)
