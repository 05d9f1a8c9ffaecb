"""Measures which share of the possible rounds takes place when slots of a federation are empty.

    python -m tools.bench pairing --slots 8 16 --empty 0 0.25 0.5

Starts the replicas that are there as threads of one process, connected over the loopback interface, with vectors
of 1000 elements. Each replica sleeps for a random time in place of its local steps, so that they are not in
lockstep. At best 2 * floor(replicas / 2) replicas have a partner.
"""

import argparse
import random
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_noloco.federation.movement import alone
from megatron_noloco.federation.node_thread import NodeThread
from megatron_noloco.outer import RoundReport, TorchWeights
from megatron_noloco.plans.draws import Stream, draw_permutation
from megatron_noloco.plans.grouping import Grouping
from megatron_noloco.settings import NolocoSettings
from tools.federated import SEED, open_replica, outer_of, wait_for_all

ELEMENTS = 1000


@dataclass(frozen=True)
class Case:
    """Attributes: `phase_seconds` is the median time from one round to the next, `sigma` that of its logarithm."""

    slots: int
    empty: float
    rounds: int
    phase_seconds: float
    sigma: float

    @property
    def replicas(self) -> Sequence[int]:
        """The replicas that take part."""
        count = self.slots - round(self.empty * self.slots)
        return sorted(draw_permutation(self.slots, SEED, Stream.SAMPLES).tolist()[:count])


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--slots", type=int, nargs="+", default=[8, 16])
    parser.add_argument(
        "--empty", type=float, nargs="+", default=[0.0, 0.25, 0.5], help="shares of the slots"
    )
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--phase-seconds", type=float, default=0.1, help="median from one round to the next")
    parser.add_argument("--sigma", type=float, default=0.3, help="of the logarithm of that time")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure each case."""
    torch.set_num_threads(1)
    cases = [
        Case(slots, empty, options.rounds, options.phase_seconds, options.sigma)
        for slots in options.slots
        for empty in options.empty
    ]
    return {"rounds": options.rounds, "cases": [measure(case) for case in cases]}


def measure(case: Case) -> dict[str, float]:
    """Return the shares of the possible rounds that were used, and that would be with planned partners alone."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        nodes = {}
        for replica in case.replicas:
            nodes[replica] = open_replica(replica, Path(folder))
            stack.callback(nodes[replica].close)
        for node in nodes.values():
            wait_for_all(node, len(nodes))
        together = threading.Barrier(len(nodes))
        with ThreadPoolExecutor(len(nodes)) as threads:
            found = threads.map(partial(rounds, case, together), nodes.values())
            reports = dict(zip(nodes, found, strict=True))
    grouping = Grouping(case.slots, 2, SEED)
    used = [report.exchange.group for of_replica in reports.values() for report in of_replica]
    planned = [grouping.group(replica, index) for replica in reports for index in range(case.rounds)]
    possible = case.rounds * (len(nodes) // 2 * 2)
    waits = [report.exchange.wait_seconds for of_replica in reports.values() for report in of_replica]
    return {
        "slots": case.slots,
        "replicas": len(nodes),
        "used": round(sum(len(group) == 2 for group in used) / possible, 4),
        "used with the plan's partners alone": round(
            sum(len(group) == 2 and set(group) <= set(nodes) for group in planned) / possible, 4
        ),
        "longest_wait_seconds": round(max(waits), 2),
    }


def rounds(case: Case, together: threading.Barrier, thread: NodeThread) -> list[RoundReport]:
    """Run the rounds of one replica, and return its reports."""
    draw, slot = random.Random(thread.node.slot), thread.node.slot
    weights = TorchWeights([torch.zeros(ELEMENTS)])
    settings = NolocoSettings(local_steps=1, payload="fp32")
    outer = outer_of(slot, thread, weights, alone(ELEMENTS), settings)
    together.wait()
    reports = []
    for done in range(1, case.rounds + 1):
        time.sleep(case.phase_seconds * draw.lognormvariate(0, case.sigma))
        reports += outer.after_local_step(done)
    return reports
