"""Grouping: with whom a replica averages in a round, computed by every rank alone."""

from dataclasses import dataclass

from megatron_noloco.plans.draws import Stream, draw_permutation

Group = tuple[int, ...]


@dataclass(frozen=True)
class Grouping:
    """Random groups of `group_size` replicas, drawn afresh each round.

    A random permutation of the replicas is cut into groups of `group_size`; when that does not divide
    `replicas`, the rest is one smaller group, and a group of one is a bye. With `per_stage` every stage
    draws for itself, so the stages of a replica gossip with different replicas.
    `group_size == replicas` is DiLoCo: everybody in one group, every round.
    """

    replicas: int
    group_size: int
    seed: int
    per_stage: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.group_size <= self.replicas:
            raise ValueError(f"group_size {self.group_size} must lie between 1 and replicas {self.replicas}")

    def groups(self, round_index: int, stage: int = 0) -> list[Group]:
        """The groups of a round, each in ascending order of replica."""
        counters = (round_index, stage) if self.per_stage else (round_index,)
        order = draw_permutation(self.replicas, self.seed, Stream.GROUPING, *counters).tolist()
        return [
            tuple(sorted(order[start : start + self.group_size]))
            for start in range(0, self.replicas, self.group_size)
        ]

    def group(self, replica: int, round_index: int, stage: int = 0) -> Group:
        """The group that contains `replica`, in ascending order, `replica` included."""
        return next(group for group in self.groups(round_index, stage) if replica in group)
