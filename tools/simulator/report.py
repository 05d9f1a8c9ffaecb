"""What a study found: one row per method, as a table and as a figure.

A method is compared with the runs "synchronous" and "alone" of its group: "NoLoCo @ Muon" with "alone @ Muon", a
name without " @ " with the plain ones.
"""

import csv
import io
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

BASELINES = ("alone", "synchronous")


class Key(NamedTuple):
    """One run of a study."""

    name: str
    learning_rate: float
    seed: int


class Row(NamedTuple):
    """One method at its best learning rate: means over seeds, and the deviation of losses (nan: one seed)."""

    name: str
    learning_rate: float
    loss: float  # of the mean model, nats per token
    deviation: float
    worst_replica: float  # the largest loss of a replica, over that of the mean model
    benefit: float  # (alone - loss) / (alone - synchronous)
    perplexity: float  # over that of the synchronous run
    megabytes: float  # sent per replica


def baseline(name: str, method: str) -> str:
    """Return the run "alone" or "synchronous" with which the run `method` is compared."""
    _, at, group = method.partition(" @ ")
    return name + at + group


def table(results: Mapping[Key, Mapping[str, Any]]) -> list[Row]:
    """Return the methods at their best learning rates, in the order of the study."""
    by_method: dict[tuple[str, float], dict[int, Mapping[str, Any]]] = {}
    for key, result in results.items():
        by_method.setdefault((key.name, key.learning_rate), {})[key.seed] = result
    most = max(map(len, by_method.values()))  # the other learning rates were tried with the first seed only
    first = next(iter(results)).seed
    best: dict[str, tuple[float, Row]] = {}
    for (name, rate), runs in by_method.items():
        tried = finite(runs[first]["mean_model_loss"])
        if len(runs) == most and (name not in best or tried < best[name][0]):
            best[name] = tried, _row(name, rate, list(runs.values()))
    return [_compared(row, best) for _, row in best.values()]


def finite(loss: float) -> float:
    """Return the loss; infinity, worse than all others, for a run that has diverged."""
    return loss if math.isfinite(loss) else math.inf


def _row(name: str, rate: float, runs: Sequence[Mapping[str, Any]]) -> Row:
    losses = [run["mean_model_loss"] for run in runs]
    worst = statistics.mean(max(run["replica_losses"]) - run["mean_model_loss"] for run in runs)
    deviation = statistics.stdev(losses) if len(losses) > 1 else math.nan
    megabytes = runs[0]["sent_bytes"] / 1e6
    return Row(name, rate, statistics.mean(losses), deviation, worst, math.nan, math.nan, megabytes)


def _compared(row: Row, best: Mapping[str, tuple[float, Row]]) -> Row:
    alone, synchronous = (best[baseline(name, row.name)][1].loss for name in BASELINES)
    return row._replace(
        benefit=(alone - row.loss) / (alone - synchronous), perplexity=math.exp(row.loss - synchronous)
    )


def as_markdown(rows: Iterable[Row]) -> str:
    head = (
        "method",
        "learning rate",
        "loss, mean model",
        "worst replica above it",
        "perplexity above synchronous",
        "benefit retained",
        "MB sent",
    )
    cells = [
        (
            row.name,
            f"{row.learning_rate:g}",
            _loss(row),
            f"{row.worst_replica:.4f}",
            f"{100 * (row.perplexity - 1):.1f} %",
            f"{100 * row.benefit:.0f} %",
            f"{row.megabytes:.1f}",
        )
        for row in rows
    ]
    return as_rows([head, *cells])


def as_rows(rows: Iterable[Sequence[object]]) -> str:
    """Return a table in Markdown; the first row is its head."""
    head, *others = [f"| {' | '.join(map(str, row))} |\n" for row in rows]
    return f"{head}{'|---' * (head.count(' | ') + 1)}|\n{''.join(others)}"


def _loss(row: Row) -> str:
    return f"{row.loss:.4f}" + ("" if math.isnan(row.deviation) else f" +- {row.deviation:.4f}")


def as_csv(rows: Iterable[Row]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([Row._fields, *rows])
    return text.getvalue()


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw the benefit retained by each method, as bars."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [row for row in rows if row.name.partition(" @ ")[0] not in BASELINES][::-1]
    figure, axes = pyplot.subplots(figsize=(8, 1 + 0.4 * len(shown)), layout="constrained")
    axes.barh([row.name for row in shown], [100 * row.benefit for row in shown])
    longest = max([100.0, *(100 * row.benefit for row in shown)])
    for place, row in enumerate(shown):
        axes.text(longest + 2, place, f"{100 * (row.perplexity - 1):+.1f} % perplexity", va="center")
    axes.axvline(100, color="black", linewidth=1)
    axes.set_xlim(0, longest + 34)
    axes.set_xticks(range(0, 101, 20))
    axes.set_xlabel("benefit retained (%); at the right: perplexity against synchronous training")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
