"""The rows of a run's `metrics.jsonl` files, as they grow, and its `run.json`."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_noloco.metrics.writers import Row


class ReplicaLog:
    """One replica's `metrics.jsonl`.

    Attributes:
        replica: its name, "00" of `replica_00`.
        rows: all complete ones so far; damaged lines are left out.
        written: when the file was written to last, seconds since the epoch; 0 before.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.replica = path.parent.name.removeprefix("replica_")
        self.rows: list[Row] = []
        self.written = 0.0
        self._file = self._read = 0

    def update(self) -> None:
        """Read what is new. A resumed run puts another file in place: that one is read from its beginning."""
        with self.path.open("rb") as file:
            status = self.path.stat()
            if status.st_ino != self._file or status.st_size < self._read:
                self._file, self._read, self.rows = status.st_ino, 0, []
            self.written = status.st_mtime
            file.seek(self._read)
            complete, newline, _ = file.read().rpartition(b"\n")
        self._read += len(complete) + len(newline)
        self.rows += _parsed(complete.splitlines())

    def of(self, kind: str) -> list[Row]:
        return [row for row in self.rows if row["kind"] == kind]


def _parsed(lines: Iterable[bytes]) -> Iterable[Row]:
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and {"kind", "step"} <= row.keys():
            yield row


class RunLog:
    """A run's folder, its `training.output_dir`.

    Attributes:
        facts: of `run.json`; empty where there is none.
        replicas: their logs, in order.
    """

    def __init__(self, folder: Path) -> None:
        """Raises ValueError where no replica has written anything."""
        self.folder = folder
        self.facts: dict[str, Any] = {}
        self.replicas: list[ReplicaLog] = []
        self.update()
        if not self.replicas:
            raise ValueError(
                f"{folder}: no replica has written metrics there (replica_00/metrics.jsonl); give the "
                "training.output_dir of a run"
            )

    def update(self) -> None:
        """Read what is new, of new replicas as well."""
        path = self.folder / "run.json"
        if path.exists():
            self.facts = json.loads(path.read_text())
        known = {log.path for log in self.replicas}
        found = set(self.folder.glob("replica_*/metrics.jsonl")) - known
        self.replicas = sorted(
            [*self.replicas, *map(ReplicaLog, found)], key=lambda log: (len(log.replica), log.replica)
        )
        for log in self.replicas:
            log.update()
