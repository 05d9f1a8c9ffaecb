"""What `attach` makes sure of before the first step."""

import hashlib

from torch import Tensor

from megatron_noloco.attach.trained import Trained
from megatron_noloco.everybody import of_all_ranks
from megatron_noloco.outer import Weights
from megatron_noloco.plans.topology import Topology


def check_reach(trained: Trained, topology: Topology, rank: int) -> None:
    """Raises ValueError where gradients are not reduced over the ranks of this rank's replica, and no other."""
    if trained.reduced_over is None:
        if not topology.slots:
            raise ValueError(
                "attach: with Megatron-core's optimizer each replica is a job of its own; give federation"
            )
        return
    own = topology.grid[topology.position(rank).replica - topology.slot].ravel().tolist()
    if sorted(trained.reduced_over) != own:
        remedy = trained.remedy[bool(topology.slots)].format(replicas=topology.replicas)
        raise ValueError(
            f"rank {rank}: the gradient all-reduce of this model spans ranks {sorted(trained.reduced_over)}, its "
            f"replica is {own}; {remedy}"
        )


def first_weights_of(weights: Weights, state: dict[str, Tensor] | None) -> bytes:
    """A digest of the weights with which the training of this rank began; raises ValueError for another state."""
    if state is None:
        return hashlib.sha256(weights.read().numpy().tobytes()).digest()
    length = len(state["slow_weights"])
    if length != weights.length:
        raise ValueError(
            f"attach: the state is of {length} weights, this rank has {weights.length}; each rank needs the one "
            "that it saved itself"
        )
    return state["first_weights"].cpu().numpy().tobytes()


def check_equal(digest: bytes, replica_size: int) -> None:
    """Raises ValueError where counterparts differ. A collective over the whole job, here at the start only."""
    digests = of_all_ranks(digest)
    for rank, other in enumerate(digests):
        if other != digests[rank % replica_size]:
            raise ValueError(
                f"the weights of replica {rank // replica_size} differ from those of replica 0; seed all replicas "
                "alike, or load the same checkpoint, before the model is wrapped (DistributedDataParallel, "
                "deepspeed.initialize)"
            )
