"""Who is where: ranks as points of a replicas x pp x dp x tp array. No process groups here."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Position:
    """The coordinates of one rank."""

    replica: int
    stage: int
    dp: int
    tp: int


@dataclass(frozen=True)
class Topology:
    """The shape of a run.

    `pp` stages of a pipeline, `dp` synchronous data-parallel copies inside a replica, `tp` tensor-parallel slices.
    rank = ((replica * pp + stage) * dp + dp_rank) * tp + tp_rank, so the tensor-parallel ranks of a stage are
    neighbours (one node) and a replica is a contiguous block of ranks.
    """

    replicas: int = 1
    pp: int = 1
    dp: int = 1
    tp: int = 1
    vpp: int = 1
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        for name, size in (
            ("replicas", self.replicas),
            ("pp", self.pp),
            ("dp", self.dp),
            ("tp", self.tp),
        ):
            if size < 1:
                raise ValueError(f"{name} must be at least 1, not {size}")

    @property
    def world_size(self) -> int:
        return self.replicas * self.replica_size

    @property
    def replica_size(self) -> int:
        """Ranks in one replica."""
        return self.pp * self.dp * self.tp

    @property
    def grid(self) -> np.ndarray:
        """All ranks, shape [replicas, pp, dp, tp]."""
        return np.arange(self.world_size).reshape(self.replicas, self.pp, self.dp, self.tp)

    def rank(self, position: Position) -> int:
        within = (position.stage * self.dp + position.dp) * self.tp + position.tp
        return position.replica * self.replica_size + within

    def position(self, rank: int) -> Position:
        """Raises ValueError when `rank` is not one of this topology's."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside a world of {self.world_size}")
        replica, stage, dp, tp = np.unravel_index(rank, self.grid.shape)
        return Position(int(replica), int(stage), int(dp), int(tp))

    def counterpart(self, rank: int, replica: int) -> int:
        """The rank with the same stage, dp and tp place in another replica: the only kind gossiped with."""
        return replica * self.replica_size + rank % self.replica_size
