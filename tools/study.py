"""Compare methods, each at its own best learning rate, simulated or trained: a table and a CSV.

    nice python -m tools.study STUDY.json --output runs/study

STUDY.json has "base" (the trainer's JSON), "seeds", and "runs": a name for each method with its changes of the
base, as `--set` takes them. The block "simulator" may have "texts", files and folders as `data.text` takes them:
text of the replicas' own.
"synchronous" and "alone" must be among the names: the benefit retained by a method with loss x is
(alone - x) / (alone - synchronous), the share it keeps of what synchronous training of all replicas gains over
one replica alone.

A method's learning rate is found with the first seed: from that of its JSON it is doubled and halved until the
best lies between two worse ones. The other seeds take the best one. With "tune": false all take that of the JSON.

Finished runs are in OUTPUT/results.jsonl and are not repeated, and refused if their settings were others: an
interrupted study can be continued, and a simulated run from where it was at most five minutes before. `--jobs`
makes several runs side by side. A run is simulated on one core; `--compiled` by `torch.compile`, which needs a
C++ compiler. With `--trainer` it is the trainer itself under mpirun, with a process for each rank: for what is
not simulated, such as pipeline stages.
"""

import hashlib
import json
import math
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Lock, Thread
from typing import Any, NamedTuple

from megatron_noloco.config import RunConfig
from megatron_noloco.errors import UserError
from megatron_noloco.preflight.search import bracket
from tools import evidence
from tools.evidence import BASELINES, baseline
from tools.options import add_changes, apply, command_line, configure
from tools.simulator.trained import train
from tools.tables import of_study

Train = Callable[[dict[str, Any], Path], dict[str, Any]]


class Key(NamedTuple):
    """One run of a study."""

    name: str
    learning_rate: float
    seed: int


class RefusedError(ValueError):
    """A study cannot be made as it is given. The message says why, in one line."""


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("study", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    add_changes(parser, "the base")
    parser.add_argument("--seeds", type=int, nargs="+", help="instead of those of the study")
    parser.add_argument("--jobs", type=int, default=1)
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--compiled", action="store_true")
    ways.add_argument("--trainer", action="store_true")
    options = parser.parse_args()
    study = json.loads(options.study.read_text())
    study["seeds"] = options.seeds or study["seeds"]
    for change in options.set:
        apply(study["base"], change)
    for method in study["runs"]:
        for name in BASELINES:
            if baseline(name, method) not in study["runs"]:
                sys.exit(
                    f'{options.study}: "runs" lacks "{baseline(name, method)}", with which "{method}" is compared'
                )
    options.output.mkdir(parents=True, exist_ok=True)
    run: Train = train if options.trainer else partial(simulate, compiled=options.compiled)
    try:
        for method in study["runs"]:  # all of them, before the first takes its time
            raw = configure(study, method)
            raw.pop("simulator", None)
            RunConfig(**raw)
        results = Runs(study, options.output / "results.jsonl", options.jobs, run).all()
    except (UserError, RefusedError) as error:  # all others are faults of the program
        sys.exit(f"study: {error}")
    runs = [row_of(options.study.stem.replace("_", " "), key, result) for key, result in results.items()]
    evidence.write(options.output / "evidence.csv", runs)
    (options.output / "table.md").write_text(found := of_study(runs, study["runs"]))
    print(found)


def row_of(study: str, key: Key, result: dict[str, Any]) -> evidence.Run:
    """Return the row of the CSV; a loss that has diverged is infinity, worse than all others."""
    loss = result["mean_model_loss"] if math.isfinite(result["mean_model_loss"]) else math.inf
    return evidence.Run(study, *key, loss, max(result["replica_losses"]), result["sent_bytes"])


class Runs:
    """The last evaluations of all runs so far, in memory and in a file.

    Args:
        path: of the file. Runs that are in it are not repeated.
        jobs: runs side by side, each in a process of its own.
        run: makes a run from its JSON, with files in the folder of `path`; returns its last evaluation.
    """

    def __init__(self, study: dict[str, Any], path: Path, jobs: int, run: Train) -> None:
        self.study, self.path, self.jobs, self.run = study, path, jobs, run
        self.results = read(path)
        self._pool = ProcessPoolExecutor(jobs, get_context("spawn"), initializer=end_with_parent)
        self._writing = Lock()

    def all(self) -> dict[Key, dict[str, Any]]:
        """Make the missing runs; returns all runs of the study."""
        with self._pool, ThreadPoolExecutor(self.jobs) as threads:
            keys = [key for keys in threads.map(self._method, self.study["runs"]) for key in keys]
        return {key: self.results[key] for key in keys}

    def _method(self, name: str) -> list[Key]:
        first, *others = self.study["seeds"]
        start = configure(self.study, name)["optimizer"]["params"]["lr"]
        rates = self._tuned(name, start, first) if self.study.get("tune", True) else [start]
        keys = [Key(name, rate, first) for rate in rates] + [Key(name, rates[0], seed) for seed in others]
        for key in keys:
            self._loss(key)
        return keys

    def _tuned(self, name: str, start: float, seed: int) -> list[float]:
        """Return the learning rates tried, the best one first."""
        return list(bracket(lambda rate: self._loss(Key(name, rate, seed)), start))

    def _loss(self, key: Key) -> float:
        raw = configure(self.study, *key)
        found = self.results.get(key, {}).get("json", digest(raw))  # results of older versions have none
        if found != digest(raw):
            raise RefusedError(f"{self.path}: {key} is there of other settings; give another --output")
        if key not in self.results:
            result = self._pool.submit(self.run, raw, self.path.parent).result() | {"json": digest(raw)}
            with self._writing, self.path.open("a") as file:
                file.write(json.dumps({**key._asdict(), **result}) + "\n")
                print(f"{key}: {result['mean_model_loss']:.4f}", file=sys.stderr)
            self.results[key] = result
        return row_of("", key, self.results[key]).loss


def read(path: Path) -> dict[Key, dict[str, Any]]:
    """Return the results of an earlier call, without a line that a crash has cut short."""
    results = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        results[Key(*(row.pop(field) for field in Key._fields))] = row
    return results


def digest(raw: dict[str, Any]) -> str:
    """Return what tells the JSON of a run from others."""
    return hashlib.sha256(json.dumps(raw, sort_keys=True).encode()).hexdigest()[:16]


def end_with_parent() -> None:
    """Let this process end when the study ends, also when that is killed."""
    parent = parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    Thread(target=wait, daemon=True).start()


def simulate(raw: dict[str, Any], folder: Path, compiled: bool = False) -> dict[str, Any]:
    """Return the last evaluation of a simulated run, and the mean model's loss at each.

    Args:
        folder: where the run is saved meanwhile, by its JSON.

    Raises RefusedError for settings that cannot be simulated.
    """
    os.environ["TORCHDYNAMO_DISABLE"] = str(int(not compiled))

    import torch

    from megatron_noloco.job.start_up import before_engines

    before_engines()

    from tools.simulator.simulation import Simulation

    torch.set_num_threads(1)
    saved = folder / f"{digest(raw)}.pt"
    try:
        texts = raw.pop("simulator", {}).get("texts", ())
        simulation = Simulation(RunConfig(**raw), compiled, texts)
    except ValueError as error:
        raise RefusedError(str(error)) from None
    evaluations = list(simulation.run(saved))
    history = [[evaluation.step, evaluation.mean_model_loss] for evaluation in evaluations]
    found = {**asdict(evaluations[-1]), "history": history}
    if texts:  # the losses of the mean model, then of each replica
        rows = torch.cat(simulation.losses_by_text(), dim=1).tolist()
        found["by_text"] = dict(zip(texts, rows, strict=True))
    return found


if __name__ == "__main__":
    main()
