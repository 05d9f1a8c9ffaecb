"""Reads the logs of a run's replicas, during the run or afterwards."""

import math
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_noloco.errors import UserError
from megatron_noloco.monitor.numbers import ONE_MODEL, TABLE, Row, is_count, is_text
from megatron_noloco.monitor.writers import METRICS, OTHERS, parsed, read_row

RUN_FACTS = ("parallel", "batch in total", "method", "optimizer", "schedule")  # facts in words
_FACTS: dict[str, Callable[[Any], bool]] = {  # of `run.json` that readers rely on, if they are there
    **dict.fromkeys(("steps", "replicas", "parameters", "synchronous_bytes_per_step"), is_count),
    **dict.fromkeys(RUN_FACTS, is_text),
    "config": lambda value: isinstance(value, dict) and isinstance(value.get("federation", {}), dict),
}


@dataclass
class Counts:
    """What the rows of steps add up to, those included that a restarted job has written again.

    Attributes:
        alone: of the rounds, those without a partner.
        missed: of these, those that were skipped though the plan had a partner.
        sums: of the numbers with a note, by name.
        latest: the newest value of each number.
    """

    rounds: int = 0
    alone: int = 0
    missed: int = 0
    sums: Counter[str] = field(default_factory=Counter)
    latest: dict[str, Any] = field(default_factory=dict)

    def add(self, row: Row) -> None:
        self.rounds += "round/partners" in row
        self.alone += row.get("round/partners") == []
        self.missed += "round/missed" in row
        noted = {number.name: row.get(number.name) for number in TABLE.values() if number.note}
        self.sums.update({name: value for name, value in noted.items() if isinstance(value, int | float)})
        self.latest.update(row)


class ReplicaLog:
    """Reads the folder of one replica: its newest rows and counts; all rows, where they are wanted.

    Args:
        keeps_rows: whether all rows are kept, beside the newest of each kind.

    Attributes:
        replica: "00" for the folder `replica_00`.
        is_of_other_job: whether a job has written here what another job of the federation has told it.
        rows: the complete rows of `metrics.jsonl`, without damaged lines.
        counts: of all rows that were read.
        stride: steps from the newest row of steps but one to the newest.
        written: when that file was last written, in seconds since the epoch; 0 where there is none yet.
    """

    def __init__(self, folder: Path, keeps_rows: bool = True) -> None:
        self.folder = folder
        self.keeps_rows = keeps_rows
        self.replica = folder.name.removeprefix("replica_")
        self.is_of_other_job = folder.parent.name == OTHERS
        self.written = 0.0
        self._file = 0
        self._begin(0)

    def _begin(self, file: int) -> None:
        """Begin to read a file, by its inode."""
        self._file, self._read = file, 0
        self.rows, self.counts = list[Row](), Counts()
        self._newest = dict[str, Row]()
        self._last_step = self.stride = 0

    def update(self) -> None:
        """Read the rows that are new since the last call, or all where a resumed run has replaced the file."""
        if not (path := self.folder / METRICS).exists():
            return
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._file or status.st_size < self._read:
                self._begin(status.st_ino)
            self.written = status.st_mtime
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._read += len(line)
                if (row := read_row(line)) is not None:
                    self._add(row)

    def _add(self, row: Row) -> None:
        step, late = row["step"], row["kind"] == "checkpoint"  # of a save that took some steps
        if step < self._last_step and not late:  # of a job that was started again
            self.rows = [earlier for earlier in self.rows if earlier["step"] < step]
            self._newest = {kind: old for kind, old in self._newest.items() if old["step"] < step}
        self._last_step = step
        if row["kind"] == "step":
            self.stride = step - self.newest("step").get("step", 0)
            self.counts.add(row)
        self._newest[row["kind"]] = row
        if self.keeps_rows:
            self.rows.append(row)

    def rows_of(self, kind: str) -> list[Row]:
        """Return the rows of a kind: "step", "evaluation" or "checkpoint"."""
        return [row for row in self.rows if row["kind"] == kind]

    def newest(self, kind: str) -> Row:
        """Return the newest row of a kind; an empty one where there is none."""
        return self._newest.get(kind, {})

    def seconds_so_far(self) -> dict[int, float]:
        """Return the seconds of training until each step that has a row, without evaluations and saves.

        Steps that this replica did not compute take none: those before it started from another's state, and those
        that it left out to keep up.
        """
        found, before, left_out, seconds = {}, 0, 0, 0.0
        for row in self.rows:
            if row["kind"] == "start":
                before = row["step"]
            elif row["kind"] == "step":
                total = row.get("total/skipped_ahead", left_out)
                computed = row["step"] - before - max(0, total - left_out)
                before, left_out = row["step"], total
                seconds += row["speed/seconds_per_step"] * computed
                found[before] = seconds
        return found


def _are_facts(found: Any) -> bool:
    """Return whether a run writes this to `run.json`, as far as readers rely on it; facts may be missing."""
    if not isinstance(found, dict):
        return False
    return all(holds(found[name]) for name, holds in _FACTS.items() if name in found)


class RunLog:
    """Reads the folder of a run, its `training.output_dir`.

    Attributes:
        facts: the content of `run.json`; {} where there is none.
        replicas: the logs of all replicas, in order; without those that a resume with fewer replicas has dropped.
    """

    def __init__(self, folder: Path, keeps_rows: bool = True) -> None:
        """Read the folder; raises UserError where no replica has written anything."""
        self.folder = folder
        self.keeps_rows = keeps_rows
        self.facts: dict[str, Any] = {}
        self.replicas: list[ReplicaLog] = []
        if not folder.is_dir():
            raise UserError(f"{folder}: there is no such folder; give the training.output_dir of a run")
        self.update()
        if not self.replicas:
            raise UserError(
                f"{folder}: no replica has written metrics there (replica_00/metrics.jsonl); give the "
                "training.output_dir of a run, or wait for its first training.log_interval local steps"
            )

    def update(self) -> None:
        """Read what is new since the last call, new replicas included."""
        path = self.folder / "run.json"
        if path.exists():
            facts = parsed(path.read_bytes())
            if not _are_facts(facts):
                raise UserError(f"{path}: not what a run writes there; remove the file to go without")
            self.facts = facts
        known = {log.folder: log for log in self.replicas}
        count = self.facts.get("replicas", math.inf)
        folders = {name: folder for name, folder in self._folders().items() if int(name) < count}
        logs = [known.get(folder) or ReplicaLog(folder, self.keeps_rows) for folder in folders.values()]
        self.replicas = sorted(logs, key=lambda log: (len(log.replica), log.replica))
        for log in self.replicas:
            log.update()

    def steps(self) -> dict[str, int]:
        """Return the local steps of each replica; rows of others name the end, where its own did not come."""
        rows = {log.replica: log.newest("step") for log in self.replicas}
        found = {replica: row.get("step", 0) for replica, row in rows.items()}
        for row in rows.values():
            for replica in found.keys() & {f"{slot:02d}" for slot in row.get(ONE_MODEL, [])}:
                found[replica] = max(found[replica], row["step"])
        return found

    @property
    def separate_jobs(self) -> bool:
        """Whether each replica is a job of its own."""
        federation = self.facts.get("config", {}).get("federation", {})
        return federation.get("rendezvous") is not None

    def _folders(self) -> dict[str, Path]:
        """Return the folder of each replica by its number; of another job the one in which it was written last."""
        found = dict[str, Path]()
        for pattern in (f"replica_*/{OTHERS}/replica_*", "replica_*"):
            paths = sorted(self.folder.glob(f"{pattern}/{METRICS}"), key=lambda path: path.stat().st_mtime)
            names = {path.parent.name.removeprefix("replica_"): path.parent for path in paths}
            found |= {name: folder for name, folder in names.items() if name.isdecimal()}
        return found
