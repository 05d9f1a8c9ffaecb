"""When replicas stay together: rho, the exact factor by which rounds shrink their spread."""

import math
from collections.abc import Sequence
from itertools import product

import numpy as np

from megatron_noloco.plans.grouping import Cycle
from megatron_noloco.plans.payloads import PAYLOADS

_Moments = tuple[np.ndarray, np.ndarray, np.ndarray]


def pull_error(payload: str, kept: bool) -> float:
    """Return epsilon of `spread_factor`, where rounding errors are `kept` that of these."""
    return PAYLOADS[payload].errors[kept]


def spread_factor(
    outer_momentum: float,
    consensus_weight: float,
    group_size: float,
    pull_error: float = 0.0,
    nesterov: bool = False,
    kept: bool = False,
) -> float:
    """Return rho, the factor of the spread SQUARED per round, for many randomly grouped replicas.

    With zero gradients and x_i = phi_i - mean(phi), a round is delta' = alpha delta + u with the pull
    u = gamma (mean_G(x) - x_i), and x moves by delta', with Nesterov's look-ahead by u + alpha delta'. The second
    moments (V, C, D) = E[x^2, x*delta, delta^2] follow one linear map per round, by

        E[u^2] = gamma^2 a (1 + epsilon^2) V,    E[x u] = -gamma a V,    E[u delta] = -gamma a C

    with a = (n-1)/n the share of a group's variance that its mean removes. The error of a coded payload is one of
    the pull, independent of it: E[x * error] = 0. Where it is kept, u = mean_G(gamma x + r - r') - gamma x_i with
    r' the new error, E[r'^2] = epsilon^2 E[(gamma x + r)^2], and the map has the moments of r in addition. rho is
    the spectral radius of that map. rho >= 1 means the replicas drift apart.

    Args:
        outer_momentum: alpha.
        consensus_weight: gamma.
        group_size: n, at least 2 (with 1 nothing pulls replicas together: rho >= 1); infinite where all
            replicas are one group.
        pull_error: epsilon, the root mean square of the pull's error over that of the pull.
        nesterov: whether the outer step looks ahead.
        kept: whether the error is kept, and added in the next round.
    """
    gamma, a = consensus_weight, 1 - 1 / group_size
    v, c, d, xr, dr, rr = np.eye(6)
    error = pull_error**2 * (gamma**2 * v + kept * (2 * gamma * xr + rr))  # E[r'^2]
    into = (rr + error) / group_size if kept else a * error
    pull = (
        gamma**2 * a * v + into,
        -gamma * a * v + kept * xr / group_size,
        -gamma * a * c + kept * dr / group_size,
    )
    moved = _moved((v, c, d), pull, outer_momentum, nesterov)
    step = np.array([*moved, *_with_error(kept * error, 1 / group_size, outer_momentum, nesterov)])
    return _radius(step)


def _moved(moments: _Moments, pull: _Moments, alpha: float, nesterov: bool) -> _Moments:
    """Return E[x^2, x*delta, delta^2] after a round, from those before and E[u^2, x*u, u*delta].

    delta' = alpha delta + u, and x' = x + p u + q delta.
    """
    (v, c, d), (uu, xu, ud) = moments, pull
    p, q = (1 + alpha, alpha**2) if nesterov else (1.0, alpha)
    return (
        v + 2 * (p * xu + q * c) + p**2 * uu + 2 * p * q * ud + q**2 * d,
        xu + alpha * c + p * uu + (p * alpha + q) * ud + q * alpha * d,
        uu + 2 * alpha * ud + alpha**2 * d,
    )


def _with_error(error: np.ndarray, share: float | np.ndarray, alpha: float, nesterov: bool) -> _Moments:
    """Return E[x*r, delta*r, r^2] after a round, of whose E[r^2] `share` is in -E[u*r]."""
    return -(1 + alpha * nesterov) * share * error, -share * error, error


def cycle_spread_factor(
    outer_momentum: float,
    consensus_weight: float,
    sizes: Sequence[int],
    pull_error: float = 0.0,
    nesterov: bool = False,
    kept: bool = False,
    across: Sequence[int] = (),
    interval: int = 0,
) -> float:
    """Return rho for pairing in cycles: the factor of the spread SQUARED per round, for any number of replicas.

    Args:
        sizes: of the groups of the rounds of one cycle; their product is the number of replicas, or with sites
            that of one site.
        pull_error: epsilon of `spread_factor`; the errors of a group's members have the sum 0 (`outer.payload`).
        nesterov: whether the outer step looks ahead.
        kept: whether errors are kept, which have no such sum, and added in the next round.
        across: see `Cycle`.
        interval: see `Cycle`.

    Expand x = phi - mean(phi), a function of the labels, in characters of the digits. The round of digit t
    removes the group means of the characters in which digit t takes part, and leaves the others: for these the u
    of `spread_factor` is 0, for the former -gamma x + error. The errors have epsilon^2 gamma^2 times the second
    moment of the characters in which t takes part, and are spread evenly over these. Errors that are kept are
    spread evenly over all characters; u is then -gamma x for those in which t takes part, r - r' for the others. A
    cycle is a linear map of the characters' moments (E[x^2], E[x delta], E[delta^2], and those of r). Labels are
    drawn again before each cycle, which spreads the moments evenly over all characters; with sites over those in
    which a digit inside takes part, as labels are drawn again inside sites. The others are the sites' means.
    rho is the spectral radius of the mean map over the characters, to the power of one over the rounds. For each
    set of digits that take part there are prod(base - 1) characters, with equal moments.
    """
    cycle = Cycle(tuple(sizes), tuple(across), interval)
    step = _map_of_cycle(cycle, outer_momentum, consensus_weight, pull_error, nesterov, kept)
    return _radius(step) ** (1 / cycle.rounds)


def spread_factors_of_sites(
    outer_momentum: float,
    consensus_weight: float,
    sizes: Sequence[int],
    across: Sequence[int],
    interval: int,
    nesterov: bool = False,
) -> tuple[float, float]:
    """Return rho of the spread inside sites, and of that of the sites' means, for exact messages.

    The two do not mix: a round across moves what differs inside sites as a random group does. The larger one is
    `cycle_spread_factor`, whose arguments these are.
    """
    cycle = Cycle(tuple(sizes), tuple(across), interval)
    step = _map_of_cycle(cycle, outer_momentum, consensus_weight, 0.0, nesterov, False)
    kinds = len(step) // 6
    inside = np.arange(len(step)) % kinds == 0
    within, between = (_radius(step[of][:, of]) ** (1 / cycle.rounds) for of in (inside, ~inside))
    return within, between


def _map_of_cycle(
    cycle: Cycle, alpha: float, gamma: float, pull_error: float, nesterov: bool, kept: bool
) -> np.ndarray:
    """Return the linear map of `cycle_spread_factor`: row and column are 6 moments x kinds of characters.

    Kind 0 are the characters in which a digit inside a site takes part. Each of the others is a kind.
    """
    bases = cycle.bases
    replicas = math.prod(bases)
    patterns = np.array(list(product((False, True), repeat=len(bases))))[1:]  # but that of the mean
    characters = np.where(patterns, np.array(bases) - 1, 1).prod(axis=1)[:, None]
    between = ~patterns[:, : len(cycle.inside)].any(axis=1)
    kinds = between.cumsum() * between
    number = kinds.max() + 1
    share = (kinds == np.arange(number)[:, None]) * characters.T
    share = share / share.sum(axis=1, keepdims=True)  # of a character in the mean of its kind
    moments = list(np.eye(6 * number).reshape(6, number, -1)[:, kinds])
    drawn = 0
    for draw, digit in map(cycle.at, range(cycle.rounds)):
        if draw > drawn:
            moments, drawn = [(share @ moment)[kinds] for moment in moments], draw
        v, c, d, xr, dr, rr = moments
        takes = patterns[:, digit, None]
        pull, stays = gamma * takes, kept * (1 - takes)
        moved = replicas - replicas // bases[digit]  # characters
        coded = pull**2 * v + kept * takes * (2 * gamma * xr + rr)
        error = pull_error**2 * (characters * coded).sum(axis=0) / moved
        into = stays * (rr + error) if kept else takes * error
        pulls = pull**2 * v + into, -pull * v + stays * xr, -pull * c + stays * dr
        left = _with_error(kept * np.tile(error, (len(patterns), 1)), stays, alpha, nesterov)
        moments = [*_moved((v, c, d), pulls, alpha, nesterov), *left]
    return np.concatenate([share @ moment for moment in moments])


def _radius(step: np.ndarray) -> float:
    return float(max(abs(np.linalg.eigvals(step))))


def is_stable(rho: float) -> bool:
    """Return whether replicas stay together. At the limit rho is computed as 1 minus a rounding error."""
    return rho < 1 - 1e-9


def rounds_to_halve(rho: float) -> float:
    """Return the rounds until gossip alone has halved the spread (not its square); infinite when rho >= 1."""
    if rho >= 1:
        return math.inf
    return math.log(0.25) / math.log(rho) if rho > 0 else 0.0
