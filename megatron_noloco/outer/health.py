"""Ends a replica whose weights, losses or gradients are no longer finite."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_noloco.job.activity import now
from megatron_noloco.outer.weights import Weights

_MOST_LOST_STEPS = 10  # in a row


class NotFiniteError(RuntimeError):
    """Raised where numbers of this replica are not finite. Save nothing; the last checkpoint is good."""


class Health:
    """Ends a replica whose numbers are no longer finite, before a checkpoint or another job gets its weights.

    A local step is lost if it was skipped, because its gradients were not finite, or if its loss was not finite.

    Args:
        weights: of this rank.
        agree: see `job.agreement.vote`; over the ranks of the replica.
    """

    def __init__(self, weights: Weights, agree: Callable[[Sequence[int]], list[int]]) -> None:
        self._weights = weights
        self._agree = agree
        self._steps = 0
        self._skipped = 0  # local steps in a row
        # Losses in a row; read by `check` alone, since a read waits for a GPU.
        self._not_finite: int | Tensor = 0

    def after_step(self, losses: Sequence[Tensor], skipped: bool) -> None:
        """Count a local step.

        Raises NotFiniteError, alike on all ranks of the replica, if the last 10 steps were skipped.

        Args:
            losses: of the microbatches; empty on ranks that compute none.
            skipped: the same on all ranks of the replica; False while fp16 searches its loss scale.
        """
        self._steps += 1
        self._skipped = self._skipped + 1 if skipped else 0
        if losses:
            self._not_finite = (self._not_finite + 1) * ~torch.stack(list(losses)).isfinite().all()
        if self._skipped == _MOST_LOST_STEPS:
            raise _error(
                f"the last {_MOST_LOST_STEPS} local steps were skipped: their gradients are not finite"
            )

    def check(self) -> bool:
        """Return whether the last local step was not lost. A collective of the replica.

        Raises NotFiniteError if a weight is not finite, or the losses of the last 10 steps were not.
        """
        finite = all(map(_is_finite, self._weights.parts()))
        lost = max(self._skipped, int(self._not_finite))
        all_finite, left = self._agree([finite, max(0, _MOST_LOST_STEPS - lost)])
        if not all_finite:
            raise _error("weights of this replica are no longer finite")
        if not left:
            raise _error(f"the losses of the last {_MOST_LOST_STEPS} local steps are not finite")
        return left == _MOST_LOST_STEPS

    def check_run(self) -> None:
        """Raise NotFiniteError if all local steps of a short run were lost. A collective of the replica."""
        taken = self._steps - max(self._skipped, int(self._not_finite))
        if self._steps and not self._agree([taken])[0]:
            raise _error(f"all {self._steps} local steps were lost: their gradients or losses are not finite")


def _error(problem: str) -> NotFiniteError:
    return NotFiniteError(
        f"{now.who}: {problem}, so the job ends before a checkpoint or another replica gets its weights; lower "
        "the learning rate, and start it again: it continues from its newest checkpoint, if there is one"
    )


def _is_finite(part: Tensor) -> bool:
    """Return whether all elements are. A sum is quick, but one of finite fp16 numbers may be infinite."""
    return bool(part.sum().isfinite() or part.sum(dtype=torch.float32).isfinite())
