"""The process groups of a rank: which of them NCCL connects."""

import pytest
import torch
import torch.distributed as dist

from megatron_noloco.pipeline.groups import build_groups, connect
from megatron_noloco.plans.topology import Topology
from tests.kit.ranks import run_ranks

# A communicator takes .5 GB of a GPU. One serves all groups of one rank, and each stage has two for its hops.
LAYOUTS = {
    "one rank": (Topology(), 1),
    "two replicas of two routed stages": (Topology(2, pp=2), 4),
    "virtual stages": (Topology(2, pp=2, vpp=2), 4),
    "tensor and data parallel": (Topology(tp=2, dp=2), 3),
    "stages and experts": (Topology(pp=2, dp=2, ep=2), 7),
    "experts on two of four ranks, tensor parallel": (Topology(tp=2, dp=2, ep=2), 6),
}


def connected(rank: int, world_size: int, topology: Topology) -> list[int]:
    """Return how many communicators NCCL would make for this rank, without and with tied embeddings."""
    found = []
    for tied in (False, True):
        groups = build_groups(topology, routed=topology.pp > 1, tied=tied)
        connect(groups, torch.device("cpu"))
        dist.barrier()
        found.append(len(set(groups.used)))
    return found


@pytest.mark.parametrize(("topology", "communicators"), LAYOUTS.values(), ids=LAYOUTS)
def test_the_communicators_of_a_rank(topology: Topology, communicators: int) -> None:
    """The stages that share an embedding have one more."""
    for untied, tied in run_ranks(topology.world_size, connected, topology):
        assert (untied, tied) == (communicators, communicators + (topology.pp > 1))
