"""The process groups of a rank: which of them NCCL connects."""

import pytest
import torch
import torch.distributed as dist

from megatron_noloco.pipeline.groups import build_groups, connect
from megatron_noloco.plans.topology import Topology
from megatron_noloco.preflight.memory import communicators
from tests.harness import run_ranks

LAYOUTS = {
    "one rank": Topology(),
    "two replicas of two routed stages": Topology(2, pp=2),
    "virtual stages": Topology(2, pp=2, vpp=2),
    "tensor and data parallel": Topology(tp=2, dp=2),
    "stages and experts": Topology(pp=2, dp=2, ep=2),
    "experts on two of four ranks, tensor parallel": Topology(tp=2, dp=2, ep=2),
}


def connected(rank: int, world_size: int, topology: Topology, tied: bool) -> tuple[int, int]:
    """Return how many communicators NCCL would make for this rank, and how many the plan counts."""
    groups = build_groups(topology, routed=topology.pp > 1, tied=tied)
    connect(groups, torch.device("cpu"))
    dist.barrier()
    return len(set(groups.used)), communicators(topology, topology.pp > 1, tied)


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("topology", LAYOUTS.values(), ids=LAYOUTS)
def test_the_plan_counts_what_nccl_connects(topology: Topology, tied: bool) -> None:
    found = run_ranks(topology.world_size, connected, topology, tied)
    assert [asked_for for asked_for, _ in found] == [counted for _, counted in found]
