"""Rounds for a DeepSpeed engine of somebody else's loop."""

import hashlib
from typing import Any

import torch.distributed as dist

from megatron_noloco.attach.groups import cut_into
from megatron_noloco.attach.weights import weights_of
from megatron_noloco.outer import OuterOptimizer, OuterSettings, RoundReport, Weights
from megatron_noloco.plans.grouping import Grouping, Pairing
from megatron_noloco.transport.protocol import Transport
from megatron_noloco.transport.torch_dist import TorchTransport


class Attached:
    """What `attach` returns.

    Attributes:
        outer: the outer optimizer of this rank. `outer.state()` belongs into a checkpoint beside the engine's own,
            `outer.restore` continues from it.
    """

    def __init__(self, engine: Any, outer: OuterOptimizer) -> None:
        self.outer = outer
        self._engine = engine
        self._done = int(engine.global_steps)

    def step(self) -> list[RoundReport]:
        """Call it after each `engine.step()`, on all ranks. It does nothing until the optimizer has taken a step.

        Returns the reports of the rounds that ended with it: none after most. Raises as
        `OuterOptimizer.after_local_step` does.
        """
        done = int(self._engine.global_steps)
        if done == self._done:  # gradients are being accumulated
            return []
        self._done = done
        return self.outer.after_local_step(done)


def attach(
    engine: Any,
    settings: OuterSettings | None = None,
    *,
    replicas: int,
    group_size: int = 2,
    pairing: Pairing = "random",
    seed: int = 0,
    transport: Transport | None = None,
) -> Attached:
    """Rounds between the replicas of a job, each of which has a DeepSpeed engine over its own ranks.

    Args:
        engine: of `deepspeed.initialize(..., mpu=ReplicaGroups(replicas))`, with any ZeRO stage.
        settings: of the method; the same on all ranks, as are the next four.
        replicas: into which the ranks of the job are divided, in blocks of consecutive ranks.
        group_size: n, replicas that average in a round.
        pairing: how groups are drawn, see `Grouping`.
        seed: of the groups.
        transport: for the exchanges; by default torch.distributed's messages between two ranks.

    Raises ValueError where the engine's data parallelism is not that of one replica, where replicas have different
    weights, and where the weights of the engine cannot be had.
    """
    topology, rank = cut_into(replicas), dist.get_rank()
    place = topology.place(rank)
    own = topology.grid[place.replica].ravel().tolist()
    reached = sorted(dist.get_process_group_ranks(engine.data_parallel_group))
    if reached != own:
        raise ValueError(
            f"rank {rank}: the gradient all-reduce of this engine spans ranks {reached}, its replica is {own}; "
            f"give deepspeed.initialize mpu=ReplicaGroups({replicas})"
        )
    weights = weights_of(engine)
    _check_equal(weights, topology.replica_size)
    grouping = Grouping(replicas, group_size, seed, pairing=pairing)
    transport = TorchTransport() if transport is None else transport
    return Attached(engine, OuterOptimizer(weights, transport, place, grouping, settings or OuterSettings()))


def _check_equal(weights: Weights, replica_size: int) -> None:
    """Raises ValueError where counterparts differ. A collective over the whole job, here at the start only."""
    digest = hashlib.sha256(weights.read().numpy().tobytes()).hexdigest()
    digests: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(digests, digest)
    for rank, other in enumerate(digests):
        if other != digests[rank % replica_size]:
            raise ValueError(
                f"the weights of replica {rank // replica_size} differ from those of replica 0; seed all replicas "
                "alike, or load the same checkpoint, before deepspeed.initialize"
            )
