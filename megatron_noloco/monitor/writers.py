"""Writes the rows of one replica to `metrics.jsonl`, TensorBoard and Weights & Biases."""

import json
import math
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Protocol, TextIO

from megatron_noloco.files import outside, write_text, write_whole
from megatron_noloco.job.activity import line_of
from megatron_noloco.monitor.numbers import Row, find_number, is_count, is_number, is_text

METRICS = "metrics.jsonl"
OTHERS = "others"  # below a replica's folder: rows of other jobs
_WANDB_ID_FILE = "wandb_run_id"


class Writer(Protocol):
    """Writes rows, which arrive in the order of their steps."""

    def write(self, row: Row) -> None: ...

    def close(self) -> None: ...


class ReplicaFiles:
    """Writes one replica's `metrics.jsonl`, with all rows, and TensorBoard events, with all single numbers.

    A row in `metrics.jsonl` has the time at which it was written, `unix_seconds`; one of kind "start" says where a
    run was continued. A full disk does not end the run: stderr says once that rows are lost.
    """

    def __init__(self, folder: Path, tensorboard: bool, start_step: int, own: bool = True) -> None:
        """Open the files, and drop rows of steps after `start_step`, which the run will write again.

        The file of an earlier run is renamed.

        Args:
            own: whether the run continues itself; if it continues another one, no row that is there is its own.
        """
        self._folder, self._failed = folder, False
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / METRICS
        rows = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        last_kept = start_step if own else 0
        kept = [row for row in rows if _step_of(row) <= last_kept]
        if rows and not last_kept:
            names = (folder / f"metrics.set_aside_{number}.jsonl" for number in count(1))
            aside = next(name for name in names if not name.exists())
            path.replace(aside)
            sys.stderr.write(f"set aside: {path}, of an earlier start, is now {aside.name}\n")
        elif kept != rows:
            write_whole(path, lambda partial: partial.write_bytes(b"".join(kept)))
        self._jsonl: TextIO = path.open("a", buffering=1)
        self._board: Any = None
        if start_step:
            self._write_row({"kind": "start", "step": start_step})
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # slow to import: only where it is used

            self._board = SummaryWriter(str(folder), purge_step=last_kept + 1)

    def write(self, row: Row) -> None:
        self._write_row(row)
        if self._board is None:
            return
        with self._errors_reported():
            for name, value in _scalars(row).items():
                self._board.add_scalar(name, value, row["step"])

    def _write_row(self, row: Row) -> None:
        with self._errors_reported():
            self._jsonl.write(json.dumps(without_nan({**row, "unix_seconds": time.time()})) + "\n")

    def close(self) -> None:
        with self._errors_reported():
            self._jsonl.close()
            if self._board is not None:
                self._board.close()

    @contextmanager
    def _errors_reported(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._failed:
                sys.stderr.write(
                    f"{self._folder}: {error.strerror or error}; training continues without its log\n"
                )
            self._failed = True


class WandbRun:
    """Writes one replica's single numbers to its run in Weights & Biases; a resumed run continues it.

    An error of wandb, such as a missing login, does not end the training: stderr says so.

    Args:
        folder: the replica's; keeps wandb's files and the id of the run.
        start_step: numbers of later steps that are already there stay: wandb accepts no second value of a step.
        own: whether the run continues itself; if not, or from step 0, it is a new run of wandb's.
        options: arguments of `wandb.init`.
    """

    def __init__(self, folder: Path, start_step: int, own: bool = True, **options: Any) -> None:
        import wandb  # optional

        self._error = wandb.errors.Error
        self._folder = folder
        self._run: Any = None
        path = folder / _WANDB_ID_FILE
        continued = path.read_text() if start_step and own and path.exists() else None
        with self._errors_reported():
            self._run = wandb.init(dir=str(folder), id=continued, resume="allow", **options)
            write_text(path, self._run.id)

    def write(self, row: Row) -> None:
        if self._run is not None:
            with self._errors_reported():
                self._run.log(_scalars(row), step=row["step"])

    def close(self) -> None:
        if self._run is not None:
            with self._errors_reported():
                self._run.finish()

    @contextmanager
    def _errors_reported(self) -> Iterator[None]:
        """Stop using wandb after its first error."""
        try:
            yield
        except self._error as error:
            self._run = None
            sys.stderr.write(f"{self._folder}: wandb: {line_of(error)}; training continues without it\n")


def _scalars(row: Row) -> dict[str, float]:
    """Return the row without lists, kind, step and replica."""
    return {name: value for name, value in row.items() if "/" in name and isinstance(value, int | float)}


def _step_of(row: bytes) -> float:
    """Return the step of a line of `metrics.jsonl`; infinity for one that a crash has damaged."""
    found = read_row(row) if row.endswith(b"\n") else None
    return math.inf if found is None else found["step"]


def parsed(text: bytes) -> Any:
    """Return what the text holds, None where it is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def read_row(line: bytes | str) -> Row | None:
    """Return the row in a line of `metrics.jsonl`, which another job or a person may have written; None: no row.

    A row has a kind and a step, and a row of steps has their seconds. Each value is one that the table of numbers
    allows for its name, and each text a short line of ASCII. Names that are not in the table are left out.
    """
    try:
        found = without_nan(json.loads(line))
    except (ValueError, RecursionError):
        return None
    row = dict[str, Any]()
    for name, value in found.items() if isinstance(found, dict) else ():
        number = find_number(name)
        holds = _PLACES.get(name) if number is None else number.holds
        if holds is not None and not holds(value):
            return None
        if holds is not None:
            row[name] = value
    is_row = {"kind", "step"} <= row.keys()
    is_timed = row.get("kind") != "step" or row.get("speed/seconds_per_step") is not None
    return outside(row) if is_row and is_timed else None


def _is_step(value: Any) -> bool:
    return type(value) is int and 0 <= value <= 2**53


_PLACES = {"kind": is_text, "step": _is_step, "replica": is_count, "unix_seconds": is_number}  # of a row


def without_nan(value: Any) -> Any:
    """Replace NaN and infinities by null, since JSON has neither."""
    if isinstance(value, Mapping):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
