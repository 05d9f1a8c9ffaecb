"""Whether the vector that a partner in another job has sent is to be believed.

The distance of the two vectors of a pair, |c_i - c_j|, is a by-product of their exchange (`ExchangeReport`). Over
the norm of the own vector it is a small number, because partners have trained for a short time since their weights
were averaged. A vector is absurd where this ratio is above 1 and above ten times the median of past exchanges. In
the first exchange the limit is 10, because weights may have moved by more than their initial norm. So weights that
have grown by a factor of 2 are refused, and those of another random draw; those of a replica that was away for
long are not.
"""

import math
import statistics
from collections import deque

from torch import Tensor

from megatron_noloco.outer.mean import ExchangeReport

_REMEMBERED = 32  # exchanges
_FAR = 10.0  # times the median


class PoisonedError(Exception):
    """What has arrived is not to be used; the message continues "rank ...".

    Attributes:
        by_partner: whether the partner is to blame: this replica's own numbers are finite.
    """

    def __init__(self, message: str, by_partner: bool = True) -> None:
        super().__init__(message)
        self.by_partner = by_partner


class Guard:
    """Of one rank, for the exchanges of all its weights, also in fragments."""

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=_REMEMBERED)

    def check(self, vector: Tensor, report: ExchangeReport) -> float:
        """After the exchange of `vector` in a pair; returns the ratio.

        Raises PoisonedError for what is absurd, or where one of the two vectors is not finite.
        """
        norm = float(vector.norm())
        if not math.isfinite(norm):
            raise PoisonedError("was sent numbers that are not finite", by_partner=False)
        if report.poisoned_elements:
            raise PoisonedError("sent numbers that are not finite")
        distance = math.sqrt(2 * report.squared_deviation)
        ratio = distance / norm if norm else 0.0  # zeros say nothing
        limit = max(1.0, _FAR * (statistics.median(self._ratios) if self._ratios else 1.0))
        if ratio > limit:
            raise PoisonedError(f"sent absurd numbers, {ratio:.2g} times this replica's norm from its own")
        return ratio

    def accept(self, ratio: float) -> None:
        """An exchange with this ratio counts."""
        self._ratios.append(ratio)
