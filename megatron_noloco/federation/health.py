"""Whether a replica of a federation still trains: its weights and its loss are finite."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_noloco.outer import Weights

_MOST_LOST_STEPS = 10  # in a row; DeepSpeed takes no step where the gradient is not finite


class NotFiniteError(RuntimeError):
    """The state of this replica is of no use, and must not be saved; its last checkpoint is."""


class Health:
    """Looks at the end of each local phase, before the round, and before each save. All ranks call it alike.

    Args:
        weights: of this rank.
        agree: over the ranks of the replica; see `transport.protocol.Partners`.
    """

    def __init__(
        self, weights: Weights, local_steps: int, agree: Callable[[Sequence[int]], list[int]]
    ) -> None:
        self._weights = weights
        self._local_steps = local_steps
        self._agree = agree
        self._finite: list[Tensor] = []  # whether the losses were, of each step since the last look
        self._lost_steps = 0

    def after_step(self, done: int, losses: Sequence[Tensor]) -> None:
        """Note the losses of a local step, and look where a local phase ends. Raises as `check` does.

        Args:
            done: local steps so far.
            losses: of the microbatches; empty on ranks that compute none.
        """
        if losses:
            self._finite.append(torch.stack(list(losses)).isfinite().all())
        if done % self._local_steps == 0:
            self.check()

    def check(self) -> None:
        """Raises NotFiniteError where weights, or the losses of the last 10 steps, are not finite."""
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
