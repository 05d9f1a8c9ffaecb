"""Has a job of a federation keep up with the others, and wait for them at its end."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from megatron_noloco.federation.members import Members, Peer
from megatron_noloco.federation.partners import is_far_behind
from megatron_noloco.plans.fragments import due_after, next_after
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

    - More than `rounds_behind` rounds behind (`is_far_behind`), it recovers a state, as at its start: its own
      weights would pull the others back. Until it has a state it takes part in no round. While a state travelled
      the others have trained on: if that is more rounds, the replica leaves out their steps, and recovers no other
      state.
    - Else, with `skip_local_steps`, a slow replica that would leave out more than a quarter of the steps between
      two rounds leaves out all local steps before that round but the last. The weights stay its own, and rounds
      pull them towards the others.

    Local steps, learning rate and samples go by the number of the step. Samples of steps left out are not read.

    The leader of the replica has it, for all ranks. Rounds of fragments have one number each.

    Attributes:
        takes_over: whether this job takes over a state at its start, where others are ahead.
    """

    def __init__(
        self,
        members: Members,
        noloco: NolocoSettings,
        federation: FederationSettings,
        steps: int | None = None,
    ) -> None:
        self._members = members
        self._noloco, self._federation = noloco, federation
        self._steps = steps
        self._behind = federation.rounds_behind * noloco.fragments
        skips = federation.skip_local_steps
        self._few = noloco.local_steps // (4 * noloco.fragments) if skips else math.inf
        self._look_interval = 1 if skips else noloco.local_steps
        self._untrained = self._has_recovered = False
        self.takes_over = True

    def start(self, done: int) -> None:
        """Announce after how many local steps this replica begins, or goes on with the state of another."""
        self._untrained = done == 0
        self._members.go_on(self.last_round(done))

    def recovered(self, step: int) -> None:
        """Go on with the state of another replica after `step` local steps."""
        self.start(step)
        self._has_recovered = True

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
            how = "" if self.takes_over else ' with checkpoint.load "auto", or `attach` without `state`'
            raise UntrainedError(
                "the others have trained already, and this replica begins with fresh weights, which would spoil "
                f"theirs; start it again{how}: it then takes over the state of another replica"
            )
        self._untrained = False  # the others are as little trained
        is_far = is_far_behind(self.last_round(step), self.last_round(due), self._behind)
        if is_far and not self._has_recovered:
            return None
        self._has_recovered = False
        if left_out <= self._few and not is_far:
            return step
        self._members.go_on(self.last_round(step + left_out))
        return step + left_out

    def _due_now(self, step: int) -> int | None:
        """Return the local steps before the round that more than half of the others have begun.

        None where there are no others, or this is no local step at which a replica looks at them. Raises
        UntrainedError where another replica waits at its end, at a local step that only its caller's loop knows.
        """
        if step % self._look_interval:
            return None
        self._members.check()
        others = self._members.present().values()
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
        own, members = self.last_round(done), self._members
        members.go_on(own, "ended")
        last = math.inf if self._steps is None else self.last_round(self._steps)
        return WaitAtEnd(members, own, last, self._noloco.deadline_seconds, self._left_out)

    def _left_out(self, last: Mapping[int, int]) -> dict[int, str]:
        """Return why slots are not in the mean that have come: those that ended far behind half of the others.

        So a single member that claims to be far ahead puts nobody out; of two the further counts.

        Args:
            last: the last round of each slot.
        """
        furthest = statistics.median_low(last.values()) if len(last) > 2 else max(last.values())
        return {
            slot: f"ended at local step {self._due(number)}, more than federation.rounds_behind "
            f"({self._federation.rounds_behind}) rounds before the others at {self._due(furthest)}"
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


class Ended(NamedTuple):
    """What a replica has waited for at its end.

    Attributes:
        is_final: whether others have their mean already, without this replica.
        left_out: why slots are not in the mean, by slot.
    """

    is_final: bool
    left_out: Mapping[int, str]


class WaitAtEnd:
    """Waits for the others at the end of this replica.

    The lowest slot at its end waits for all, and proposes the mean (`final_mean`). Who trains, or was lost
    meanwhile, is waited for until `seconds` after the last news of any: a round that it begins, its end, its loss,
    each only for the first time, so that nobody who comes and goes holds others up.

    Args:
        own: last round of this replica.
        last: that of the run; inf: it is not known.
        left_out: returns why slots that have come are not in the mean, from the last round of each.
    """

    def __init__(
        self,
        members: Members,
        own: int,
        last: float,
        seconds: float,
        left_out: Callable[[Mapping[int, int]], dict[int, str]],
    ) -> None:
        self._members, self._own, self._last = members, own, last
        self._seconds, self._why_not = seconds, left_out
        self._peers, self._met = dict[int, Peer](), set[int]()
        self._news, self._since = set[tuple[float, ...]](), -math.inf

    def look(self) -> Ended | None:
        """Look at the others; return None while others are waited for."""
        self._members.check()
        self._members.publish_reached()
        at, peers = self._members.mesh.clock(), self._members.peers()
        gone = self._peers.keys() - peers.keys()  # a later process of the slot differs
        self._peers = {**peers, **{slot: replace(self._peers[slot], present=False) for slot in gone}}
        self._met |= {slot for slot, peer in peers.items() if peer.present}
        came = {slot: peer.status.begun for slot, peer in self._peers.items() if has_come(peer)}
        news = {
            (slot, min(peer.status.begun, self._last), peer.present, slot in came)
            for slot, peer in self._peers.items()
        }
        if not news <= self._news:
            self._since = at
        self._news |= news
        came[self._members.slot] = self._own
        why = {slot: self._why_away(peer) for slot, peer in self._peers.items() if slot not in came}
        awaited = {slot for slot in why.keys() & self._met if not self._peers[slot].status.has_left}
        why |= self._why_not(came)
        if most_are_final(peers.values()):
            return Ended(True, why)
        lowest, own = min(came.keys() - why.keys()), self._members.slot
        is_proposed = lowest != own and peers[lowest].status.mean.attempt > 0
        is_over = is_proposed or not awaited or at >= self._since + self._seconds
        return Ended(False, why) if is_over and own not in why else None

    def _why_away(self, peer: Peer) -> str:
        """Say why a replica was not waited for any longer."""
        if peer.status.has_left:
            return "has left"
        return f"began no round for {self._seconds:g} s" if peer.present else "is not there"


def has_come(peer: Peer) -> bool:
    """Return whether a replica is there, and waits at its end."""
    return peer.present and peer.status.phase == "ended"


def most_are_final(peers: Iterable[Peer]) -> bool:
    """Return whether most of those that wait at their end use the mean already, or have left with it."""
    ended = [bool(peer.status.mean.final) for peer in peers if has_come(peer) or peer.status.mean.final]
    return 2 * sum(ended) > len(ended)
