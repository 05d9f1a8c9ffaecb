"""What a run leaves to read: every replica's `metrics.jsonl`, and TensorBoard's events beside it."""

import json
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Protocol, TextIO

from megatron_noloco.files import write_text
from megatron_noloco.monitor.charts import layout

Row = Mapping[str, Any]  # "kind", "step", "replica", and numbers (or lists of numbers) by name


class Writer(Protocol):
    """Takes rows, in the order of their steps."""

    def write(self, row: Row) -> None: ...

    def close(self) -> None: ...


class ReplicaFiles:
    """One replica's `metrics.jsonl`, with all rows, and TensorBoard events beside it, with all single numbers.

    A disk without room for a row does not end the run; stderr says so once.
    """

    def __init__(self, folder: Path, tensorboard: bool, start_step: int) -> None:
        """Rows of steps after `start_step`, left by a run that went further, will be written again: drop them.

        Where none is left, they are another run's: its file is kept under another name.
        """
        self._folder, self._failed = folder, False
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        rows = path.read_text().splitlines(keepends=True) if path.exists() else []
        kept = [row for row in rows if _step_of(row) <= start_step]
        if rows and not kept:
            names = (folder / f"metrics.set_aside_{number}.jsonl" for number in count(1))
            aside = next(name for name in names if not name.exists())
            path.replace(aside)
            sys.stderr.write(f"set aside: {path}, of an earlier start, is now {aside.name}\n")
        elif kept != rows:
            write_text(path, "".join(kept))
        self._jsonl: TextIO = path.open("a", buffering=1)
        self._board: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # slow to import: only where it is used

            self._board = SummaryWriter(str(folder), purge_step=start_step + 1)
            self._board.add_custom_scalars(layout())

    def write(self, row: Row) -> None:
        with self._going_on():
            self._jsonl.write(json.dumps(_without_nan(row)) + "\n")
        if self._board is None:
            return
        with self._going_on():
            for name, value in single_numbers(row).items():
                self._board.add_scalar(name, value, row["step"])

    def close(self) -> None:
        with self._going_on():
            self._jsonl.close()
            if self._board is not None:
                self._board.close()

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._failed:
                sys.stderr.write(
                    f"{self._folder}: {error.strerror or error}; training continues without its log\n"
                )
            self._failed = True


def single_numbers(row: Row) -> dict[str, float]:
    """Those that a curve can show."""
    return {name: value for name, value in row.items() if "/" in name and isinstance(value, int | float)}


def _step_of(row: str) -> float:
    """Later than any for a row that a crash has damaged."""
    try:
        return int(json.loads(row)["step"]) if row.endswith("\n") else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf


def _without_nan(value: Any) -> Any:
    """JSON has no NaN: it becomes null."""
    if isinstance(value, Mapping):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
