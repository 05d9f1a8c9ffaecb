"""Run under launchers by test_world_joins.py: join, choose a transport, exchange. A JSON line per rank."""

import os
import sys

import torch.distributed as dist

from megatron_noloco.job.join import choose_transport, join
from megatron_noloco.job.launcher import read_world
from tests.distributed.transport_suite import swap
from tests.harness import say

if __name__ == "__main__":
    world = read_world(os.environ)
    join(world, "gloo")
    try:
        transport = choose_transport(sys.argv[1], world)  # type: ignore[arg-type]
        if world.world_size == 2:
            swap(transport, 1 - world.rank, 1000, tag=1)
        outcome = transport.name
    except ValueError as error:
        outcome = str(error)
    seen = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")}
    say({"launcher": world.launcher, "outcome": outcome, "size": dist.get_world_size(), **seen})
    dist.barrier()
    dist.destroy_process_group()
