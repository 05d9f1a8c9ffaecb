"""Goodput of synchronous training, DiLoCo and NoLoCo with uneven replicas, in one job and as separate jobs.

    nice python -m tools.faults uneven --output runs/uneven

A rank is a replica. Its local steps take `--step-seconds` at least, far longer than they need here, so that all
can share the processors of one machine. Three cases: "even"; "one_slow", where those of the last replica take
3 times as long; and "by_chance", where every local step of every replica takes a time of its own,
lognormal with the same mean.

"goodput" is the number of local steps that all took, over what they would have taken
without waiting between the first step of all and the last, at one step in `--step-seconds`.
"of_the_others" is that of the replicas but the last, each until it has ended itself. "left_out" are the local
steps that the last replica left out, as slow ones do in a federation (docs/faults.md, different speeds).
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tools.processes import Federation, base_config

_SLOWER, _SIGMA, _LIMIT_SECONDS = 3.0, 0.5, 900.0
_CASES = ("even", "one_slow", "by_chance")
_METHODS: dict[str, dict[str, Any]] = {
    "synchronous": {"enabled": False},
    "DiLoCo": {"method": "diloco", "outer_momentum": 0.5, "outer_lr": 0.7},
    "NoLoCo": {},
    "NoLoCo, separate jobs": {},
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, required=True, help="a folder; it is emptied")
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--step-seconds", type=float, default=0.5)
    parser.add_argument("--cases", nargs="+", choices=_CASES, default=list(_CASES))


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run each case with each method."""
    shutil.rmtree(options.output, ignore_errors=True)
    found: dict[str, dict[str, Any]] = {case: {} for case in options.cases}
    for case in options.cases:
        seconds = options.replicas * [options.step_seconds]
        if case == "one_slow":
            seconds[-1] *= _SLOWER
        pace = [",".join(map(str, seconds)), "--sigma", str(_SIGMA if case == "by_chance" else 0)]
        for method, noloco in _METHODS.items():
            folder = (options.output / f"{case}, {method}").resolve()
            folder.mkdir(parents=True)
            train = separate_jobs if method == "NoLoCo, separate jobs" else one_job
            train(folder, noloco, ["tools.faults.replica", *pace, "--times", str(folder)], options)
            found[case][method] = goodput(folder, options)
    return {"replicas": options.replicas, "step_seconds": options.step_seconds, "found": found}


def config(noloco: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Return a config of local steps and rounds alone, with evaluation and save at the end."""
    base = base_config(options.steps)
    base["scheduler"]["params"]["warmup_num_steps"] = 1
    base["training"]["log_interval"] = options.steps
    base["evaluation"]["interval"] = base["checkpoint"]["save_interval"] = 0
    base["noloco"] |= noloco
    return base


def one_job(folder: Path, noloco: dict[str, Any], through: list[str], options: argparse.Namespace) -> None:
    raw = config(noloco, options)
    del raw["federation"]
    raw["noloco"]["routing"] = "off"
    raw["parallel"] = {"replicas" if noloco.get("enabled", True) else "data_parallel_size": options.replicas}
    raw["training"]["output_dir"] = str(folder)
    (file := folder / "config.json").write_text(json.dumps(raw))
    command = [sys.executable, "-m", "megatron_noloco.job.torchrun", "--standalone"]
    command += ["--nproc-per-node", str(options.replicas), "-m", *through, "train", "--config", str(file)]
    with (folder / "log").open("w") as log:
        subprocess.run(
            command, stdout=log, stderr=log, check=True, timeout=_LIMIT_SECONDS,
            env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )  # fmt: skip


def separate_jobs(
    folder: Path, noloco: dict[str, Any], through: list[str], options: argparse.Namespace
) -> None:
    settings = {"slots": options.replicas, "start_with": options.replicas}
    with Federation(folder, config(noloco, options), settings) as federation:
        for replica in range(options.replicas):
            federation.start(replica, *through)
        federation.wait(_LIMIT_SECONDS)
        if any(federation.exit_codes().values()):
            sys.exit(f"uneven: exit codes {federation.exit_codes()}, see {folder}")


def goodput(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    steps = [
        [tuple(map(float, line.split())) for line in (folder / f"steps_{replica}").read_text().splitlines()]
        for replica in range(options.replicas)
    ]
    first = min(begun for (begun, _), *_ in steps)
    last = max(taken[-1][1] for taken in steps)
    others = [len(taken) / (taken[-1][1] - first) for taken in steps[:-1]]
    return {
        "goodput": sum(map(len, steps)) / len(steps) / (last - first) * options.step_seconds,
        "of_the_others": sum(others) / len(others) * options.step_seconds,
        "left_out": options.steps - len(steps[-1]),
    }
