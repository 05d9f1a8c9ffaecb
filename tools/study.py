"""Compare methods in the simulator, each at its own best learning rate: a table, a CSV and a figure.

    nice python -m tools.study STUDY.json --output runs/study

STUDY.json has "base" (the trainer's JSON), "learning_rates", "seeds", and "runs": a name for each method with its
changes of the base as the simulator's `--set` takes them. "synchronous" and "alone" must be among the names: the
benefit retained by a method with loss x is (alone - x) / (alone - synchronous), the share it keeps of what
synchronous training of all replicas gains over one replica alone.

Finished runs are in OUTPUT/results.jsonl and are not repeated: an interrupted study can be continued. A run takes
one core; `--jobs` runs several side by side.
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
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from tools.simulate_convergence import apply

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
    options = parser.parse_args()
    study = json.loads(options.study.read_text())
    missing = [name for name in BASELINES if name not in study["runs"]]
    if missing:
        sys.exit(f'{options.study}: "runs" lacks {" and ".join(missing)}, which the others are compared with')
    options.output.mkdir(parents=True, exist_ok=True)
    results = run(study, options.output / "results.jsonl", options.jobs)
    rows = table(results)
    (options.output / "table.csv").write_text(as_csv(rows))
    (options.output / "table.md").write_text(as_markdown(rows))
    print(as_markdown(rows))


def run(study: dict[str, Any], path: Path, jobs: int) -> dict[Key, dict[str, Any]]:
    """The last evaluation of every run of the study; those not in the file are run and added to it."""
    results = read(path)
    keys = [
        Key(name, rate, seed)
        for seed in study["seeds"]
        for name in study["runs"]
        for rate in study["learning_rates"]
    ]
    todo = [key for key in keys if key not in results]
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool, path.open("a") as file:
        running = {pool.submit(simulate, configure(study, key)): key for key in todo}
        for number, future in enumerate(as_completed(running), 1):
            key = running[future]
            results[key] = future.result()
            file.write(json.dumps({**key._asdict(), **results[key]}) + "\n")
            file.flush()
            print(f"{number}/{len(todo)} {key}: {results[key]['mean_model_loss']:.4f}", file=sys.stderr)
    return {key: results[key] for key in keys}


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


def configure(study: dict[str, Any], key: Key) -> dict[str, Any]:
    raw = copy.deepcopy(study["base"])
    raw["training"]["seed"] = key.seed
    raw["optimizer"]["params"]["lr"] = key.learning_rate
    for change in study["runs"][key.name]:
        apply(raw, change)
    return raw


def simulate(raw: dict[str, Any]) -> dict[str, Any]:
    """In a process of its own: the last evaluation, and how the loss of the mean model fell."""
    import torch

    from megatron_noloco.quiet import quieten

    quieten()

    from megatron_noloco.config import RunConfig
    from tools.simulator.simulation import Simulation

    torch.set_num_threads(1)
    evaluations = list(Simulation(RunConfig.from_dict(raw)).run())
    history = [[evaluation.step, evaluation.mean_model_loss] for evaluation in evaluations]
    return {**asdict(evaluations[-1]), "history": history}


def table(results: dict[Key, dict[str, Any]]) -> list[Row]:
    """The methods at their best learning rates, in the order of the study."""
    names = list(dict.fromkeys(key.name for key in results))
    best = {name: min(_candidates(name, results), key=lambda row: row.loss) for name in names}
    alone, synchronous = (best[name].loss for name in BASELINES)
    return [row._replace(benefit=(alone - row.loss) / (alone - synchronous)) for row in best.values()]


def _candidates(name: str, results: dict[Key, dict[str, Any]]) -> Iterable[Row]:
    for rate in dict.fromkeys(key.learning_rate for key in results if key.name == name):
        runs = [result for key, result in results.items() if (key.name, key.learning_rate) == (name, rate)]
        losses = [result["mean_model_loss"] for result in runs]
        worst = statistics.mean(max(result["replica_losses"]) - result["mean_model_loss"] for result in runs)
        deviation = statistics.stdev(losses) if len(losses) > 1 else math.nan
        megabytes = runs[0]["sent_bytes"] / 1e6
        yield Row(name, rate, statistics.mean(losses), deviation, worst, math.nan, megabytes)


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
