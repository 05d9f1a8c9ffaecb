"""How much of an exchange with overlap still delays training, and by how much local steps become slower.

    mpirun --oversubscribe --bind-to none -n 2 python -m tools.bench overlap --megabytes 64
    torchrun --nproc-per-node 2 -m tools.bench overlap --megabytes 64

Every rank is a replica. A local step consists of matrix products on one core, in `--microbatches` parts between
which messages may move, as in the trainer. It is as long as an exchange that training waits for, which is measured
first. A repeat runs in turn k = 4 local steps alone, with a round that training waits for ("none"), and with one
that is merged d = 2 steps later ("delayed"). Times are those of the slowest rank, the shortest of the repeats:

    all         the k steps and what the round adds to them
    pause       time in calls of the outer optimizer
    wait        the part of it that waits for messages
    in_the_air  the first d local steps of a round; under "alone" the same steps without one

Between ranks of one machine the processor itself carries the messages: no wait is left, but copying and arithmetic
take from the steps what they took from the pause. On a slow network, for root:

    python -m tests.netlab run --hosts 2 --rate 100Mbit --delay 25ms --module tools.bench overlap --megabytes 8
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import NoReturn

import torch
import torch.distributed as dist

from megatron_noloco.job.launcher import read_world
from megatron_noloco.job.leaving import leave
from megatron_noloco.job.world import choose_transport, join
from megatron_noloco.outer import OuterOptimizer, RoundReport, TorchWeights
from megatron_noloco.plans.topology import Place
from megatron_noloco.settings import NolocoSettings
from megatron_noloco.transport.interface import Transport
from tools.bench.laps import slowest

WIDTH = 256  # of the matrices of a local step: 1 MB for the three of them
WARM_UPS, DEADLINE_SECONDS = 2, 300.0
LOCAL_STEPS, OVERLAP_STEPS = 4, 2  # k and d


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--megabytes", type=float, default=64.0, help="bytes of the fp32 weights / 1e6")
    parser.add_argument("--microbatches", type=int, default=8, help="of a local step")
    parser.add_argument("--repeats", type=int, default=9, help=f"timed repeats, after {WARM_UPS} to warm up")


def run(options: argparse.Namespace) -> NoReturn:
    """Measure."""
    torch.set_num_threads(1)
    world = read_world(os.environ)
    join(world, "gloo")
    measure(options, choose_transport("auto", world))
    leave(0)


def measure(options: argparse.Namespace, transport: Transport) -> None:
    """Measure, and print the figures."""
    bench = Bench(options, build_outer(options, transport))
    exchange_seconds = bench.calibrate()
    measured = bench.measure()

    fastest = {
        way: {what: round(min(seconds), 5) for what, seconds in times.items()}
        for way, times in measured.items()
    }

    def ratio(what: str, way: str, base: str) -> float:
        return round(fastest[way][what] / max(fastest[base][what], 1e-9), 3)

    if dist.get_rank() == 0:
        print(json.dumps({
            "transport": transport.name,
            "ranks": dist.get_world_size(),
            "bytes": int(options.megabytes * 1e6) // 4 * 4,
            "local_steps": LOCAL_STEPS,
            "overlap_steps": OVERLAP_STEPS,
            "exchange_seconds": round(exchange_seconds, 5),
            "fastest_seconds": fastest,
            "delayed_over_none": {what: ratio(what, "delayed", "none") for what in ("pause", "wait")},
            "steps_in_the_air_over_alone": ratio("in_the_air", "delayed", "alone"),
        }), flush=True)  # fmt: skip
    dist.barrier()


def build_outer(options: argparse.Namespace, transport: Transport) -> OuterOptimizer:
    settings = NolocoSettings(local_steps=LOCAL_STEPS, payload="fp32", deadline_seconds=DEADLINE_SECONDS)
    weights = TorchWeights([torch.ones(int(options.megabytes * 1e6) // 4)])
    return OuterOptimizer(weights, transport, Place(transport.rank, transport.world_size), settings)


class Bench:
    """Runs local steps that train nothing, with and without rounds between them."""

    def __init__(self, options: argparse.Namespace, outer: OuterOptimizer) -> None:
        self.options = options
        self.outer = outer
        self.done = 0
        self.products = 1  # in a microbatch
        self.left, self.right, self.product = (torch.ones(WIDTH, WIDTH) / WIDTH for _ in range(3))

    def calibrate(self) -> float:
        """Make the local steps as long as asked for; returns the seconds of an exchange that is waited for."""
        options, exchanges = self.options, []
        for _ in range(5):
            dist.barrier()
            self.done += LOCAL_STEPS
            (report,) = self.outer.after_local_step(self.done)
            exchanges.append(report.exchange.seconds)
        seconds = slowest(statistics.median(exchanges[1:]))
        self.products = 200
        self.step()
        one = slowest(timed(self.step)) / (self.products * options.microbatches)
        self.products = max(1, round(seconds / options.microbatches / one))
        return seconds

    def step(self) -> None:
        """Take a local step. An exchange that is under way may move between its microbatches."""
        for _ in range(self.options.microbatches):
            self.outer.progress()
            for _ in range(self.products):
                torch.mm(self.left, self.right, out=self.product)

    def measure(self) -> dict[str, dict[str, list[float]]]:
        """Return the seconds per variant, part and repeat."""
        ways = {"alone": -1, "none": 0, "delayed": OVERLAP_STEPS}
        found: dict[str, dict[str, list[float]]] = {name: {} for name in ways}
        for repeat in range(-WARM_UPS, self.options.repeats):
            for name, overlap_steps in ways.items():
                dist.barrier()
                for what, seconds in self.phase(overlap_steps).items():
                    worst = slowest(seconds)
                    if repeat >= 0:
                        found[name].setdefault(what, []).append(worst)
        return found

    def phase(self, overlap_steps: int) -> dict[str, float]:
        """Run a round from its beginning and k local steps; with -1 the steps alone."""
        started, in_the_air = time.perf_counter(), 0.0
        reports: list[RoundReport] = []
        if overlap_steps >= 0:
            self.outer.overlap_steps = overlap_steps
            self.done += LOCAL_STEPS
            reports += self.outer.after_local_step(self.done)
        for index in range(1, LOCAL_STEPS + 1):
            seconds = timed(self.step)
            in_the_air += seconds if index <= OVERLAP_STEPS else 0.0
            if overlap_steps >= 0 and index < LOCAL_STEPS:
                reports += self.outer.after_local_step(self.done + index)
        times = {"all": time.perf_counter() - started, "in_the_air": in_the_air}
        times["pause"] = sum(report.pause_seconds for report in reports)
        times["wait"] = sum(report.exchange.wait_seconds for report in reports)
        return times


def timed(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
