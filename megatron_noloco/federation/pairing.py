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
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field

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
        return _pairs_of_rows(labels, members, _Places(hidden, there, sites, crosses))

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


_KINDS = (
    (False, False),
    (False, True),
    (True, False),
    (True, True),
)  # of pairs, in the order of their choice


class _Places:
    """Where replicas are, and which two may be a pair.

    A pair's kind is whether both are at one site, and whether both can be reached.

    Args:
        there: those that count as being at their site.
        sites: of all replicas; empty where all are at one.
        crosses: whether the round goes across sites.
    """

    def __init__(self, hidden: Set[int], there: Set[int], sites: Mapping[int, str], crosses: bool) -> None:
        self._hidden, self._sites, self._crosses = hidden, sites, crosses
        self._at_site, self._open_at_site = (
            Counter(map(sites.get, some)) for some in (there, there - hidden)
        )

    def kind(self, one: int, two: int) -> tuple[bool, bool] | None:
        """Return the kind of a pair; None: the two are never a pair."""
        same, hidden_members = self._sites.get(one) == self._sites.get(two), len({one, two} & self._hidden)
        if hidden_members == 2 or not (same or self._goes_across(one) or self._goes_across(two)):
            return None
        return same, not hidden_members

    def begins(self, one: int, kind: tuple[bool, bool]) -> bool:
        """Whether to look for pairs of a kind from this member: each pair has a member of which that is so."""
        same, both_open = kind
        return (same or self._goes_across(one)) if both_open else one in self._hidden

    def _goes_across(self, one: int) -> bool:
        if self._crosses:
            return True
        site = self._sites.get(one)
        return self._open_at_site[site] == 0 if one in self._hidden else self._at_site[site] == 1


def _pairs_of_rows(labels: list[int], members: Set[int], places: _Places) -> dict[int, int]:
    """Return the partner of each replica that has one, taking the rows in order for one kind after the other."""
    by_label = {labels[member]: member for member in members}
    pairs: dict[int, int] = {}
    for kind in _KINDS:
        left = [one for one in members if one not in pairs and places.begins(one, kind)]
        for row in range(len(labels)):
            for one in left:
                two = by_label.get((row - labels[one]) % len(labels), one)
                if two != one and not {one, two} & pairs.keys() and places.kind(one, two) == kind:
                    pairs |= {one: two, two: one}
            left = [one for one in left if one not in pairs]
            if not left:
                break
    return pairs
