"""Who is where: ranks as points of a replicas x stages x lanes x shards array. No process groups here."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Position:
    """The coordinates of one rank."""

    replica: int
    stage: int
    lane: int
    shard: int


@dataclass(frozen=True)
class Topology:
    """The shape of a run.

    rank = ((replica * stages + stage) * lanes + lane) * shards + shard, so the shards of a stage are
    neighbours (one node) and a replica is a contiguous block of ranks.
    """

    replicas: int = 1
    stages: int = 1
    lanes: int = 1
    shards: int = 1

    def __post_init__(self) -> None:
        for name, size in (
            ("replicas", self.replicas),
            ("stages", self.stages),
            ("lanes", self.lanes),
            ("shards", self.shards),
        ):
            if size < 1:
                raise ValueError(f"{name} must be at least 1, not {size}")

    @property
    def world_size(self) -> int:
        return self.replicas * self.replica_size

    @property
    def replica_size(self) -> int:
        """Ranks in one replica."""
        return self.stages * self.lanes * self.shards

    @property
    def grid(self) -> np.ndarray:
        """All ranks, shape [replicas, stages, lanes, shards]."""
        return np.arange(self.world_size).reshape(self.replicas, self.stages, self.lanes, self.shards)

    def rank(self, position: Position) -> int:
        within = (position.stage * self.lanes + position.lane) * self.shards + position.shard
        return position.replica * self.replica_size + within

    def position(self, rank: int) -> Position:
        """Raises ValueError when `rank` is not one of this topology's."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside a world of {self.world_size}")
        replica, stage, lane, shard = np.unravel_index(rank, self.grid.shape)
        return Position(int(replica), int(stage), int(lane), int(shard))

    def counterpart(self, rank: int, replica: int) -> int:
        """The rank with the same stage, lane and shard in another replica: the only kind gossiped with."""
        return replica * self.replica_size + rank % self.replica_size
