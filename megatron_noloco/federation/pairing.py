"""The partner of a replica in a round when not all replicas are there: the planned one, or a further candidate.

A replica whose planned partner is there exchanges with it. For the replicas left over, each round has R rows of
candidate pairs, drawn from the seed: replicas get random labels, and in row a labels x and y with x + y = a modulo
R are a pair. So every two replicas are a pair in exactly one row. The rows are taken in order; two replicas that
are both still left over are partners. Replicas that know the same others compute the same pairs, without any
message, and at most one replica is left without a partner.

Two replicas that no other can connect to ("hidden") are never a pair. Where the plan pairs them, they change
partners with a planned pair of which both can be reached. A hidden replica that is left over comes before the
others that are.
"""

from collections.abc import Iterable, Set
from dataclasses import dataclass

from megatron_noloco.plans.draws import Stream, draw_permutation
from megatron_noloco.plans.grouping import Grouping


@dataclass(frozen=True)
class Others:
    """The other replicas, as a replica knows them when it begins a round.

    Attributes:
        present: those that take part in the round, or will.
        free: those of them that have no other partner in it.
        waiting: those of the free ones that have begun the round with this replica.
        hidden: those of all replicas, this one included, that no other can connect to.
    """

    present: Set[int]
    free: Set[int]
    waiting: Set[int]
    hidden: Set[int] = frozenset()


def choose(grouping: Grouping, replica: int, at: tuple[int, int], others: Others) -> int | None:
    """Return the partner of a replica in a round; None: it skips the round.

    A replica that waits for this one already is preferred to those that have not begun the round.

    Args:
        grouping: of pairs.
        at: round and fragment.
    """
    labels = draw_permutation(grouping.replicas, grouping.seed, Stream.CHOICES, *at).tolist()
    pairs = [frozenset(group) for group in grouping.groups(at[0], fragment=at[1]) if len(group) == 2]
    planned = _partners(_without_hidden_pairs(pairs, labels, {replica, *others.present}, others.hidden))
    if planned.get(replica) in others.free:
        return planned[replica]
    if others.waiting:
        return min(others.waiting, key=lambda other: (labels[replica] + labels[other]) % len(labels))
    unseen = others.hidden if replica in others.hidden else set()  # they may be there
    left_over = {other for other in others.free if planned.get(other) not in {*others.present, *unseen}}
    return _left_over_pairs(labels, {replica, *left_over}, others.hidden).get(replica)


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


def _left_over_pairs(labels: list[int], left_over: Set[int], hidden: Set[int]) -> dict[int, int]:
    """Return the partner of each replica that has one, taking the rows in order: hidden replicas first."""
    by_label = {labels[replica]: replica for replica in left_over}
    pairs: dict[int, int] = {}
    for hidden_members in (1, 0):
        for row in range(len(labels)):
            for label in list(by_label):
                other = (row - label) % len(labels)
                if label == other or label not in by_label or other not in by_label:
                    continue
                pair = {by_label[label], by_label[other]}
                if len(pair & hidden) == hidden_members:
                    pairs |= _partners([pair])
                    del by_label[label], by_label[other]
    return pairs
