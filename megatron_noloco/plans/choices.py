"""Whom a replica meets in a round when not all are there: the plan's partner, or another replica left over.

For each round there is a first choice, the pair of the plan, and R further ones. They pair the replicas by labels
that are drawn for the round: in choice a, labels x and y with x + y = a modulo R meet. So each two replicas are a
pair in exactly one of them. A replica whose partner of the plan is there meets it. Those left over go through the
further choices in order, and two that are both still left over meet. Who knows of the same replicas computes
the same pairs, and at most one replica is left over in the end.
"""

from collections.abc import Set
from dataclasses import dataclass

from megatron_noloco.plans.draws import Stream, draw_permutation
from megatron_noloco.plans.grouping import Grouping


@dataclass(frozen=True)
class Others:
    """What a replica knows of the others when it comes to a round.

    Attributes:
        there: those that take part in the round, or will.
        free: those of them that can still be met.
        waiting: those of these that have come to the round, to meet this replica.
    """

    there: Set[int]
    free: Set[int]
    waiting: Set[int]


def choose(grouping: Grouping, replica: int, at: tuple[int, int], others: Others) -> int | None:
    """The partner of a replica in a round; None: a bye.

    Who waits for it already is preferred to those that have not come yet.

    Args:
        grouping: of pairs.
        at: round and fragment.
    """
    partners: dict[int, int] = {}
    for group in grouping.groups(at[0], fragment=at[1]):
        if len(group) == 2:
            partners |= {group[0]: group[1], group[1]: group[0]}
    planned = partners.get(replica)
    if planned is not None and planned in others.free:
        return planned
    labels = draw_permutation(grouping.replicas, grouping.seed, Stream.CHOICES, *at).tolist()
    if others.waiting:
        return min(others.waiting, key=lambda other: (labels[replica] + labels[other]) % len(labels))
    left_over = {other for other in others.free if partners.get(other) not in others.there}
    return _paired(labels, {replica, *left_over}).get(replica)


def _paired(labels: list[int], left_over: Set[int]) -> dict[int, int]:
    """The partner of each replica, where it has one, by the choices in order."""
    by_label = {labels[replica]: replica for replica in left_over}
    pairs: dict[int, int] = {}
    for choice in range(len(labels)):
        for label in list(by_label):
            other = (choice - label) % len(labels)
            if label != other and label in by_label and other in by_label:
                one, two = by_label.pop(label), by_label.pop(other)
                pairs |= {one: two, two: one}
    return pairs
