"""The costs of a faulty replica for the others: their losses with it, without it, and with a healthy one instead.

    nice python -m tools.faults faulty --output runs/faulty

The last replica sends NaN from its first exchange on; or it is stopped (SIGSTOP)
after a third of the local steps, for good; or its local steps take three times as long. Each local step has a
pause of `--step-seconds`, so that it is slow and not the machine.

Reports the mean of the validation losses of the others in each run, divided by that of the run without the faulty
replica; how it ended; rounds that the others missed, and the longest pause of one of them. Exit code 1 when one of
the others has not ended well.
"""

import argparse
import math
import shutil
from pathlib import Path
from typing import Any

from tools.faults.disturb import Fault, disturb
from tools.processes import Federation, base_config, mean

_FACTORS = {"healthy": 1.0, "sends_nan": math.nan, "frozen": 1.0, "slow": 1.0}
_SLOWER = 3


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, required=True, help="a folder; it is emptied")
    parser.add_argument("--replicas", type=int, default=5, help="with the faulty one")
    parser.add_argument("--faults", nargs="+", choices=_FACTORS, default=list(_FACTORS))
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--step-seconds", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for each run")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run all replicas but the last, then all with each fault of the last."""
    shutil.rmtree(options.output, ignore_errors=True)
    without = others_beside(None, options)
    beside = {fault: others_beside(fault, options) for fault in options.faults}
    for found in beside.values():
        if found["loss"] and without["loss"]:
            found["over_without"] = found["loss"] / without["loss"]
    well = all(found["ended_well"] for found in (without, *beside.values()))
    return {"well": well, "seed": options.seed, "without": without, "beside": beside}


def others_beside(fault: str | None, options: argparse.Namespace) -> dict[str, Any]:
    """Run all replicas but the last, and with a fault that one, too; returns figures of the others."""
    others, faulty = range(options.replicas - 1), options.replicas - 1
    running = [*others, faulty] if fault else others
    base = base_config(options.steps)
    base["training"]["seed"] = options.seed
    settings = {"slots": options.replicas, "start_with": len(running)}
    faults = [Fault(options.steps // 3, 0.0, "freeze", faulty)] if fault == "frozen" else []
    with Federation(options.output / (fault or "without"), base, settings) as federation:
        for replica in running:
            is_faulty = replica == faulty
            pause = options.step_seconds * (_SLOWER if is_faulty and fault == "slow" else 1)
            factor = _FACTORS[fault or "healthy"] if is_faulty else 1.0
            federation.start(replica, "tools.faults.replica", str(pause), "--factor", str(factor))
        codes = disturb(federation, faults, options.limit, untouched=others)
    return {
        "loss": mean(map(federation.loss, others)),
        "ended_well": all(codes[replica] == 0 for replica in others),
        "steps_of_the_last": federation.last(faulty, "step"),
        "iterations_left_out": [federation.total(replica, "skipped_ahead") for replica in running],
        "missed_rounds": [federation.total(replica, "missed_rounds") for replica in others],
        "longest_pause_seconds": max(map(federation.longest_pause, others)),
    }
