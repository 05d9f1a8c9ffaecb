"""The partner of a replica in a round when not all replicas are there: the planned one, or a further candidate.

A replica whose planned partner is there exchanges with it. For the replicas left over, each round has R rows of
candidate pairs, drawn from the seed: replicas get random labels, and in row a labels x and y with x + y = a modulo
R are a pair. So every two replicas are a pair in exactly one row. The rows are taken in order; two replicas that
are both still left over are partners. Replicas that know the same others compute the same pairs, without any
message, and at most one replica is left without a partner.

Where jobs name their sites, planned pairs are drawn by the same rows from all replicas whose site is known: in
most rounds inside sites, in every `interval`-th across them as far as that is possible. Left-over replicas are
paired likewise. Only a replica that has nobody at its own site goes across in any round, before others do.

Two replicas that no other can connect to ("hidden") are never a pair. Where the plan pairs them, they change
partners with a planned pair of which both can be reached. A hidden replica that is left over comes before the
others that are.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from itertools import combinations

from megatron_noloco.plans.draws import Stream, draw_permutation
from megatron_noloco.plans.grouping import Grouping, goes_across


@dataclass(frozen=True)
class Others:
    """The other replicas, as a replica knows them when it begins a round.

    Attributes:
        present: those that take part in the round, or will.
        free: those of them that have no other partner in it.
        waiting: those of the free ones that have begun the round with this replica.
        hidden: those of all replicas, this one included, that no other can connect to.
        sites: where replicas are, as far as that is known, this one included.
    """

    present: Set[int]
    free: Set[int]
    waiting: Set[int]
    hidden: Set[int] = frozenset()
    sites: Mapping[int, str] = field(default_factory=dict)


def choose(
    grouping: Grouping, replica: int, at: tuple[int, int], others: Others, interval: int = 0
) -> int | None:
    """Return the partner of a replica in a round; None: it skips the round.

    A replica that waits for this one already is preferred to those that have not begun the round.

    Args:
        grouping: of pairs.
        at: round and fragment.
        interval: every how many rounds replicas exchange across sites, if there are several.
    """
    labels = draw_permutation(grouping.replicas, grouping.seed, Stream.CHOICES, *at).tolist()
    hidden, several = others.hidden, len(set(others.sites.values())) > 1
    crosses = several and goes_across(sum(at), interval)
    there, sites = {replica, *others.present}, others.sites if several else {}

    def pairs_of_rows(members: Set[int], there: Set[int]) -> dict[int, int]:
        return _pairs_of_rows(labels, members, _across_or_not(hidden, there, sites, crosses))

    if several:
        planned = pairs_of_rows(sites.keys(), sites.keys())
    else:
        groups = grouping.groups(at[0], fragment=at[1])
        pairs = [frozenset(group) for group in groups if len(group) == 2]
        planned = _partners(_without_hidden_pairs(pairs, labels, there, hidden))
    if planned.get(replica) in others.free:
        return planned[replica]
    if others.waiting:
        return min(others.waiting, key=lambda other: (labels[replica] + labels[other]) % len(labels))
    unseen = hidden if replica in hidden else set()  # they may be there
    left_over = {other for other in others.free if planned.get(other) not in {*others.present, *unseen}}
    return pairs_of_rows({replica, *left_over}, there).get(replica)


def _without_hidden_pairs(
    pairs: list[frozenset[int]], labels: list[int], present: Set[int], hidden: Set[int]
) -> list[frozenset[int]]:
    """Return the pairs without those of two hidden replicas, which change partners with a pair of none, if any."""

    def by_label(pair: Set[int]) -> list[int]:
        return sorted(pair, key=labels.__getitem__)

    both = [pair for pair in pairs if pair <= hidden]  # present or not: they do not see each other
    none = [pair for pair in pairs if not pair & hidden and pair <= present]
    found = [pair for pair in pairs if pair not in both]
    for two, others in zip(*(sorted(some, key=by_label) for some in (both, none)), strict=False):
        found.remove(others)
        found += map(frozenset, zip(by_label(two), by_label(others), strict=True))
    return found


def _partners(pairs: Iterable[Set[int]]) -> dict[int, int]:
    return {one: two for pair in pairs for one in pair for two in pair - {one}}


def _across_or_not(
    hidden: Set[int], there: Set[int], sites: Mapping[int, str], crosses: bool
) -> Callable[[int, int], tuple[bool, bool] | None]:
    """Return what says whether two replicas are at one site, and both can be reached; None: they are never a pair.

    Args:
        there: those that count as being at their site.
        sites: of all replicas; empty where all are at one.
        crosses: whether the round goes across sites.
    """
    at_site, open_at_site = (Counter(map(sites.get, some)) for some in (there, there - hidden))

    def is_alone(one: int) -> bool:
        site = sites.get(one)
        return open_at_site[site] == 0 if one in hidden else at_site[site] == 1

    def kind(one: int, two: int) -> tuple[bool, bool] | None:
        same, hidden_members = sites.get(one) == sites.get(two), len({one, two} & hidden)
        if hidden_members == 2 or not (same or crosses or is_alone(one) or is_alone(two)):
            return None
        return same, not hidden_members

    return kind


def _pairs_of_rows(
    labels: list[int], members: Set[int], kind: Callable[[int, int], tuple[bool, bool] | None]
) -> dict[int, int]:
    """Return the partner of each replica that has one, taking the rows in order for one kind after the other."""
    found = []
    for one, two in combinations(sorted(members), 2):
        if (which := kind(one, two)) is not None:
            found.append((which, (labels[one] + labels[two]) % len(labels), one, two))
    pairs: dict[int, int] = {}
    for *_, one, two in sorted(found):
        if one not in pairs and two not in pairs:
            pairs |= {one: two, two: one}
    return pairs
