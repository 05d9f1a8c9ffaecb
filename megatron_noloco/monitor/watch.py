"""Shows the state of a run on the terminal: a table with a row per replica, and notes below it."""

import time
from collections.abc import Iterator, Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from megatron_noloco.job.run_folder import is_under_way
from megatron_noloco.monitor import figures
from megatron_noloco.monitor.numbers import TABLE, shown
from megatron_noloco.monitor.run_log import ReplicaLog, RunLog

_QUIET_SECONDS, _QUIET_ROWS = 60.0, 3  # their sum without a new row: a replica may have ended
_PAGE_SECONDS = 6
_WIDTH = 80  # of the terminal, at least
_SHARE_OF_NOTES = 6  # a note for so many lines of the terminal, at most


def run_table(run: RunLog, now: float | None = None, lines: int | None = None) -> Group:
    """Return the state of a run, 80 characters wide. The column "age" is the time since a replica's newest row.

    Args:
        now: seconds since the epoch; None: the time of the clock.
        lines: of the terminal; where there are too few, replicas are shown page by page. None: as many as needed.
    """
    now = time.time() if now is None else now
    below = [*_totals(run), *_fitting(list(notes(run)), lines)]
    progress = _progress(run, now)
    replicas = run.replicas
    room = len(replicas) if lines is None else max(1, lines - _height([progress, *below]) - 3)
    if len(replicas) > room:
        start = int(now / _PAGE_SECONDS) % -(-len(replicas) // room) * room
        replicas = replicas[start : start + room]
        below.insert(0, f"replicas {replicas[0].replica} to {replicas[-1].replica} of {len(run.replicas)}")
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    headings = ["replica", "step", *(number.column for number in TABLE.values() if number.column), "age"]
    steps = run.steps()
    columns = zip(headings, *(_cells(log, steps[log.replica], now) for log in replicas), strict=True)
    shown = [column for column in columns if any(column[1:])]
    for heading, *_ in shown:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in zip(*(cells for _, *cells in shown), strict=True):
        table.add_row(*map(Text, row))  # of a text rich would read the markup
    return Group(Text(progress), table, *map(Text, below))


def _height(texts: Sequence[str]) -> int:
    return sum(-(-len(text) // _WIDTH) for text in texts)


def _fitting(notes: Sequence[str], lines: int | None) -> Sequence[str]:
    """Return as many notes as there is room for."""
    room = len(notes) if lines is None else lines // _SHARE_OF_NOTES
    more = len(notes) - room
    return (
        notes if more <= 0 else [*notes[:room], f"{more} more replicas have notes: `watch --once` shows all"]
    )


def _cells(log: ReplicaLog, steps: int, now: float) -> list[str]:
    round_ = {name: value for name, value in log.counts.latest.items() if name.startswith("round/")}
    newest = {**round_, **log.newest("evaluation"), **log.newest("step")}
    step = str(steps or "")
    age = figures.duration(max(0.0, now - log.written)) if log.written else ""
    return [
        log.replica,
        step,
        *(shown(newest, number.name) for number in TABLE.values() if number.column),
        age,
    ]


def _there(run: RunLog) -> list[ReplicaLog]:
    """Return the replicas that count: in a federation not those that have left, and wrote nothing lately."""
    if not run.separate_jobs:
        return run.replicas
    lately = _written(run) - _quiet_seconds(run)
    return [log for log in run.replicas if log.written >= lately]


def _written(run: RunLog) -> float:
    return max(log.written for log in run.replicas)


def _quiet_seconds(run: RunLog) -> float:
    """Return the seconds without a row after which a replica may have ended."""
    of_row = (log.stride * log.newest("step").get("speed/seconds_per_step", 0.0) for log in run.replicas)
    return _QUIET_SECONDS + _QUIET_ROWS * max(of_row)


def _progress(run: RunLog, now: float) -> str:
    there = [log for log in _there(run) if log.newest("step")]
    of_all, total = run.steps(), run.facts.get("steps", 0)
    steps = [of_all[log.replica] for log in there] or [0]
    done = min(steps)
    text = f"{run.folder}: step {done}" + (f" of {total}" if total else "")
    since = max(0.0, now - _written(run))
    heard = max((log.written for log in run.replicas if log.is_of_other_job), default=0.0)
    if not is_under_way(run.folder) and (0 < total <= max(steps) or now - heard > _quiet_seconds(run)):
        # By the furthest, since last rows of other jobs may not have come.
        state = "ended" if 0 < total <= max(steps) else "no job is under way"
        return f"{text}; {state}, last written {figures.duration(since)} ago"
    if there and since > _quiet_seconds(run):  # on another host
        return f"{text}; nothing written for {figures.duration(since)}, so it may have ended"
    if done < total and there:
        slowest = max(log.newest("step")["speed/seconds_per_step"] for log in there)
        text += f", {figures.duration((total - done) * slowest)} of training left"
    return text


def _totals(run: RunLog) -> Iterator[str]:
    """Yield the lines about all replicas together."""
    evaluation = run.replicas[0].newest("evaluation")
    if (mean := evaluation.get("validation/mean_model_loss")) is not None:
        yield f"validation at step {evaluation['step']}: mean model {figures.loss(mean)}"
    waits = ((log.replica, shown(log.counts.latest, "round/deadline_seconds")) for log in _there(run))
    deadlines = [f"replica {replica} {seconds} s" for replica, seconds in waits if seconds]
    if deadlines:
        yield f"waits for a partner at most: {', '.join(deadlines)}"
    checkpoints = [log.newest("checkpoint") for log in _there(run)]
    if all(checkpoints):
        yield f"last checkpoint: step {min(row['step'] for row in checkpoints)}"


def notes(run: RunLog) -> Iterator[str]:
    """Yield a line for each replica that had rounds without a partner, or numbers with a note."""
    for log in run.replicas:
        counts, notes = log.counts, list[str]()
        if counts.alone:
            last = counts.latest.get("round/missed")
            why = f" ({counts.missed} missed, the last: {last})" if counts.missed else ""
            notes.append(f"no partner in {counts.alone} of {counts.rounds} rounds in the log{why}")
        sums = counts.sums
        notes += [f"{sums[number.name]} {number.note}" for number in TABLE.values() if sums[number.name]]
        if notes:
            yield f"replica {log.replica}: {', '.join(notes)}"
