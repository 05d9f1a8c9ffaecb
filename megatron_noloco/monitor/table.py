"""A run as a table: one line for each replica."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from megatron_noloco.monitor.rows import RunLog
from megatron_noloco.monitor.writers import Row

_MOST_WAITS = 8  # are shown
_SILENT_SECONDS = 30.0  # after which a rank that waits should have said so again

# Heading and what stands below it, from the newest row of steps. All of them fit into 80 characters.
_COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("step", lambda row: str(row["step"])),
    ("loss", lambda row: _figure(row, "train/loss", ".4f")),
    ("tokens/s", lambda row: _figure(row, "speed/tokens_per_second", ".0f")),
    ("MFU", lambda row: _figure(row, "speed/mfu", ".1%")),
    ("round", lambda row: _figure(row, "round/index", "d")),
    ("with", lambda row: _partners(row)),
    ("pause ms", lambda row: _figure(row, "round/pause_seconds", ".0f", 1000)),
    ("spread", lambda row: _figure(row, "round/spread", ".1e")),
)


def as_table(run: RunLog, now: float | None = None) -> Group:
    """The state of a run. Columns without figures are left out; "age" is that of a replica's newest row.

    Args:
        now: seconds since the epoch; by default of the clock.
    """
    now = time.time() if now is None else now
    rows = []
    for log in run.replicas:
        steps, evaluations = log.of("step"), log.of("evaluation")
        figures = [figure(steps[-1]) if steps else "" for _, figure in _COLUMNS]
        validation = _figure(evaluations[-1], "validation/loss", ".4f") if evaluations else ""
        age = _duration(max(0.0, now - log.written)) if log.written else ""
        rows.append([log.replica, *figures, validation, age])
    headings = ["replica", *(heading for heading, _ in _COLUMNS), "valid.", "age"]
    table = Table(box=None, padding=(0, 1, 0, 0))
    for heading, *column in zip(headings, *rows, strict=True):
        if any(column):
            table.add_column(heading, justify="right", no_wrap=True)
    for row in zip(*(column for column in zip(*rows, strict=True) if any(column)), strict=True):
        table.add_row(*row)
    return Group(Text(_progress(run)), table, *map(Text, [*_of_all(run), *_notes(run), *_waits(run, now)]))


def _progress(run: RunLog) -> str:
    latest = [log.of("step")[-1] for log in run.replicas if log.of("step")]
    done = min((row["step"] for row in latest), default=0)
    text = f"{run.folder}: step {done}"
    if not (total := run.facts.get("steps")):
        return text
    text += f" of {total}"
    speed = [row["speed/seconds_per_step"] for row in latest if "speed/seconds_per_step" in row]
    if done < total and speed:
        text += f", {_duration((total - done) * max(speed))} of training left"
    return text


def _of_all(run: RunLog) -> list[str]:
    """What one replica knows of all."""
    evaluations = run.replicas[0].of("evaluation")
    checkpoints = [log.of("checkpoint") for log in run.replicas]
    lines = []
    if evaluations and evaluations[-1].get("validation/mean_model_loss") is not None:
        row = evaluations[-1]
        lines.append(f"validation at step {row['step']}: mean model {row['validation/mean_model_loss']:.4f}")
    if all(checkpoints):
        lines.append(f"last checkpoint: step {min(saved[-1]['step'] for saved in checkpoints)}")
    return lines


def _notes(run: RunLog) -> Iterator[str]:
    """What a person should look at, replica by replica."""
    for log in run.replicas:
        steps = log.of("step")
        rounds = [row["round/partners"] for row in steps if "round/partners" in row]
        late = Counter(row["late/partner"] for row in steps if "late/partner" in row)
        notes = [
            f"a bye in {byes} of {len(rounds)} rounds in the log" if (byes := rounds.count([])) else "",
            f"{skipped} skipped steps" if steps and (skipped := steps[-1].get("train/skipped_steps")) else "",
            f"{bad} poisoned elements" if (bad := sum(map(_poisoned, steps))) else "",
            *(f"waited for replica {partner}: {times} x" for partner, times in sorted(late.items())),
        ]
        if any(notes):
            yield f"replica {log.replica}: {', '.join(filter(None, notes))}"


def _waits(run: RunLog, now: float) -> Iterator[str]:
    """Of the ranks that stand still, the longest waits first."""
    waits = {wait: said for log in run.replicas for wait, said in log.waits.items()}
    longest = sorted(waits, key=lambda wait: -wait.seconds)
    for wait in longest[:_MOST_WAITS]:
        silent = now - waits[wait]
        gone = f" (said {_duration(silent)} ago: the process may be gone)" if silent > _SILENT_SECONDS else ""
        yield f"{wait}{gone}"
    if len(longest) > _MOST_WAITS:
        yield f"and {len(longest) - _MOST_WAITS} more ranks stand still"


def _poisoned(row: Row) -> int:
    return row.get("round/poisoned_elements") or 0


def _figure(row: Mapping[str, Any], name: str, form: str, times: float = 1) -> str:
    value = row.get(name)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "" if name not in row else "none"
    return format(value * times, form)


def _partners(row: Row) -> str:
    if "round/partners" not in row:
        return ""
    return ",".join(map(str, row["round/partners"])) or "bye"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h {minutes}min"
    return f"{minutes}min" if minutes >= 10 else f"{60 * minutes + rest}s"
