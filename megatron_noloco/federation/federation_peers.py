"""The other jobs of a federation, as a training loop meets them."""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from megatron_noloco.federation.catch_up import CatchUp, UntrainedError
from megatron_noloco.federation.end_of_run import EndOfRun
from megatron_noloco.federation.final_mean import FINAL, FinalMean
from megatron_noloco.federation.membership import Membership
from megatron_noloco.federation.mesh import Member
from megatron_noloco.federation.recovery import Recovery
from megatron_noloco.federation.rounds import Replica, late_change
from megatron_noloco.federation.states import StateAdapter
from megatron_noloco.federation.statuses import FinalStatus
from megatron_noloco.job.activity import now
from megatron_noloco.job.agreement import broadcast_from_rank_0, computed_by_rank_0
from megatron_noloco.outer import ExchangeReport, OuterOptimizer, RoundReport
from megatron_noloco.outer.health import Health
from megatron_noloco.outer.peers import Average, Boundary
from megatron_noloco.plans.fragments import due_after, fragment_after, next_after

Value = TypeVar("Value")
_LOOK_SECONDS = 0.2


class FederationPeers:
    """The other jobs, as one rank of this job meets them; see `outer.peers.Peers`.

    The first rank of the replica decides, and tells the others.

    Args:
        replica: what `Membership.replica` returned, which makes the exchanges of `outer`.
        keeper: copies this job's state, and uses another.
        health: ends this replica before a round where its weights are no longer finite.
    """

    def __init__(
        self,
        membership: Membership,
        replica: Replica,
        outer: OuterOptimizer,
        keeper: StateAdapter,
        health: Health,
    ) -> None:
        self._membership, self._replica, self.outer = membership, replica, outer
        self._keeper, self._health = keeper, health
        self._members, self._states = membership.members, membership.states
        self._schedule = membership.noloco.local_steps, membership.noloco.fragments
        self._settings = membership.noloco, membership.federation
        self._catch_up = None
        if self._members is not None:
            self._catch_up = CatchUp(self._members, *self._settings, membership.steps)
        self._final: Recovery | None = None  # taken from a replica that has finished

    def announce(self, done: int) -> None:
        """Tell the others after how many local steps this replica goes on, so that they do not find it behind."""
        if self._catch_up is not None:
            self._catch_up.start(done)

    def begin(self, done: int, takes_over: bool) -> Boundary:
        """Announce that this replica trains on after `done` local steps.

        With `takes_over`, it recovers the state of the replica that is furthest before, where that is more than
        `rounds_behind` rounds ahead, and trains on from there. Until it trains it has begun no round, so
        replicas that are as far ahead do not wait for it, and those that begin with it do.
        """
        taken = None
        if self._catch_up is not None:
            self._catch_up.takes_over = takes_over
        if takes_over:
            taken = self._take_over(done)
        if taken is None:
            self.announce(done)
            return Boundary(done)
        return _taken_over(done, taken)

    def catch_up(self, done: int) -> Boundary:
        """Return where the training goes on; gives the state to jobs that wait for it. Raises UntrainedError."""
        started = time.perf_counter()
        told = broadcast_from_rank_0(self._look(done))
        assert told is not None
        wanted, step, problem = told
        if problem:
            raise UntrainedError(problem)
        lines: tuple[str, ...] = ()
        if wanted and self._states.give(self._keeper, done, wanted):
            pause = time.perf_counter() - started
            lines = (f" state after iteration {done} given to another replica | pause: {pause:.2f} s |",)
        if step is not None:
            if step - done >= self._membership.noloco.local_steps:
                left_out = f"left out: {done + 1} to {step}"
                lines += (f" continuing at iteration {step + 1} with the other replicas | {left_out} |",)
            return _left_out(done, step, lines)
        taken = self._take_over(done)
        if taken is None:  # it is tried again; nobody exchanges with this replica until then
            return Boundary(done, lines=lines)
        return _taken_over(done, taken, lines)

    def rounds(self, done: int) -> list[RoundReport]:
        """Run the rounds that are due. Raises NotFiniteError where one begins and a weight is not finite."""
        if fragment_after(done, *self._schedule) is not None:
            self._health.check()
        return self.outer.after_local_step(done)

    def average(self, done: int, trained: bool, before_waiting: Callable[[], object]) -> Average:
        """Make all replicas that come to their end equal to their mean; see `FinalMean`.

        A replica that ended more than `rounds_behind` rounds before the others, or comes when they have their
        mean, is not in it, and takes the final model of one of them.
        """
        before_waiting()
        started, own = time.perf_counter(), self._replica.place.replica
        if self._final is None:
            now.part("waiting for the other replicas at the end")
            end = None
            if self._members is not None:
                end = EndOfRun(self._members, *self._settings, done, self._membership.steps)
            is_found = self._give_until(done, lambda: end.look() if end else None)
            self._states.can_give(0)
            if is_found is None:
                return Average(stopped=True)
            if is_found:
                mean = FinalMean(self._replica, end)
                reports = self.outer.settle(mean, [(own,)], FINAL)
                if mean.stopped:
                    return Average(stopped=True)
                if not mean.is_late:
                    seconds = time.perf_counter() - started
                    lines = tuple(filter(None, map(_averaged, reports)))
                    return Average(reports, seconds, lines=lines, replicas={own, *reports[-1].group})
        taken = self._final or self._recover(done, ahead=0)
        seconds = time.perf_counter() - started
        if taken is None:
            return Average(
                (),
                seconds,
                lines=(" the others' final model could not be taken: that of this replica is another |",),
            )
        finals = computed_by_rank_0(self._finals)
        if self._members is not None:
            self._members.step = done  # given once it is saved
            self._members.change(mean=FinalStatus(final=finals.get(taken.slot, "of another")))
        # A state that was taken before was named there.
        lines = () if taken is self._final else (f" {taken} |",)
        return Average((), seconds, lines=lines, replicas={own, taken.slot, *finals})

    def _finals(self) -> dict[int, str]:
        """Return the other replicas that are there and have the final model, each with the name of its attempt."""
        statuses = self._membership.leader.present()
        return {slot: status.mean.final for slot, status in statuses.items() if status.mean.final}

    def leave(self, done: int) -> Boundary:
        """Run the next round before it is due, so that the partner keeps half of what was learned since the last.

        Waits for a partner `leave_seconds` at most. Where the round counts, a resume goes on after the local steps
        after which it would have been due. Raises NotFiniteError.
        """
        self._health.check()
        membership, reports, step = self._membership, self.outer.finish(), done
        at, seconds = next_after(done, *self._schedule), membership.federation.leave_seconds
        due = due_after(*at, *self._schedule)
        has_round = fragment_after(done, *self._schedule) is not None
        if seconds and not has_round and not (membership.steps is not None and due > membership.steps):
            if self._members is not None:
                self._members.leave_in(seconds)
            reports.append(self.outer.run_round(*at))
            step = due if len(reports[-1].exchange.group) > 1 else done
        if (late := late_change(self._replica, self.outer.weights.length)) is not None:
            self.outer.add_late(late)
        if step == done:
            return Boundary(done, rounds=reports)
        replicas = " and ".join(map(str, reports[-1].exchange.group))
        line = f" replicas {replicas} exchanged once more | left out: {done + 1} to {step} |"
        return _left_out(done, step, (line,), reports)

    def summary(self, met: int, rounds: int) -> str:
        if rounds and not met:
            return f"none of this job's {rounds} rounds had a partner"
        return f"{met} of this job's {rounds} rounds had a partner" if rounds else ""

    def close(self, at_once: bool) -> None:
        """Disconnect, without waiting for other ranks of this job."""
        self._membership.leave()

    def _take_over(self, done: int) -> Recovery | None:
        """Recover the state of a replica that is ahead; where others have their final model, that."""
        is_late = bool(computed_by_rank_0(self._finals))
        taken = self._recover(done, 0 if is_late else None)
        self._final = taken if is_late else None
        return taken

    def _recover(self, done: int, ahead: int | None = None) -> Recovery | None:
        """Recover the state of another replica that is so many rounds ahead (`rounds_behind`), and go on from
        it.
        """
        membership = self._membership
        rounds = membership.federation.rounds_behind if ahead is None else ahead
        least = max(1, done + rounds * membership.noloco.local_steps + (ahead is None))
        with now.doing("recovering the state of another replica"):
            taken = self._states.recover(self._keeper, least, membership.say)
        if taken is not None:
            self._replica.ledger.clear()
            if self._catch_up is not None and ahead is None:
                self._catch_up.recovered(taken.step)
        return taken

    def _look(self, done: int) -> tuple[list[Member], int | None, str] | None:
        """Return what the leader decides: to whom to give, the next step, and why it cannot go on."""
        if self._catch_up is None:
            return None
        wanted = self._states.wanted(done)
        try:
            step = self._catch_up.next_step(done)
        except UntrainedError as error:
            return wanted, done, str(error)
        if (
            step is not None and self._membership.leader.status.phase == "behind"
        ):  # the others are not ahead now
            self.announce(step)
        return wanted, step, ""

    def stay(self, done: int) -> None:
        """Give the final model to replicas that were lost, and come back within the time of a start."""
        self._states.can_give(done)
        until = time.monotonic() + self._membership.back_seconds
        now.part("giving the final model to replicas that come back")
        self._give_until(done, lambda: None if self._is_awaited(until) else True)
        self._states.can_give(0)

    def _is_awaited(self, until: float) -> bool:
        """Return whether a replica may still want the final model."""
        peers = self._membership.leader.peers()
        others = [slot for slot, peer in peers.items() if not peer.status.has_left]
        lost = [str(slot) for slot in others if not peers[slot].present]
        late = [slot for slot in others if peers[slot].present and not peers[slot].status.mean.final]
        if time.monotonic() >= until or not (lost or late or self._states.is_giving):
            return False
        if lost:
            self._membership.leader.mesh.warn(
                f"waiting for {self._membership.back_seconds:.0f} s at most, to give the final model to replica "
                f"{', '.join(lost)} if it comes back"
            )
        return True

    def _give_until(self, done: int, look: Callable[[], Value | None]) -> Value | None:
        """Give the present state to those that ask for it, until `look`, on the leader, returns something.

        None: this job is to stop.
        """

        def news() -> tuple[list[Member], Value | None]:
            while not self._membership.leader.is_leaving:
                wanted, found = self._states.wanted(done), look()
                if wanted or found is not None:
                    return wanted, found
                time.sleep(_LOOK_SECONDS)
            return [], None

        while True:
            wanted, found = computed_by_rank_0(news)
            if wanted:
                self._states.give(self._keeper, done, wanted)
            if found is not None or not wanted:
                return found


def _left_out(done: int, step: int, lines: tuple[str, ...], rounds: Sequence[RoundReport] = ()) -> Boundary:
    numbers = {"total/skipped_ahead": step - done} if step > done else {}
    return Boundary(step, step - done, rounds, lines, numbers)


def _taken_over(done: int, taken: Recovery, lines: tuple[str, ...] = ()) -> Boundary:
    own = f"; this job had done {done} local steps, and the samples between are not read" * (
        0 < done < taken.step
    )
    numbers = {"handover/giver": taken.slot, "total/skipped_ahead": taken.step - done}
    return Boundary(taken.step, lines=(*lines, f" {taken}{own} |"), numbers=numbers)


def _averaged(report: ExchangeReport) -> str:
    """Return a line on the mean at the end; "" where this job has met no other."""
    who = f"of replicas {', '.join(map(str, report.group))}"
    if len(report.group) == 1:
        if not report.missed:
            return ""
        who = "skipped: no other replica is there"
    return f" final average {who} |" + f" {report.missed} |" * bool(report.missed)
