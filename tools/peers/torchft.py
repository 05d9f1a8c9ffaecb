"""torchft beside this project: the same weights, a killed replica, a killed coordinator, slow links.

torchft is installed into an environment of its own, which shares this one's torch.
"""

import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from tests.netlab.lab import NIC, REPOSITORY, Lab, lab
from tests.netlab.network import Link
from tests.netlab.relay import address_of
from tools.processes import free_ports

VERSION = "0.2.0"
_PORT = 29600  # on every host of a lab
_SECONDS = 300.0  # for any one thing to happen
WAYS = ("torchft-diloco", "diloco", "noloco")


class Environment:
    """A Python with torchft.

    Args:
        folder: of the environment; it is made once.
    """

    def __init__(self, folder: Path) -> None:
        self.python, self.lighthouse = folder / "bin" / "python", folder / "bin" / "torchft_lighthouse"
        if not self.lighthouse.exists():
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
            ours = sysconfig.get_paths()["purelib"]
            theirs = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
            (theirs / "shared.pth").write_text(f"{ours}\n{REPOSITORY}\n")
            pip = [str(self.python), "-m", "pip", "install", "-q", f"torchft=={VERSION}"]
            subprocess.run(pip, check=True)


class Replicas:
    """The processes of one comparison, each with a log. A context that leaves none behind.

    Args:
        way: one of `replica.WAYS`.
        options: more options of `tools.peers.replica`.
        there: the hosts of the replicas; None: all run on this one.
        quorum: the fewest replicas of a round under torchft; None: all.
    """

    def __init__(
        self,
        environment: Environment,
        folder: Path,
        way: str,
        replicas: int,
        options: Sequence[str],
        there: Lab | None = None,
        quorum: int | None = None,
    ) -> None:
        folder.mkdir(parents=True)
        self._quorum = quorum or replicas
        self._environment, self.folder, self.way, self.replicas = environment, folder, way, replicas
        self._options, self._there = options, there
        hosts = [address_of(replica) for replica in range(replicas)] if there else ["127.0.0.1"] * replicas
        ports = [_PORT] * replicas if there else list(free_ports(replicas))
        self._addresses = [f"{host}:{port}" for host, port in zip(hosts, ports, strict=True)]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}  # -1: torchft's lighthouse

    def __enter__(self) -> "Replicas":
        if self.way.startswith("torchft"):
            self.start_lighthouse()
        for replica in range(self.replicas):
            self.start(replica)
        return self

    def __exit__(self, *_: object) -> None:
        for process in list(self._processes):
            self.kill(process)

    def start_lighthouse(self) -> None:
        """Start torchft's coordinator."""
        options = [
            "--min_replicas",
            str(self._quorum),
            "--bind",
            f"0.0.0.0:{self._addresses[0].rpartition(':')[2]}",
        ]
        self._launch(-1, [str(self._environment.lighthouse), *options])

    def start(self, replica: int) -> None:
        """Start a replica."""
        addresses = ",".join(self._addresses) if self.way == "noloco" else self._addresses[0]
        self._launch(
            replica,
            [
                *[str(self._environment.python), "-m", "tools.peers.replica", self.way],
                *["--replica", str(replica), "--replicas", str(self.replicas), "--address", addresses],
                *[
                    "--output",
                    str(self.folder.resolve()),
                    *(["--hosts"] if self._there else []),
                    *self._options,
                ],
            ],
        )

    def _launch(self, replica: int, command: list[str]) -> None:
        environ = os.environ | {"OMP_NUM_THREADS": "1"}
        if self._there:
            host = self._there.names[max(0, replica)]
            environ, command = environ | {"GLOO_SOCKET_IFNAME": NIC}, self._there.on(host, *command)
        with (self.folder / f"{'lighthouse' if replica < 0 else replica}.log").open("ab") as log:
            self._processes[replica] = subprocess.Popen(
                command, cwd=REPOSITORY, env=environ, stdout=log, stderr=log, start_new_session=True
            )

    def kill(self, replica: int) -> None:
        """Kill a replica; -1: the lighthouse."""
        process = self._processes.pop(replica)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def running(self, replica: int) -> bool:
        """Whether the process has not ended."""
        return self._processes[replica].poll() is None

    def events(self, replica: int, after: float = 0.0, event: str = "round") -> list[dict[str, Any]]:
        """Return the events of a replica with a time after `after`, in seconds since 1970."""
        file = self.folder / f"replica_{replica}.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        rows = [json.loads(line) for line in lines if line.endswith("}")]
        return [row for row in rows if row["event"] == event and row["time"] > after]

    def counted(self, replica: int, after: float = 0.0) -> list[dict[str, Any]]:
        """Return the rounds that counted."""
        return [row for row in self.events(replica, after) if row["counts"]]

    def wait(self) -> None:
        """Wait for all replicas to end. Raises RuntimeError when one fails."""
        for replica in range(self.replicas):
            if self._processes[replica].wait(timeout=_SECONDS):
                log = (self.folder / f"{replica}.log").read_text()
                raise RuntimeError(f"{self.way}, replica {replica}:\n{log[-2000:]}")

    def weights(self) -> torch.Tensor:
        """Return the weights at the end, shape [replicas, weights]."""
        files = [self.folder / f"replica_{replica}.pt" for replica in range(self.replicas)]
        return torch.stack(
            [torch.nn.utils.parameters_to_vector(torch.load(file).values()) for file in files]
        ).double()


def until(true: Callable[[], Any], seconds: float = _SECONDS) -> bool:
    """Wait until a condition holds; returns whether it does."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def same_weights(environment: Environment, folder: Path) -> dict[str, Any]:
    """Train 4 replicas both ways; returns the largest difference of the weights, relative to their norm."""
    found = {}
    pairs = {
        "DiLoCo, Nesterov 0.7 / 0.9": ("torchft-diloco", "diloco", ["--nesterov"]),
        "DiLoCo, heavy ball 0.7 / 0.9": ("torchft-diloco", "diloco", []),
        "local SGD": ("torchft-localsgd", "localsgd", []),
    }
    for name, (theirs, ours, options) in pairs.items():
        weights = []
        for way in (theirs, ours):
            where = folder / f"{way}{len(options)}"
            with Replicas(environment, where, way, 4, ["--steps", "30", *options]) as replicas:
                replicas.wait()
                weights.append(replicas.weights())
        theirs_, ours_ = weights
        found[name] = {
            "relative difference": float((theirs_[0] - ours_[0]).norm() / ours_[0].norm()),
            "between the replicas of torchft": float((theirs_ - theirs_[0]).abs().max()),
            "between the replicas of this project": float((ours_ - ours_[0]).abs().max()),
        }
    return found


def faults(environment: Environment, folder: Path, way: str) -> dict[str, Any]:
    """Kill one of 4 replicas and start it again, then kill the coordinator; returns seconds and local steps."""
    options = ["--steps", "1000000", "--pause", "0.2", "--local-steps", "5", "--deadline", "10", "--nesterov"]
    others, lost = range(3), 3
    with Replicas(environment, folder / way, way, 4, options, quorum=2) as replicas:

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
        back = seconds_after(again, [lost])
        began = replicas.events(lost, again, "process")
        found: dict[str, Any] = {
            "usual seconds between rounds": between,
            "seconds until the others' next round": commit,
            "failed rounds of the others": failed,
            "seconds until it takes part again": back,
            "of these, seconds to load Python": began[0]["time"] - again if began else None,
        }
        until(all_count(time.time(), range(4), rounds=2), 60)
        coordinator = -1 if way.startswith("torchft") else 0
        rest = [replica for replica in range(4) if replica != coordinator]
        killed = time.time()
        replicas.kill(coordinator)
        until(all_count(killed, rest, rounds=3), 30)
        found["coordinator killed"] = {
            "rounds of each other in 30 s": [len(replicas.counted(replica, killed)) for replica in rest],
            "still running": [replicas.running(replica) for replica in rest],
        }
        again = time.time()
        if coordinator < 0:
            replicas.start_lighthouse()
        else:
            replicas.start(coordinator)
        alive = [replica for replica in rest if replicas.running(replica)]
        found["coordinator killed"]["seconds to the next round once it is back"] = (
            seconds_after(again, alive) if alive else None
        )
        return found


def slow_links(
    environment: Environment, folder: Path, link: Link, replicas: int, way: str, steps: int
) -> dict[str, Any]:
    """Train on hosts of a lab; returns seconds and bytes of a round, and the first replica's loss over time."""
    options = [
        "--steps",
        str(steps),
        "--hidden",
        "64",
        "--local-steps",
        "10",
        "--deadline",
        "60",
        "--nesterov",
    ]
    with lab([link] * replicas) as there:
        before = [there.sent_bytes(name) for name in there.names]
        where = folder / f"{way}-{replicas}-{link.rate:.0f}"
        with Replicas(environment, where, way, replicas, options, there) as running:
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


def plot_links(found: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw seconds of a round over replicas.

    Args:
        found: results of `slow_links` by "links, RATE Mbit/s, R replicas, WAY".
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = {"torchft-diloco": "torchft, DiLoCo", "diloco": "here, DiLoCo", "noloco": "here, NoLoCo"}
    points = [(*name.split(", ")[1:], one["seconds of a round"]) for name, one in found.items()]
    rates = list(dict.fromkeys(rate for rate, *_ in points))
    figure, plots = pyplot.subplots(1, len(rates), figsize=(9, 3.2), layout="constrained", squeeze=False)
    for axes, rate in zip(plots[0], rates, strict=True):
        for way, label in names.items():
            mine = [
                (int(replicas.split()[0]), seconds)
                for r, replicas, w, seconds in points
                if (r, w) == (rate, way)
            ]
            axes.plot(*zip(*sorted(mine), strict=True), marker="o", label=label)
        axes.set_title(f"{rate}, 10 ms")
        axes.set_xlabel("replicas")
        axes.set_ylim(bottom=0)
    plots[0][0].set_ylabel("seconds of a round")
    plots[0][0].legend(frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
