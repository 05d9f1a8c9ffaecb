"""A federation for a long time, with delays, absences, drops and restarts: does anything grow?

    nice python -m tools.soak --minutes 30

The replicas are threads of one process, each with the federation's transport, on the loopback interface, and
rounds of `--elements` weights. Before a round each waits for a random time. Some rounds a replica leaves out, and
says so before the others come; in some its messages are lost, as where a connection breaks; now and then one is
closed and started anew, as another process would be.

Prints one JSON object: rounds, and skipped rounds, injected and counted, with their reasons. Injected are one for
each replica whose planned partner leaves the round out, and two where one loses its messages. Then
memory, file descriptors and threads after the first tenth and at the end, and the slope of the memory over the
second half, by least squares. Allocated is what all libraries have taken from malloc and not given back. Resident
is what the kernel counts after glibc was made to give back the pages that are free. Blocks in use lie scattered
over the arenas that glibc makes for new threads, and each restart has new ones: MALLOC_ARENA_MAX=1 keeps that from
looking like growth.
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
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import linear_regression

import torch
from megatron_noloco.federation.commit import committing

from megatron_noloco.federation.movement import alone
from megatron_noloco.federation.partners import Standing
from megatron_noloco.outer import OuterOptimizer, TorchWeights
from megatron_noloco.plans.grouping import Grouping
from megatron_noloco.plans.topology import Place
from megatron_noloco.settings import NolocoSettings
from megatron_noloco.transport.chunks import ReportedTransfers, cut
from megatron_noloco.transport.interface import Flight, Message, RankLostError
from tools.federated import DEADLINE_SECONDS, open_transport, wait_for_all
from tools.memory import allocated_bytes, resident_bytes
from tools.options import command_line

_SAMPLES = 60
_LOOK_SECONDS = 0.001


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--elements", type=int, default=100_000)
    parser.add_argument(
        "--absences", type=float, default=0.1, help="share of rounds that a replica leaves out"
    )
    parser.add_argument(
        "--restarts", type=float, default=0.01, help="share of rounds before which one restarts"
    )
    parser.add_argument(
        "--drops", type=float, default=0.01, help="share of rounds in which one loses messages"
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
        self.rounds = self.restarts = self.absences = self.drops = 0
        self.skips_injected = 0
        self.skips: Counter[str] = Counter()  # by their reason
        self.grouping = Grouping(options.replicas, 2, seed=0)
        self.replicas = [self._start(replica, 0) for replica in range(options.replicas)]

    def run(self) -> dict[str, object]:
        started, samples = time.monotonic(), list[tuple[float, dict[str, int]]]()
        seconds = 60 * self.options.minutes
        with ThreadPoolExecutor(len(self.replicas)) as threads:
            while (elapsed := time.monotonic() - started) < seconds:
                self._round(threads)
                if elapsed > seconds * (len(samples) + 1) / _SAMPLES:
                    samples.append((elapsed, held()))
            samples.append((elapsed, held()))
            for replica in self.replicas:
                replica.transport.close()
        return {
            "seed": self.options.seed,
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
            self.replicas[place].transport.close()
            self.replicas[place] = self._start(place, number)
            self.restarts += 1
        for replica in self.replicas:  # connections that a restart has broken are made again
            wait_for_all(replica.transport, len(self.replicas))
        here = [replica for replica in self.replicas if self.draws.random() >= self.options.absences]
        absent = [replica for replica in self.replicas if replica not in here]
        for replica in absent:
            replica.transport.partners.leave_out(number)
        for replica in here:
            replica.wait_until_known(number, here)
        loses = self.draws.choice(here) if here and self.draws.random() < self.options.drops else None
        delays = [self.draws.uniform(0, self.options.delay) for _ in here]
        why_not = threads.map(lambda one, delay: one.take_part(number, delay, one is loses), here, delays)
        self.skips.update(filter(None, why_not))
        self.rounds += 1
        self.absences += len(absent)
        coming = {replica.transport.rank for replica in here}
        self.skips_injected += sum(
            not coming.issuperset(self.grouping.group(rank, number)) for rank in coming
        )
        if loses is not None and loses.lost:
            self.drops += 1
            self.skips_injected += 2

    def _start(self, place: int, number: int) -> "Replica":
        return Replica(self.grouping, place, self.folder, self.options.elements, number)


class Replica:
    """One that begins with the round `number`."""

    def __init__(self, grouping: Grouping, replica: int, folder: Path, elements: int, number: int) -> None:
        place, weights = Place(replica, grouping.replicas), TorchWeights([torch.ones(elements)])
        self.transport = open_transport(place, folder)
        self.transport.partners.leave_out(number - 1)
        settings = NolocoSettings(local_steps=1, payload="fp32")
        apart = committing(alone(elements), self.transport.partners, place, settings)
        self._outer = OuterOptimizer(weights, self.transport, place, settings, apart=apart)
        self.lost = False

    def wait_until_known(self, number: int, here: list["Replica"]) -> None:
        """Until it has heard from all others which of them come to this round."""
        coming = {replica.transport.rank for replica in here}
        deadline = time.monotonic() + DEADLINE_SECONDS
        for rank in self.transport.service.peers.others:
            while (self.transport.partners.standing(number, rank)[0] >= Standing.FREE) != (rank in coming):
                if time.monotonic() > deadline:
                    raise SystemExit(f"rank {self.transport.rank} has not heard from rank {rank}")
                time.sleep(_LOOK_SECONDS)

    def take_part(self, number: int, delay: float, loses: bool) -> str:
        """Return why the round was skipped, or an empty string; then `lost` says whether a loss mattered."""
        time.sleep(delay)
        self.lost = False
        with self._losing() if loses else nullcontext():
            (report,) = self._outer.after_local_step(number + 1)
        return report.exchange.missed.partition(" ")[2].partition(" ")[2]  # without "replica 3"

    @contextmanager
    def _losing(self) -> Iterator[None]:
        """Its messages get lost, and it learns so at once, as where a connection breaks."""

        def post(sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Flight:
            self.lost = True
            wanted = ReportedTransfers(cut(receives, self.transport.chunk_bytes), tag)
            for message in receives:
                wanted.report(RankLostError(message.rank, "is lost, says tools.soak"))
            return Flight(wanted, ReportedTransfers([], tag))

        self.transport.post = post  # type: ignore[method-assign]
        try:
            yield
        finally:
            del self.transport.post


def slope(samples: list[tuple[float, dict[str, int]]], name: str) -> int | None:
    """Per minute; None for fewer than two samples."""
    if len(samples) < 2:
        return None
    minutes = [seconds / 60 for seconds, _ in samples]
    return round(linear_regression(minutes, [held[name] for _, held in samples]).slope)


def held() -> dict[str, int]:
    """What this process has now."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return {
        "allocated_bytes": allocated_bytes(),
        "resident_bytes": resident_bytes(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
    }


if __name__ == "__main__":
    main()
