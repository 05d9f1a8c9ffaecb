"""The learning rate of a run from short ones: a search, and what its length makes of the result."""

import math
from collections.abc import Callable, Mapping

# So many times the best rates of the whole run are those of a run of a tenth of its local steps: 1.4 to 6.7 times
# on four texts, with rounds and without (docs/evidence-details.md, "Rates of short runs").
TOO_HIGH = 2.7
_STEP = (
    2.0  # between the factors that are tried; a parabola through three losses finds the place between them
)
_MOST = 2.0**10  # that the learning rates of the file may be too high


def bracket(loss: Callable[[float], float], start: float) -> dict[float, float]:
    """Return losses by factor, the best first: doubles and halves until the best lies between two worse ones.

    Args:
        loss: at a factor of the learning rates; infinity for a run that has diverged.

    Raises ValueError where all have.
    """
    losses = {factor: loss(factor) for factor in (start, _STEP * start, start / _STEP)}

    def order(
        factor: float,
    ) -> tuple[float, float]:  # of two runs that have diverged, the lower rate is first
        return losses[factor], factor

    while (best := min(losses, key=order)) in (max(losses), min(losses)):
        factor = best * _STEP if best == max(losses) else best / _STEP
        if losses[best] == math.inf and factor * _MOST < start:
            raise ValueError(
                f"training diverges at the learning rates of the file, and at {factor:g} times these"
            )
        losses[factor] = loss(factor)
    return {factor: losses[factor] for factor in sorted(losses, key=order)}


def best_factor(losses: Mapping[float, float]) -> float:
    """Return the lowest point of the parabola through the best loss and its neighbours, over log(factor).

    Args:
        losses: of `bracket`.

    Beside a run that has diverged it is the best factor that was tried.
    """
    best = min(losses, key=losses.__getitem__)
    below, above = losses[best / _STEP] - losses[best], losses[best * _STEP] - losses[best]
    if not 0 < below + above < math.inf:
        return best
    return best * _STEP ** ((below - above) / (2 * (below + above)))
