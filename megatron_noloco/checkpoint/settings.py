"""What a run wants of its checkpoints."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class CheckpointSettings:
    """Attributes:
    folder: holds a folder per saved step.
    run: the JSON of the run, as it is written into each manifest.
    completed: gives the JSON of a saved run the defaults of the fields that are newer than it.
    keep_last: complete checkpoints that are kept.
    async_save: whether training continues while a copy of the state is being written.
    load: "auto" (the newest sound checkpoint in `folder`), "none", or a step folder.
    fold: with fewer replicas than were saved, fold the others into the mean of those kept; else drop them.
    """

    folder: Path
    run: dict[str, Any]
    completed: Callable[[dict[str, Any]], dict[str, Any]]
    keep_last: int = 2
    async_save: bool = False
    load: str = "auto"
    fold: bool = False

    @property
    def seed(self) -> int:
        """Of the run."""
        return int(self.run["training"]["seed"])


@dataclass(frozen=True)
class SaveReport:
    """How a save went on this rank; `error` is None when the files are safe (or still being written)."""

    step: int
    pause_seconds: float  # training stood still
    error: str | None
