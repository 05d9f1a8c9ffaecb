"""Measure the exchange between two ranks; `doctor` starts it by mpirun. Rank 0 prints one JSON object.

mpirun -n 2 python -m megatron_noloco.preflight.pair SECONDS
"""

import json
import socket
import statistics
import sys
import time
from typing import NamedTuple

import torch
from mpi4py import MPI

from megatron_noloco.errors import UserError
from megatron_noloco.outer import Channel, Exchange
from megatron_noloco.plans.topology import Place
from megatron_noloco.transport.mpi import MpiTransport, library

_ELEMENTS = 1 << 22  # 16 MiB
_PARTS = 16  # of the computation, between which messages may move
_LEVELS = {
    MPI.THREAD_SINGLE: "single", MPI.THREAD_FUNNELED: "funneled",
    MPI.THREAD_SERIALIZED: "serialized", MPI.THREAD_MULTIPLE: "multiple",
}  # fmt: skip


class Pair(NamedTuple):
    """The measurements of two ranks."""

    hosts: list[str]
    library: str  # of MPI
    thread_level: str
    latency_seconds: float  # of an exchange of one number
    gb_per_second: float  # each way
    hidden: float  # share of an exchange that a computation of the same length hides


def measure(seconds: float) -> Pair:
    """Measure exchanges for about `seconds`: alone, and during a computation that takes as long.

    Raises UserError where there are not 2 ranks.
    """
    torch.set_num_threads(1)
    world = MPI.COMM_WORLD
    if world.size != 2:
        raise UserError(
            f"each of the ranks is alone: mpi4py runs on {library()}, which is not the MPI of this mpirun"
        )
    transport = MpiTransport()
    exchange = Exchange(transport, Place(transport.rank, 2), Channel.ROUNDS, 60.0)
    number = 0

    def timed(elements: int, computing_seconds: float = 0.0) -> float:
        nonlocal number
        number += 1
        vector = torch.ones(elements)
        world.Barrier()
        started = time.perf_counter()
        exchange.begin(vector, (0, 1), number, "a measurement")
        for _ in range(_PARTS if computing_seconds else 0):
            compute(computing_seconds / _PARTS)
            for _ in exchange.progress():
                pass
        for _ in exchange.finish():
            pass
        return float(world.allreduce(time.perf_counter() - started, MPI.MAX))

    latency = statistics.median(timed(1) for _ in range(20))
    timed(_ELEMENTS)
    once = timed(_ELEMENTS)
    repeats = max(3, min(50, round(seconds / (4 * once))))
    alone = statistics.median(timed(_ELEMENTS) for _ in range(repeats))
    both = statistics.median(timed(_ELEMENTS, alone) for _ in range(repeats))
    return Pair(
        hosts=world.allgather(socket.gethostname()),
        library=library(),
        thread_level=_LEVELS[MPI.Query_thread()],
        latency_seconds=latency,
        gb_per_second=4 * _ELEMENTS / alone / 1e9,
        hidden=max(0.0, min(1.0, 2 - both / alone)),
    )


def compute(seconds: float) -> None:
    """Multiply matrices on one core for so long."""
    matrix, until = torch.ones(128, 128), time.perf_counter() + seconds
    while time.perf_counter() < until:
        matrix @ matrix


if __name__ == "__main__":
    try:
        found = measure(float(sys.argv[1]))
    except UserError as error:
        sys.exit(str(error))
    if MPI.COMM_WORLD.rank == 0:
        sys.stdout.write(json.dumps(found._asdict()) + "\n")
