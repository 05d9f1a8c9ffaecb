"""All ranks of a job step with the same kernel of Adam."""

import socket

import pytest
import torch
import torch.distributed as dist

from megatron_noloco.engine import initialize
from tests.harness import run_ranks


def asked(rank: int, world_size: int, hosts: str, has_it: list[bool]) -> tuple[bool, int]:
    """Return the choice of a rank on a GPU, and how often it asked for the kernel."""
    calls = []

    def loads() -> bool:
        calls.append(rank)
        return has_it[rank]

    torch.cuda.is_available = lambda: True
    socket.gethostname = lambda: hosts[rank]
    initialize.fused_adam_loads = loads
    chosen = initialize.all_have_fused_adam()
    dist.barrier()
    return chosen, len(calls)


@pytest.mark.parametrize("has_it", [[True] * 4, [True, True, False, True]], ids=["all", "all but one"])
def test_fused_adam_is_for_all_ranks_or_for_none(has_it: list[bool]) -> None:
    """The first rank of each host asks first, when it may have to compile it."""
    found = run_ranks(4, asked, "abab", has_it)
    assert [chosen for chosen, _ in found] == [all(has_it)] * 4
    assert [calls for _, calls in found] == [2, 2, 1, 1]
