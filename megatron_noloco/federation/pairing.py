"""The partner of a replica in a round: the planned one, or a further candidate if that one is not there.

The members of a federation are the replicas that are there or were there. Their plan is that of a single job with
as many replicas, in the order of their numbers (`plans.grouping`). A replica whose planned partner is there
exchanges with it. For the replicas left over, each round has R rows of candidate pairs, drawn from the seed: the R
members get random labels, and in row a labels x and y with x + y = a modulo R are a pair. So every two members are
a pair in exactly one row. The rows are taken in order; two replicas that are both still left over are partners.
Replicas that know the same others compute the same pairs, without any message, and at most one replica is left
without a partner.

Where jobs name their sites, planned pairs are drawn by the same rows from all members whose site is known: in
most rounds inside sites, in every `interval`-th across them as far as that is possible. Left-over replicas are
paired likewise. Only a replica that is alone at its site goes across in any round, before all others, with each of
them as often.

Two replicas that no other can connect to ("hidden") are never a pair. Where there are such replicas, planned pairs
are drawn by the rows, too, and hidden replicas come before the others.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import permutations

from megatron_noloco.plans.draws import Stream, draw_permutation
from megatron_noloco.plans.grouping import goes_across
from megatron_noloco.settings import SITE_INTERVAL, NolocoSettings, grouping_of


@dataclass(frozen=True)
class Candidates:
    """The other replicas, as a replica knows them when it begins a round.

    Attributes:
        members: all replicas that are there or were there, this one included.
        present: those that take part in the round, or will, as far as this one sees them.
        free: those of them that have no other partner in it.
        waiting: those of the free ones that have begun the round with this replica.
        hidden: those of all replicas, this one included, that no other can connect to.
        sites: where replicas are, as far as that is known, this one included.
    """

    members: Set[int]
    present: Set[int]
    free: Set[int]
    waiting: Set[int]
    hidden: Set[int] = frozenset()
    sites: Mapping[int, str] = field(default_factory=dict)

    @property
    def several_sites(self) -> bool:
        """Whether replicas are at several sites, as far as that is known."""
        return len(set(self.sites.values())) > 1


@dataclass(frozen=True)
class Pairing:
    """The plan of pairs of a federation, from which each replica chooses its partners.

    Attributes:
        noloco: the method.
        seed: of the draws; the same in all jobs, as is `noloco`.
    """

    noloco: NolocoSettings
    seed: int

    def choose(self, replica: int, at: tuple[int, int], candidates: Candidates) -> int | None:
        """Return the partner of a replica in a round; None: it skips the round.

        A replica that waits for this one already is preferred to those that have not begun the round.

        Args:
            at: round and fragment.
        """
        planned, rows = self.planned(at, candidates), self._rows(at, candidates)
        if planned.get(replica) in candidates.free:
            return planned[replica]
        if candidates.waiting:
            return min(candidates.waiting, key=lambda other: rows.row(replica, other))
        there = {replica, *candidates.present}
        left_over = {other for other in candidates.free if planned.get(other) not in there - {replica}}
        return rows.pairs({replica, *left_over}, there).get(replica)

    def planned(self, at: tuple[int, int], candidates: Candidates) -> dict[int, int]:
        """Return the planned partner of each member that has one, whoever is there."""
        if candidates.several_sites or candidates.hidden:
            known = candidates.sites.keys() if candidates.several_sites else candidates.members
            return self._rows(at, candidates).pairs(known, known)
        members = sorted(candidates.members)
        groups = grouping_of(self.noloco, len(members), self.seed).groups(at[0], fragment=at[1])
        return {members[one]: members[two] for group in groups for one, two in permutations(group, 2)}

    def _rows(self, at: tuple[int, int], candidates: Candidates) -> "_Rows":
        interval = self.noloco.site_interval or SITE_INTERVAL
        crosses = candidates.several_sites and goes_across(sum(at), interval)
        labels = draw_permutation(len(candidates.members), self.seed, Stream.CHOICES, *at).tolist()
        sites = candidates.sites if candidates.several_sites else {}
        return _Rows(
            dict(zip(sorted(candidates.members), labels, strict=True)), candidates.hidden, sites, crosses
        )


class _Kind(IntEnum):
    """What a pair is, in the order in which pairs are chosen."""

    ALONE = 0  # at two sites; a member has nobody to exchange with at its own
    ACROSS = 1  # at two sites, in a round that goes across
    INSIDE = 2  # at one site


@dataclass(frozen=True)
class _Rows:
    """The candidate pairs of a round.

    Attributes:
        labels: of all members.
        hidden: see `Candidates`.
        sites: of all replicas; empty where all are at one.
        crosses: whether the round goes across sites.
    """

    labels: Mapping[int, int]
    hidden: Set[int]
    sites: Mapping[int, str]
    crosses: bool

    def row(self, one: int, two: int) -> int:
        """Return the row in which two members are a pair."""
        return (self.labels[one] + self.labels[two]) % len(self.labels)

    def pairs(self, candidates: Set[int], there: Set[int]) -> dict[int, int]:
        """Return the partner of each candidate that has one.

        Takes the rows in order for one kind after the other; of each kind for hidden members before the others.

        Args:
            there: the members that count as being at their site.
        """
        alone = {one for one in candidates if self.sites and self._is_alone(one, there)}
        has_one = {_Kind.ALONE: alone, _Kind.ACROSS: candidates if self.crosses else frozenset[int]()}
        by_label = {self.labels[candidate]: candidate for candidate in candidates}
        pairs: dict[int, int] = {}
        for kind in _Kind:
            members = has_one.get(kind, candidates)  # each pair of the kind has one of them
            for left in (members & self.hidden, members - self.hidden):
                for row in range(len(self.labels)):
                    left = left - pairs.keys()
                    if not left:
                        break
                    for one in left:
                        two = by_label.get((row - self.labels[one]) % len(self.labels), one)
                        if (
                            two != one
                            and not {one, two} & pairs.keys()
                            and self._kind(one, two, alone) == kind
                        ):
                            pairs |= {one: two, two: one}
        return pairs

    def _kind(self, one: int, two: int, alone: Set[int]) -> _Kind | None:
        """Return the kind of a pair; None: the two are never a pair."""
        if {one, two} <= self.hidden:
            return None
        if self.sites.get(one) == self.sites.get(two):
            return _Kind.INSIDE
        if {one, two} & alone:
            return _Kind.ALONE
        return _Kind.ACROSS if self.crosses else None

    def _is_alone(self, one: int, there: Set[int]) -> bool:
        """Return whether a member has nobody to exchange with at its own site."""
        partners = there - self.hidden if one in self.hidden else there - {one}
        return all(self.sites.get(one) != self.sites.get(two) for two in partners)
