"""How a job enters a federation: the one way in, for the trainer and for `attach`."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil

from megatron_noloco.errors import UserError
from megatron_noloco.federation.compatibility import RunIdentity, digests_of, run_number
from megatron_noloco.federation.gather import Gather
from megatron_noloco.federation.keys import Keys
from megatron_noloco.federation.members import Members
from megatron_noloco.federation.movement import Held, movement_of
from megatron_noloco.federation.network import Network, meeting_place, place_to_advertise, place_to_listen
from megatron_noloco.federation.pairing import Pairing
from megatron_noloco.federation.partners import Partners
from megatron_noloco.federation.recovery import States
from megatron_noloco.federation.rounds import Replica
from megatron_noloco.federation.statuses import PeerStatus
from megatron_noloco.job.activity import now
from megatron_noloco.job.agreement import computed_by_rank_0
from megatron_noloco.outer import Weights
from megatron_noloco.plans.topology import Place
from megatron_noloco.settings import FederationSettings, NolocoSettings, shared

FIRST_SECONDS = 5.0  # for another job, which may have a state to give
TOGETHER_SECONDS = 30.0  # for others that are started again with this job
START_SECONDS = 600.0  # for `start_with` jobs
_BACK_SECONDS = range(20, 120)  # for a job that was lost to start again, while others are at their end


class Membership:
    """The connection of a job to a federation, as one of its ranks has it.

    The job is one replica. Its first rank leads: it alone is connected to other replicas, sees them and decides.

    Args:
        members: of the leader; None on the other ranks.
        place: of the replica among the others.
        steps: see `join_federation`.

    Attributes:
        back_seconds: for a job that was lost to come back, once this one is at its end: twice the time of a start.
        states: gives the state of this replica to others, and takes theirs.
        say: called on the leader with lines about states that could not be taken over.
    """

    name = "federation"  # in the place of a transport's

    def __init__(
        self,
        members: Members | None,
        place: Place,
        noloco: NolocoSettings,
        federation: FederationSettings,
        steps: int | None = None,
    ) -> None:
        self.members, self.place = members, place
        self.noloco, self.federation = noloco, federation
        self.states = States(members, steps)
        self.steps = steps
        self.back_seconds = _seconds_to_come_back()
        self.say: Callable[[str], object] = lambda line: None

    def replica(self, weights: Weights, seed: int, held: Held | None = None) -> Replica:
        """Return what makes the exchanges of rounds count for both partners or for neither.

        A collective of the job.

        Args:
            weights, held: see `movement_of`.
        """
        movement = self.states.movement = movement_of(weights, self.noloco.fragments, held)
        partners = None
        if self.members is not None:
            seconds = self.federation.shortest_deadline_seconds, self.noloco.deadline_seconds
            behind = self.federation.rounds_behind * self.noloco.fragments
            partners = Partners(self.members, *seconds, behind)
        return Replica(Gather(movement), self.place, Pairing(self.noloco, seed), partners)

    def wait_for_start(self, done: int) -> bool:
        """Wait for `start_with` jobs, ten minutes at most; return whether they came, or this job is to end.

        A job that finds others past their first round waits for five seconds at most, in which those that start
        with it come. Then it waits as long for links to all that are there. A job that continues from a
        checkpoint waits for half a minute at most, in which others that are started again with it may come.

        Args:
            done: local steps of the checkpoint; 0: there is none.

        Raises UserError where the rendezvous has only led to jobs with which a new job can never exchange.
        """
        self.states.can_give(done)
        try:
            return computed_by_rank_0(partial(self._wait_for_others, done), UserError)
        except UserError:
            self.leave()
            raise

    def finds_trained(self) -> bool:
        """Wait half a minute for a replica that has trained; return whether it came, or this job is to stop.

        A collective of the job.
        """

        def is_there() -> bool:
            there = self.leader.present().values()
            return any(status.begun >= 0 and not status.has_left for status in there)

        now.part("looking for another replica")
        return computed_by_rank_0(
            lambda: self.leader.wait(is_there, TOGETHER_SECONDS) or self.leader.is_leaving
        )

    def _wait_for_others(self, done: int) -> bool:
        """Wait for others at the start; return whether enough came. Raises UserError where no other can."""
        members, others = self.leader, self.federation.start_with - 1

        def are_there(least: int) -> bool:
            count = len(members.present())
            now.part(f"{count + 1} of {least + 1} replicas are there")
            return count >= least

        def can_start() -> bool:  # or some are past their first round
            return are_there(others) or any(status.begun > 0 for status in members.present().values())

        members.wait(lambda: are_there(max(1, others)), FIRST_SECONDS)
        if (refusal := members.mesh.refusal) and not members.peers() and not done:
            raise UserError(refusal)
        seconds = TOGETHER_SECONDS if done else START_SECONDS
        if not can_start():
            enough = f"federation.start_with = {others + 1} replicas"
            members.mesh.warn(f"waits {seconds:g} s at most until {enough} are there")
        came = members.wait(can_start, seconds)

        def are_reached() -> bool:  # or can never be; others know of a job before this one has a link to it
            is_hidden = members.status.hidden
            peers = (peer for peer in members.peers().values() if peer.present)
            return all(peer.reached or (is_hidden and peer.status.hidden) for peer in peers)

        members.wait(are_reached, FIRST_SECONDS)
        return came or members.is_leaving or done > 0

    @property
    def leader(self) -> Members:
        """The members, on the leader."""
        assert self.members is not None
        return self.members

    def leave(self) -> None:
        """Disconnect, so that no replica waits for this one. The ranks need not call it together."""
        self.states.close()
        if self.members is not None:
            self.members.close()


def _seconds_to_come_back() -> float:
    """Return twice the time that this process has taken so far, to its start."""
    seconds = 2 * (time.time() - psutil.Process().create_time())
    return min(max(seconds, _BACK_SECONDS.start), _BACK_SECONDS.stop)


def join_federation(
    federation: FederationSettings,
    noloco: NolocoSettings,
    place: Place,
    alike: RunIdentity,
    steps: int | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> Membership:
    """Connect this job, which is one replica, to the other jobs. A collective of the job.

    Args:
        federation, noloco: without `settings.federation_problems`.
        place: of the replica.
        alike: what all jobs must have alike besides the settings, such as the model.
        steps: local steps of the whole training, the last of which is never left out; None: not known.
        stopped: see `Network.open`.

    Raises UserError for a rendezvous or a key file that is none, for a folder that it may not write, and where it
    cannot listen; OSError where its address cannot be announced for another reason.
    """
    members = list[Members]()

    def open_network() -> None:
        try:
            members.append(network_of(federation, noloco, alike).open(place.replica, stopped))
        except PermissionError as error:
            raise UserError(str(error)) from None

    computed_by_rank_0(open_network, ValueError, OSError)
    return Membership(members[0] if members else None, place, noloco, federation, steps)


def network_of(federation: FederationSettings, noloco: NolocoSettings, alike: RunIdentity) -> Network:
    """Return how this job's ranks reach the others; opens nothing. Raises UserError as `join_federation` does."""
    assert federation.rendezvous is not None
    alike = alike._replace(shared={"noloco": shared(noloco), **alike.shared})
    seeds, folder = meeting_place(federation.rendezvous)
    listen = place_to_listen(federation.listen, seeds)
    return Network(
        run_number(alike.shared),
        alike.digests,
        Keys.read(Path(str(federation.key_file))),
        seeds,
        folder,
        listen,
        place_to_advertise(federation.advertise, listen),
        PeerStatus(
            site=federation.site or "",
            kind=alike.kind,
            digests=digests_of(alike.own),
            batch=alike.batch,
        ),
    )
