"""Run under launchers by test_world_joins.py: join, choose transports, exchange. A JSON line per rank."""

import os
import sys

import torch.distributed as dist

from megatron_noloco.job.launcher import World, read_world
from megatron_noloco.job.world import choose_transport, join
from tests.kit.ranks import say
from tests.kit.transport_suite import swap


def outcome(kind: str, world: World) -> str:
    """The name of the transport that was chosen, after a message over it; else why there is none."""
    try:
        transport = choose_transport(kind, world)  # type: ignore[arg-type]
    except ValueError as error:
        return str(error)
    if world.world_size == 2:
        swap(transport, 1 - world.rank, 1000, tag=1)
    return transport.name


if __name__ == "__main__":
    world = read_world(os.environ)
    join(world, "gloo")
    outcomes = {kind: outcome(kind, world) for kind in sys.argv[1:]}
    seen = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")}
    say({"launcher": world.launcher, "outcomes": outcomes, "size": dist.get_world_size(), **seen})
    dist.barrier()
    dist.destroy_process_group()
