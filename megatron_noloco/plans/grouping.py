"""Which replicas average together in a round. Every rank computes it alone, from the seed and the round."""

from dataclasses import dataclass
from math import prod
from numbers import Integral
from typing import Literal

from megatron_noloco.plans.draws import Stream, draw_permutation

Group = tuple[int, ...]
Pairing = Literal["random", "cycle"]


def goes_across(round_index: int, interval: int) -> bool:
    """Whether the groups of a round go across sites: those of the last of `interval` rounds."""
    return round_index % interval == interval - 1


@dataclass(frozen=True)
class Grouping:
    """Divides all replicas into groups, in another way in each round.

    "random": a random permutation of the replicas is cut into groups of `group_size`; when that does not divide
    `replicas`, the rest is one smaller group, and a group of one skips the round. `group_size == replicas` is
    DiLoCo: all replicas are one group, in every round.

    "cycle": the replicas get random labels, whose digits have the prime factors of R as bases. Each round takes
    the next digit: the members of a group differ in this digit only (for R = 2^T: pairs i and i XOR 2^t). Plain
    averages along the cycle would make all replicas equal after its T rounds, the fewest that groups of this size
    allow (a hypercube, or hyper-hypercube; see Takezawa et al., arXiv 2305.11420). Then labels are drawn again.
    No prime factor of `replicas` may be larger than `group_size` (`settings.groups_problem`).

    The fragments of the weights (`plans.fragments`) have groups of their own. "random": each draws for itself.
    "cycle": all have the same labels, and fragment f begins f digits later. So the fragments of one round take
    different digits, and with T fragments a replica exchanges in one round with all partners of a whole cycle.
    Each fragment still takes every digit once before labels are drawn again. So its spread shrinks by
    `stability.cycle_spread_factor` of the group sizes in the order that begins f digits later, which for pairs is
    the same for all fragments.

    Attributes:
        replicas: their number, R.
        group_size: the most replicas in a group.
        seed: of the draws, at least 0, the same on all ranks.
        pairing: see above.

    Raises ValueError for a seed that is negative or no integer.
    """

    replicas: int
    group_size: int
    seed: int
    pairing: Pairing = "random"

    def __post_init__(self) -> None:
        if not isinstance(self.seed, Integral):
            raise ValueError(f"seed must be an integer, not {self.seed!r}")
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, not {self.seed}")

    def groups(self, round_index: int, fragment: int = 0) -> list[Group]:
        """Return the groups of a round of a fragment, each in ascending order of replica."""
        factors = prime_factors(self.replicas) if self.pairing == "cycle" else ()
        draw = round_index // len(factors) if factors else round_index
        # Fragment 0 has the groups of a run without fragments.
        counters = (draw, fragment) if fragment and not factors else (draw,)
        labels = draw_permutation(self.replicas, self.seed, Stream.GROUPING, *counters)
        if factors:  # the least significant digit first
            place = (round_index + fragment) % len(factors)
            digits = labels.reshape(-1, factors[place], prod(factors[:place]))
            groups = digits.swapaxes(1, 2).reshape(-1, factors[place]).tolist()
        else:
            order, size = labels.tolist(), self.group_size
            groups = [order[start : start + size] for start in range(0, self.replicas, size)]
        return [tuple(sorted(group)) for group in groups]

    def group(self, replica: int, round_index: int, fragment: int = 0) -> Group:
        """Return the group of `replica`, which includes it, in ascending order."""
        return next(group for group in self.groups(round_index, fragment) if replica in group)


def averaging_cycle(replica: int, replicas: int, seed: int) -> list[Group]:
    """Return one replica's groups in which consecutive plain averages give every replica the mean of all.

    There is one group for each prime factor of `replicas`, of that size: log2 R pairs where R is a power of 2. The
    smallest come last: where at most one factor is odd, the last means are then equal bit for bit.
    """
    factors = prime_factors(replicas)
    cycle = Grouping(replicas, max(factors, default=1), seed, pairing="cycle")
    return [cycle.group(replica, place) for place in reversed(range(len(factors)))]


def prime_factors(number: int) -> tuple[int, ...]:
    """Return the prime factors of a number in ascending order, with multiplicity; empty for 1."""
    factors, rest, factor = [], number, 2
    while rest > 1:
        if factor * factor > rest:
            factor = rest  # a prime
        while rest % factor == 0:
            factors.append(factor)
            rest //= factor
        factor += 1
    return tuple(factors)
