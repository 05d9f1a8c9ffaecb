"""Has a job of a federation keep up with the others, and wait for them at its end."""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from megatron_noloco.federation.links import PeerStatus
from megatron_noloco.federation.node_thread import NodeThread
from megatron_noloco.federation.partners import is_far_behind
from megatron_noloco.plans.fragments import due_after, next_after
from megatron_noloco.plans.grouping import Group
from megatron_noloco.settings import FederationSettings, NolocoSettings

_TRAINED_ROUNDS = 10  # from here on, weights are not to be averaged with fresh weights


class UntrainedError(RuntimeError):
    """Raised where the others have trained, and this replica has no weights with which it could join them."""


class CatchUp:
    """Decides which local step comes next, so that a replica exchanges with the others when they do.

    A replica that was away would find no partner, since the others are at later rounds, and a replica that is
    slower than the others would make its partners wait. So it compares itself with the others: before each local
    step, or once in a round where it leaves out no steps. If more than half of them have begun a round that is far
    ahead, it goes on there:

    - More than `rounds_behind` rounds behind (`is_far_behind`), it takes over a state, as at its start: its own
      weights would pull the others back. Until it has a state it takes part in no round.
    - Else, with `skip_local_steps`, a slow replica that would leave out more than a quarter of the steps between
      two rounds leaves out all local steps before that round but the last. The weights stay its own, and rounds
      pull them towards the others.

    Local steps, learning rate and samples go by the number of the step. Samples of steps left out are not read.

    The leader of the replica has it, for all ranks. Rounds of fragments have one number each.
    """

    def __init__(
        self,
        thread: NodeThread,
        noloco: NolocoSettings,
        federation: FederationSettings,
        steps: int | None = None,
    ) -> None:
        self._thread, self._node = thread, thread.node
        self._noloco, self._federation = noloco, federation
        self._steps = steps
        self._behind = federation.rounds_behind * noloco.fragments
        skips = federation.skip_local_steps
        self._few = noloco.local_steps // (4 * noloco.fragments) if skips else math.inf
        self._look_interval = 1 if skips else noloco.local_steps
        self._untrained = False

    def start(self, done: int) -> None:
        """Announce after how many local steps this replica begins, or goes on with the state of another."""
        self._untrained = done == 0
        self._thread.do(self._node.go_on, self.last_round(done))

    def next_step(self, step: int) -> int | None:
        """Return the local step (from 0) to take in place of `step`; None: take over a state before the next step.

        Raises UntrainedError if this replica began with fresh weights and the others have trained for long, or a
        replica is at its end.
        """
        due = self._due_now(step)
        if due is None:
            return step
        left_out = due - 1 - step
        if self._untrained and left_out >= _TRAINED_ROUNDS * self._noloco.local_steps:
            raise UntrainedError(
                "the others have trained already, and this replica begins with fresh weights, which would spoil "
                'theirs; start it again, with checkpoint.load "auto" where that is set: it then takes over the '
                "state of another replica"
            )
        self._untrained = False  # the others are as little trained
        if is_far_behind(self.last_round(step), self.last_round(due), self._behind):
            return None
        if left_out <= self._few:
            return step
        self._thread.do(self._node.go_on, self.last_round(step + left_out))
        return step + left_out

    def _due_now(self, step: int) -> int | None:
        """Return the local steps before the round that more than half of the others have begun.

        None where there are no others, or this is no local step at which a replica looks at them. Raises
        UntrainedError where another replica waits at its end, at a local step that only its caller's loop knows.
        """
        if step % self._look_interval:
            return None
        self._thread.check()
        others = self._node.present().values()
        begun = [status.begun for status in others if status.phase == "training" and status.begun >= 0]
        ended = sum(status.phase == "ended" for status in others)
        if self._steps is not None:
            begun += ended * [self.last_round(self._steps) + 1]  # due at the last step, or later
        elif self._untrained and ended:
            raise UntrainedError(
                "another replica waits at its end, and this replica begins with fresh weights, which would spoil "
                "the model of all; start it again from a checkpoint, or not at all"
            )
        if not begun:
            return None
        due = self._due(statistics.median_low(begun))
        return due if self._steps is None else min(due, self._steps)

    def at_end(self, done: int) -> "WaitAtEnd":
        """Announce the end of this replica, after `done` local steps, and look at the others from then on."""
        own = self.last_round(done)
        self._thread.do(self._node.go_on, own, "ended")
        return WaitAtEnd(self._thread, own, self._noloco.deadline_seconds, self._left_out)

    def _left_out(self, last: Mapping[int, int]) -> dict[int, str]:
        """Return why slots are not in the mean that have come: those that ended far behind the furthest.

        Args:
            last: the last round of each slot.
        """
        furthest = max(last.values())
        return {
            slot: f"ended at local step {self._due(number)}, more than federation.rounds_behind "
            f"({self._federation.rounds_behind}) rounds before the furthest at {self._due(furthest)}"
            for slot, number in last.items()
            if is_far_behind(number, furthest, self._behind)
        }

    def _due(self, number: int) -> int:
        """Return the local steps before a round; 0 for -1."""
        if number < 0:
            return 0
        fragments = self._noloco.fragments
        return due_after(*divmod(number, fragments), self._noloco.local_steps, fragments)

    def last_round(self, done: int) -> int:
        """Return the number of the last round before the next local step; -1 where there was no round."""
        round_index, fragment = next_after(done, self._noloco.local_steps, self._noloco.fragments)
        return round_index * self._noloco.fragments + fragment - 1


@dataclass
class _Awaited:
    """Another replica, as a replica at its end sees it.

    Attributes:
        seen: of it, now.
        furthest: the latest round that it has begun.
        since: when it began that round; or when it was lost, or began again, for the first time after that.
    """

    seen: PeerStatus
    furthest: int
    since: float
    spared: bool = False

    @property
    def is_at_end(self) -> bool:
        """Whether it is there, and waits at its end."""
        return self.seen.present and self.seen.status.phase == "ended"

    @property
    def is_awaited(self) -> bool:
        """Whether it may still come to its end."""
        return not self.is_at_end and self.seen.status.phase != "left"

    def why_away(self, seconds: float) -> str:
        """Say why it was not waited for any longer."""
        if self.seen.status.phase == "left":
            return "has left"
        return f"began no round for {seconds:g} s" if self.seen.present else "is not there"

    def look(self, seen: PeerStatus, at: float) -> None:
        before, self.seen = self.seen, seen
        if seen.status.begun > self.furthest:
            self.furthest, self.since, self.spared = seen.status.begun, at, False
        elif not self.spared and (seen.status.begun, seen.present) != (before.status.begun, before.present):
            self.since, self.spared = at, True  # once: a replica that comes and goes must not hold others up


class MeanGroup(NamedTuple):
    """Who forms the mean at the end.

    Attributes:
        group: the slots that have come to their end, this one included; all get the mean.
        left_out: why slots are not in it, by slot. A slot of the group ended too far behind; others have not come.
        links: to whom each member has a link; see `Node.links_of_ended`.
    """

    group: Group
    left_out: dict[int, str]
    links: dict[int, set[int]]


class WaitAtEnd:
    """Waits for the others at the end of this replica.

    A replica that trains is waited for until `seconds` after the last round that it began, and a replica whose
    link is lost meanwhile until `seconds` after that, however often it comes and goes.

    Args:
        own: last round of this replica.
        left_out: returns why slots that have come are not in the mean, from the last round of each.
    """

    def __init__(
        self,
        thread: NodeThread,
        own: int,
        seconds: float,
        left_out: Callable[[Mapping[int, int]], dict[int, str]],
    ) -> None:
        self._thread, self._own, self._seconds, self._why_not = thread, own, seconds, left_out
        self._awaited = dict[int, _Awaited]()
        self._links, self._since, self._first = dict[int, set[int]](), -math.inf, math.inf

    def look(self) -> MeanGroup | None:
        """Look at the others; return who forms the mean, or None where others are still waited for."""
        at = time.monotonic()
        for slot, seen in self._thread.seen().items():
            if slot not in self._awaited:
                since = at if seen.present else -math.inf
                self._awaited[slot] = _Awaited(seen, seen.status.begun, since)
            self._awaited[slot].look(seen, at)
        late = at - self._seconds
        if any(one.since > late and one.is_awaited for one in self._awaited.values()):
            return None
        if not self._is_settled(at):
            return None
        came = {slot: one.seen.status.begun for slot, one in self._awaited.items() if one.is_at_end}
        came[self._thread.node.slot] = self._own
        group = {
            *came
        } | self._links.keys() - self._awaited.keys()  # with the replicas that only others reach
        why = {slot: one.why_away(self._seconds) for slot, one in self._awaited.items() if slot not in group}
        return MeanGroup(tuple(sorted(group)), why | self._why_not(came), self._links)

    def _is_settled(self, at: float) -> bool:
        """Return whether all have links to each other, or who has has not changed for a while.

        Nor is it waited for any longer than for a replica.
        """
        self._first = min(self._first, at)
        links = self._thread.node.links_of_ended()
        if links != self._links:
            self._links, self._since = links, at
        there = set().union(*links.values())
        coming = there - links.keys() - self._awaited.keys()  # only others reach these, and wait for them
        came = {slot for slot, one in self._awaited.items() if one.is_at_end}
        # A replica that is told of links by way of another one has them with that one's next status.
        late = at - self._since > 2 * self._thread.node.pulse_seconds and not coming
        return (
            late
            or at - self._first > self._seconds
            or (came <= links.keys() and all(there <= to | {slot} for slot, to in links.items()))
        )
