"""Draws what the jobs of a federation did and when: a row for each replica, over seconds."""

from typing import Any

from plotly import graph_objects

from megatron_noloco.monitor.run_log import RunLog

_PARTNER, _ALONE = "round with a partner", "round without one"
_MISSED = "round skipped because of the partner"
_CONTINUED, _TAKEN_OVER = "start from its checkpoint", "start from another replica's state"
_MARKERS = {  # symbol, size, colour
    _PARTNER: ("circle", 5, "#1f77b4"),
    _ALONE: ("circle-open", 7, "#1f77b4"),
    _MISSED: ("x", 9, "#d62728"),
    _CONTINUED: ("diamond-open", 13, "#2ca02c"),
    _TAKEN_OVER: ("diamond", 13, "#2ca02c"),
}


class _Points:
    """Points of one trace: seconds and replicas."""

    def __init__(self) -> None:
        self.x: list[float | None] = []
        self.y: list[int | None] = []

    def add(self, x: float | None, y: int | None) -> None:
        self.x.append(x)
        self.y.append(y)

    def end_line(self) -> None:
        self.add(None, None)


def timeline_of(run: RunLog) -> list[Any]:
    """Return the traces, over seconds since the first local step; none for a run that is no federation."""
    if not run.facts.get("config", {}).get("federation", {}).get("slots"):
        return []
    present, exchanges = _Points(), _Points()
    marks = {name: _Points() for name in _MARKERS}
    rounds: dict[int, dict[int, float]] = {}  # when each replica logged a round
    for log in run.replicas:
        replica, step, missed = int(log.replica), 0, 0
        for row in (row for row in log.rows if "unix_seconds" in row):
            at = row["unix_seconds"]
            if row["kind"] == "start":
                present.end_line()
                marks[_TAKEN_OVER if row["step"] > step else _CONTINUED].add(at, replica)
            if row["kind"] == "step":
                if step == 0:  # a run's first start has no row of its own
                    present.add(at - row["speed/seconds_per_step"] * row["step"], replica)
                lost, missed = missed, row.get("total/missed_rounds", missed)
                if "round/partners" in row:
                    name = _PARTNER if row["round/partners"] else _MISSED if missed > lost else _ALONE
                    marks[name].add(at, replica)
                    of_round = rounds.setdefault(row["round/index"], {})
                    for other in row["round/partners"]:
                        if other in of_round:
                            exchanges.add(at, replica)
                            exchanges.add(of_round[other], other)
                            exchanges.end_line()
                    of_round[replica] = at
            if row["kind"] != "evaluation":
                step = row["step"]
            present.add(at, replica)
        present.end_line()
    first = min((x for x in present.x if x is not None), default=0.0)
    for points in (present, exchanges, *marks.values()):
        points.x = [None if x is None else x - first for x in points.x]
    line = graph_objects.Scatter
    return [
        line(x=exchanges.x, y=exchanges.y, name="exchange", mode="lines", line={"color": "#bbb", "width": 1}),
        line(
            x=present.x, y=present.y, name="local steps", mode="lines", line={"color": "#1f77b4", "width": 3}
        ),
        *(
            line(
                x=marks[name].x,
                y=marks[name].y,
                name=name,
                mode="markers",
                marker={"symbol": symbol, "size": size, "color": color},
            )
            for name, (symbol, size, color) in _MARKERS.items()
            if marks[name].x
        ),
    ]
