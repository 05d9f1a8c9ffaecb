"""A federation for a long time, with delays, absences, drops and restarts: does anything grow?

    nice python -m tools.faults soak --minutes 30

The replicas are threads of one process, connected over the loopback interface, with rounds of `--elements`
weights. Before a round each waits for a random time. Some rounds a replica leaves out, and says so before the
others come. In some its conversations are cut, as where a connection breaks. Now and then one is closed and
started anew, as another process would be.

Reports rounds, and skipped rounds, injected and counted, with their reasons. Injected are one
where an odd number of replicas comes, and two where a cut ends a round. Then
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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import linear_regression
from typing import Any

import torch

from megatron_noloco.outer import TorchWeights
from megatron_noloco.settings import NolocoSettings
from tools.federated import DEADLINE_SECONDS, open_replica, outer_of, wait_for_all
from tools.processes import held

_REPLICAS, _SEED, _SAMPLES = 4, 0, 60
_ABSENCES, _DELAY_SECONDS = 0.1, 0.05  # share of rounds that a replica leaves out; before a round, at most
_LOOK_SECONDS = 0.001
_CUT = "is cut, says the soak"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--elements", type=int, default=100_000)
    parser.add_argument(
        "--restarts", type=float, default=0.01, help="share of rounds before which one restarts"
    )
    parser.add_argument(
        "--drops", type=float, default=0.01, help="share of rounds in which one loses messages"
    )


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run the rounds."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        return Soak(options, Path(folder)).run()


class Soak:
    """All replicas, and what is counted over them."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        self.folder = folder
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
                replica.thread.close()
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
            self.replicas[place].thread.close()
            self.replicas[place] = self._start(place, number)
            self.restarts += 1
        for replica in self.replicas:  # connections that a restart has broken are made again
            wait_for_all(replica.thread, len(self.replicas))
        here = [replica for replica in self.replicas if self.draws.random() >= _ABSENCES]
        absent = [replica for replica in self.replicas if replica not in here]
        for replica in absent:
            replica.leave_out(number)
        for replica in here:
            replica.wait_until_known(number, here)
        loses = self.draws.choice(here) if here and self.draws.random() < self.options.drops else None
        delays = [self.draws.uniform(0, _DELAY_SECONDS) for _ in here]
        why_not = threads.map(lambda one, delay: one.take_part(number, delay, one is loses), here, delays)
        self.skips.update(filter(None, why_not))
        self.rounds += 1
        self.absences += len(absent)
        self.skips_injected += len(here) % 2
        if loses is not None and loses.lost:
            self.drops += 1
            self.skips_injected += 2

    def _start(self, place: int, number: int) -> "Replica":
        return Replica(place, self.folder, self.options.elements, number)


class Replica:
    """A replica that begins with the round `number`."""

    def __init__(self, slot: int, folder: Path, elements: int, number: int) -> None:
        self.thread = open_replica(slot, folder)
        self.leave_out(number - 1)
        settings = NolocoSettings(local_steps=1, payload="fp32", deadline_seconds=DEADLINE_SECONDS)
        self._outer = outer_of(self.thread, TorchWeights([torch.ones(elements)]), settings)
        self.lost = False

    def leave_out(self, number: int) -> None:
        """Tell the others that this replica has no part in a round, or in those before."""
        self.thread.do(self.thread.node.begin_round, number, None)

    def wait_until_known(self, number: int, here: list["Replica"]) -> None:
        """Wait until it has heard from all others which of them come to this round."""
        node = self.thread.node
        coming = {replica.thread.node.slot for replica in here} - {node.slot}

        def is_known() -> bool:
            return {slot for slot, status in node.present().items() if status.open_from <= number} == coming

        if not self.thread.wait(is_known, DEADLINE_SECONDS):
            raise SystemExit(f"replica {node.slot} has not heard from all others")

    def take_part(self, number: int, delay: float, loses: bool) -> str:
        """Return why the round was skipped, or an empty string; then `lost` says whether a cut ended it."""
        time.sleep(delay)
        with self._losing() if loses else nullcontext():
            (report,) = self._outer.after_local_step(number + 1)
        self.lost = loses and _CUT in report.exchange.missed
        return report.exchange.missed.partition(" ")[2].partition(" ")[2]  # without "replica 3"

    @contextmanager
    def _losing(self) -> Iterator[None]:
        """Cut the conversations of this replica, as where a connection breaks."""
        over, node = threading.Event(), self.thread.node

        def end() -> None:
            for link in node.links.values():
                link.end_conversations(_CUT)

        def cut() -> None:
            while not over.wait(_LOOK_SECONDS):
                self.thread.do(end)

        cutting = threading.Thread(target=cut)
        cutting.start()
        try:
            yield
        finally:
            over.set()
            cutting.join()


def slope(samples: list[tuple[float, dict[str, int]]], name: str) -> int | None:
    """Per minute; None for fewer than two samples."""
    if len(samples) < 2:
        return None
    minutes = [seconds / 60 for seconds, _ in samples]
    return round(linear_regression(minutes, [held[name] for _, held in samples]).slope)
