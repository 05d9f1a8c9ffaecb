"""A federation that is disturbed from outside at random moments, against one that is not.

    nice python -m tools.chaos --output runs/chaos

Every replica is a process of its own, with a folder of its own: they share no files. Some are killed (SIGKILL),
one after another; some of these come back, the first of them without its folder; some are stopped and continued
(SIGSTOP, SIGCONT); new ones join empty slots. With `--cuts`, for root, each replica is a host of `tools.netlab`,
on a link of 100 Mbit/s and 5 ms, and some links are cut for some seconds: what is under way is lost, and nobody is
told. What happens to whom, and when, follows from `--seed`: each moment is a random local step of the run and a
random part of a second after it, so that it falls into a step, an exchange, an evaluation or a save. Then the same
replicas run undisturbed, those that join from the beginning on.

With `--one-job` the replicas are the ranks of one job under mpirun, with the kills and freezes of the same seed: a
kill ends the job, and it is started again. Nothing is lost but the local steps since its last checkpoint, so that
the losses at the end have to be those of the undisturbed job, to the last bit.

Prints one JSON object: what was done, how every replica ended, the losses of both runs, and the longest pause of a
replica to which nothing was done. Exit code 1 when a replica that should have ended did not, or not well.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from tools.chaos_job import OneJob
from tools.netlab.lab import Lab, lab
from tools.netlab.network import Link
from tools.netlab.relay import address_of
from tools.written import Written

_BASE = Path(__file__).parents[1] / "configs" / "federation.json"
_LOOK_SECONDS = 0.05
_LINK = Link(rate=100e6, delay=5e-3)
_PORT = 29500  # on every host of a lab


@dataclass(frozen=True)
class Fault:
    """One disturbance: after `step` local steps of the federation, and `seconds` more."""

    step: int
    seconds: float
    what: str  # "kill", "return", "return empty", "freeze", "cut", "join"
    replica: int
    lasts_seconds: float = 0.0  # "freeze" and "cut"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="a folder; it is emptied")
    parser.add_argument("--replicas", type=int, default=8, help="at the start")
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--returns", type=int, default=2, help="of those killed")
    parser.add_argument("--joins", type=int, default=1, help="new replicas")
    parser.add_argument("--freezes", type=int, default=2, help="stopped for some seconds")
    parser.add_argument("--cuts", type=int, default=0, help="links that are cut for some seconds")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds for each of the two runs")
    parser.add_argument("--one-job", action="store_true", help="all replicas in one job")
    options = parser.parse_args()
    faults = draw_faults(options)
    shutil.rmtree(options.output, ignore_errors=True)
    if options.one_job:
        return one_job(options, faults)
    slots = options.replicas + options.joins
    with network(options.cuts, slots) as there:
        with Federation(options.output / "disturbed", slots, options.steps, there) as disturbed:
            endings = disturbed.run(options.replicas, faults, options.limit)
        with Federation(options.output / "undisturbed", slots, options.steps, there) as undisturbed:
            undisturbed.run(slots, [], options.limit)
    gone = {fault.replica for fault in faults if fault.what == "kill"}
    gone -= {fault.replica for fault in faults if fault.what.startswith("return")}
    touched = {fault.replica for fault in faults}
    expected = [replica for replica in range(slots) if replica not in gone]
    losses = {replica: disturbed.loss(replica) for replica in expected}
    loss, reference = mean(losses.values()), mean(map(undisturbed.loss, range(slots)))
    well = all(endings[replica] == 0 for replica in expected) and None not in losses.values()
    print(json.dumps({
        "seed": options.seed,
        "faults": [fault.__dict__ for fault in faults],
        "exit_codes": endings,
        "losses": losses,
        "mean_loss": loss,
        "undisturbed_mean_loss": reference,
        "loss_ratio": loss / reference if loss and reference else None,
        "longest_pause_seconds": max(map(disturbed.longest_pause, set(expected) - touched)),
        "undisturbed_longest_pause_seconds": max(map(undisturbed.longest_pause, range(slots))),
        "missed_rounds": {replica: disturbed.last(replica, "total/missed_rounds") for replica in expected},
        "rounds_in_doubt": {replica: disturbed.last(replica, "total/rounds_in_doubt") for replica in expected},
        "processes_left": disturbed.running() + undisturbed.running(),
    }))  # fmt: skip
    return 0 if well else 1


def one_job(options: argparse.Namespace, faults: list[Fault]) -> int:
    replicas, base = range(options.replicas), base_config(options.steps)
    with OneJob(options.output / "disturbed", options.replicas, base) as disturbed:
        codes = disturbed.run(faults, options.limit)
    with OneJob(options.output / "undisturbed", options.replicas, base) as undisturbed:
        undisturbed.run([], options.limit)
    losses, expected = ([job.loss(replica) for replica in replicas] for job in (disturbed, undisturbed))
    print(json.dumps({
        "seed": options.seed,
        "faults": [fault.__dict__ for fault in faults if fault.what in ("kill", "freeze")],
        "exit_codes": codes,
        "continued_from": disturbed.continued_from(),
        "losses": losses,
        "undisturbed_losses": expected,
    }))  # fmt: skip
    return 0 if codes[-1] == 0 and None not in losses and losses == expected else 1


def draw_faults(options: argparse.Namespace) -> list[Fault]:
    """In the order of their moments; a replica is in at most one kind of trouble."""
    draws = random.Random(options.seed)
    troubled = options.kills + options.freezes + options.cuts
    if options.returns > options.kills or troubled >= options.replicas:
        sys.exit("chaos: at least one replica must stay untouched, and only those killed can return")

    def moment(first: float, last: float) -> tuple[int, float]:
        return draws.randrange(int(first * options.steps), int(last * options.steps)), draws.random()

    victims = draws.sample(range(options.replicas), troubled)
    faults = []
    for number, replica in enumerate(victims[: options.kills]):
        killed = moment(0.1, 0.5)
        faults.append(Fault(*killed, "kill", replica))
        if number < options.returns:
            back = max(killed[0] + options.steps // 10, moment(0.4, 0.7)[0])
            faults.append(Fault(back, draws.random(), "return empty" if number == 0 else "return", replica))
    for number, replica in enumerate(victims[options.kills :]):
        what = "freeze" if number < options.freezes else "cut"
        faults.append(Fault(*moment(0.1, 0.8), what, replica, draws.uniform(2, 15)))
    for number in range(options.joins):
        faults.append(Fault(*moment(0.2, 0.6), "join", options.replicas + number))
    return sorted(faults, key=lambda fault: (fault.step, fault.seconds))


def network(cuts: int, slots: int) -> contextlib.AbstractContextManager[Lab | None]:
    """A host for each slot where links are to be cut; else the loopback interface does."""
    return lab([_LINK] * slots) if cuts else contextlib.nullcontext()


class Federation(Written):
    """Replicas on this machine, in a folder with a folder for each. As a context: no process is left behind.

    Args:
        there: the hosts of the replicas; None: all on this one.
    """

    def __init__(self, folder: Path, slots: int, steps: int, there: Lab | None) -> None:
        self.folder = folder
        self._there = there
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._addresses = [f"{address_of(slot)}:{_PORT}" for slot in range(slots)]
        if there is None:
            self._addresses = [f"127.0.0.1:{port}" for port in free_ports(slots)]
        self._base = base_config(steps)
        self._base["federation"] |= {"slots": slots, "start_with": 1, "shortest_deadline_seconds": 5}

    def __enter__(self) -> "Federation":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()

    def run(self, replicas: int, faults: list[Fault], limit: float) -> dict[int, int | None]:
        """The exit code of every replica's last process; None where it was killed at the limit."""
        deadline = time.monotonic() + limit
        for replica in range(replicas):
            self.start(replica)
        ends: list[tuple[float, Fault]] = []
        coming = list(faults)
        while time.monotonic() < deadline and (coming or ends or self.running()):
            for when, fault in [end for end in ends if end[0] <= time.monotonic()]:
                self._end(fault)
                ends.remove((when, fault))
            if coming and (self.step(self._processes) >= coming[0].step or not self.running()):
                fault = coming.pop(0)
                time.sleep(fault.seconds)
                self._apply(fault)
                if fault.lasts_seconds:
                    ends.append((time.monotonic() + fault.lasts_seconds, fault))
            time.sleep(_LOOK_SECONDS)
        return {replica: process.poll() for replica, process in self._processes.items()}

    def _apply(self, fault: Fault) -> None:
        match fault.what:
            case "kill":
                self._processes[fault.replica].kill()
                self._processes[fault.replica].wait()
            case "freeze":
                self._processes[fault.replica].send_signal(signal.SIGSTOP)
            case "cut":
                assert self._there is not None
                self._there.cut(self._there.names[fault.replica])
            case "return empty":
                shutil.rmtree(self._folder(fault.replica))
                self.start(fault.replica)
            case _:
                self.start(fault.replica)

    def _end(self, fault: Fault) -> None:
        if fault.what == "freeze":
            self._processes[fault.replica].send_signal(signal.SIGCONT)
        else:
            assert self._there is not None
            self._there.heal(self._there.names[fault.replica])

    def start(self, replica: int) -> None:
        folder = self._folder(replica)
        folder.mkdir(parents=True, exist_ok=True)
        here = {
            "listen": f"tcp://{self._addresses[replica]}",
            "rendezvous": "tcp://" + ",".join(self._addresses),
        }
        config = self._base | {"federation": self._base["federation"] | here}
        config["training"] = config["training"] | {"output_dir": str(folder.resolve())}
        file = (folder / "config.json").resolve()
        file.write_text(json.dumps(config))
        command = [sys.executable, "-m", "megatron_noloco", "train", "--config", str(file)]
        command += ["--replica", str(replica), "--progress", "lines"]
        if self._there is not None:
            command = self._there.on(self._there.names[replica], *command)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with (self.folder / f"replica_{replica}.log").open("ab") as log:
            self._processes[replica] = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def running(self) -> int:
        return sum(process.poll() is None for process in self._processes.values())

    def files(self, replica: int) -> Iterable[Path]:
        return self._folder(replica).glob("replica_*/metrics.jsonl")

    def _folder(self, replica: int) -> Path:
        return self.folder / f"host_{replica}"


def base_config(steps: int) -> dict[str, Any]:
    base: dict[str, Any] = json.loads(_BASE.read_text())
    base["training"] |= {"train_iters": steps, "log_interval": 1}
    base["scheduler"]["params"]["total_num_steps"] = steps
    base["evaluation"] = {"interval": max(1, steps // 6), "iters": 10}
    return base


def free_ports(count: int) -> Iterator[int]:
    """Ports of the loopback interface that nobody uses now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        ports = [each.getsockname()[1] for each in sockets]
    yield from ports


def mean(losses: Iterable[float | None]) -> float | None:
    found = [loss for loss in losses if loss is not None]
    return fmean(found) if found else None


if __name__ == "__main__":
    sys.exit(main())
