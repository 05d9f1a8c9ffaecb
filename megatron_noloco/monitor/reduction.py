"""How many values of one name become one number."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple


class Sample(NamedTuple):
    """A value and what it counts for in a weighted mean."""

    value: Any  # a number; only `last` takes anything else, such as a list
    weight: float = 1.0


Combine = Callable[[Sequence[Sample]], Sample]


def last(samples: Sequence[Sample]) -> Sample:
    """The newest in time; among ranks, the highest rank's."""
    return samples[-1]


def total(samples: Sequence[Sample]) -> Sample:
    return Sample(sum(sample.value for sample in samples), _weight(samples))


def largest(samples: Sequence[Sample]) -> Sample:
    return max(samples, key=lambda sample: sample.value)


def mean(samples: Sequence[Sample]) -> Sample:
    """sum(w * x) / sum(w); nan where all weights are zero."""
    weight = _weight(samples)
    return Sample(sum(x * w for x, w in samples) / weight if weight else math.nan, weight)


def root_mean_square(samples: Sequence[Sample]) -> Sample:
    """sqrt(sum(w * x^2) / sum(w)); nan where all weights are zero, and a nan of weight zero does not count."""
    weight = _weight(samples)
    squares = sum(x**2 * w for x, w in samples if w)
    return Sample(math.sqrt(squares / weight) if weight else math.nan, weight)


def _weight(samples: Sequence[Sample]) -> float:
    return sum(sample.weight for sample in samples)


@dataclass(frozen=True)
class Reduction:
    """First `steps` combines a rank's values of one log interval, then `ranks` what the ranks have.

    Attributes:
        per: what the number is about. "step": the interval's figure is divided by its local steps (use `total` for
            `steps`). "run": values add up since the start of the run, resumes included; record one in every local
            step, if only a zero, so that every row has the sum (use `last` for `steps`).
    """

    steps: Combine
    ranks: Combine
    per: Literal["step", "interval", "run"] = "interval"

    def over_steps(self, samples: Sequence[Sample], steps: int) -> Sample:
        """One rank's figure for an interval of `steps` local steps."""
        value, weight = _combined(self.steps, samples)
        return Sample(value / steps if self.per == "step" else value, weight)

    def over_ranks(self, samples: Sequence[Sample]) -> Any:
        """The replica's figure, from those ranks that recorded one, in rank order."""
        return _combined(self.ranks, samples).value


def _combined(combine: Combine, samples: Sequence[Sample]) -> Sample:
    """A single one stays as it is, to the last bit."""
    return samples[0] if len(samples) == 1 else combine(samples)


LAST = Reduction(last, last)  # known to all ranks alike: a learning rate
LAST_SUM = Reduction(last, total)  # of the last time it happened, all ranks together: bytes of a round
LAST_MAX = Reduction(last, largest)  # likewise, the slowest rank's: seconds of a round
RMS = Reduction(last, root_mean_square)  # likewise, weighted by elements: a standard deviation
MEAN = Reduction(mean, mean)
SUM = Reduction(total, total)
PER_STEP = Reduction(total, mean, per="step")  # seconds in a local step, mean of the ranks
SLOWEST = Reduction(total, largest, per="step")  # seconds in a local step, of the slowest rank
TOTAL = Reduction(last, total, per="run")
