"""How a job enters a federation: the one way in, for the trainer and for `attach`."""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from megatron_noloco.federation.commit import Replica, committing
from megatron_noloco.federation.counterpart import FINAL
from megatron_noloco.federation.handover import Handover, Snapshot
from megatron_noloco.federation.keeping_up import Health, KeepingUp
from megatron_noloco.federation.keys import Keys
from megatron_noloco.federation.likeness import digests_of, run_number
from megatron_noloco.federation.movement import Held, movement_of
from megatron_noloco.federation.network import (
    FederationTransport,
    Network,
    Patience,
)
from megatron_noloco.federation.rendezvous import rendezvous_of
from megatron_noloco.federation.service import ServiceFailedError
from megatron_noloco.federation.tree_mean import TreeMean
from megatron_noloco.job.agreement import of_all_ranks, voting
from megatron_noloco.job.join import reachable_address
from megatron_noloco.outer import (
    ExchangeReport,
    OuterOptimizer,
    Weights,
)
from megatron_noloco.plans.topology import Place
from megatron_noloco.settings import FederationSettings, NolocoSettings, shared

FIRST_SECONDS = 5.0  # for another job, which may have a state to give
TOGETHER_SECONDS = 30.0  # for others that are started again with this job
_FAREWELL_SECONDS = 0.5  # for the others to read it: what arrives with the end of a connection may be lost


class Boundary(NamedTuple):
    """The boundary between two local steps.

    Attributes:
        step: the next local step, from 0.
        gave: whether the state was given to another job.
        took: whether that of another was taken over; else the steps before `step` were left out, if any.
    """

    step: int
    gave: bool
    took: bool = False


@dataclass(frozen=True)
class Membership:
    """The part of a rank in a federation.

    Attributes:
        transport: to the counterparts in the other jobs.
        keeping_up: which local step comes next.
        handover: gives this rank's state to others, and takes theirs.
    """

    transport: FederationTransport
    keeping_up: KeepingUp
    handover: Handover
    noloco: NolocoSettings
    federation: FederationSettings

    def replica(self, weights: Weights, seed: int, held: Held | None = None) -> Replica:
        """Return what makes the exchanges of rounds count for both partners or for neither; see `committing`.

        A collective of the job.

        Args:
            weights, held: see `movement_of`.
        """
        movement = movement_of(weights, self.noloco.fragments, held)
        return committing(movement, self.transport.partners, self.transport.place, self.noloco, seed)

    def health(self, weights: Weights) -> Health:
        """Return what ends this replica where its weights are no longer finite."""
        noloco, agree = self.noloco, self.transport.partners.agree
        return Health(weights, noloco.local_steps, noloco.fragments, agree)

    def between_steps(
        self, done: int, copy: Callable[[], Callable[[], Snapshot]], take_over: Callable[[int], int | None]
    ) -> "Boundary":
        """Return what happened between two local steps, and which one comes next.

        Call it between two local steps. A collective of the replica; raises as `KeepingUp.next_step` does.

        Args:
            done: local steps so far.
            copy: see `Handover.give`.
            take_over: is called where this replica was away for long, with the fewest local steps of a state that
                is worth taking; takes one over, and returns its local steps, or None where there is none to take.
        """
        votes = [not self.handover.wanted(done), self.keeping_up.due(done)]
        not_wanted, due = self.transport.partners.agree(votes)
        gave = not not_wanted and self.handover.give(copy)
        step = self.keeping_up.next_step(done, due)
        if step is not None:
            return Boundary(step, gave)
        taken = take_over(self.keeping_up.least_to_take(done))
        if taken is None:  # it is tried again; nobody exchanges with this replica until then
            return Boundary(done, gave)
        self.keeping_up.start(taken)
        return Boundary(taken, gave, took=True)

    def average(self, outer: OuterOptimizer, done: int) -> list[ExchangeReport]:
        """Make all replicas that come to their end equal to their mean; see `TreeMean`. A collective.

        A replica that ended more than `rounds_behind` rounds before the furthest gets the mean, and is not in it.
        Averages nothing, and returns no reports, where this job is asked to stop meanwhile.

        Args:
            done: local steps of this replica.
        """
        self.handover.ended()
        end = self.keeping_up.members_at_end(done, self.transport.partners.stopped)
        if end is None:
            return []
        at_end, seconds = self.keeping_up.is_at_its_end, self.noloco.deadline_seconds
        mean = TreeMean(self.transport, seconds, at_end, end.left_out)
        reports = outer.settle(mean, [end.group], FINAL)
        return [] if mean.stopped else reports

    def leave(self) -> None:
        """Disconnect, so that no replica waits for this one."""
        with suppress(ServiceFailedError):  # then the connections are lost, which tells the others
            self.keeping_up.leave()
        self.handover.close()
        with suppress(ServiceFailedError):
            if self.transport.present():
                time.sleep(_FAREWELL_SECONDS)
        self.transport.close()

    def wait_for_start(self, continues: bool) -> bool:
        """Wait for `start_with` jobs, `deadline_seconds` at most; return whether they came, or this job is to
        stop. A collective.

        A job that finds others past their first round waits for no more. A job that continues from a checkpoint
        waits for half a minute at most, in which others that are started again with it may come.
        """
        self.transport.wait_for(1, FIRST_SECONDS)
        seconds = self.noloco.deadline_seconds
        if continues:
            seconds = min(seconds, TOGETHER_SECONDS)
        came = self.transport.wait_for(self.federation.start_with - 1, seconds, trained=True)
        return self.transport.partners.agree([came or continues]) == [True]


def join_federation(
    federation: FederationSettings,
    noloco: NolocoSettings,
    place: Place,
    alike: Mapping[str, Any],
    steps: int | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> Membership:
    """Connect this rank to its counterparts in the other jobs. A collective of the job, which is one replica.

    Args:
        federation, noloco: without `settings.federation_problems`.
        place: of this rank; its replica is the job's slot.
        alike: what all jobs must have alike besides the settings, such as the model; anything that JSON can hold.
        steps: local steps of the whole training, the last of which is never left out; None: not known.
        stopped: see `FederationTransport`.

    Raises ValueError for a rendezvous or a key file that is none, and where it cannot listen; OSError where its
    address cannot be announced.
    """
    network = network_of(federation, noloco, alike)
    patience = Patience(
        federation.shortest_deadline_seconds,
        noloco.deadline_seconds,
        federation.rounds_behind * noloco.fragments,
    )
    if not dist.is_initialized():
        transport = FederationTransport(place, network, patience, stopped=stopped)
    else:
        transport = FederationTransport(place, network, patience, voting(), stopped)
        addresses = of_all_ranks((place.rank, transport.address))
        # Others that find one rank learn from it where all ranks of its replica are.
        transport.service.learn(dict(addresses))
    keeping_up, handover = KeepingUp(transport, noloco, federation, steps), Handover(transport)
    return Membership(transport, keeping_up, handover, noloco, federation)


def network_of(federation: FederationSettings, noloco: NolocoSettings, alike: Mapping[str, Any]) -> Network:
    """Return how this job's ranks reach the others; opens nothing. Raises ValueError as `join_federation` does."""
    assert federation.rendezvous is not None
    compared = {"noloco": shared(noloco), **alike}
    run, digests = run_number(compared), digests_of(compared)
    rendezvous = rendezvous_of(federation.rendezvous, run, digests)
    keys = None
    if federation.encryption == "curve":
        assert federation.key_file is not None
        keys = Keys.read(Path(federation.key_file))
    listen = None if federation.listen == "off" else federation.listen or rendezvous.listen
    return Network(
        rendezvous,
        run,
        listen,
        keys,
        partial(reachable_address, rendezvous.hosts),
        federation.advertise,
        digests=digests,
    )
