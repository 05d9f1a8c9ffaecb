"""Compares a federation that is disturbed at random moments with one that is not.

    nice python -m tools.chaos --output runs/chaos

Every replica is a process of its own, with a folder of its own: they share no files. Some are killed (SIGKILL),
one after another; some of these come back, the first of them without its folder; some are stopped and continued
(SIGSTOP, SIGCONT); new ones join empty slots. With `--cuts`, for root, each replica is a host of `tests.netlab`,
on a link of 100 Mbit/s and 5 ms, and some links are cut for some seconds: packets are lost, and no connection is
closed. `--seed` decides the faults, their replicas and moments: each moment is a random local step of the run and
a random part of a second after it, so that it falls into a step, an exchange, an evaluation or a save. Then the
same replicas run undisturbed, those that join from the beginning on.

With `--one-job` the replicas are the ranks of one job under mpirun, with the kills and freezes of the same seed:
a kill ends the job, and it is started again. Nothing is lost but the local steps since
its last checkpoint, so that the losses at the end have to be those of the undisturbed job, to the last bit.

Prints one JSON object: the faults, the exit code of every replica, the losses of both runs, and the longest pause
of a replica without a fault. Exit code 1 when a replica that should have ended well did not.
"""

import argparse
import contextlib
import json
import random
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.netlab.lab import Lab, lab
from tests.netlab.network import Link
from tools.options import command_line
from tools.processes import Federation, OneJob, base_config, mean

_LOOK_SECONDS = 0.05
_LINK = Link(rate=100e6, delay=5e-3)


@dataclass(frozen=True)
class Fault:
    """One disturbance, `seconds` after the federation has made `step` local steps."""

    step: int
    seconds: float
    what: str  # "kill", "return", "return empty", "freeze", "cut", "join"
    replica: int
    lasts_seconds: float = 0.0  # "freeze" and "cut"


def main() -> int:
    parser = command_line(__doc__)
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
        base, settings = base_config(options.steps), {"slots": slots, "start_with": 1}
        with Federation(options.output / "disturbed", base, settings, there) as disturbed:
            endings = run(disturbed, options.replicas, faults, options.limit, there)
        with Federation(options.output / "undisturbed", base, settings, there) as undisturbed:
            run(undisturbed, slots, [], options.limit, there)
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
        "missed_rounds": {replica: disturbed.total(replica, "missed_rounds") for replica in expected},
        "rounds_in_doubt": {replica: disturbed.total(replica, "rounds_in_doubt") for replica in expected},
        "processes_left": len(disturbed.running() + undisturbed.running()),
    }))  # fmt: skip
    return 0 if well else 1


def one_job(options: argparse.Namespace, faults: list[Fault]) -> int:
    replicas, base = range(options.replicas), base_config(options.steps)
    with OneJob(options.output / "disturbed", options.replicas, base) as disturbed:
        code = disturbed.run(faults, options.limit)
    with OneJob(options.output / "undisturbed", options.replicas, base) as undisturbed:
        undisturbed.run([], options.limit)
    losses, expected = ([job.loss(replica) for replica in replicas] for job in (disturbed, undisturbed))
    print(json.dumps({
        "seed": options.seed,
        "faults": [fault.__dict__ for fault in faults if fault.what in ("kill", "freeze")],
        "exit_codes": [*disturbed.exit_codes_before, code],
        "continued_from": disturbed.continued_from(),
        "losses": losses,
        "undisturbed_losses": expected,
    }))  # fmt: skip
    return 0 if code == 0 and None not in losses and losses == expected else 1


def draw_faults(options: argparse.Namespace) -> list[Fault]:
    """Draw the faults, in the order of their moments; each replica has at most one kind."""
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
    """Return a lab with a host for each slot where links are cut, else a context of None."""
    return lab([_LINK] * slots) if cuts else contextlib.nullcontext()


def run(
    federation: Federation, replicas: int, faults: list[Fault], limit: float, there: Lab | None
) -> dict[int, int | None]:
    """Return the exit code of every replica's last process; None where it had not ended at the limit."""
    deadline = time.monotonic() + limit
    for replica in range(replicas):
        federation.start(replica)
    ends: list[tuple[float, Fault]] = []
    coming = list(faults)
    while time.monotonic() < deadline and (coming or ends or federation.running()):
        for when, fault in [end for end in ends if end[0] <= time.monotonic()]:
            undo(fault, federation, there)
            ends.remove((when, fault))
        if coming and (federation.furthest_step() >= coming[0].step or not federation.running()):
            fault = coming.pop(0)
            time.sleep(fault.seconds)
            inflict(fault, federation, there)
            if fault.lasts_seconds:
                ends.append((time.monotonic() + fault.lasts_seconds, fault))
        time.sleep(_LOOK_SECONDS)
    return federation.exit_codes()


def inflict(fault: Fault, federation: Federation, there: Lab | None) -> None:
    match fault.what:
        case "kill":
            federation.kill(fault.replica)
        case "freeze":
            federation.signal(fault.replica, signal.SIGSTOP)
        case "cut":
            assert there is not None
            there.cut(there.names[fault.replica])
        case "return empty":
            shutil.rmtree(federation.host(fault.replica))
            federation.start(fault.replica)
        case _:
            federation.start(fault.replica)


def undo(fault: Fault, federation: Federation, there: Lab | None) -> None:
    if fault.what == "freeze":
        federation.signal(fault.replica, signal.SIGCONT)
    else:
        assert there is not None
        there.heal(there.names[fault.replica])


if __name__ == "__main__":
    sys.exit(main())
