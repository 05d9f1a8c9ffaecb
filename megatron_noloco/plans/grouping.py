"""Which replicas average together in a round. Every rank computes it alone, from the seed and the round."""

from dataclasses import dataclass
from math import gcd, lcm, prod
from numbers import Integral
from typing import Literal, NamedTuple

import numpy as np

from megatron_noloco.errors import UserError
from megatron_noloco.plans.draws import Stream, draw_permutation

Group = tuple[int, ...]
Pairing = Literal["random", "cycle"]


class Sites(NamedTuple):
    """Says where replicas are: inside a site links are fast, between sites they are slow.

    Attributes:
        of: the number of the site of each replica; all sites have equally many.
        interval: every how many rounds groups go across sites, at least 2.
    """

    of: Group
    interval: int

    @property
    def number(self) -> int:
        """The number of sites."""
        return max(self.of) + 1

    @property
    def size(self) -> int:
        """The number of replicas at a site."""
        return len(self.of) // self.number


class Cycle(NamedTuple):
    """The order in which rounds take the digits of replicas' labels.

    Attributes:
        inside: the bases of the digits, the least significant first; with sites those of a replica in its site.
        across: those of the site, which are more significant; without sites none.
        interval: the last of so many rounds takes the next digit of the site, the others those inside.
    """

    inside: tuple[int, ...]
    across: tuple[int, ...] = ()
    interval: int = 0

    @classmethod
    def of(cls, replicas: int, sites: Sites | None) -> "Cycle":
        """Return the cycle of so many replicas: the digits have prime factors as bases."""
        if sites is None:
            return cls(prime_factors(replicas))
        return cls(prime_factors(sites.size), prime_factors(sites.number), sites.interval)

    @property
    def bases(self) -> tuple[int, ...]:
        """The bases of all digits, the least significant first."""
        return self.inside + self.across

    def at(self, round_index: int, fragment: int = 0) -> tuple[int, int]:
        """Return how often labels were drawn again before a round, and which digit it takes.

        Without sites, all fragments have the same labels, and fragment f begins f digits later; with sites it has
        the labels and digits of the round that is f rounds later.
        """
        if not self.across:
            return round_index // len(self.inside), (round_index + fragment) % len(self.inside)
        place = round_index + fragment
        crossings = place // self.interval
        draw, digit = divmod(place - crossings, len(self.inside))
        if goes_across(place, self.interval):
            digit = len(self.inside) + crossings % len(self.across)
        return draw, digit

    @property
    def rounds(self) -> int:
        """After how many rounds labels are drawn again at the same place of the interval."""
        if not self.across:
            return len(self.inside)
        again = lcm(len(self.across), len(self.inside) // gcd(len(self.inside), self.interval - 1))
        return self.interval * again


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

    With `sites`, which only "cycle" knows, a label is the number of the site and that of the replica in it. Rounds
    take the digits of the latter, and labels are drawn again inside each site after them; the last of
    `sites.interval` rounds takes the next digit of the site. Its groups have a member of each of several sites.

    Attributes:
        replicas: their number, R.
        group_size: the most replicas in a group.
        seed: of the draws, at least 0, the same on all ranks.
        pairing: see above.

    Raises UserError for a seed that is negative or no integer.
    """

    replicas: int
    group_size: int
    seed: int
    pairing: Pairing = "random"
    sites: Sites | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.seed, Integral):
            raise UserError(f"seed must be an integer, not {self.seed!r}")
        if self.seed < 0:
            raise UserError(f"seed must be at least 0, not {self.seed}")

    @property
    def cycle(self) -> Cycle:
        """The digits of labels, and when rounds take them."""
        return Cycle.of(self.replicas, self.sites)

    def groups(self, round_index: int, fragment: int = 0) -> list[Group]:
        """Return the groups of a round of a fragment, each in ascending order of replica."""
        if self.pairing == "cycle" and self.replicas > 1:
            cycle = self.cycle
            draw, digit = cycle.at(round_index, fragment)
            labelled = draw_permutation(self.replicas, self.seed, Stream.GROUPING, draw)
            if self.sites is not None:  # by site, in each of them at random
                labelled = labelled[np.argsort(np.array(self.sites.of)[labelled], kind="stable")]
            base = cycle.bases[digit]
            digits = labelled.reshape(-1, base, prod(cycle.bases[:digit]))
            groups = digits.swapaxes(1, 2).reshape(-1, base).tolist()
        else:  # fragment 0 has the groups of a run without fragments
            counters = (round_index, fragment) if fragment else (round_index,)
            order = draw_permutation(self.replicas, self.seed, Stream.GROUPING, *counters).tolist()
            size = self.group_size
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
