"""A federation for a long time, with delays, absences and restarts: does anything grow?

    nice python -m tools.soak --minutes 30

The replicas are threads of one process, each with the federation's transport, on the loopback interface, and
rounds of `--elements` weights. Before a round each waits for a random time. Some rounds a replica leaves out; now
and then one is closed and started anew, as another process would be. Of those that come to a round all but one at
most can meet. Who does not is counted as skipped, and as necessary where the absences leave nobody for it.

Prints one JSON object: rounds, those skipped and those that had to be, and resident memory, file descriptors and
threads after the first tenth and at the end. Memory is what is in use: glibc keeps for later what is freed, in an
arena for each thread, and is made to give it back first. Each restart has new threads, whose arenas otherwise look
like growth.
"""

import argparse
import ctypes
import gc
import json
import os
import random
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from megatron_noloco.federation.transport import FederationTransport
from megatron_noloco.outer import OuterOptimizer, OuterSettings, TorchWeights
from megatron_noloco.plans.grouping import Grouping
from megatron_noloco.plans.topology import Place
from tools.federated import open_door, wait_for_all


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--elements", type=int, default=100_000)
    parser.add_argument(
        "--absences", type=float, default=0.1, help="share of rounds that a replica leaves out"
    )
    parser.add_argument(
        "--restarts", type=float, default=0.01, help="share of rounds before which one restarts"
    )
    parser.add_argument("--delay", type=float, default=0.05, help="seconds, at most, before a round")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(Soak(options, Path(folder)).run()))


class Soak:
    """All replicas, and what is counted over them."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        self.folder = folder
        self.draws = random.Random(options.seed)
        self.rounds = self.skipped = self.necessary = self.restarts = 0
        self.replicas = [self._start(replica, 0) for replica in range(options.replicas)]

    def run(self) -> dict[str, object]:
        started = time.monotonic()
        first: dict[str, int] = {}
        seconds = 60 * self.options.minutes
        with ThreadPoolExecutor(len(self.replicas)) as threads:
            while (elapsed := time.monotonic() - started) < seconds:
                self._round(threads)
                if not first and elapsed > seconds / 10:
                    first = held()
            last = held()
            for outer in self.replicas:
                outer.transport.close()  # type: ignore[attr-defined]
        return {
            "seed": self.options.seed,
            "minutes": round((time.monotonic() - started) / 60, 1),
            "rounds": self.rounds,
            "restarts": self.restarts,
            "skipped": self.skipped,
            "necessary": self.necessary,
            "after_a_tenth": first,
            "at_the_end": last,
            "growth_of_memory": round(last["resident_bytes"] / first["resident_bytes"] - 1, 4)
            if first
            else None,
        }

    def _round(self, threads: ThreadPoolExecutor) -> None:
        number = self.rounds
        if self.draws.random() < self.options.restarts:
            replica = self.draws.randrange(len(self.replicas))
            self.replicas[replica].transport.close()  # type: ignore[attr-defined]
            self.replicas[replica] = self._start(replica, number)
            self.restarts += 1
        for outer in self.replicas:  # connections that a restart has broken are made again
            assert isinstance(outer.transport, FederationTransport)
            wait_for_all(outer.transport, len(self.replicas))
        here = [outer for outer in self.replicas if self.draws.random() >= self.options.absences]
        for outer in self.replicas:
            if outer not in here:
                assert isinstance(outer.transport, FederationTransport)
                outer.transport.partners.leave_out(number)
        delays = [self.draws.uniform(0, self.options.delay) for _ in here]
        met = list(threads.map(lambda outer, delay: meet(outer, number, delay), here, delays))
        self.rounds += 1
        self.skipped += met.count(False)
        self.necessary += len(here) % 2

    def _start(self, replica: int, number: int) -> OuterOptimizer:
        place = Place(replica, self.options.replicas)
        transport = open_door(place, self.folder)
        transport.partners.leave_out(number - 1)
        weights = TorchWeights([torch.ones(self.options.elements)])
        grouping = Grouping(place.replicas, 2, seed=0)
        return OuterOptimizer(weights, transport, place, grouping, OuterSettings(local_steps=1))


def meet(outer: OuterOptimizer, number: int, delay: float) -> bool:
    """Whether it met another replica."""
    time.sleep(delay)
    (report,) = outer.after_local_step(number + 1)
    return len(report.exchange.group) == 2


def held() -> dict[str, int]:
    """What this process has now."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "resident_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
    }


if __name__ == "__main__":
    main()
