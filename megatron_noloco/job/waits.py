"""Ranks that stand still, as small files in the folders of their replicas, which `watch` reads."""

import json
from dataclasses import dataclass
from pathlib import Path

from megatron_noloco.files import write_text

WAITS = "waits_*.json"  # the names of the files


@dataclass(frozen=True)
class Wait:
    """What a rank says of itself.

    Attributes:
        who: the rank, its host and its place.
        doing: what it has been doing, and for whom it waits.
        seconds: for how long.
    """

    who: str
    doing: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.who} has stood still for {self.seconds:.0f} s {self.doing}"


def wait_file(replica_folder: Path, rank: int) -> Path:
    """Where a rank writes its wait; there is no such file while it goes on."""
    return replica_folder / WAITS.replace("*", f"{rank:05d}")


def write_wait(path: Path, wait: Wait) -> None:
    """Raises OSError where it cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(vars(wait)))


def waits_of(replica_folder: Path) -> dict[Wait, float]:
    """Of the replica's ranks, in their order, and when each was written, in seconds since the epoch.

    A rank that is killed leaves its last one behind.
    """
    found = {}
    for path in sorted(replica_folder.glob(WAITS)):
        try:
            found[Wait(**json.loads(path.read_text()))] = path.stat().st_mtime
        except FileNotFoundError:  # the rank has gone on
            continue
    return found
