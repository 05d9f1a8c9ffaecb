"""Has a job of a federation keep up with the others."""

import math
import statistics

from megatron_noloco.federation.members import Members
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
        self._members.go_on(last_round(done, self._noloco))

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
        is_far = is_far_behind(last_round(step, self._noloco), last_round(due, self._noloco), self._behind)
        if is_far and not self._has_recovered:
            return None
        self._has_recovered = False
        if left_out <= self._few and not is_far:
            return step
        self._members.go_on(last_round(step + left_out, self._noloco))
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
            begun += ended * [last_round(self._steps, self._noloco) + 1]  # due at the last step, or later
        elif self._untrained and ended:
            raise UntrainedError(
                "another replica waits at its end, and this replica begins with fresh weights, which would spoil "
                "the model of all; start it again from a checkpoint, or not at all"
            )
        if not begun:
            return None
        due = steps_before(statistics.median_low(begun), self._noloco)
        return due if self._steps is None else min(due, self._steps)


def steps_before(number: int, noloco: NolocoSettings) -> int:
    """Return the local steps before a round; 0 for -1."""
    if number < 0:
        return 0
    return due_after(*divmod(number, noloco.fragments), noloco.local_steps, noloco.fragments)


def last_round(done: int, noloco: NolocoSettings) -> int:
    """Return the number of the last round before the next local step; -1 where there was no round."""
    round_index, fragment = next_after(done, noloco.local_steps, noloco.fragments)
    return round_index * noloco.fragments + fragment - 1
