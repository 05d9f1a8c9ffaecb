"""Compare methods in the simulator, each at its own best learning rate: a table, a CSV and a figure.

    nice python -m tools.study STUDY.json --output runs/study

STUDY.json has "base" (the trainer's JSON), "seeds", and "runs": a name for each method with its changes of the
base as the simulator's `--set` takes them. "synchronous" and "alone" must be among the names: the benefit retained
by a method with loss x is (alone - x) / (alone - synchronous), the share it keeps of what synchronous training of
all replicas gains over one replica alone.

A method's learning rate is found with the first seed: from that of its JSON it is doubled and halved until the
best lies between two worse ones. The other seeds take the best one.

Finished runs are in OUTPUT/results.jsonl and are not repeated: an interrupted study can be continued. A run takes
one core; `--jobs` runs several side by side, `--compiled` by `torch.compile`, which needs a C++ compiler.
"""

import argparse
import copy
import csv
import io
import json
import math
import statistics
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from tools.simulator.changes import apply

BASELINES = ("alone", "synchronous")


class Key(NamedTuple):
    """One run of a study."""

    name: str
    learning_rate: float
    seed: int


class Row(NamedTuple):
    """One method at its best learning rate: means over the seeds, and the standard deviation of the loss."""

    name: str
    learning_rate: float
    loss: float  # of the mean model, nats per token
    deviation: float
    worst_replica: float  # the largest loss of a replica, over that of the mean model
    benefit: float
    megabytes: float  # sent per replica


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--compiled", action="store_true")
    options = parser.parse_args()
    study = json.loads(options.study.read_text())
    missing = [name for name in BASELINES if name not in study["runs"]]
    if missing:
        sys.exit(f'{options.study}: "runs" lacks {" and ".join(missing)}, which the others are compared with')
    options.output.mkdir(parents=True, exist_ok=True)
    results = Runs(study, options.output / "results.jsonl", options.jobs, options.compiled).all()
    rows = table(results)
    (options.output / "table.csv").write_text(as_csv(rows))
    (options.output / "table.md").write_text(as_markdown(rows))
    print(as_markdown(rows))


class Runs:
    """The last evaluation of every run so far, in memory and in a file.

    Args:
        path: of the file. Runs that are in it are not repeated.
        jobs: runs side by side, each in a process of its own.
    """

    def __init__(self, study: dict[str, Any], path: Path, jobs: int, compiled: bool = False) -> None:
        self.study, self.path, self.jobs, self.compiled = study, path, jobs, compiled
        self.results = read(path)
        self._pool = ProcessPoolExecutor(jobs, get_context("spawn"))
        self._writing = Lock()

    def all(self) -> dict[Key, dict[str, Any]]:
        """Make the runs that are missing; returns all of the study."""
        with self._pool, ThreadPoolExecutor(self.jobs) as threads:
            keys = [key for keys in threads.map(self._method, self.study["runs"]) for key in keys]
        return {key: self.results[key] for key in keys}

    def _method(self, name: str) -> list[Key]:
        first, *others = self.study["seeds"]
        start = configure(self.study, name)["optimizer"]["params"]["lr"]
        losses = {rate: self._loss(Key(name, rate, first)) for rate in (start, 2 * start, start / 2)}
        while (best := min(losses, key=losses.__getitem__)) in (max(losses), min(losses)):
            rate = 2 * best if best == max(losses) else best / 2
            losses[rate] = self._loss(Key(name, rate, first))
        keys = [Key(name, rate, first) for rate in losses]
        keys += [Key(name, best, seed) for seed in others]
        for key in keys:
            self._loss(key)
        return keys

    def _loss(self, key: Key) -> float:
        if key not in self.results:
            raw = configure(self.study, *key)
            result = self._pool.submit(simulate, raw, self.compiled).result()
            with self._writing, self.path.open("a") as file:
                file.write(json.dumps({**key._asdict(), **result}) + "\n")
                print(f"{key}: {result['mean_model_loss']:.4f}", file=sys.stderr)
            self.results[key] = result
        return _finite(self.results[key]["mean_model_loss"])


def read(path: Path) -> dict[Key, dict[str, Any]]:
    """What an earlier call wrote; a line cut short by a crash is left out."""
    results = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        results[Key(*(row.pop(field) for field in Key._fields))] = row
    return results


def configure(
    study: dict[str, Any], name: str, learning_rate: float | None = None, seed: int = 0
) -> dict[str, Any]:
    """The JSON of a run. A learning rate scales those of all parameters (Muon has two)."""
    raw = copy.deepcopy(study["base"])
    raw["training"]["seed"] = seed
    for change in study["runs"][name]:
        apply(raw, change)
    params = raw["optimizer"]["params"]
    if learning_rate is not None:
        factor = learning_rate / params["lr"]
        params |= {field: params[field] * factor for field in ("lr", "muon_lr", "adam_lr") if field in params}
    return raw


def simulate(raw: dict[str, Any], compiled: bool = False) -> dict[str, Any]:
    """In a process of its own: the last evaluation, and how the loss of the mean model fell."""
    import torch

    from megatron_noloco.quiet import quieten

    quieten()

    from megatron_noloco.config import RunConfig
    from tools.simulator.simulation import Simulation

    torch.set_num_threads(1)
    evaluations = list(Simulation(RunConfig.from_dict(raw), compiled).run())
    history = [[evaluation.step, evaluation.mean_model_loss] for evaluation in evaluations]
    return {**asdict(evaluations[-1]), "history": history}


def table(results: dict[Key, dict[str, Any]]) -> list[Row]:
    """The methods at their best learning rates, in the order of the study."""
    by_method: dict[tuple[str, float], dict[int, dict[str, Any]]] = {}
    for key, result in results.items():
        by_method.setdefault((key.name, key.learning_rate), {})[key.seed] = result
    most = max(map(len, by_method.values()))  # the other learning rates were tried with the first seed only
    first = next(iter(results)).seed
    best: dict[str, tuple[float, Row]] = {}
    for (name, rate), runs in by_method.items():
        tried = _finite(runs[first]["mean_model_loss"])
        if len(runs) == most and (name not in best or tried < best[name][0]):
            best[name] = tried, _row(name, rate, list(runs.values()))
    alone, synchronous = (best[name][1].loss for name in BASELINES)
    benefit = {name: (alone - row.loss) / (alone - synchronous) for name, (_, row) in best.items()}
    return [row._replace(benefit=benefit[name]) for name, (_, row) in best.items()]


def _row(name: str, rate: float, runs: list[dict[str, Any]]) -> Row:
    losses = [run["mean_model_loss"] for run in runs]
    worst = statistics.mean(max(run["replica_losses"]) - run["mean_model_loss"] for run in runs)
    deviation = statistics.stdev(losses) if len(losses) > 1 else math.nan
    return Row(name, rate, statistics.mean(losses), deviation, worst, math.nan, runs[0]["sent_bytes"] / 1e6)


def _finite(loss: float) -> float:
    """Of a run that has diverged: infinite, worse than all others."""
    return loss if math.isfinite(loss) else math.inf


def as_markdown(rows: Iterable[Row]) -> str:
    lines = [
        "| method | learning rate | loss, mean model | worst replica above it | benefit retained | MB sent |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.name} | {row.learning_rate:g} | {row.loss:.4f} +- {row.deviation:.4f} | "
        f"{row.worst_replica:.4f} | {100 * row.benefit:.0f} % | {row.megabytes:.1f} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def as_csv(rows: Iterable[Row]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([Row._fields, *rows])
    return text.getvalue()


if __name__ == "__main__":
    main()
