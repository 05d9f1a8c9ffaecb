"""How a job of a federation keeps up with the others."""

import statistics
import time
from dataclasses import dataclass

import torch.distributed as dist

from megatron_noloco.federation.transport import FederationTransport
from megatron_noloco.outer.tags import tag_of
from megatron_noloco.plans.fragments import next_after

_LOOK_SECONDS = 0.05
_TRAINED_ROUNDS = 10  # after so many, weights are not to be averaged with fresh ones


class UntrainedError(RuntimeError):
    """A replica has no weights with which it could join the others."""


@dataclass(frozen=True)
class Pace:
    """When rounds are, and how far apart replicas may be.

    Attributes:
        local_steps: k, from a round of a fragment to its next.
        fragments: of the weights.
        rounds_behind: a replica that is so many rounds behind half of the others goes on where they are.
        start_with: replicas, this one included, to wait for before the first local step.
        longest_seconds: for which they are waited for.
        steps: local steps of the whole training, whose last phase is never left out; None: not known.
    """

    local_steps: int
    fragments: int
    rounds_behind: int
    start_with: int
    longest_seconds: float
    steps: int | None = None


class KeepingUp:
    """Which local step comes next, in a federation.

    A replica that was away, or is slow, would meet nobody: the others are at later rounds. At the beginning of a
    local phase, when it is `rounds_behind` rounds or more behind half of the others, it goes on at their round.
    The samples of the steps between are not read; its weights are its own, and rounds pull them to those of the
    others.
    """

    def __init__(self, transport: FederationTransport, pace: Pace) -> None:
        self._transport = transport
        self._pace = pace
        self._untrained = False

    def start(self, done: int) -> bool:
        """Before the first local step: tell where this rank is; whether those to start with came in time."""
        self._untrained = done == 0
        self._tell(done)
        came = self._transport.wait_for(self._pace.start_with - 1, self._pace.longest_seconds)
        return self._transport.partners.agree(came)

    def next_step(self, step: int) -> int:
        """The local step (from 0) that follows when `step` would; the same on all ranks of the replica.

        Raises UntrainedError for a replica that began anew, and finds that the others have trained long before.
        """
        local_steps = self._pace.local_steps
        if step % local_steps:
            return step
        holder = [self._phase_of_others()]
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.broadcast_object_list(holder, src=0)
        phase = holder[0]
        if phase is None:
            return step
        behind = phase - step // local_steps
        if behind < self._pace.rounds_behind:
            self._untrained = False  # or as little as the others
            return step
        if self._untrained and behind >= _TRAINED_ROUNDS:
            raise UntrainedError(
                "the others have trained already, and this replica has no checkpoint: its weights would spoil "
                "theirs; start from a copy of another replica's checkpoint (checkpoint.load; in a loop of your "
                "own, its model, its optimizer and attach's state)"
            )
        self._tell(phase * local_steps)
        return phase * local_steps

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
        """The exchanges before this step are over here: nobody is to wait in one that was left out."""
        over = self._over(done)
        if over >= 0:
            self._transport.partners.begin(over, None)
            self._transport.partners.end(over, tag_of(over + 1, 0))

    def _over(self, done: int) -> int:
        """The number of the last exchange before the next local step; -1 where there was none."""
        round_index, fragment = next_after(done, self._pace.local_steps, self._pace.fragments)
        return round_index * self._pace.fragments + fragment - 1

    def _phase_of_others(self) -> int | None:
        """The local phase that half of the others, at least, have reached; None where nobody is there."""
        begun = [number for number in self._transport.begun() if number >= 0]
        if not begun:
            return None
        phase = statistics.median_low(begun) // self._pace.fragments + 1
        steps = self._pace.steps
        return phase if steps is None else min(phase, (steps - 1) // self._pace.local_steps)
