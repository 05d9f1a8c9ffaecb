"""One rank of a measurement in the lab; `rounds` starts it by mpirun. Rank 0 prints one JSON object.

    python -m tests.netlab.rank WAY BYTES REPEATS PAUSE_SECONDS FOLDER

Ranks begin each repeat at the same instant of the clock that they share, and agree on it through files in FOLDER:
no message of theirs opens a connection or fills a window before the measurement does.
"""

import atexit
import json
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mpi4py import MPI

if TYPE_CHECKING:
    from megatron_noloco.outer import OuterOptimizer
    from megatron_noloco.settings import NolocoSettings

DEADLINE_SECONDS = 300.0
_MICROBATCH_SECONDS = 0.02
_PORT = 29500  # on every host
_POLL_SECONDS = 0.005


class Way(NamedTuple):
    """A measured function of the repeat's number, and one that is called repeatedly before it."""

    act: Callable[[int], object]
    meanwhile: Callable[[int], object] = lambda repeat: None


def new_partners(elements: int, folder: Path) -> Way:
    """Return the exchange of random pairs, without a local phase before it."""
    from megatron_noloco.outer import Channel, Exchange
    from megatron_noloco.plans.grouping import Grouping
    from megatron_noloco.plans.topology import Place
    from megatron_noloco.transport.mpi import MpiTransport

    transport = MpiTransport()
    rank, size, vector = transport.rank, transport.world_size, _ones(elements)
    exchange = Exchange(transport, Place(rank, size), Channel.ROUNDS, DEADLINE_SECONDS)
    grouping = Grouping(size, 2, seed=0)

    def act(repeat: int) -> None:
        exchange.begin(vector, grouping.group(rank, repeat), repeat, "a repeat")
        for _ in exchange.finish():
            pass

    return Way(act)


def round_over_mpi(elements: int, folder: Path) -> Way:
    from megatron_noloco.outer import OuterOptimizer, TorchWeights
    from megatron_noloco.plans.topology import Place
    from megatron_noloco.transport.mpi import MpiTransport

    transport, weights = MpiTransport(), TorchWeights([_ones(elements)])
    place = Place(transport.rank, transport.world_size)
    return training_round(OuterOptimizer(weights, transport, place, _settings()))


def round_of_federation(elements: int, folder: Path) -> Way:
    """Return the round between separate jobs, with keys."""
    from megatron_noloco.federation.keys import Keys
    from megatron_noloco.outer import TorchWeights
    from tools.federated import open_replica, outer_of, wait_for_all

    world = MPI.COMM_WORLD
    if world.rank == 0:
        Keys.make(folder / "key")
    world.Barrier()
    first = f"{world.bcast(socket.gethostname())}:{_PORT}"
    seeds = [first] * (world.rank > 0)
    members = open_replica(world.rank, f"*:{_PORT}", seeds, Keys.read(folder / "key"))
    wait_for_all(members, world.size)
    world.Barrier()
    return training_round(outer_of(members, TorchWeights([_ones(elements)]), _settings()))


def _settings() -> "NolocoSettings":
    from megatron_noloco.settings import NolocoSettings

    return NolocoSettings(payload="fp32", local_steps=2, deadline_seconds=DEADLINE_SECONDS)


def training_round(outer: "OuterOptimizer") -> Way:
    """Return the outer optimizer's round with random pairs, after local steps that train nothing."""
    return Way(
        lambda repeat: outer.after_local_step(2 * repeat + 2),
        lambda repeat: outer.after_local_step(2 * repeat + 1),
    )


def mpi_allreduce(elements: int, folder: Path) -> Way:
    import numpy as np

    mine, total = np.ones(elements, np.float32), np.empty(elements, np.float32)
    return Way(lambda repeat: MPI.COMM_WORLD.Allreduce(mine, total))


def gloo_allreduce(elements: int, folder: Path) -> Way:
    import torch.distributed as dist

    world = MPI.COMM_WORLD
    store = (
        dist.TCPStore(socket.gethostname(), 0, is_master=True, wait_for_workers=False)
        if not world.rank
        else None
    )
    host, port = world.bcast((socket.gethostname(), store.port) if store is not None else None)
    store = store or dist.TCPStore(host, port)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    atexit.register(dist.destroy_process_group)
    vector = _ones(elements)
    return Way(lambda repeat: dist.all_reduce(vector))


WAYS = {
    "new partners": new_partners,
    "round": round_over_mpi,
    "federation": round_of_federation,
    "allreduce": mpi_allreduce,
    "gloo": gloo_allreduce,
}


def measure(way: Way, repeats: int, pause_seconds: float, folder: Path) -> list[float]:
    """Return the seconds on this rank, per repeat."""
    seconds = []
    for repeat in range(repeats):
        start = _agree_on_start(folder, repeat) + pause_seconds
        while (left := start - time.time()) > 0:
            way.meanwhile(repeat)
            time.sleep(min(_MICROBATCH_SECONDS, left))
        way.act(repeat)
        seconds.append(time.time() - start)
    return seconds


def _agree_on_start(folder: Path, repeat: int) -> float:
    """Wait for all ranks; returns the time at which the last one came."""
    (folder / f"{repeat}.{MPI.COMM_WORLD.rank}").touch()
    while len(here := list(folder.glob(f"{repeat}.*"))) < MPI.COMM_WORLD.size:
        time.sleep(_POLL_SECONDS)
    return max(path.stat().st_mtime for path in here)


def _ones(elements: int) -> Any:
    import torch

    torch.set_num_threads(1)
    return torch.ones(elements)


def main() -> None:
    name, length, repeats, pause_seconds, folder = sys.argv[1:]
    way = WAYS[name](int(length) // 4, Path(folder))
    seconds = MPI.COMM_WORLD.gather(measure(way, int(repeats), float(pause_seconds), Path(folder)))
    if seconds is not None:
        rounds = list(zip(*seconds, strict=True))[1:]  # the first has costs of its own
        figures = {
            "mean_seconds": statistics.median(map(statistics.mean, rounds)),
            "slowest_seconds": statistics.median(map(max, rounds)),
        }
        print(json.dumps({name: round(figure, 3) for name, figure in figures.items()}), flush=True)
    MPI.COMM_WORLD.Barrier()


if __name__ == "__main__":
    main()
