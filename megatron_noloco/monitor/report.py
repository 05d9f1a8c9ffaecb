"""Writes a report of runs: one HTML page with interactive plots, which needs no other file and no network."""

import time
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from plotly import graph_objects, offline

from megatron_noloco import __version__
from megatron_noloco.monitor import figures
from megatron_noloco.monitor.numbers import BYTES, LOSS, SPREAD, Row, numbers_in, shown
from megatron_noloco.monitor.plots import Plot, plots_of_one, plots_of_several, smoothed
from megatron_noloco.monitor.run_log import RUN_FACTS, RunLog
from megatron_noloco.monitor.watch import notes

_STYLE = """
:root{color-scheme:light dark}
body{font-family:sans-serif;max-width:64em;margin:2em auto;padding:0 1em;line-height:1.4}
table{border-collapse:collapse;display:block;overflow-x:auto}
td,th{padding:.2em 1em .2em 0;text-align:left;vertical-align:top}
tr{border-bottom:1px solid #8884}
@media(prefers-color-scheme:dark){.plotly-graph-div{filter:invert(.9) hue-rotate(180deg)}}
"""


def write_page(runs: Sequence[RunLog], path: Path) -> None:
    """Write the page of a run, or one that compares several. Raises OSError."""
    title = " and ".join(run.folder.resolve().name for run in runs)
    plots = [
        plot for plot in (plots_of_one(runs[0]) if len(runs) == 1 else plots_of_several(runs)) if plot.traces
    ]
    sections = "".join(
        f"<section><h2>{escape(plot.title)}</h2><p>{escape(plot.explanation)}</p>{_drawn(plot, number)}</section>"
        for number, plot in enumerate(plots)
    )
    lines = "".join(f"<p>{escape(line)}</p>" for run in runs for line in notes(run))
    path.write_text(
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style><script>{offline.get_plotlyjs()}</script></head>\n"
        f"<body><h1>{escape(title)}</h1>\n{_table([_facts(run) for run in runs])}\n{lines}\n{sections}"
        f"<p>megatron_noloco {__version__}</p></body></html>\n",
        encoding="utf-8",
    )


def _table(columns: Sequence[Mapping[str, str]]) -> str:
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [[name, *(column.get(name, "") for column in columns)] for name in names]
    cells = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    return "<table>" + "".join(f"<tr>{row}</tr>" for row in cells) + "</table>"


def _facts(run: RunLog) -> dict[str, str]:
    """Return what the run was and what came of it, each with its name."""
    facts, steps = run.facts, _newest(run, "step")
    found = {"folder": str(run.folder.resolve())}
    if written := max(log.written for log in run.replicas):
        found["last written"] = time.strftime("%Y-%m-%d %H:%M", time.localtime(written))
    found |= {label: facts[label] for label in RUN_FACTS if label in facts}
    if run.separate_jobs:  # whose jobs may differ
        found["parallel"] = f"{len(run.replicas)} replicas as separate jobs"
    if parameters := facts.get("parameters"):
        found["weights"] = f"{parameters:,}"
    if not steps:
        return found
    found["local steps"] = f"{_range_of_steps(steps)} of {facts.get('steps', '?')}"
    seconds = (max(log.seconds_so_far().values(), default=0.0) for log in run.replicas)
    found["training time"] = figures.duration(max(seconds))
    if checkpoints := _newest(run, "checkpoint"):
        found["last checkpoint"] = f"local step {_range_of_steps(checkpoints)}"
    first = run.replicas[0]
    if row := first.newest("evaluation"):
        own = shown(row, "validation/loss")
        found[f"validation loss, replica {int(first.replica)}"] = f"{own} nats per token"
        if (mean := row.get("validation/mean_model_loss")) is not None:
            found["validation loss, mean model"] = f"{figures.loss(mean)} nats per token"
    for number in numbers_in(BYTES):
        if size := sum(row.get(number.name) or 0 for row in steps):
            found[f"sent in {number.label}, all replicas"] = f"{number.shown(size)} MB"
    return found


def _newest(run: RunLog, kind: str) -> list[Row]:
    return [row for log in run.replicas if (row := log.newest(kind))]


def _range_of_steps(rows: Sequence[Row]) -> str:
    """Return the local steps of rows, of the replica furthest behind first where they differ."""
    steps = [row["step"] for row in rows]
    return f"{min(steps)}" + f" to {max(steps)}" * (max(steps) > min(steps))


def _switches(plot: Plot) -> Iterator[dict[str, Any]]:
    """Yield the buttons of a plot over local steps: over seconds of training instead, and smooth lines."""
    if plot.seconds:
        places = {plot.x: [trace.x for trace in plot.traces], "seconds of training": plot.seconds}
        axes = ([label, "update", {"x": x}, {"xaxis.title.text": label}] for label, x in places.items())
        yield _buttons(0.0, *axes)
    lines = [number for number, trace in enumerate(plot.traces) if trace.mode == "lines" and not trace.yaxis]
    if lines and plot.title in (LOSS, SPREAD):
        values = [plot.traces[number].y for number in lines]
        smooth = [*map(smoothed, values)]
        yield _buttons(
            0.5,
            ["as logged", "restyle", {"y": values}, lines],
            ["smooth", "restyle", {"y": smooth}, lines],
        )


def _buttons(x: float, *choices: list[Any]) -> dict[str, Any]:
    """Return buttons of plotly of which one is in force: of each its label, its method and the arguments."""
    buttons = [{"label": label, "method": method, "args": args} for label, method, *args in choices]
    place = {"x": x, "xanchor": "left", "y": 1.15}
    return {"type": "buttons", "direction": "right", "buttons": buttons, **place}


def _drawn(plot: Plot, number: int) -> str:
    figure = graph_objects.Figure(plot.traces)
    figure.update_layout(
        template="plotly_white",
        margin={"l": 60, "r": 20, "t": 60, "b": 50},
        legend={"orientation": "h", "yanchor": "top", "y": -0.2},
        xaxis_title=plot.x,
        yaxis_title=plot.y,
        height=420,
        **plot.layout,
    )
    figure.update_layout(updatemenus=[*_switches(plot)])
    options = {"responsive": True, "displaylogo": False}
    return figure.to_html(options, include_plotlyjs=False, full_html=False, div_id=f"plot-{number}")
