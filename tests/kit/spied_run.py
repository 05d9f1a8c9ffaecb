"""One spied rank, forked by the harness or started by mpirun (then: the argument is the config file)."""

import sys
from typing import Any

import torch.distributed as dist

from megatron_noloco.job.leaving import leave
from megatron_noloco.training.run import Run
from tests.kit.ranks import say
from tests.kit.spy import Spy
from tests.kit.tiny import already_joined, trained


def spied_rank(rank: int, world_size: int, config: str, plant: bool = False) -> dict[str, Any]:
    """Train over torch, and plant a collective over everybody when asked to."""
    already_joined()
    spy = Spy()
    spy.listen_to_torch()
    run = trained(config)
    if plant:
        dist.barrier()
    return _told(spy, run)


def _told(spy: Spy, run: Run) -> dict[str, Any]:
    groups = run.engine.groups
    hops = [groups.forward_hops.group_name, groups.backward_hops.group_name]
    return {"rank": dist.get_rank(), "calls": spy.report(), "hops": hops}


if __name__ == "__main__":
    spy = Spy()
    spy.listen_to_mpi()
    spy.listen_to_torch()
    say(_told(spy, trained(sys.argv[1])))
    leave(0)
