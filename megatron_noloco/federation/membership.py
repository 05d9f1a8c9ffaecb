"""How a job enters a federation: the one way in, for the trainer and for `attach`."""

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from megatron_noloco.errors import UserError
from megatron_noloco.federation.commit import Replica, committing
from megatron_noloco.federation.exchanges import FINAL
from megatron_noloco.federation.handover import Handover, Keeper, Taken
from megatron_noloco.federation.keeping_up import AtEnd, AtItsEnd, KeepingUp, UntrainedError
from megatron_noloco.federation.keys import Keys
from megatron_noloco.federation.likeness import Alike, run_number
from megatron_noloco.federation.movement import Held, movement_of
from megatron_noloco.federation.network import FederationTransport, Network
from megatron_noloco.federation.partners import Patience
from megatron_noloco.federation.rendezvous import rendezvous_of
from megatron_noloco.federation.service import ServiceFailedError
from megatron_noloco.federation.tree_mean import Tree, TreeMean
from megatron_noloco.job.activity import now
from megatron_noloco.job.agreement import found_by_rank_0, of_rank_0, vote
from megatron_noloco.job.join import reachable_address
from megatron_noloco.outer import ExchangeReport, OuterOptimizer, RoundReport, Weights
from megatron_noloco.outer.health import Health
from megatron_noloco.plans.fragments import due_after, fragment_after, next_after
from megatron_noloco.plans.topology import Place
from megatron_noloco.settings import FederationSettings, NolocoSettings, shared

FIRST_SECONDS = 5.0  # for another job, which may have a state to give
TOGETHER_SECONDS = 30.0  # for others that are started again with this job
_FAREWELL_SECONDS = 0.5  # for the others to read it: what arrives with the end of a connection may be lost
_LOOK_SECONDS = 0.05


class Boundary(NamedTuple):
    """The boundary between two local steps.

    Attributes:
        step: the next local step, from 0.
        gave: whether the state was given to another job.
        took: whose state was taken over; None: the steps before `step` were left out, if any.
    """

    step: int
    gave: bool
    took: Taken | None = None


class Membership:
    """The part of a job in a federation, as one of its ranks has it.

    The job is one replica. Its first rank speaks for all: it alone is connected to other replicas, sees them and
    decides, and the other ranks are told.

    Args:
        transport: of the speaker; None on the other ranks.
        place: of the replica among the others.
        steps: see `join_federation`.

    Attributes:
        keeping_up: of the speaker: which local step comes next.
        handover: gives the state of this replica to others, and takes theirs.
        keeper: what copies this job's state, and uses another; to be set before the first local step.
        say: called on the speaker with lines for the log.
    """

    def __init__(
        self,
        transport: FederationTransport | None,
        place: Place,
        noloco: NolocoSettings,
        federation: FederationSettings,
        steps: int | None = None,
    ) -> None:
        self.transport, self.place = transport, place
        self.noloco, self.federation = noloco, federation
        self.keeping_up = None if transport is None else KeepingUp(transport, noloco, federation, steps)
        self.handover = Handover(transport)
        self.keeper: Keeper
        self.say: Callable[[str], object] = lambda line: None
        self._steps = steps
        self._replica: Replica

    def replica(self, weights: Weights, seed: int, held: Held | None = None) -> Replica:
        """Return what makes the exchanges of rounds count for both partners or for neither; see `committing`.

        A collective of the job.

        Args:
            weights, held: see `movement_of`.
        """
        movement = movement_of(weights, self.noloco.fragments, held)
        partners = None if self.transport is None else self.transport.partners
        self._replica = committing(movement, partners, self.place, self.noloco, seed)
        return self._replica

    def health(self, weights: Weights) -> Health:
        """Return what ends this replica where its weights are no longer finite."""
        return Health(weights, vote)

    def sends_after(self, done: int) -> bool:
        """Return whether a round of weights, or of a fragment, begins after this local step."""
        return fragment_after(done, self.noloco.local_steps, self.noloco.fragments) is not None

    # All methods from here on are collectives of the replica.

    def wait_for_start(self, done: int) -> bool:
        """Wait for `start_with` jobs, `deadline_seconds` at most; return whether they came, or this job is to end.

        A job that finds others past their first round waits for no more. A job that continues from a checkpoint
        waits for half a minute at most, in which others that are started again with it may come.

        Args:
            done: local steps of the checkpoint; 0: there is none.

        Raises UserError where the rendezvous has only led to jobs with which a new job can never exchange.
        """
        self.handover.trains_from(done)
        came, refusal = found_by_rank_0(partial(self._wait_for_others, done))
        if refusal:
            self.leave()
            raise UserError(refusal)
        return came

    def _wait_for_others(self, done: int) -> tuple[bool, str]:
        """Wait for others at the start; return whether enough came, and why none of them can."""
        assert self.transport is not None
        self.transport.wait_for(1, FIRST_SECONDS)
        if done:
            seconds, refusal = min(self.noloco.deadline_seconds, TOGETHER_SECONDS), ""
        else:
            seconds, refusal = self.noloco.deadline_seconds, self.transport.refusal
        came = not refusal and self.transport.wait_for(self.federation.start_with - 1, seconds, trained=True)
        return came or done > 0, refusal

    def announce(self, done: int) -> None:
        """Tell the others after how many local steps this replica goes on, so that they do not find it behind."""
        if self.keeping_up is not None:
            self.keeping_up.start(done)

    def begin(self, done: int, takes: bool) -> Boundary:
        """Announce that this replica trains on after `done` local steps.

        With `takes`, it takes the state of the replica that is furthest before, where that is more than
        `rounds_behind` rounds ahead, and trains on from there.
        """
        taken = self._take_over(done) if takes else None
        if taken is not None:
            done = taken.step
        self.announce(done)
        return Boundary(done, False, taken)

    def between_steps(self, done: int) -> Boundary:
        """Return what happened between two local steps, and which one comes next.

        Raises as `KeepingUp.next_step` does.

        Args:
            done: local steps so far.
        """
        told = of_rank_0(self._look(done))
        assert told is not None
        wanted, step, problem = told
        if problem:
            raise UntrainedError(problem)
        gave = wanted and self.handover.give(partial(self.keeper.copy, done))
        if step is not None:
            return Boundary(step, gave)
        taken = self._take_over(done)
        if taken is None:  # it is tried again; nobody exchanges with this replica until then
            return Boundary(done, gave)
        self.announce(taken.step)
        return Boundary(taken.step, gave, taken)

    def average(self, outer: OuterOptimizer, done: int) -> list[ExchangeReport]:
        """Make all replicas that come to their end equal to their mean; see `TreeMean`.

        A replica that ended more than `rounds_behind` rounds before the furthest gets the mean, and is not in it.
        Averages nothing, and returns no reports, where this job is asked to stop meanwhile.

        Args:
            done: local steps of this replica.
        """
        end = self._wait_at_end(done)
        self.handover.ended()
        if end is None:
            return []
        tree = None
        if self.transport is not None and self.keeping_up is not None:
            seconds = self.noloco.deadline_seconds
            tree = Tree(self.transport, seconds, self.keeping_up.is_at_its_end, end.left_out, end.links)
        mean = TreeMean(self._replica, tree)
        reports = outer.settle(mean, [end.group], FINAL)
        return [] if mean.stopped else reports

    def exchange_once_more(self, outer: OuterOptimizer, done: int) -> tuple[list[RoundReport], int]:
        """Run the next round before it is due, since this replica leaves.

        So the partner keeps half of what this replica has learned since its last round. Waits for a partner
        `leave_seconds` at most.

        Args:
            done: local steps of this replica.

        Returns the reports of the rounds that have ended, and after how many local steps a resume goes on: where
        the round counts, those after which it would have been due.
        """
        reports, schedule = outer.finish(), (self.noloco.local_steps, self.noloco.fragments)
        if not self.federation.leave_seconds or fragment_after(done, *schedule) is not None:
            return reports, done
        at = next_after(done, *schedule)
        if self._steps is not None and due_after(*at, *schedule) > self._steps:
            return reports, done
        if self.transport is not None:
            self.transport.partners.leave_in(self.federation.leave_seconds)
        reports.append(outer.run_round(*at))
        counts = len(reports[-1].exchange.group) > 1
        return reports, due_after(*at, *schedule) if counts else done

    def leave(self) -> None:
        """Disconnect, so that no replica waits for this one. The ranks need not call it together."""
        if self.keeping_up is not None:
            with suppress(ServiceFailedError):  # then the connections are lost, which tells the others
                self.keeping_up.leave()
        self.handover.close()
        if self.transport is not None:
            with suppress(ServiceFailedError):
                if self.transport.present():
                    time.sleep(_FAREWELL_SECONDS)
            self.transport.close()

    def _take_over(self, done: int) -> Taken | None:
        least = done + self.federation.rounds_behind * self.noloco.local_steps + 1
        with now.doing("taking over the state of another replica"):
            return self.handover.take_over(self.keeper, least, self.noloco.deadline_seconds, self.say)

    def _look(self, done: int) -> tuple[bool, int | None, str] | None:
        """Return what the speaker decides: whether to give, the next step, and why it cannot go on."""
        if self.keeping_up is None:
            return None
        wanted = self.handover.wanted(done)
        try:
            return wanted, self.keeping_up.next_step(done), ""
        except UntrainedError as error:
            return wanted, done, str(error)

    def _wait_at_end(self, done: int) -> AtEnd | None:
        """Wait for the others, and give those that ask for it the state; None where this job is to stop."""
        waiting = None if self.keeping_up is None else self.keeping_up.at_end(done)
        now.part("waiting for the other replicas at the end")
        while True:
            wanted, end = found_by_rank_0(partial(self._look_at_end, waiting, done))
            if wanted:
                self.handover.give(partial(self.keeper.copy, done))
            if end is not None or not wanted:
                return end

    def _look_at_end(self, waiting: AtItsEnd | None, done: int) -> tuple[bool, AtEnd | None]:
        """Wait for news; return whether a state is wanted, and who forms the mean; neither if this job stops."""
        assert self.transport is not None
        assert waiting is not None
        while not self.transport.partners.stopped():
            wanted, end = self.handover.wanted(done), waiting.look()
            if wanted or end is not None:
                return wanted, end
            time.sleep(_LOOK_SECONDS)
        return False, None


def join_federation(
    federation: FederationSettings,
    noloco: NolocoSettings,
    place: Place,
    alike: Alike,
    steps: int | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> Membership:
    """Connect this job, which is one replica, to the other jobs. A collective of the job.

    Args:
        federation, noloco: without `settings.federation_problems`.
        place: of the replica: the job's slot, and their number.
        alike: what all jobs must have alike besides the settings, such as the model.
        steps: local steps of the whole training, the last of which is never left out; None: not known.
        stopped: see `FederationTransport`.

    Raises UserError for a rendezvous or a key file that is none, and where it cannot listen; OSError where its
    address cannot be announced.
    """
    transport, problem = None, None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            patience = Patience(
                federation.shortest_deadline_seconds,
                noloco.deadline_seconds,
                federation.rounds_behind * noloco.fragments,
            )
            network = network_of(federation, noloco, alike)
            transport = FederationTransport(place, network, patience, stopped=stopped)
        except (ValueError, OSError) as error:
            problem = error
    if (found := of_rank_0(problem)) is not None:
        raise found
    return Membership(transport, place, noloco, federation, steps)


def network_of(federation: FederationSettings, noloco: NolocoSettings, alike: Alike) -> Network:
    """Return how this job's ranks reach the others; opens nothing. Raises UserError as `join_federation` does."""
    assert federation.rendezvous is not None
    alike = alike._replace(shared={"noloco": shared(noloco), **alike.shared})
    run, digests = run_number(alike.shared), alike.digests
    rendezvous = rendezvous_of(federation.rendezvous, run, digests)
    keys = None
    if federation.encryption == "tls":
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
        kind=alike.kind,
        site=federation.site or "",
    )
