"""Draws what the jobs of a federation did and when: a row for each replica, over seconds."""

from typing import Any

from plotly import graph_objects

from megatron_noloco.monitor.run_log import RunLog

_PARTNER, _ALONE = "round with a partner", "round without a partner"
_MISSED = "round skipped because of the partner"
_CONTINUED, _TAKEN_OVER = "start from its checkpoint", "goes on with another replica's state"
_MARKERS = {  # symbol, size, colour
    _PARTNER: ("circle", 5, "#1f77b4"),
    _ALONE: ("circle-open", 7, "#1f77b4"),
    _MISSED: ("x", 9, "#d62728"),
    _CONTINUED: ("diamond-open", 13, "#2ca02c"),
    _TAKEN_OVER: ("diamond", 13, "#2ca02c"),
}


_Points = list[tuple[float | None, int | None]]  # seconds and replicas
_GAP = (None, None)  # where a line breaks off


def timeline_of(run: RunLog) -> list[Any]:
    """Return the traces, over seconds since the first local step; none for a run that is no federation."""
    if not run.separate_jobs:
        return []
    present, exchanges = _Points(), _Points()
    marks = {name: _Points() for name in _MARKERS}
    rounds: dict[int | None, dict[int, float]] = {}  # when each replica logged a round
    for log in run.replicas:
        replica, missed, began = int(log.replica), 0, False
        for row in (row for row in log.rows if row.get("unix_seconds") is not None):
            at = row["unix_seconds"]
            if row["kind"] == "start":
                present.append(_GAP)
                marks[_CONTINUED].append((at, replica))
            if row["kind"] == "step":
                if "handover/giver" in row:
                    marks[_TAKEN_OVER].append((at, replica))
                elif not began:  # a run's first start has no row of its own
                    present.append((at - row["speed/seconds_per_step"] * row["step"], replica))
                lost, missed = missed, row.get("total/missed_rounds", missed)
                if "round/partners" in row:
                    name = _PARTNER if row["round/partners"] else _MISSED if missed > lost else _ALONE
                    marks[name].append((at, replica))
                    of_round = rounds.setdefault(row.get("round/index"), {})
                    for other in row["round/partners"]:
                        if other in of_round:
                            exchanges += [(at, replica), (of_round[other], other), _GAP]
                    of_round[replica] = at
            began = True
            present.append((at, replica))
        present.append(_GAP)
    first = min((x for x, _ in present if x is not None), default=0.0)

    def trace(points: _Points, name: str, mode: str, **style: Any) -> Any:
        x = [None if x is None else x - first for x, _ in points]
        return graph_objects.Scatter(x=x, y=[y for _, y in points], name=name, mode=mode, **style)

    return [
        trace(exchanges, "exchange", "lines", line={"color": "#bbb", "width": 1}),
        trace(present, "local steps", "lines", line={"color": "#1f77b4", "width": 3}),
        *(
            trace(marks[name], name, "markers", marker={"symbol": symbol, "size": size, "color": color})
            for name, (symbol, size, color) in _MARKERS.items()
            if marks[name]
        ),
    ]
