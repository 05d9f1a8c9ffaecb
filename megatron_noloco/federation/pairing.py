"""The partner of a replica in a round when not all replicas are there: the planned one, or a further candidate.

A replica whose planned partner is there exchanges with it. For the replicas left over, each round has R rows of
candidate pairs, drawn from the seed: replicas get random labels, and in row a labels x and y with x + y = a modulo
R are a pair. So every two replicas are a pair in exactly one row. The rows are taken in order; two replicas that
are both still left over are partners. Replicas that know the same others compute the same pairs, without any
message, and at most one replica is left without a partner.

Where jobs name their sites, planned pairs are drawn by the same rows from all replicas whose site is known: in
most rounds inside sites, in every `interval`-th across them as far as that is possible. Left-over replicas are
paired likewise. Only a replica that is alone at its site goes across in any round, before all others, with each of
them as often.

Two replicas that no other can connect to ("hidden") are never a pair. Where there are such replicas, planned pairs
are drawn by the rows, too, and hidden replicas come before the others.
"""

from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import permutations

from megatron_noloco.plans.draws import Stream, draw_permutation
from megatron_noloco.plans.grouping import Grouping, goes_across


@dataclass(frozen=True)
class Others:
    """The other replicas, as a replica knows them when it begins a round.

    Attributes:
        present: those that take part in the round, or will, as far as this one sees them.
        free: those of them that have no other partner in it.
        waiting: those of the free ones that have begun the round with this replica.
        hidden: those of all replicas, this one included, that no other can connect to.
        elsewhere: the hidden ones that others see. A hidden replica sees no other itself.
        sites: where replicas are, as far as that is known, this one included.
    """

    present: Set[int]
    free: Set[int]
    waiting: Set[int]
    hidden: Set[int] = frozenset()
    elsewhere: Set[int] = frozenset()
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
    there, sites = {replica, *others.present, *others.elsewhere}, others.sites if several else {}

    def pairs_of_rows(members: Set[int], there: Set[int]) -> dict[int, int]:
        return _pairs_of_rows(labels, members, _Places(hidden, there, sites, crosses))

    if several or hidden:
        known = sites.keys() if several else set(range(grouping.replicas))
        planned = pairs_of_rows(known, known)
    else:
        planned = dict(
            pair for group in grouping.groups(at[0], fragment=at[1]) for pair in permutations(group, 2)
        )
    if planned.get(replica) in others.free:
        return planned[replica]
    if others.waiting:
        return min(others.waiting, key=lambda other: (labels[replica] + labels[other]) % len(labels))
    left_over = {other for other in others.free if planned.get(other) not in there - {replica}}
    return pairs_of_rows({replica, *left_over}, there).get(replica)


class _Kind(IntEnum):
    """What a pair is, in the order in which pairs are chosen."""

    HIDDEN_ALONE = 0  # at two sites; a hidden member has nobody to exchange with at its own
    ALONE = 1  # at two sites; a member that can be reached has nobody at its own
    ACROSS_HIDDEN = 2  # at two sites, in a round that goes across; a member is hidden
    ACROSS = 3
    HIDDEN = 4  # at one site; a member is hidden
    OPEN = 5


class _Places:
    """Where replicas are, and which two may be a pair.

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

    def kind(self, one: int, two: int) -> _Kind | None:
        """Return the kind of a pair; None: the two are never a pair."""
        hidden = {one, two} & self._hidden
        if len(hidden) == 2:
            return None
        if self._sites.get(one) == self._sites.get(two):
            return _Kind.HIDDEN if hidden else _Kind.OPEN
        if alone := {member for member in (one, two) if self._is_alone(member)}:
            return _Kind.HIDDEN_ALONE if alone & hidden else _Kind.ALONE
        if self._crosses:
            return _Kind.ACROSS_HIDDEN if hidden else _Kind.ACROSS
        return None

    def begins(self, one: int, kind: _Kind) -> bool:
        """Whether to look for pairs of a kind from this member: each pair has a member of which that is so."""
        if kind in (_Kind.HIDDEN_ALONE, _Kind.ALONE) and not self._is_alone(one):
            return False
        if kind in (_Kind.ACROSS_HIDDEN, _Kind.ACROSS) and not self._crosses:
            return False
        return (one in self._hidden) == (kind in (_Kind.HIDDEN_ALONE, _Kind.ACROSS_HIDDEN, _Kind.HIDDEN))

    def _is_alone(self, one: int) -> bool:
        """Whether a replica has nobody to exchange with at its own site."""
        site = self._sites.get(one)
        return self._open_at_site[site] == 0 if one in self._hidden else self._at_site[site] == 1


def _pairs_of_rows(labels: list[int], members: Set[int], places: _Places) -> dict[int, int]:
    """Return the partner of each replica that has one, taking the rows in order for one kind after the other."""
    by_label = {labels[member]: member for member in members}
    pairs: dict[int, int] = {}
    for kind in _Kind:
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
