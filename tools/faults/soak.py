"""A federation for a long time, with delays, absences, broken connections and restarts: does anything grow?

    nice python -m tools.faults soak --minutes 30

The replicas are threads of one process, connected over the loopback interface, with rounds of `--elements`
weights. Before a round each waits for a random time. Some rounds a replica leaves out, and says so before the
others come. In some rounds all connections break at a random moment; these rounds count all the same. Now and then
a replica is closed and started anew, as another process would be.

Reports rounds, and skipped rounds, injected and counted, with their reasons. A skip is injected where an odd
number of replicas comes; besides, two replicas skip a round that both of their planned partners leave out. Then
memory, file descriptors and threads after the first tenth and at the end, and the slope of the memory over the
second half, by least squares. Allocated is what all libraries have taken from malloc and not given back. Resident
is what the kernel counts after glibc was made to give back the pages that are free. Blocks in use lie scattered
over the arenas that glibc makes for new threads, and each restart has new ones: MALLOC_ARENA_MAX=1 keeps that from
looking like growth.
"""

import argparse
import random
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import linear_regression
from typing import Any

import torch

from megatron_noloco.federation.https_carrier import HttpsCarrier
from megatron_noloco.federation.keys import Keys
from megatron_noloco.outer import TorchWeights
from megatron_noloco.settings import NolocoSettings
from tools.federated import DEADLINE_SECONDS, open_replica, outer_of, wait_for_all
from tools.processes import free_ports, held

_REPLICAS, _SEED, _SAMPLES = 4, 0, 60
_ABSENCES, _DELAY_SECONDS = 0.1, 0.05  # share of rounds that a replica leaves out; before a round, at most


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--elements", type=int, default=100_000)
    parser.add_argument(
        "--restarts", type=float, default=0.01, help="share of rounds before which one restarts"
    )
    parser.add_argument(
        "--drops", type=float, default=0.01, help="share of rounds in which connections break"
    )


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run the rounds."""
    torch.set_num_threads(1)
    return Soak(options).run()


class Soak:
    """All replicas, and what is counted over them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        with tempfile.TemporaryDirectory() as folder:
            self.keys = Keys.make(Path(folder) / "key")
        self.places = [f"127.0.0.1:{port}" for port in free_ports(_REPLICAS)]
        self.draws = random.Random(_SEED)
        self.rounds = self.restarts = self.absences = self.drops = 0
        self.skips_injected = 0
        self.skips: Counter[str] = Counter()  # by their reason
        self.replicas = [self._start(replica, 0) for replica in range(_REPLICAS)]

    def run(self) -> dict[str, Any]:
        started, samples = time.monotonic(), list[tuple[float, dict[str, int]]]()
        seconds = 60 * self.options.minutes
        with ThreadPoolExecutor(len(self.replicas)) as threads:
            while (elapsed := time.monotonic() - started) < seconds:
                self._round(threads)
                if elapsed > seconds * (len(samples) + 1) / _SAMPLES:
                    samples.append((elapsed, held()))
            samples.append((elapsed, held()))
            for replica in self.replicas:
                replica.members.close()
        return {
            "minutes": round((time.monotonic() - started) / 60, 1),
            "rounds": self.rounds,
            "restarts": self.restarts,
            "absences": self.absences,
            "drops": self.drops,
            "skips_injected": self.skips_injected,
            "skips": self.skips.total(),
            "reasons": self.skips,
            "after_a_tenth": samples[len(samples) // 10][1],
            "at_the_end": samples[-1][1],
            "bytes_per_minute": {
                name: slope(samples[len(samples) // 2 :], name)
                for name in ("allocated_bytes", "resident_bytes")
            },
        }

    def _round(self, threads: ThreadPoolExecutor) -> None:
        number = self.rounds
        if self.draws.random() < self.options.restarts:
            place = self.draws.randrange(len(self.replicas))
            self.replicas[place].members.close()
            self.replicas[place] = self._start(place, number)
            self.restarts += 1
        for replica in self.replicas:  # connections that a restart has broken are made again
            wait_for_all(replica.members, len(self.replicas))
        here = [replica for replica in self.replicas if self.draws.random() >= _ABSENCES]
        absent = [replica for replica in self.replicas if replica not in here]
        for replica in absent:
            replica.leave_out(number)
        for replica in here:
            replica.wait_until_known(number, here)
        broken = here if self.draws.random() < self.options.drops else []
        breaking = threading.Timer(self.draws.uniform(0, 2 * _DELAY_SECONDS), _break_connections, (broken,))
        breaking.start()
        delays = [self.draws.uniform(0, _DELAY_SECONDS) for _ in here]
        self.skips.update(
            filter(None, threads.map(lambda one, delay: one.take_part(number, delay), here, delays))
        )
        breaking.join()
        self.rounds += 1
        self.absences += len(absent)
        self.skips_injected += len(here) % 2
        self.drops += bool(broken)

    def _start(self, place: int, number: int) -> "Replica":
        return Replica(place, self.places, self.options.elements, number, self.keys)


class Replica:
    """A replica that begins with the round `number`."""

    def __init__(self, slot: int, places: list[str], elements: int, number: int, keys: Keys) -> None:
        self.members = open_replica(slot, places[slot], places if number else places[:slot], keys)
        self.leave_out(number - 1)
        settings = NolocoSettings(local_steps=1, payload="fp32", deadline_seconds=DEADLINE_SECONDS)
        self._outer = outer_of(self.members, TorchWeights([torch.ones(elements)]), settings)

    def leave_out(self, number: int) -> None:
        """Tell the others that this replica has no part in a round, or in those before."""
        self.members.begin_round(number, None)

    def wait_until_known(self, number: int, here: list["Replica"]) -> None:
        """Wait until it has heard from all others which of them come to this round."""
        members = self.members
        coming = {replica.members.slot for replica in here} - {members.slot}

        def is_known() -> bool:
            found = {
                slot for slot, status in members.present().items() if status.open_from(members.slot) <= number
            }
            return found == coming

        if not members.wait(is_known, DEADLINE_SECONDS):
            raise SystemExit(f"replica {members.slot} has not heard from all others")

    def take_part(self, number: int, delay: float) -> str:
        """Return why the round was skipped, or an empty string."""
        time.sleep(delay)
        (report,) = self._outer.after_local_step(number + 1)
        return report.exchange.missed.partition(" ")[2].partition(" ")[2]  # without "replica 3"


def _break_connections(replicas: list[Replica]) -> None:
    """Break what others have opened to these replicas, as a router does that was started again."""
    for replica in replicas:
        (carrier,) = replica.members.mesh.carriers
        assert isinstance(carrier, HttpsCarrier)
        carrier._soon(carrier._server.close)


def slope(samples: list[tuple[float, dict[str, int]]], name: str) -> int | None:
    """Per minute; None for fewer than two samples."""
    if len(samples) < 2:
        return None
    minutes = [seconds / 60 for seconds, _ in samples]
    return round(linear_regression(minutes, [held[name] for _, held in samples]).slope)
