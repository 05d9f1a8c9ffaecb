"""A run as one HTML page with its plots in it: nothing else is needed to look at it."""

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
from megatron_noloco.monitor.rows import RunLog
from megatron_noloco.monitor.table import as_table
from megatron_noloco.monitor.writers import Row

_FORWARD_BACKWARD = "forward and backward"
_WAITS = {  # within forward and backward
    "data/wait_seconds": "waiting for data",
    "routing/wait_seconds": "waiting for other stages",
}
_PHASES = {  # of a step, from the beginning to the end
    "time/forward_backward_seconds": _FORWARD_BACKWARD,
    "time/optimizer_seconds": "inner optimizer",
    "time/exchange_seconds": "exchanges",
}
_MOST_LINES = 16  # a legend names no more replicas than these

Plot = Callable[[RunLog, Any], None]


def write_page(run: RunLog, path: Path) -> None:
    """Raises OSError where it cannot be written."""
    sections = "".join(
        f"<section><h2>{escape(title)}</h2><p>{escape(words)}</p>{_svg(run, plot)}</section>\n"
        for title, words, plot in _sections(run)
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
    console.print(as_table(run))
    return console.export_text()


def _svg(run: RunLog, plot: Plot) -> str:
    figure = Figure(figsize=(9, 4), layout="constrained")
    plot(run, figure.subplots())
    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": plot.__name__}):  # the same run gives the same page
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


def _sections(run: RunLog) -> Iterator[tuple[str, str, Plot]]:
    """Title, explanation and plot of what the run has numbers about."""
    yield "Loss", "Of every replica: in training, and on validation text (points). Nats per token.", _loss
    if any(row.get("round/spread") for row in _steps(run)):
        yield (
            "Spread",
            "How far replicas are apart: the standard deviation of a weight over those that met, before their "
            "round; root mean square over all weights. It follows the learning rate (dotted, on the right).",
            _spread,
        )
    yield "Where the time goes", "Seconds in a local step, means of all replicas.", _phases
    if any(row.get("total/sent_bytes") for row in _steps(run)):
        yield (
            "Bytes",
            "Sent by a replica so far, mean of the replicas, and what a ring all-reduce of the gradients in every "
            "step would have sent.",
            _bytes,
        )
    if any(row.get("round/partners") for row in _steps(run)):
        yield "Who met whom", "In the last round before each row of the log; a bye is a ring.", _meetings


def _steps(run: RunLog) -> list[Row]:
    return [row for log in run.replicas for row in log.of("step")]


def _curve(rows: Sequence[Row], name: str) -> tuple[list[int], list[float]]:
    found = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return [step for step, _ in found], [value for _, value in found]


def _loss(run: RunLog, axes: Any) -> None:
    for number, log in enumerate(run.replicas):
        color, label = f"C{number % 10}", f"replica {log.replica}"
        axes.plot(*_curve(log.of("step"), "train/loss"), color=color, linewidth=0.8, label=label)
        axes.plot(*_curve(log.of("evaluation"), "validation/loss"), ".", color=color)
    of_mean = _curve(run.replicas[0].of("evaluation"), "validation/mean_model_loss")
    if of_mean[0]:
        axes.plot(*of_mean, "k.--", label="mean model, validation")
    axes.set(xlabel="local step", ylabel="loss")
    if len(run.replicas) <= _MOST_LINES:
        axes.legend()


def _spread(run: RunLog, axes: Any) -> None:
    for log in run.replicas:
        axes.plot(*_curve(log.of("step"), "round/spread"), ".-", linewidth=0.8)
    axes.set(xlabel="local step", ylabel="spread", ylim=(0, None))
    rates = axes.twinx()
    rates.plot(*_curve(run.replicas[0].of("step"), "train/learning_rate"), "k:")
    rates.set(ylabel="learning rate", ylim=(0, None))


def _phases(run: RunLog, axes: Any) -> None:
    order, whole = _means(run, "speed/seconds_per_step")
    phases = {label: _means(run, name)[1] for name, label in _PHASES.items()}
    waits = {label: _means(run, name)[1] for name, label in _WAITS.items()}
    phases["everything else"] = _rest(whole, phases)
    phases[_FORWARD_BACKWARD] = _rest(phases[_FORWARD_BACKWARD], waits)
    phases = {label: seconds for label, seconds in (waits | phases).items() if any(seconds)}
    axes.stackplot(order, phases.values(), labels=phases.keys())
    axes.set(xlabel="local step", ylabel="seconds")
    axes.legend()


def _rest(whole: Sequence[float], parts: Mapping[str, Sequence[float]]) -> list[float]:
    """What is left of each number."""
    return [max(0.0, sums - sum(some)) for sums, *some in zip(whole, *parts.values(), strict=True)]


def _bytes(run: RunLog, axes: Any) -> None:
    for name, label in (("total/sent_bytes", "exchanges"), ("total/routed_bytes", "routed activations")):
        order, sent = _means(run, name)
        if any(sent):
            axes.plot(order, [figure / 1e6 for figure in sent], label=label)
    if per_step := run.facts.get("synchronous_bytes_per_step"):
        axes.plot([0, order[-1]], [0, per_step * order[-1] / 1e6], "k--", label="all-reduce in every step")
    axes.set(xlabel="local step", ylabel="MB sent")
    axes.legend()


def _meetings(run: RunLog, axes: Any) -> None:
    order, _ = _means(run, "round/index")
    interval = min((after - before for before, after in pairwise(order)), default=1)
    groups: dict[int, set[tuple[int, ...]]] = {}
    for log in run.replicas:
        number = int(log.replica)
        for row in log.of("step"):
            if "round/partners" in row:
                groups.setdefault(row["step"], set()).add(tuple(sorted({number, *row["round/partners"]})))
    for step, met in groups.items():
        for place, group in enumerate(
            sorted(met)
        ):  # side by side: lines of one round may cross the same replicas
            x = step + 0.7 * interval * place / len(met)
            style = "o-" if len(group) > 1 else "o"
            face = f"C{place % 10}" if len(group) > 1 else "none"
            axes.plot(
                [x] * len(group), group, style, color=f"C{place % 10}", markersize=4, markerfacecolor=face
            )
    axes.set(xlabel="local step", ylabel="replica")
    axes.yaxis.get_major_locator().set_params(integer=True)


def _means(run: RunLog, name: str) -> tuple[list[int], list[float]]:
    """Steps, and the means over the replicas that have a row of them."""
    at_steps: dict[int, list[float]] = {}
    for row in _steps(run):
        at_steps.setdefault(row["step"], []).append(row.get(name) or 0.0)
    return sorted(at_steps), [statistics.mean(at_steps[step]) for step in sorted(at_steps)]
