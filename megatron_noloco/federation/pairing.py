"""The partner of a replica in a round when not all replicas are there: the planned one, or a further candidate.

A replica whose planned partner is there exchanges with it. For the replicas left over, each round has R rows of
candidate pairs, drawn from the seed: replicas get random labels, and in row a labels x and y with x + y = a modulo
R are a pair. So every two replicas are a pair in exactly one row. The rows are taken in order; two replicas that
are both still left over are partners. Replicas that know the same others compute the same pairs, without any
message, and at most one replica is left without a partner.
"""

from collections.abc import Set
from dataclasses import dataclass

from megatron_noloco.plans.draws import Stream, draw_permutation
from megatron_noloco.plans.grouping import Grouping


@dataclass(frozen=True)
class Others:
    """What a replica knows of the other replicas when it begins a round.

    Attributes:
        present: those that take part in the round, or will.
        free: those of them that have no other partner in it.
        waiting: those of the free ones that have begun the round with this replica.
    """

    present: Set[int]
    free: Set[int]
    waiting: Set[int]


def choose(grouping: Grouping, replica: int, at: tuple[int, int], others: Others) -> int | None:
    """Return the partner of a replica in a round; None: it skips the round.

    A replica that waits for this one already is preferred to those that have not begun the round.

    Args:
        grouping: of pairs.
        at: round and fragment.
    """
    planned: dict[int, int] = {}
    for group in grouping.groups(at[0], fragment=at[1]):
        if len(group) == 2:
            planned |= {group[0]: group[1], group[1]: group[0]}
    if planned.get(replica) in others.free:
        return planned[replica]
    labels = draw_permutation(grouping.replicas, grouping.seed, Stream.CHOICES, *at).tolist()
    if others.waiting:
        return min(others.waiting, key=lambda other: (labels[replica] + labels[other]) % len(labels))
    left_over = {other for other in others.free if planned.get(other) not in others.present}
    return _pairs(labels, {replica, *left_over}).get(replica)


def _pairs(labels: list[int], left_over: Set[int]) -> dict[int, int]:
    """Return the partner of each replica that has one, taking the rows in order."""
    by_label = {labels[replica]: replica for replica in left_over}
    pairs: dict[int, int] = {}
    for row in range(len(labels)):
        for label in list(by_label):
            other = (row - label) % len(labels)
            if label != other and label in by_label and other in by_label:
                one, two = by_label.pop(label), by_label.pop(other)
                pairs |= {one: two, two: one}
    return pairs
