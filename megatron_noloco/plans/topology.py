"""The layout of ranks: points of a replicas x pp x dp x tp array. Makes no process groups."""

from dataclasses import dataclass

import numpy as np

from megatron_noloco.errors import UserError


@dataclass(frozen=True)
class Position:
    """Holds the coordinates of one rank."""

    replica: int
    stage: int
    dp: int
    tp: int


@dataclass(frozen=True)
class Place:
    """Places one rank for the outer optimizer: in which replica, among how many, and where its counterparts are.

    `outer` knows no more of a topology. A replica of one rank is `Place(replica, replicas)`.

    Attributes:
        replica: this rank's replica, from 0.
        replicas: their number; None in a federation, where it changes.
        rank: its rank in the transport; by default the first rank of the replica.
        ranks_per_replica: replicas are contiguous blocks of this many ranks.

    Raises UserError for a replica that is not among them, and for a rank that is not in the replica.
    """

    replica: int
    replicas: int | None
    rank: int = -1
    ranks_per_replica: int = 1

    def __post_init__(self) -> None:
        if self.replica < 0 or (self.replicas is not None and self.replica >= self.replicas):
            most = "" if self.replicas is None else f" and at most replicas - 1 = {self.replicas - 1}"
            raise UserError(f"replica {self.replica} must be at least 0{most}")
        if self.rank == -1:
            object.__setattr__(self, "rank", self.replica * self.ranks_per_replica)
        if self.rank // self.ranks_per_replica != self.replica:
            raise UserError(
                f"rank {self.rank} is not in replica {self.replica} of {self.ranks_per_replica} ranks each"
            )

    def rank_of(self, replica: int) -> int:
        """Return the rank at the same place in another replica, the only kind that this rank exchanges with."""
        return replica * self.ranks_per_replica + self.rank % self.ranks_per_replica


@dataclass(frozen=True)
class Topology:
    """Lays out the ranks of a run.

    rank = ((replica * pp + stage) * dp + dp_rank) * tp + tp_rank, so the tensor-parallel ranks of a stage are
    neighbours (one node) and a replica is a contiguous block of ranks. In a federation each job is one replica,
    and counts its own ranks from 0.

    Attributes:
        replicas: copies of the model, each with weights of its own; in a federation 1.
        pp: pipeline stages of a replica.
        dp: synchronous data-parallel copies inside a replica.
        tp: tensor-parallel slices of a stage.
        vpp: model chunks per stage (Megatron's interleaved schedule); these need no further ranks.
        sequence_parallel: whether activations are split over the tensor-parallel ranks outside attention and MLP.
        slot: the number of the first replica; in a federation, of the only one of this job.
        separate_jobs: whether other jobs have the other replicas; False: this job has all replicas.
        ep: consecutive data-parallel ranks that divide the experts of each layer among them; a divisor of dp.
    """

    replicas: int = 1
    pp: int = 1
    dp: int = 1
    tp: int = 1
    vpp: int = 1
    sequence_parallel: bool = False
    slot: int = 0
    separate_jobs: bool = False
    ep: int = 1

    def __post_init__(self) -> None:
        for name in ("replicas", "pp", "dp", "tp", "vpp", "ep"):
            if (size := getattr(self, name)) < 1:
                raise UserError(f"{name} must be at least 1, not {size}")
        if self.dp % self.ep:
            raise UserError(f"dp {self.dp} does not divide into groups of ep {self.ep}")
        if self.separate_jobs and not (self.replicas == 1 and self.slot >= 0):
            raise UserError(f"slot {self.slot} must be that of one replica, from 0")

    @property
    def total_replicas(self) -> int | None:
        """Replicas of all jobs together; None in a federation, where their number changes."""
        return None if self.separate_jobs else self.replicas

    @property
    def numbers(self) -> range:
        """The numbers of the replicas of this job."""
        return range(self.slot, self.slot + self.replicas)

    @property
    def world_size(self) -> int:
        """Ranks of all replicas of this job together."""
        return self.replicas * self.replica_size

    @property
    def microbatches_at_once(self) -> int:
        """Microbatches of which the schedule takes a multiple: with virtual stages as many as stages."""
        return self.pp if self.vpp > 1 else 1

    @property
    def replica_size(self) -> int:
        """Ranks in one replica."""
        return self.pp * self.dp * self.tp

    @property
    def replica_in_words(self) -> str:
        """The layout of a replica, such as "pipeline 2 x data 1 x tensor 4"."""
        virtual = f" ({self.vpp} virtual stages each)" if self.vpp > 1 else ""
        experts = f" (expert {self.ep})" if self.ep > 1 else ""
        return f"pipeline {self.pp}{virtual} x data {self.dp}{experts} x tensor {self.tp}"

    def in_words(self, replicas: int) -> str:
        """Return the layout of replicas, such as "1 replica x pipeline 2 x data 1 x tensor 4 = 8 ranks"."""
        ranks = replicas * self.replica_size
        return (
            f"{replicas:,} replica{'s' * (replicas > 1)} x {self.replica_in_words} = "
            f"{ranks:,} rank{'s' * (ranks > 1)}"
        )

    @property
    def grid(self) -> np.ndarray:
        """All ranks, shape [replicas, pp, dp, tp]."""
        return np.arange(self.world_size).reshape(self.replicas, self.pp, self.dp, self.tp)

    def owners(self, dp: int, experts: bool) -> range:
        """Return the data-parallel ranks that have the same weights as rank `dp`, and divide their fp32 copy.

        Args:
            experts: whether the weights are experts, which every ep-th rank has; all ranks have the others.
        """
        return range(dp % self.ep, self.dp, self.ep) if experts else range(self.dp)

    def experts(self, dp: int, number: int) -> range:
        """Return which of the `number` experts of a layer the data-parallel rank `dp` has."""
        share, place = number // self.ep, dp % self.ep
        return range(place * share, (place + 1) * share)

    def rank(self, position: Position) -> int:
        within = (position.stage * self.dp + position.dp) * self.tp + position.tp
        return (position.replica - self.slot) * self.replica_size + within

    def position(self, rank: int) -> Position:
        """Return the coordinates of a rank; raises UserError when it is not in this topology."""
        if not 0 <= rank < self.world_size:
            raise UserError(f"rank {rank} is outside a world of {self.world_size}")
        replica, stage, dp, tp = np.unravel_index(rank, self.grid.shape)
        return Position(self.slot + int(replica), int(stage), int(dp), int(tp))

    def place(self, rank: int) -> Place:
        """Return the place of a rank for its outer optimizer; raises UserError as `position` does."""
        at = self.position(rank)
        number = self.slot * self.replica_size + rank  # in the federation
        return Place(at.replica, self.total_replicas, number, self.replica_size)
