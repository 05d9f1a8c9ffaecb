"""How a job enters a federation: the one way in, for the trainer and for `attach`."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from megatron_noloco.errors import UserError
from megatron_noloco.federation.catch_up import AtEnd, AtItsEnd, CatchUp, UntrainedError
from megatron_noloco.federation.compatibility import Alike, run_number
from megatron_noloco.federation.final_mean import FINAL, FinalMean
from megatron_noloco.federation.gather import Gather
from megatron_noloco.federation.keys import Keys
from megatron_noloco.federation.messages import Member
from megatron_noloco.federation.movement import Held, movement_of
from megatron_noloco.federation.network import Network, open_node
from megatron_noloco.federation.node_thread import NodeThread
from megatron_noloco.federation.pairing import Pairing
from megatron_noloco.federation.partners import Partners
from megatron_noloco.federation.rendezvous import rendezvous_of
from megatron_noloco.federation.rounds import Leading, Replica
from megatron_noloco.federation.takeover import Keeper, Taken, TakeOver
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

    The job is one replica. Its first rank leads: it alone is connected to other replicas, sees them and decides,
    and the other ranks are told.

    Args:
        leading: of the leader; None on the other ranks.
        place: of the replica among the others.
        steps: see `join_federation`.

    Attributes:
        catch_up: of the leader: which local step comes next.
        states: gives the state of this replica to others, and takes theirs.
        keeper: what copies this job's state, and uses another; to be set before the first local step.
        say: called on the leader with lines for the log.
    """

    def __init__(
        self,
        leading: Leading | None,
        place: Place,
        noloco: NolocoSettings,
        federation: FederationSettings,
        steps: int | None = None,
    ) -> None:
        self.leading, self.place = leading, place
        self.noloco, self.federation = noloco, federation
        thread = None if leading is None else leading.thread
        self.catch_up = None if thread is None else CatchUp(thread, noloco, federation, steps)
        self.states = TakeOver(thread)
        self.keeper: Keeper
        self.say: Callable[[str], object] = lambda line: None
        self._steps = steps
        self._replica: Replica

    def replica(self, weights: Weights, seed: int, held: Held | None = None) -> Replica:
        """Return what makes the exchanges of rounds count for both partners or for neither.

        A collective of the job.

        Args:
            weights, held: see `movement_of`.
        """
        gather = Gather(movement_of(weights, self.noloco.fragments, held))
        self._replica = Replica(gather, self.place, Pairing(self.noloco, seed), self.leading)
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

        A job that finds others past their first round waits for five seconds at most, in which those that start
        with it get links to it. A job that continues from a checkpoint waits for half a minute at most, in which
        others that are started again with it may come.

        Args:
            done: local steps of the checkpoint; 0: there is none.

        Raises UserError where the rendezvous has only led to jobs with which a new job can never exchange.
        """
        self.states.trains_from(done)
        came, refusal = found_by_rank_0(partial(self._wait_for_others, done))
        if refusal:
            self.leave()
            raise UserError(refusal)
        return came

    def _wait_for_others(self, done: int) -> tuple[bool, str]:
        """Wait for others at the start; return whether enough came, and why no other can."""
        thread = self._thread
        self._wait_for(1, FIRST_SECONDS)
        seconds = self.noloco.deadline_seconds
        refusal = "" if thread.node.present() else thread.node.dialling.refusal
        if done:
            seconds, refusal = min(seconds, TOGETHER_SECONDS), ""
        others = self.federation.start_with - 1
        came = not refusal and self._wait_for(others, seconds, trained=True)
        if came:
            self._wait_for(others, FIRST_SECONDS)  # they may start with this one, and have no link to it yet
        return came or done > 0, refusal

    def _wait_for(self, others: int, seconds: float, trained: bool = False) -> bool:
        """Wait until this many replicas are there, or this job is to stop; returns False when time is up.

        Replicas count that have a link to this one, and of two hidden replicas each for the other.

        Args:
            trained: whether a replica that is past its first round ends the wait as well.
        """
        node = self._thread.node

        def enough() -> bool:
            present, hidden = node.present(), node.hidden()
            there = len({*present} | hidden - {node.slot} if node.slot in hidden else present)
            now.part(f"{there + 1} of {others + 1} replicas are there")
            return there >= others or (trained and any(status.begun > 0 for status in present.values()))

        return self._thread.wait(enough, seconds) or node.is_leaving

    @property
    def _thread(self) -> NodeThread:
        assert self.leading is not None
        return self.leading.thread

    def announce(self, done: int) -> None:
        """Tell the others after how many local steps this replica goes on, so that they do not find it behind."""
        if self.catch_up is not None:
            self.catch_up.start(done)

    def begin(self, done: int, takes: bool) -> Boundary:
        """Announce that this replica trains on after `done` local steps.

        With `takes`, it takes the state of the replica that is furthest before, where that is more than
        `rounds_behind` rounds ahead, and trains on from there. Until it trains it has begun no round, so
        replicas that are as far ahead do not wait for it, and those that begin with it do.
        """
        taken = self._take_over(done) if takes else None
        if taken is not None:
            done = taken.step
        self.announce(done)
        return Boundary(done, False, taken)

    def between_steps(self, done: int) -> Boundary:
        """Return what happened between two local steps, and which one comes next.

        Raises as `CatchUp.next_step` does.

        Args:
            done: local steps so far.
        """
        told = of_rank_0(self._look(done))
        assert told is not None
        wanted, step, problem = told
        if problem:
            raise UntrainedError(problem)
        gave = wanted and self.states.give(self.keeper, done)
        if step is not None:
            return Boundary(step, gave)
        if self.leading is not None:  # no replica waits for this one until it goes on
            thread = self.leading.thread
            thread.do(thread.node.go_on, -1, "behind")
        taken = self._take_over(done)
        if taken is None:  # it is tried again; nobody exchanges with this replica until then
            return Boundary(done, gave)
        self.announce(taken.step)
        return Boundary(taken.step, gave, taken)

    def average(self, outer: OuterOptimizer, done: int) -> list[ExchangeReport]:
        """Make all replicas that come to their end equal to their mean; see `FinalMean`.

        A replica that ended more than `rounds_behind` rounds before the furthest gets the mean, and is not in it.
        Averages nothing, and returns no reports, where this job is asked to stop meanwhile.

        Args:
            done: local steps of this replica.
        """
        end = self._wait_at_end(done)
        self.states.trains_from(0)
        if end is None:
            return []
        mean = FinalMean(self._replica, end, self.noloco.deadline_seconds)
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
        if self.leading is not None:
            self.leading.thread.node.leave_in(self.federation.leave_seconds)
        reports.append(outer.run_round(*at))
        counts = len(reports[-1].exchange.group) > 1
        return reports, due_after(*at, *schedule) if counts else done

    def leave(self) -> None:
        """Disconnect, so that no replica waits for this one. The ranks need not call it together."""
        self.states.close()
        if self.leading is not None:
            self.leading.thread.close()

    def _take_over(self, done: int) -> Taken | None:
        least = done + self.federation.rounds_behind * self.noloco.local_steps + 1
        with now.doing("taking over the state of another replica"):
            return self.states.take_over(self.keeper, least, self.noloco.deadline_seconds, self.say)

    def _look(self, done: int) -> tuple[bool, int | None, str] | None:
        """Return what the leader decides: whether to give, the next step, and why it cannot go on."""
        if self.catch_up is None:
            return None
        wanted = self.states.wanted(done)
        try:
            step = self.catch_up.next_step(done)
        except UntrainedError as error:
            return wanted, done, str(error)
        if step is not None and self._thread.node.phase == "behind":  # the others are no longer ahead
            self.announce(step)
        return wanted, step, ""

    def _wait_at_end(self, done: int) -> AtEnd | None:
        """Wait for the others, and give those that ask for it the state; None where this job is to stop."""
        waiting = None if self.catch_up is None else self.catch_up.at_end(done)
        now.part("waiting for the other replicas at the end")
        while True:
            wanted, end = found_by_rank_0(partial(self._look_at_end, waiting, done))
            if wanted:
                self.states.give(self.keeper, done)
            if end is not None or not wanted:
                return end

    def _look_at_end(self, waiting: AtItsEnd | None, done: int) -> tuple[bool, AtEnd | None]:
        """Wait for news; return whether a state is wanted, and who forms the mean; neither if this job stops."""
        assert waiting is not None
        while not self._thread.node.is_leaving:
            wanted, end = self.states.wanted(done), waiting.look()
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
        place: of the replica.
        alike: what all jobs must have alike besides the settings, such as the model.
        steps: local steps of the whole training, the last of which is never left out; None: not known.
        stopped: see `open_node`.

    Raises UserError for a rendezvous or a key file that is none, and where it cannot listen; OSError where its
    address cannot be announced.
    """
    leading, problem = None, None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            thread = open_node(network_of(federation, noloco, alike), place.replica, stopped)
            seconds = federation.shortest_deadline_seconds, noloco.deadline_seconds
            behind = federation.rounds_behind * noloco.fragments
            leading = Leading(thread, Partners(thread.node, *seconds, behind))
        except (ValueError, OSError) as error:
            problem = error
    if (found := of_rank_0(problem)) is not None:
        raise found
    return Membership(leading, place, noloco, federation, steps)


def network_of(federation: FederationSettings, noloco: NolocoSettings, alike: Alike) -> Network:
    """Return how this job's ranks reach the others; opens nothing. Raises UserError as `join_federation` does."""
    assert federation.rendezvous is not None
    alike = alike._replace(shared={"noloco": shared(noloco), **alike.shared})
    run, digests = run_number(alike.shared), alike.digests
    rendezvous = rendezvous_of(federation.rendezvous, run, digests)
    key_file = Path(str(federation.key_file)) if federation.encryption == "tls" else None
    return Network(
        rendezvous,
        Member(run, digests, alike.kind),
        None if federation.listen == "off" else federation.listen or rendezvous.listen,
        None if key_file is None else Keys.read(key_file),
        partial(reachable_address, rendezvous.hosts),
        federation.advertise,
        key_file,
        federation.site or "",
    )
