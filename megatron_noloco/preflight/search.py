"""The learning rate of a long run from short ones: a search at each of some lengths, and an extrapolation."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

_STEP = (
    2.0  # between the factors that are tried; a parabola through three losses finds the place between them
)
_MOST = 2.0**10  # that the learning rates of the file may be too high
_DECLINE = 0.4  # docs/evidence-details.md, "Rates of short runs"


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


def search(loss: Callable[[int, float], float], lengths: Sequence[int], steps: int) -> float:
    """Return the factor of the learning rates that is to be expected as the best one of `steps` local steps.

    Args:
        loss: of a run of so many local steps, at the rates times a factor.
        lengths: of short runs, ascending.
    """
    best: dict[int, float] = {}
    for length in lengths:
        start = _STEP ** round(math.log(extrapolate(best, length), _STEP)) if best else 1.0
        best[length] = best_factor(bracket(partial(loss, length), start))
    return extrapolate(best, steps)


def extrapolate(best: Mapping[int, float], steps: int) -> float:
    """Return the best factor for `steps` local steps from those of shorter runs.

    It is taken to fall with a power of the number of steps: the mean of that between the shortest and the longest
    run, which is noisy, and of `_DECLINE`; of one run `_DECLINE` alone.
    """
    shortest, longest = min(best), max(best)
    decline = _DECLINE
    if shortest < longest:
        decline = (decline + math.log(best[shortest] / best[longest]) / math.log(longest / shortest)) / 2
    return best[longest] * (longest / steps) ** decline
