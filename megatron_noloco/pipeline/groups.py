"""Builds the process groups of one rank.

With `use_local_synchronization` only the members of a group make it, so that the time of the start does not grow
with the number of replicas.
"""

from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import GlobalMemoryBuffer

from megatron_noloco.plans.topology import Position, Topology

ProcessGroup = dist.ProcessGroup

PATIENCE = timedelta(minutes=30)  # longest wait for another rank of a group, which may be saving


@dataclass(frozen=True)
class Groups:
    """The groups that this rank belongs to. All but the two hop groups lie inside its replica."""

    topology: Topology
    position: Position
    tp: ProcessGroup  # tensor parallelism: same replica, stage and dp rank
    pp: ProcessGroup  # pipeline parallelism: same replica, dp rank and tp rank
    dp: ProcessGroup  # synchronous data parallelism: same replica, stage and tp rank
    ep: ProcessGroup  # expert parallelism: the dp ranks that together have all experts of their stage
    expert_dp: ProcessGroup  # the dp ranks that have the same experts
    mp: ProcessGroup  # model parallelism: same replica and dp rank; gradient norm and clipping
    replica: ProcessGroup  # all ranks of the replica: statistics
    tied_embedding: ProcessGroup | None  # first and last stage, where they share one embedding
    forward_hops: ProcessGroup  # activations: all stages of all replicas that routes can reach
    backward_hops: ProcessGroup  # their gradients, on connections of their own
    collection: ProcessGroupCollection  # the same groups under Megatron-core's names

    @property
    def used(self) -> list[ProcessGroup]:
        """Groups over which tensors of the device are sent, in one order on all ranks."""
        found: list[ProcessGroup | None] = [self.tp, self.dp, self.mp]
        if self.topology.ep > 1:
            found += [self.ep, self.collection.tp_ep, self.expert_dp]
        if self.topology.pp > 1:
            found += [self.tied_embedding, self.forward_hops, self.backward_hops]
        return [group for group in found if group is not None]

    @property
    def first_stage(self) -> bool:
        return self.position.stage == 0

    @property
    def last_stage(self) -> bool:
        return self.position.stage == self.topology.pp - 1


def build_groups(
    topology: Topology, routed: bool, tied: bool = False, patience: timedelta = PATIENCE
) -> Groups:
    """Make this rank's groups; all ranks of the world must call this function with the same arguments.

    All ranks make the kinds of groups in one order, so that ranks waiting for each other cannot form a cycle; and
    equally many groups, since torch names a group after its ranks and the number of groups made before. All groups
    of this rank alone are the same: NCCL takes memory for each (`preflight.memory` counts them).

    Args:
        routed: whether microbatches may leave their replica; if not, the hop groups stay inside it.
        tied: whether the first and the last stage share the embedding weights.
        patience: time-out of the groups' messages.
    """
    at = topology.position(dist.get_rank())
    grid = topology.grid
    own = grid[at.replica - topology.slot]
    myself = own[at.stage, at.dp, [at.tp]]

    def made(ranks: np.ndarray) -> ProcessGroup:
        members = sorted(ranks.ravel().tolist())
        return dist.new_group(members, timeout=patience, use_local_synchronization=True)

    alone = made(myself)

    def group(ranks: np.ndarray) -> ProcessGroup:
        return made(ranks) if ranks.size > 1 else alone

    tp = group(own[at.stage, at.dp, :])
    pp = group(own[:, at.dp, at.tp])
    dp = group(own[at.stage, :, at.tp])
    ep, tp_ep, expert_dp = alone, tp, dp
    if topology.ep > 1:
        first = at.dp // topology.ep * topology.ep
        together = own[at.stage, first : first + topology.ep]
        ep, tp_ep = group(together[:, at.tp]), group(together)
        expert_dp = group(own[at.stage, topology.owners(at.dp, experts=True), at.tp])
    mp = group(own[:, at.dp, :])
    replica = group(own)
    tied_embedding = None
    if tied and topology.pp > 1:
        if at.stage in (0, topology.pp - 1):
            tied_embedding = group(own[[0, -1], at.dp, at.tp])
        else:
            made(myself)  # unused, but keeps the number of groups equal
    reachable = grid[:, :, at.dp, at.tp] if routed else own[:, at.dp, at.tp]
    forward_hops, backward_hops = group(reachable), group(reachable)

    collection = ProcessGroupCollection()
    collection.tp, collection.pp, collection.mp = tp, pp, mp
    collection.dp = collection.dp_cp = dp
    collection.cp = alone
    collection.tp_cp = tp
    collection.ep, collection.tp_ep, collection.expt_dp = ep, tp_ep, expert_dp
    collection.expt_tp = tp  # each expert is cut into slices like the other layers
    collection.tp_dp_cp = None  # needed only by kinds of load balancing that are not supported
    # Core would all-reduce tied weights on CUDA inside the constructor; model and engine do this instead.
    collection.embd = collection.pos_embd = None
    groups = Groups(
        topology, at, tp, pp, dp, ep, expert_dp, mp, replica, tied_embedding, forward_hops, backward_hops,
        collection,
    )  # fmt: skip
    _set_parallel_state(groups, alone)
    if torch.cuda.is_available():
        connect(groups, torch.device("cuda"))
    return groups


def connect(groups: Groups, device: torch.device) -> None:
    """Use each group once, and each hop that routes can take, in one order on all ranks; nothing is sent over pp.

    NCCL connects a group at its first collective, and two ranks at their first message. That would otherwise be in
    the middle of a schedule whose kernels wait for each other, and with routes for as long as new pairs come up:
    memory would grow for hours. Groups of one rank are used as well: DeepSpeed broadcasts every parameter in them.
    """
    for group in groups.used:
        dist.all_reduce(torch.zeros(1, device=device), group=group)
    at, stages = groups.position, groups.topology.pp

    def reached(stage: int) -> list[int]:
        ranks = dist.get_process_group_ranks(groups.forward_hops)
        return [rank for rank in ranks if groups.topology.position(rank).stage == stage % stages]

    around = groups.topology.vpp > 1  # from the last stage to the first
    after = reached(at.stage + 1) if around or not groups.last_stage else []
    before = reached(at.stage - 1) if around or not groups.first_stage else []
    for group, receivers, senders in (
        (groups.forward_hops, after, before),
        (groups.backward_hops, before, after),
    ):
        hops = [(dist.isend, rank) for rank in receivers] + [(dist.irecv, rank) for rank in senders]
        messages = [dist.P2POp(way, torch.zeros(1, device=device), rank, group) for way, rank in hops]
        for message in dist.batch_isend_irecv(messages) if messages else []:
            message.wait()


def _set_parallel_state(groups: Groups, alone: ProcessGroup) -> None:
    """Set core's global groups, which a few of its modules read although they get explicit ones.

    `initialize_model_parallel` cannot: it has one data-parallel dimension, so it cannot place the pipeline between
    replicas and data parallelism, and every rank would build the groups of all ranks.
    """
    state = parallel_state
    state._TENSOR_MODEL_PARALLEL_GROUP = groups.tp
    state._TENSOR_MODEL_PARALLEL_GLOBAL_RANKS = dist.get_process_group_ranks(groups.tp)
    state._PIPELINE_MODEL_PARALLEL_GROUP = groups.pp
    state._PIPELINE_GLOBAL_RANKS = dist.get_process_group_ranks(groups.pp)
    state._MODEL_PARALLEL_GROUP = groups.mp
    state._DATA_PARALLEL_GROUP = state._DATA_PARALLEL_GROUP_WITH_CP = groups.dp
    state._CONTEXT_PARALLEL_GROUP = alone
    state._TENSOR_AND_CONTEXT_PARALLEL_GROUP = groups.tp
    if state._GLOBAL_MEMORY_BUFFER is None:
        state._GLOBAL_MEMORY_BUFFER = GlobalMemoryBuffer()
