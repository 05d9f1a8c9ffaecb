"""The runs of docs/evidence.csv, or of a study, and what tables show of a method."""

import csv
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from math import expm1, isnan
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from tools.options import configure

ROOT = Path(__file__).parents[1]
EVIDENCE = ROOT / "docs" / "evidence.csv"
BASELINES = ("alone", "synchronous")
WEIGHTS, STEPS = 84_816, 2000  # of the runs whose bytes are shown per weight and local step
_RATES = re.compile(r", ([\d.]+) ([\d.]+)(?=,| @|$)")  # `muon_lr` and `adam_lr` in a method's name


class Run(NamedTuple):
    """A row of the CSV. Losses are in nats per token, those of the mean model and of the worst replica."""

    study: str
    method: str
    learning_rate: float
    seed: int
    loss: float
    worst: float
    sent: float  # bytes of a replica; nan: not kept

    @property
    def rates(self) -> tuple[float, float] | None:
        """`muon_lr` and `adam_lr`, as the name has them or else the study; None: neither has them."""
        if named := _named_rates(self.method):
            return named
        if self.method not in _study(self.study).get("runs", {}):
            return None
        params = configure(_study(self.study), self.method, self.learning_rate)["optimizer"]["params"]
        return (params["muon_lr"], params.get("adam_lr", params["lr"])) if "muon_lr" in params else None


class Found(NamedTuple):
    """The runs of a method at its best rates, by seed, and those at the others that were tried."""

    best: Mapping[int, Run]
    others: list[dict[int, Run]]


Methods = Mapping[str, list[Run]]
"""Runs by the method's name without its learning rates."""


def read(file: Path) -> list[Run]:
    rows = csv.reader(file.read_text().splitlines()[1:])
    return [
        Run(study, method, float(rate), int(seed), float(loss), float(worst), float(sent))
        for study, method, rate, seed, loss, worst, sent in rows
    ]


def write(file: Path, runs: Iterable[Run]) -> None:
    names = (
        "study",
        "method",
        "learning_rate",
        "seed",
        "mean_model_loss",
        "worst_replica_loss",
        "sent_bytes",
    )
    with file.open("w", newline="") as out:
        csv.writer(out, lineterminator="\n").writerows([names, *runs])


def baseline(name: str, method: str) -> str:
    """Return the run "alone" or "synchronous" with which the run `method`, "NAME @ GROUP", is compared."""
    _, at, group = method.partition(" @ ")
    return name + at + group


def methods_of(runs: Iterable[Run]) -> Methods:
    methods = defaultdict(list)
    for run in runs:
        methods[_RATES.sub("", run.method)].append(run)
    return methods


def found(method: str, methods: Methods) -> Found | None:
    """Return the runs of a method at the rates with the lowest loss of the first seed, and the others.

    Args:
        method: its name, or several with " + " between. With learning rates: only the runs at these.
    """
    names = method.split(" + ")
    runs = [run for name in names for run in methods.get(_RATES.sub("", name), [])]
    if rates := _named_rates(names[-1]):
        runs = [run for run in runs if run.rates == rates]
    by_rates: dict[object, dict[int, Run]] = defaultdict(dict)
    for run in sorted(runs, key=lambda run: run.seed):
        by_rates[run.rates, run.learning_rate][run.seed] = run
    first, *others = sorted(by_rates.values(), key=lambda tried: (min(tried), tried[min(tried)].loss)) or [{}]
    return Found(first, others) if first else None


def _named_rates(method: str) -> tuple[float, float] | None:
    named = _RATES.search(method)
    return (float(named[1]), float(named[2])) if named else None


@cache
def _study(name: str) -> dict[str, Any]:
    """Return the JSON of a study; nothing for an earlier one, whose file is no longer there."""
    file = ROOT / "tools" / "studies" / f"{name.replace(' ', '_')}.json"
    return dict(json.loads(file.read_text())) if file.exists() else {}


Baselines = Mapping[str, Found]
"""The rows "first", "synchronous" and "alone" of a table; of the last two those that it has."""


def _loss(method: Found, _: Baselines) -> str:
    return _over_seeds([run.loss for run in method.best.values()])


def _above_first(method: Found, baselines: Baselines) -> str:
    first = baselines["first"].best
    same = [run.loss - first[seed].loss for seed, run in method.best.items() if seed in first]
    return _over_seeds(same, sign="+") if same and method.best != first else ""


def _over_seeds(losses: list[float], sign: str = "") -> str:
    several = f" +- {stdev(losses):.4f}" if len(losses) > 1 else ""
    return f"{mean(losses):{sign}.4f}{several}" + (" (2 seeds)" if len(losses) == 2 else "")


def _rates(method: Found, _: Baselines) -> str:
    return _shown_rates(method.best)


def _shown_rates(runs: Mapping[int, Run]) -> str:
    run = next(iter(runs.values()))
    return ", ".join(f"{rate:.3g}" for rate in run.rates or (run.learning_rate,))


def _others(method: Found, _: Baselines) -> str:
    tried = sorted((_shown_rates(runs), runs[min(runs)].loss) for runs in method.others)
    return "; ".join(f"{rates}: {loss:.4f}" for rates, loss in tried)


def _worst(method: Found, _: Baselines) -> str:
    above = mean(run.worst - run.loss for run in method.best.values())
    return f"{above:.4f}" if above else ""


def _perplexity(method: Found, baselines: Baselines) -> str:
    means = _of_same_seeds(method, baselines, "synchronous")
    if method == baselines.get("synchronous") or means is None:
        return ""
    own, synchronous = means
    return f"{100 * expm1(own - synchronous):.1f} %"


def _benefit(method: Found, baselines: Baselines) -> str:
    if (means := _of_same_seeds(method, baselines, "alone", "synchronous")) is None:
        return ""
    own, alone, synchronous = means
    return f"{100 * (alone - own) / (alone - synchronous):.0f} %"


def _of_same_seeds(method: Found, baselines: Baselines, *names: str) -> list[float] | None:
    """Return the mean losses of a method and of baselines, over the seeds that all have; None: there is none."""
    if not baselines.keys() >= set(names):
        return None
    all_runs = [method.best, *(baselines[name].best for name in names)]
    seeds = set.intersection(*(set(runs) for runs in all_runs))
    return [mean(runs[seed].loss for seed in seeds) for runs in all_runs] if seeds else None


def _megabytes(method: Found, _: Baselines) -> str:
    sent = _sent(method) / 1e6
    return f"{sent:.0f}" if sent >= 10 else f"{sent:.1f}" if sent > 0 else ""


def _bytes(method: Found, _: Baselines) -> str:
    sent = _sent(method) / WEIGHTS / STEPS
    return f"{sent:.3g}" if sent > 0 else ""


def _sent(method: Found) -> float:
    return mean([run.sent for run in method.best.values() if not isnan(run.sent)] or [0.0])


class Measure(NamedTuple):
    title: str
    show: Callable[[Found, Baselines], str]


MEASURES = {
    "rates": Measure("`muon_lr`, `adam_lr`", _rates),
    "loss": Measure("loss, nats per token", _loss),
    "seed1": Measure("loss of seed 1", lambda method, _: f"{method.best[1].loss:.4f}"),
    "worst": Measure("worst replica above it", _worst),
    "first": Measure("above the first row", _above_first),
    "perplexity": Measure("perplexity above synchronous", _perplexity),
    "benefit": Measure("benefit retained", _benefit),
    "MB": Measure("MB sent per replica", _megabytes),
    "bytes": Measure("bytes per weight and step", _bytes),
    "others": Measure("other rates: loss", _others),
}
