"""How a job of a federation keeps up with the others."""

import statistics
import time
from dataclasses import dataclass

from megatron_noloco.federation.transport import FederationTransport
from megatron_noloco.job.agreement import of_rank_0
from megatron_noloco.plans.fragments import due_after, next_after

_LOOK_SECONDS = 0.05
_TRAINED_ROUNDS = 10  # after so many, weights are not to be averaged with fresh ones


class UntrainedError(RuntimeError):
    """A replica has no weights with which it could join the others."""


@dataclass(frozen=True)
class Pace:
    """When exchanges are, and how far apart replicas may be.

    Attributes:
        local_steps: k, from a round of a fragment to its next.
        fragments: of the weights.
        rounds_behind: a replica that is so many rounds behind half of the others goes on where they are.
        adapts: whether one that is slower than half of the others leaves out some local steps before an exchange.
        longest_seconds: for which the others are waited for at the end.
        steps: local steps of the whole training, the last of which is never left out; None: not known.
    """

    local_steps: int
    fragments: int
    rounds_behind: int
    adapts: bool
    longest_seconds: float
    steps: int | None = None


def wait_for_others(transport: FederationTransport, others: int, seconds: float) -> bool:
    """Until so many other replicas are there; False where they are not in time. All ranks of the job call it."""
    came = transport.wait_for(others, seconds)
    return transport.partners.agree([came]) == [True]


class KeepingUp:
    """Which local step comes next, in a federation.

    A replica that was away would meet nobody, since the others are at later rounds; one that is slower than the
    others would let its partners wait. So it looks at the others now and then. Where half of them, at least, have
    come to an exchange that is more than a few local steps away, it leaves out all of these but the last. A few
    are a quarter of the steps from one exchange to the next; where it does not adapt, those of
    `Pace.rounds_behind` rounds, so that no step is left out for being slow.

    Local steps, learning rate and samples are those of the number of the step. The samples of steps that are left
    out are not read. The weights are the replica's own, and rounds pull them to those of the others.

    Attributes:
        local_steps: k.
    """

    def __init__(self, transport: FederationTransport, pace: Pace) -> None:
        self._transport = transport
        self.partners = transport.partners
        self._pace = pace
        self.local_steps = pace.local_steps
        self._few = pace.rounds_behind * pace.local_steps
        self._look_interval = pace.local_steps
        if pace.adapts:
            self._few = pace.local_steps // (4 * pace.fragments)
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
        due = of_rank_0(self._due_of_others())
        if due is None:
            return step
        left_out = due - 1 - step
        if self._untrained and left_out >= _TRAINED_ROUNDS * self.local_steps:
            raise UntrainedError(
                "the others have trained already, and this replica has no checkpoint: its weights would spoil "
                "theirs; start it again when one of those that it can reach has saved a checkpoint (in a loop of "
                "your own: from a copy of another replica's model, optimizer and state of attach)"
            )
        self._untrained = False  # or as little as the others
        if left_out <= self._few:
            return step
        self._tell(step + left_out)
        return step + left_out

    def wait_at_end(self, done: int) -> None:
        """After the last local step: until the others that are there have begun the last round.

        For `longest_seconds` at most: replicas of different speed come to the end minutes apart.
        """
        last = self._over(done)
        deadline = time.monotonic() + self._pace.longest_seconds
        while any(begun < last for begun in self._transport.begun()) and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)

    def leave(self) -> None:
        """At the end: nobody is to wait for this replica any more."""
        self._transport.close()

    def _tell(self, done: int) -> None:
        """This replica does not come to exchanges before this step: nobody is to wait for it in one."""
        self._transport.partners.leave_out(self._over(done))

    def _over(self, done: int) -> int:
        """The number of the last exchange before the next local step; -1 where there was none."""
        round_index, fragment = next_after(done, self.local_steps, self._pace.fragments)
        return round_index * self._pace.fragments + fragment - 1

    def _due_of_others(self) -> int | None:
        """The local steps before the exchange that half of the others have come to; None where nobody is there."""
        begun = [number for number in self._transport.begun() if number >= 0]
        if not begun:
            return None
        at = divmod(statistics.median_low(begun), self._pace.fragments)
        due = due_after(*at, self.local_steps, self._pace.fragments)
        return due if self._pace.steps is None else min(due, self._pace.steps)
