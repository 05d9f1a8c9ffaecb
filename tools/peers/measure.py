"""torchft beside this project: a killed replica, a killed coordinator, slow links."""

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from tests.netlab.lab import lab
from tests.netlab.network import Link
from tools.peers.processes import LIGHTHOUSE, Replicas, until
from tools.peers.replica import Work


def faults(folder: Path, way: str) -> dict[str, Any]:
    """Kill one of 4 replicas and start it again, then kill the coordinator; returns seconds and local steps."""
    work = Work(steps=10**6, pause=0.2)
    others, lost = range(3), 3
    with Replicas(folder / way, way, 4, work, quorum=2) as replicas:

        def all_count(after: float, who: Sequence[int], rounds: int = 1) -> Callable[[], bool]:
            return lambda: all(len(replicas.counted(replica, after)) >= rounds for replica in who)

        def seconds_after(moment: float, who: Sequence[int]) -> float | None:
            if not until(all_count(moment, who), 120):
                return None
            return max(replicas.counted(replica, moment)[0]["time"] for replica in who) - moment

        all_begin = all_count(0, range(4), rounds=4)
        until(lambda: all_begin() or not all(map(replicas.running, range(4))))
        if not all_begin():
            raise RuntimeError(f"{way}: no 4 rounds; see {folder / way}")
        usual = [row["time"] for row in replicas.counted(0)]
        between = median(later - earlier for earlier, later in pairwise(usual))
        killed = time.time()
        replicas.kill(lost)
        commit = seconds_after(killed, others)
        time.sleep(2 * between)
        failed = sum(not row["counts"] for replica in others for row in replicas.events(replica, killed))
        again = time.time()
        replicas.start(lost)
        found: dict[str, Any] = {
            "usual seconds between rounds": between,
            "seconds until the others' next round": commit,
            "failed rounds of the others": failed,
            "seconds until it takes part again": seconds_after(again, [lost]),
        }
        until(all_count(time.time(), range(4), rounds=2), 60)
        coordinator = LIGHTHOUSE if way == "torchft" else 0
        rest = [replica for replica in range(4) if replica != coordinator]
        killed = time.time()
        replicas.kill(coordinator)
        until(all_count(killed, rest, rounds=3), 30)
        rounds = [len(replicas.counted(replica, killed)) for replica in rest]
        again = time.time()
        replicas.start(coordinator)
        alive = [replica for replica in rest if replicas.running(replica)]
        found["coordinator killed"] = {
            "rounds of each other in 30 s": rounds,
            "seconds to the next round once it is back": seconds_after(again, alive) if alive else None,
        }
        return found


def slow_links(folder: Path, link: Link, replicas: int, way: str) -> dict[str, Any]:
    """Train on hosts of a lab; returns seconds and bytes of a round, and the first replica's loss over time."""
    work = Work(hidden=64, local_steps=10, deadline_seconds=60)
    with lab([link] * replicas) as there:
        before = [there.sent_bytes(name) for name in there.names]
        where = folder / f"{way}-{replicas}-{link.rate:.0f}"
        with Replicas(where, way, replicas, work, there) as running:
            running.wait()
            sent = [there.sent_bytes(name) - was for name, was in zip(there.names, before, strict=True)]
            rounds = [running.counted(replica) for replica in range(replicas)]
            start = max(running.events(replica, event="start")[0]["time"] for replica in range(replicas))
            later = [row["seconds"] for rows in rounds for row in rows[2:]]
            return {
                "seconds of a round": median(later),
                "bytes of a replica and round": sum(sent) / sum(map(len, rounds)),
                "loss": [[row["time"] - start, row["loss"]] for row in rounds[0]],
            }
