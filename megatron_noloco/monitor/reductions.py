"""How the values of one number become one: over the local steps of a log interval, then over a replica's ranks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

# last: the newest, among ranks that of the highest rank. mean: sum(w x) / sum(w), nan where all weights are zero.
# rms: sqrt(sum(w x^2) / sum(w)), likewise; a nan of weight zero does not count.
How = Literal["last", "sum", "max", "mean", "rms"]


class Sample(NamedTuple):
    """A value and its weight in a weighted mean."""

    value: Any  # a number; only "last" takes anything else, such as a list
    weight: float = 1.0


@dataclass(frozen=True)
class Reduction:
    """Reduces the values of one number: over the steps of a log interval, then over the ranks of the replica.

    Attributes:
        per: "step": the interval's sum (`steps` must be "sum") is divided by its local steps. "run": values add up
            since the start of the run, resumes included (`steps` must be "last"); record one in every local step,
            if only a zero, so that every row has the sum.
        words: for docs/watching.md, where it is no mean.
    """

    steps: How
    ranks: How
    per: Literal["step", "interval", "run"] = "interval"
    words: str = ""

    def over_steps(self, samples: Sequence[Sample], steps: int) -> Sample:
        """Reduce one rank's values of an interval of `steps` local steps."""
        value, weight = _combined(self.steps, samples)
        return Sample(value / steps if self.per == "step" else value, weight)

    def over_ranks(self, samples: Sequence[Sample]) -> Any:
        """Reduce the values of the ranks that recorded one, in rank order."""
        return _combined(self.ranks, samples).value


def _combined(how: How, samples: Sequence[Sample]) -> Sample:
    if len(samples) == 1 or how == "last":  # a single one stays as it is, to the last bit
        return samples[-1]
    if how == "max":
        return max(samples, key=lambda sample: sample.value)
    weight = sum(sample.weight for sample in samples)
    if how == "sum":
        return Sample(sum(sample.value for sample in samples), weight)
    if how == "mean":
        return Sample(sum(x * w for x, w in samples) / weight if weight else math.nan, weight)
    squares = sum(x**2 * w for x, w in samples if w)
    return Sample(math.sqrt(squares / weight) if weight else math.nan, weight)


LAST = Reduction("last", "last")  # the same on all ranks: a learning rate
LAST_SUM = Reduction("last", "sum", words="sum of the ranks")
LAST_MAX = Reduction("last", "max", words="largest of the ranks")
RMS = Reduction("last", "rms", words="root mean square")  # weighted by elements
MEAN = Reduction("mean", "mean")
MEAN_SUM = Reduction("mean", "sum")  # each rank has a part
SUM = Reduction("sum", "sum")
SUM_MAX = Reduction("sum", "max")  # the same on all ranks: steps that were skipped
PER_STEP = Reduction("sum", "mean", per="step", words="per local step")
SLOWEST = Reduction("sum", "max", per="step", words="per local step; slowest rank")
TOTAL = Reduction("last", "sum", per="run", words="sum of the ranks")
TOTAL_MAX = Reduction("last", "max", per="run")
