"""What the training loop of a federation's job does beside rounds: keep up with the others, and stay finite."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_noloco.federation.transport import FederationTransport
from megatron_noloco.job.agreement import of_rank_0
from megatron_noloco.outer import Weights
from megatron_noloco.plans.fragments import due_after, next_after

_LOOK_SECONDS = 0.05
_TRAINED_ROUNDS = 10  # from here on, weights are not to be averaged with fresh ones
_MOST_LOST_STEPS = 10  # in a row; DeepSpeed takes no step where the gradient is not finite


class UntrainedError(RuntimeError):
    """The others have trained, and this replica has no weights with which it could join them."""


class NotFiniteError(RuntimeError):
    """The state of this replica is of no use and must not be saved; its last checkpoint is good."""


@dataclass(frozen=True)
class Pace:
    """When exchanges are, and how far apart replicas may be.

    Attributes:
        local_steps: k, from a round of a fragment to its next.
        fragments: number of fragments of the weights.
        rounds_behind: a replica that is more rounds behind half of the others goes on where they are.
        adapts: whether a replica that is slower than half of the others leaves out local steps before an exchange.
        longest_seconds: the longest wait for the others at the end.
        steps: local steps of the whole training, the last of which is never left out; None: not known.
    """

    local_steps: int
    fragments: int
    rounds_behind: int
    adapts: bool
    longest_seconds: float
    steps: int | None = None


def wait_for_others(transport: FederationTransport, others: int, seconds: float) -> bool:
    """Wait until this many other replicas are connected; returns False when time is up. All ranks call it."""
    return transport.partners.agree([transport.wait_for(others, seconds)]) == [True]


class KeepingUp:
    """Chooses the next local step of a replica, so that it comes to the rounds of the others.

    A replica that was away would find no partner, since the others are at later rounds; a slow one would let its
    partners wait. So every replica looks at the others now and then. Where at least half of them have come to an
    exchange that is more than a few local steps ahead, it leaves out all of these steps but the last. "A few" is a
    quarter of the steps between two exchanges. Without `Pace.adapts` it is the steps of `Pace.rounds_behind`
    rounds, so that no step is left out for being slow.

    Learning rate and samples follow the number of the step; the samples of steps left out are not read. The
    weights stay the replica's own, and rounds pull them towards those of the others.

    Attributes:
        local_steps: k.
        partners: of the transport.
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
        """Announce, before the first local step, at which step this replica begins."""
        self._untrained = done == 0
        self._announce(done)

    def next_step(self, step: int) -> int:
        """Return the local step (from 0) to take in place of `step`; the same on all ranks of the replica.

        Raises UntrainedError if this replica began with fresh weights and the others have trained for long.
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
        self._untrained = False  # the others are as little trained
        if left_out <= self._few:
            return step
        self._announce(step + left_out)
        return step + left_out

    def wait_at_end(self, done: int) -> None:
        """Wait after the last local step until the others that are connected have begun the last round.

        It takes `Pace.longest_seconds` at most: replicas of different speed reach the end minutes apart.
        """
        last = self._last_exchange(done)
        deadline = time.monotonic() + self._pace.longest_seconds
        while any(begun < last for begun in self._transport.begun()) and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)

    def leave(self) -> None:
        """Disconnect, so that no replica waits for this one."""
        self._transport.close()

    def _announce(self, done: int) -> None:
        """Tell the others that this replica skips the exchanges before this step, so that none waits for it."""
        self.partners.leave_out(self._last_exchange(done))

    def _last_exchange(self, done: int) -> int:
        """Return the number of the last exchange before the next local step; -1 where there was none."""
        round_index, fragment = next_after(done, self.local_steps, self._pace.fragments)
        return round_index * self._pace.fragments + fragment - 1

    def _due_of_others(self) -> int | None:
        """Return the local steps before the exchange that half of the others have begun; None: no others."""
        begun = [number for number in self._transport.begun() if number >= 0]
        if not begun:
            return None
        at = divmod(statistics.median_low(begun), self._pace.fragments)
        due = due_after(*at, self.local_steps, self._pace.fragments)
        return due if self._pace.steps is None else min(due, self._pace.steps)


class Health:
    """Ends a replica whose weights or losses are no longer finite, before others or a checkpoint get them.

    The training loop calls it after each local step and before each save, alike on all ranks of the replica.

    Args:
        weights: of this rank.
        agree: see `commit.Partners`.
    """

    def __init__(
        self, weights: Weights, local_steps: int, agree: Callable[[Sequence[int]], list[int]]
    ) -> None:
        self._weights = weights
        self._local_steps = local_steps
        self._agree = agree
        self._finite: list[Tensor] = []  # whether the losses were, for each step since the last check
        self._lost_steps = 0

    def after_step(self, done: int, losses: Sequence[Tensor]) -> None:
        """Note the losses of a local step, and check at the end of a local phase. Raises as `check` does.

        Args:
            done: local steps so far.
            losses: of the microbatches; empty on ranks that compute none.
        """
        if losses:
            self._finite.append(torch.stack(list(losses)).isfinite().all())
        if done % self._local_steps == 0:
            self.check()

    def check(self) -> None:
        """Raise NotFiniteError if a weight is not finite, or the losses of the last 10 steps were not."""
        for finite in self._finite:
            self._lost_steps = 0 if finite else self._lost_steps + 1
        self._finite.clear()
        weights = all(bool(part.sum().isfinite()) for part in self._weights.parts())
        sound = self._agree([weights, self._lost_steps < _MOST_LOST_STEPS])
        for name, fine in zip(("weights are", "loss is"), sound, strict=True):
            if not fine:
                raise NotFiniteError(
                    f"this replica's {name} no longer finite, so its job ends before that reaches others or a "
                    "checkpoint; started again, it continues from its newest checkpoint"
                )
