"""Compares a federation that is disturbed at random moments with one that is not.

    nice python -m tools.faults chaos --output runs/chaos

Some replicas are killed (SIGKILL), one after another; some of these come back, the first of them without its
folder; some are stopped and continued (SIGSTOP, SIGCONT); new ones join. `--seed` decides the faults, their
replicas and moments: each moment is a random local step of the run and a random part of a second after it, so that
it falls into a step, an exchange, an evaluation or a save. Then the same replicas run undisturbed, those that join
from the beginning on.

Reports the faults, the exit code of every replica, the losses of both runs, by how much those of the disturbed one
are apart (0: all have ended as one model), and the longest pause of a replica without a fault. Exit code 1 when a
replica that should have ended well did not.
"""

import argparse
import random
import shutil
import sys
from pathlib import Path
from typing import Any

from tools.faults.disturb import Fault, disturb
from tools.processes import Federation, base_config, mean


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, required=True, help="a folder; it is emptied")
    parser.add_argument("--replicas", type=int, default=8, help="at the start")
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--returns", type=int, default=2, help="of those killed")
    parser.add_argument("--joins", type=int, default=1, help="new replicas")
    parser.add_argument("--freezes", type=int, default=2, help="stopped for some seconds")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds for each of the two runs")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run the federation with faults, then without."""
    faults = draw_faults(options)
    shutil.rmtree(options.output, ignore_errors=True)
    slots = options.replicas + options.joins
    base, settings = base_config(options.steps), {"slots": slots, "start_with": 1}
    with Federation(options.output / "disturbed", base, settings) as disturbed:
        disturbed.start_all(range(options.replicas))
        endings = disturb(disturbed, faults, options.limit)
    with Federation(options.output / "undisturbed", base, settings) as undisturbed:
        undisturbed.start_all(range(slots))
        disturb(undisturbed, [], options.limit)
    gone = {fault.replica for fault in faults if fault.what == "kill"}
    gone -= {fault.replica for fault in faults if fault.what.startswith("return")}
    touched = {fault.replica for fault in faults}
    expected = [replica for replica in range(slots) if replica not in gone]
    losses = {replica: disturbed.loss(replica) for replica in expected}
    loss, reference = mean(losses.values()), mean(map(undisturbed.loss, range(slots)))
    return {
        "well": all(endings[replica] == 0 for replica in expected) and None not in losses.values(),
        "seed": options.seed,
        "faults": [fault.__dict__ for fault in faults],
        "exit_codes": endings,
        "losses": losses,
        "apart": max(found) - min(found) if (found := [each for each in losses.values() if each]) else None,
        "mean_loss": loss,
        "undisturbed_mean_loss": reference,
        "loss_ratio": loss / reference if loss and reference else None,
        "longest_pause_seconds": max(map(disturbed.longest_pause, set(expected) - touched)),
        "undisturbed_longest_pause_seconds": max(map(undisturbed.longest_pause, range(slots))),
        "missed_rounds": {replica: disturbed.total(replica, "missed_rounds") for replica in expected},
        "rounds_in_doubt": {replica: disturbed.total(replica, "rounds_in_doubt") for replica in expected},
        "processes_left": len(disturbed.running() + undisturbed.running()),
    }


def draw_faults(options: argparse.Namespace) -> list[Fault]:
    """Draw the faults, in the order of their moments; each replica has at most one kind."""
    draws = random.Random(options.seed)
    troubled = options.kills + options.freezes
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
    for replica in victims[options.kills :]:
        faults.append(Fault(*moment(0.1, 0.8), "freeze", replica, draws.uniform(2, 15)))
    for number in range(options.joins):
        faults.append(Fault(*moment(0.2, 0.6), "join", options.replicas + number))
    return sorted(faults, key=lambda fault: (fault.step, fault.seconds))
