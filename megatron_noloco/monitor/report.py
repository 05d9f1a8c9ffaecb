"""Writes a report of a run: one HTML page that contains its plots."""

import io
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from rich.console import Console

from megatron_noloco import __version__
from megatron_noloco.monitor.run_log import RunLog
from megatron_noloco.monitor.watch import run_table
from megatron_noloco.monitor.writers import Row

_FORWARD_BACKWARD = "forward and backward"
_WAITS = {  # parts of forward and backward
    "data/wait_seconds": "waiting for data",
    "routing/wait_seconds": "waiting for other stages",
}
_PHASES = {  # of a local step, in order
    "time/forward_backward_seconds": _FORWARD_BACKWARD,
    "time/optimizer_seconds": "inner optimizer",
    "time/exchange_seconds": "exchanges",
}
_MOST_LINES = 16  # with more replicas, the plot has no legend

Plot = Callable[[RunLog, Any], None]


def write_page(run: RunLog, path: Path) -> None:
    """Write the page. Raises OSError."""
    sections = "".join(
        f"<section><h2>{escape(title)}</h2><p>{escape(explanation)}</p>{_svg(run, plot)}</section>\n"
        for title, explanation, plot in _sections(run)
    )
    name = escape(str(run.folder.resolve()))
    path.write_text(
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title>\n'
        "<style>body{font-family:sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
        "svg{width:100%;height:auto}pre{overflow-x:auto;font-size:80%}</style></head>\n"
        f"<body><h1>{name}</h1>\n<pre>{escape(_text(run))}</pre>\n{sections}"
        f"<p>megatron_noloco {__version__}</p></body></html>\n"
    )


def _text(run: RunLog) -> str:
    console = Console(file=io.StringIO(), width=200, record=True)
    console.print(run_table(run))
    return console.export_text()


def _svg(run: RunLog, plot: Plot) -> str:
    figure = Figure(figsize=(9, 4), layout="constrained")
    plot(run, figure.subplots())
    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": plot.__name__}):  # the same run gives the same page
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


def _sections(run: RunLog) -> Iterator[tuple[str, str, Plot]]:
    """Yield title, explanation and plot of each section for which the run has numbers."""
    yield "Loss", "Of every replica, in nats per token: training (lines) and validation (points).", _loss
    if _has(run, "round/spread"):
        yield (
            "Spread",
            "How far replicas are apart: the standard deviation of a weight over the group before its round, root "
            "mean square over all weights. It follows the learning rate (dotted, on the right).",
            _spread,
        )
    yield "Where the time goes", "Seconds in a local step, means of all replicas.", _phases
    if _has(run, "total/sent_bytes"):
        yield (
            "Bytes",
            "Sent by a replica so far, mean of the replicas, and what a ring all-reduce of the gradients in every "
            "step would have sent.",
            _bytes,
        )
    if _has(run, "round/partners"):
        yield (
            "Pairings",
            "In the last round before each row of the log: a line joins replicas that exchanged, an open circle "
            "is a skipped round.",
            _pairings,
        )


def _has(run: RunLog, name: str) -> bool:
    return any(row.get(name) for row in _steps(run))


def _steps(run: RunLog) -> list[Row]:
    return [row for log in run.replicas for row in log.rows_of("step")]


def _curve(rows: Sequence[Row], name: str) -> tuple[list[int], list[float]]:
    found = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return [step for step, _ in found], [value for _, value in found]


def _means(run: RunLog, name: str) -> tuple[list[int], list[float]]:
    """Return the steps that have rows, and for each the mean of a number over the replicas that have a row."""
    at_steps: dict[int, list[float]] = {}
    for row in _steps(run):
        at_steps.setdefault(row["step"], []).append(row.get(name) or 0.0)
    return sorted(at_steps), [statistics.mean(at_steps[step]) for step in sorted(at_steps)]


def _loss(run: RunLog, axes: Any) -> None:
    for number, log in enumerate(run.replicas):
        color, label = f"C{number % 10}", f"replica {log.replica}"
        axes.plot(*_curve(log.rows_of("step"), "train/loss"), color=color, linewidth=0.8, label=label)
        axes.plot(*_curve(log.rows_of("evaluation"), "validation/loss"), ".", color=color)
    mean_model = _curve(run.replicas[0].rows_of("evaluation"), "validation/mean_model_loss")
    if mean_model[0]:
        axes.plot(*mean_model, "k.--", label="mean model, validation")
    axes.set(xlabel="local step", ylabel="loss")
    if len(run.replicas) <= _MOST_LINES:
        axes.legend()


def _spread(run: RunLog, axes: Any) -> None:
    for log in run.replicas:
        axes.plot(*_curve(log.rows_of("step"), "round/spread"), ".-", linewidth=0.8)
    axes.set(xlabel="local step", ylabel="spread", ylim=(0, None))
    rates = axes.twinx()
    rates.plot(*_curve(run.replicas[0].rows_of("step"), "train/learning_rate"), "k:")
    rates.set(ylabel="learning rate", ylim=(0, None))


def _phases(run: RunLog, axes: Any) -> None:
    steps, whole = _means(run, "speed/seconds_per_step")
    phases = {label: _means(run, name)[1] for name, label in _PHASES.items()}
    waits = {label: _means(run, name)[1] for name, label in _WAITS.items()}
    phases["everything else"] = _remainder(whole, phases)
    phases[_FORWARD_BACKWARD] = _remainder(phases[_FORWARD_BACKWARD], waits)
    phases = {label: seconds for label, seconds in (waits | phases).items() if any(seconds)}
    axes.stackplot(steps, phases.values(), labels=phases.keys())
    axes.set(xlabel="local step", ylabel="seconds")
    axes.legend()


def _remainder(whole: Sequence[float], parts: Mapping[str, Sequence[float]]) -> list[float]:
    """Return each number of `whole` less the same one of all `parts`."""
    return [max(0.0, total - sum(taken)) for total, *taken in zip(whole, *parts.values(), strict=True)]


def _bytes(run: RunLog, axes: Any) -> None:
    for name, label in (("total/sent_bytes", "exchanges"), ("total/routed_bytes", "routed activations")):
        steps, sent = _means(run, name)
        if any(sent):
            axes.plot(steps, [size / 1e6 for size in sent], label=label)
    if per_step := run.facts.get("synchronous_bytes_per_step"):
        axes.plot([0, steps[-1]], [0, per_step * steps[-1] / 1e6], "k--", label="all-reduce in every step")
    axes.set(xlabel="local step", ylabel="MB sent")
    axes.legend()


def _pairings(run: RunLog, axes: Any) -> None:
    groups: dict[int, set[tuple[int, ...]]] = {}
    for log in run.replicas:
        for row in log.rows_of("step"):
            if "round/partners" in row:
                group = tuple(sorted({int(log.replica), *row["round/partners"]}))
                groups.setdefault(row["step"], set()).add(group)
    steps = sorted({row["step"] for row in _steps(run)})
    interval = min((after - before for before, after in pairwise(steps)), default=1)
    for step, of_round in groups.items():
        for place, group in enumerate(sorted(of_round)):
            # Side by side, since the lines of two groups may overlap.
            x = step + 0.7 * interval * place / len(of_round)
            color, paired = f"C{place % 10}", len(group) > 1
            line, face = ("o-", color) if paired else ("o", "none")
            axes.plot([x] * len(group), group, line, color=color, markersize=4, markerfacecolor=face)
    axes.set(xlabel="local step", ylabel="replica")
    axes.yaxis.get_major_locator().set_params(integer=True)
