"""The speed of a pair's exchange over MPI, its messages alone and with the mean, against raw MPI calls.

    mpirun --oversubscribe --bind-to none -n 2 python -m tools.bench exchange --megabytes 64

Ranks 2i and 2i+1 are a pair. Each repeat runs all variants in turn, on the same bytes, so that noise of the
machine affects them alike; a time is that of the slowest rank. With `CC=false` before it torch forms the means.
"""

import argparse
import itertools
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from megatron_noloco.outer import Channel, Exchange
from megatron_noloco.outer.vectors import HOST, buffer
from megatron_noloco.plans.topology import Place
from megatron_noloco.transport.interface import Message
from megatron_noloco.transport.mpi import MpiTransport, library
from tools.bench.laps import Laps, rounded

DEADLINE_SECONDS = 300.0
TRANSPORT = "transport"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--megabytes", type=float, default=64.0, help="bytes of the fp32 vector / 1e6")
    parser.add_argument("--repeats", type=int, default=15, help="timed repeats, after two to warm up")


def run(options: argparse.Namespace) -> dict[str, Any] | None:
    """Measure."""
    torch.set_num_threads(1)
    world = MPI.COMM_WORLD
    if world.Get_size() % 2:
        raise SystemExit(f"ranks are paired: start an even number of ranks, not {world.Get_size()}")
    elements = int(options.megabytes * 1e6) // 4
    ways = make_ways(world, elements)
    laps = Laps(options.repeats, 2, world.Barrier, lambda seconds: world.allreduce(seconds, op=MPI.MAX))
    for _ in laps:
        for name, way in ways.items():
            with laps.lap(name):
                way()
    if world.Get_rank() != 0:
        return None
    medians = laps.medians()
    return {
        "library": library(),
        "ranks": world.Get_size(),
        "bytes": elements * 4,
        "repeats": options.repeats,
        "median_seconds": rounded(medians, 6),
        "core_seconds_for_1e9_weights": {
            name: round(statistics.median(times) / elements * 1e9, 2) for name, times in laps.cpu.items()
        },
        "gb_per_second": {name: round(elements * 4 / value / 1e9, 3) for name, value in medians.items()},
        "transport_time_over": {
            name: round(medians[TRANSPORT] / value, 3) for name, value in medians.items() if name != TRANSPORT
        },
    }


def make_ways(world: MPI.Comm, elements: int) -> dict[str, Callable[[], None]]:
    """Return the variants to compare. Each brings the partner's vector here, or the pair's mean."""
    transport = MpiTransport()
    partner = transport.rank ^ 1
    outgoing = buffer(elements, HOST).fill_(float(transport.rank))  # as the vectors of a run
    incoming = buffer(elements, HOST).zero_()
    raw_outgoing, raw_incoming = outgoing.numpy(), incoming.numpy()
    fits = raw_outgoing.nbytes < 2**31  # one raw call can carry no more

    def swap() -> None:
        flight = transport.post([Message(partner, outgoing)], [Message(partner, incoming)], tag=2**20)
        flight.wait(DEADLINE_SECONDS)

    place = Place(transport.rank, transport.world_size)
    exchange = Exchange(transport, place, Channel.ROUNDS, DEADLINE_SECONDS)
    group, numbers = tuple(sorted((transport.rank, partner))), itertools.count()

    def mean() -> None:
        exchange.begin(outgoing, group, next(numbers), "a measurement")
        for _ in exchange.finish():
            pass

    def sendrecv() -> None:
        world.Sendrecv(
            raw_outgoing.view(np.uint8), partner, recvbuf=raw_incoming.view(np.uint8), source=partner
        )

    def memcpy() -> None:
        incoming.copy_(outgoing)

    return {TRANSPORT: swap, "exchange": mean, "memcpy": memcpy} | ({"sendrecv": sendrecv} if fits else {})
