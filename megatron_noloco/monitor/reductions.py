"""How the values of one number become one: over the local steps of a log interval, then over a replica's ranks."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple


class Sample(NamedTuple):
    """A value and its weight in a weighted mean."""

    value: Any  # a number; only `last` takes anything else, such as a list
    weight: float = 1.0


Combine = Callable[[Sequence[Sample]], Sample]


def last(samples: Sequence[Sample]) -> Sample:
    """Return the newest sample; among ranks, that of the highest rank."""
    return samples[-1]


def total(samples: Sequence[Sample]) -> Sample:
    """Return the sum of the values."""
    return Sample(sum(sample.value for sample in samples), _weight(samples))


def largest(samples: Sequence[Sample]) -> Sample:
    """Return the sample with the largest value."""
    return max(samples, key=lambda sample: sample.value)


def mean(samples: Sequence[Sample]) -> Sample:
    """Return sum(w * x) / sum(w); nan where all weights are zero."""
    weight = _weight(samples)
    return Sample(sum(x * w for x, w in samples) / weight if weight else math.nan, weight)


def root_mean_square(samples: Sequence[Sample]) -> Sample:
    """Return sqrt(sum(w * x^2) / sum(w)); nan where all weights are zero. A nan of weight zero does not count."""
    weight = _weight(samples)
    squares = sum(x**2 * w for x, w in samples if w)
    return Sample(math.sqrt(squares / weight) if weight else math.nan, weight)


def _weight(samples: Sequence[Sample]) -> float:
    return sum(sample.weight for sample in samples)


@dataclass(frozen=True)
class Reduction:
    """Reduces the values of one number: `steps` over a log interval, then `ranks` over the replica.

    Attributes:
        per: "step": the interval's sum (`steps` must be `total`) is divided by its local steps. "run": values add
            up since the start of the run, resumes included (`steps` must be `last`); record one in every local
            step, if only a zero, so that every row has the sum.
        words: for docs/watching.md, where it is no mean.
    """

    steps: Combine
    ranks: Combine
    per: Literal["step", "interval", "run"] = "interval"
    words: str = ""

    def over_steps(self, samples: Sequence[Sample], steps: int) -> Sample:
        """Reduce one rank's values of an interval of `steps` local steps."""
        value, weight = _combined(self.steps, samples)
        return Sample(value / steps if self.per == "step" else value, weight)

    def over_ranks(self, samples: Sequence[Sample]) -> Any:
        """Reduce the values of the ranks that recorded one, in rank order."""
        return _combined(self.ranks, samples).value


def _combined(combine: Combine, samples: Sequence[Sample]) -> Sample:
    """Combine several samples; a single one stays as it is, to the last bit."""
    return samples[0] if len(samples) == 1 else combine(samples)


LAST = Reduction(last, last)  # the same on all ranks: a learning rate
LAST_SUM = Reduction(last, total, words="sum of the ranks")
LAST_MAX = Reduction(last, largest, words="largest of the ranks")
RMS = Reduction(last, root_mean_square, words="root mean square")  # weighted by elements
MEAN = Reduction(mean, mean)
MEAN_SUM = Reduction(mean, total)  # each rank has a part
SUM = Reduction(total, total)
SUM_MAX = Reduction(total, largest)  # the same on all ranks: steps that were skipped
PER_STEP = Reduction(total, mean, per="step", words="per local step")
SLOWEST = Reduction(total, largest, per="step", words="per local step; slowest rank")
TOTAL = Reduction(last, total, per="run", words="sum of the ranks")
TOTAL_MAX = Reduction(last, largest, per="run")
