"""Draws the numbers of runs: what each plot shows, and its lines and points."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from plotly import graph_objects
from plotly.colors import qualitative

from megatron_noloco.monitor.numbers import BYTES, LOSS, SPREAD, TIME, Number, Row, numbers_in
from megatron_noloco.monitor.run_log import ReplicaLog, RunLog
from megatron_noloco.monitor.timeline import timeline_of

_COLORS = qualitative.Plotly
_SMOOTHED_ROWS = 19  # an older row counts less
_MOST_NAMES = 16  # with more replicas, the plot has no legend


class Plot(NamedTuple):
    """Describes a plot: title, a sentence about it, the names of its axes, and what is drawn."""

    title: str
    explanation: str
    y: str
    traces: list[Any]
    layout: Mapping[str, Any] = {}
    x: str = "local step"
    seconds: Sequence[Sequence[float]] = ()  # of training, in place of the local steps of each trace


def plots_of_one(run: RunLog) -> Iterator[Plot]:
    """Yield the plots of a run; those for which it has no numbers have no traces."""
    for plot in _plots(run):
        if plot.title in (LOSS, SPREAD, TIME, BYTES):
            logs = (run.replicas[trace.meta or 0] for trace in plot.traces)
            places = (_seconds_at(log, trace.x) for log, trace in zip(logs, plot.traces, strict=True))
            plot = plot._replace(seconds=[*places])
        yield plot


def _plots(run: RunLog) -> Iterator[Plot]:
    few = len(run.replicas) <= _MOST_NAMES
    numbered = {"showlegend": False, "yaxis_dtick": 1 if few else None}
    yield Plot(
        LOSS,
        "The loss of every replica: training (lines) and validation (points).",
        "loss, nats per token",
        list(_curves(run, LOSS)),
        {"showlegend": few},
    )
    yield Plot(
        SPREAD,
        "How far replicas are apart: the standard deviation of a weight over the group before its round, root "
        "mean square over all weights. The spread follows the learning rate (dotted, on the right).",
        "spread",
        list(_beside_rates(run, list(_curves(run, SPREAD)))),
        {
            "showlegend": few,
            "yaxis_rangemode": "tozero",
            "yaxis2": {"overlaying": "y", "side": "right", "rangemode": "tozero", "title": "learning rate"},
        },
    )
    steps, phases = phases_of(run)
    yield Plot(
        TIME,
        "Seconds in a local step, means of all replicas.",
        "seconds",
        [
            graph_objects.Scatter(x=steps, y=seconds, name=label, stackgroup="all", line={"width": 0})
            for label, seconds in phases.items()
        ],
    )
    yield Plot(
        BYTES,
        "MB sent by a replica so far (mean of the replicas), and MB that a ring all-reduce of the gradients in "
        "every step would have sent.",
        "MB sent",
        list(_bytes(run)),
    )
    yield Plot(
        "Pairings",
        "In the last round before each row of the log: a line joins replicas that exchanged, an open circle is a "
        "skipped round.",
        "replica",
        pairings_of(run),
        numbered,
    )
    yield Plot(
        "Timeline",
        "The jobs of the federation: where the line of a job breaks off, the job was away.",
        "replica",
        timeline_of(run),
        {**numbered, "showlegend": True},
        "seconds",
    )


def plots_of_several(runs: Sequence[RunLog]) -> Iterator[Plot]:
    """Yield the loss of several runs over local steps, seconds and bytes."""
    for scale in ("local step", "seconds of training", "MB sent by the first replica"):
        traces = []
        for number, run in enumerate(runs):
            rows = run.replicas[0].rows_of("evaluation")
            names = "validation/mean_model_loss", "validation/loss"
            losses = [row.get(names[0]) or row.get(names[1], math.nan) for row in rows]
            curve = places_of(run.replicas[0], scale), losses
            traces.append(_line(curve, run.folder.resolve().name, number, mode="lines+markers"))
        title, explanation = f"Validation loss over {scale}", "Of the mean model, else of the first replica."
        yield Plot(title, explanation, "loss, nats per token", traces, x=scale)


def places_of(log: ReplicaLog, scale: str) -> list[float]:
    """Return where on the axis `scale` of a comparison each evaluation lies; NaN after the newest row of steps."""
    steps = [row["step"] for row in log.rows_of("evaluation")]
    if scale == "local step":
        return steps
    if scale == "seconds of training":
        return _seconds_at(log, steps)
    known = {row["step"]: (row.get("total/sent_bytes") or 0) / 1e6 for row in log.rows_of("step")}
    return _between(log, known, steps)


def _seconds_at(log: ReplicaLog, steps: Sequence[float]) -> list[float]:
    """Return the seconds of training of a replica until these local steps; NaN after its newest row of steps."""
    return _between(log, log.seconds_so_far(), steps)


def _between(log: ReplicaLog, known: Mapping[int, float], steps: Sequence[float]) -> list[float]:
    begin = next((row["step"] for row in log.rows[:1] if row["kind"] == "start"), 0)
    at, values = zip(*({begin: 0.0} | dict(known)).items(), strict=True)
    return np.interp(steps, at, values, right=math.nan).tolist()


def smoothed(values: Sequence[float | None]) -> list[float | None]:
    """Return a moving average of the values up to each place, which begins anew after a gap (None or NaN)."""
    found, mean, weight = list[float | None](), 0.0, 0.0
    for value in values:
        if value is None or math.isnan(value):
            mean = weight = 0.0
            found.append(value)
        else:
            mean, weight = mean + (value - mean) / (weight + 1), min(weight + 1, _SMOOTHED_ROWS)
            found.append(mean)
    return found


def _line(
    curve: tuple[Sequence[float], Sequence[float]],
    name: str,
    number: int | None = None,
    mode: str = "lines",
    dash: str = "solid",
) -> Any:
    """Return a line or points; lines of the same number have one colour, those without are grey."""
    color = "#888" if number is None else _COLORS[number % len(_COLORS)]
    line = {"color": color, "dash": dash, "width": 1.5}
    return graph_objects.Scatter(
        x=curve[0], y=curve[1], name=name, mode=mode, line=line, marker={"color": color}
    )


def _curves(run: RunLog, chart: str) -> Iterator[Any]:
    """Yield the numbers of a chart: lines of steps, points of evaluations, a dashed line for all replicas."""
    for place, log in enumerate(run.replicas):
        name = f"replica {log.replica}"
        for number in numbers_in(chart):
            rows = log.rows_of("evaluation" if number.reduction is None else "step")
            if number.of_all or not (curve := _curve(rows, number.name))[0]:
                continue
            if number.label:
                points = _line(curve, f"{name}, {number.label}", place, mode="markers")
                yield points.update(showlegend=False, meta=place)
            else:
                yield _line(curve, name, place).update(meta=place)
    for number in numbers_in(chart):
        rows = run.replicas[0].rows_of("evaluation")
        if number.of_all and (curve := _curve(rows, number.name))[0]:
            yield _line(curve, number.label, mode="lines+markers", dash="dash")


def _beside_rates(run: RunLog, curves: list[Any]) -> Iterator[Any]:
    """Yield curves, if there are any, and the learning rate on the axis at the right."""
    if curves:
        yield from curves
        rates = _curve(run.replicas[0].rows_of("step"), "train/learning_rate")
        yield _line(rates, "learning rate", dash="dot").update(yaxis="y2")


def _bytes(run: RunLog) -> Iterator[Any]:
    for place, number in enumerate(numbers_in(BYTES)):
        steps, sent = _means(run, number.name)
        if any(sent):
            yield _line((steps, [size / 1e6 for size in sent]), number.label, place)
            per_step = run.facts.get("synchronous_bytes_per_step")
            if place == 0 and per_step:
                ends = [0, steps[-1]], [0, per_step * steps[-1] / 1e6]
                yield _line(ends, "all-reduce in every step", dash="dash")


def phases_of(run: RunLog) -> tuple[list[int], dict[str, list[float]]]:
    """Return the steps that have rows, and the seconds of each phase of a local step; together they are all."""

    def layers(whole: Number) -> Iterator[tuple[str, list[float]]]:
        """Yield the parts of a number, and last what they leave of it."""
        parts = [number for number in numbers if number.part_of == whole.name]
        for part in parts:
            yield from layers(part)
        totals = (means[number.name][1] for number in (whole, *parts))
        yield whole.label, [max(0.0, total - sum(taken)) for total, *taken in zip(*totals, strict=True)]

    numbers = [*numbers_in(TIME)]
    means = {number.name: _means(run, number.name) for number in numbers}
    (whole,) = (number for number in numbers if not number.part_of)
    return means[whole.name][0], {label: seconds for label, seconds in layers(whole) if any(seconds)}


def pairings_of(run: RunLog) -> list[Any]:
    """Return a line for each group of the rounds in the log; lines of one colour are one trace, with gaps."""
    groups: dict[int, set[tuple[int, ...]]] = {}
    for log in run.replicas:
        for row in log.rows_of("step"):
            if "round/partners" in row:
                group = tuple(sorted({int(log.replica), *row["round/partners"]}))
                groups.setdefault(row["step"], set()).add(group)
    steps = sorted({row["step"] for row in _steps(run)})
    interval = min((after - before for before, after in pairwise(steps)), default=1)
    drawn: dict[int | None, tuple[list[Any], list[Any]]] = {}
    for step, of_round in groups.items():
        for place, group in enumerate(sorted(of_round)):
            # Side by side, since the lines of two groups may overlap.
            x = step + 0.7 * interval * place / len(of_round)
            number = place % len(_COLORS) if len(group) > 1 else None
            xs, ys = drawn.setdefault(number, ([], []))
            xs += [*[x] * len(group), None]
            ys += [*group, None]
    traces = {number: _line(curve, "", number, mode="lines+markers") for number, curve in drawn.items()}
    if None in traces:
        traces[None].update(marker_symbol="circle-open")
    return [*traces.values()]


def _steps(run: RunLog) -> list[Row]:
    return [row for log in run.replicas for row in log.rows_of("step")]


def _curve(rows: Sequence[Row], name: str) -> tuple[list[int], list[float]]:
    """Return the steps and values of the rows that have a number.

    NaN, where a line breaks off, stands where steps before a row were left out, and of numbers of a round where
    there was no partner.
    """
    found = []
    for row in rows:
        alone = name.startswith("round/") and row.get("round/partners") == []
        if "handover/giver" in row or alone:
            found.append((row["step"], math.nan))
        if row.get(name) is not None and not alone:
            found.append((row["step"], row[name]))
    return [step for step, _ in found], [value for _, value in found]


def _means(run: RunLog, name: str) -> tuple[list[int], list[float]]:
    """Return the steps that have rows, and for each the mean of a number over the replicas that have a row."""
    at_steps: dict[int, list[float]] = {}
    for row in _steps(run):
        at_steps.setdefault(row["step"], []).append(row.get(name) or 0.0)
    return sorted(at_steps), [statistics.mean(at_steps[step]) for step in sorted(at_steps)]
