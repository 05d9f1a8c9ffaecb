"""The learning rate of a run from short ones: a search, and what its length makes of the result."""

import math
from collections.abc import Callable, Mapping

from megatron_noloco.errors import UserError

# So many times the best rates of the whole run are those of a run of a tenth of its local steps: 1.4 to 6.7 times
# on four texts, with rounds and without (`python -m tools.tables choices`).
SHORT_RUN_RATE_RATIO = 2.7
_STEP = 2.0  # between the factors that are tried; a parabola through three losses finds the best one between
_MOST = 2.0**10  # that the learning rates of the file may be too high, or too low


def bracket(loss: Callable[[float], float], start: float) -> dict[float, float]:
    """Return losses by factor, the best first: doubles and halves until the best lies between two worse ones.

    Args:
        loss: at a factor of the learning rates; infinity for a run that has diverged.

    Raises UserError where all have, and where the best is still the lowest or the highest after ten doublings.
    """
    losses = {factor: loss(factor) for factor in (start, _STEP * start, start / _STEP)}

    def order(factor: float) -> tuple[float, float]:
        return losses[factor], factor  # of two runs that have diverged, the lower rate is first

    while (best := min(losses, key=order)) in (max(losses), min(losses)):
        rises = best == max(losses)
        if max(best / start, start / best) >= _MOST:
            raise UserError(
                f"training diverges at the learning rates of the file, and at {best:g} times these"
                if losses[best] == math.inf
                else f"the loss is best at the {'highest' if rises else 'lowest'} learning rates that were tried, "
                f"{best:g} times those of the file; give rates near these, if training lowers the loss at all"
            )
        factor = best * _STEP if rises else best / _STEP
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
