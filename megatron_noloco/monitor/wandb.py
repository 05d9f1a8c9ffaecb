"""A replica's numbers in Weights & Biases."""

import sys
from pathlib import Path
from typing import Any

from megatron_noloco.files import write_text
from megatron_noloco.monitor.writers import Row, single_numbers

_RUN_ID = "wandb_run_id"  # a file


class WandbRun:
    """One replica's run in Weights & Biases, with all single numbers; a resumed run continues it.

    An error of wandb, such as a missing login, does not end the training; stderr says so.

    Args:
        folder: the replica's; keeps wandb's files and the id of the run.
        start_step: with 0 a new run begins. Steps after it, left by a run that went further, stay as they were:
            wandb takes no second value of a step.
        options: for `wandb.init`.
    """

    def __init__(self, folder: Path, start_step: int, **options: Any) -> None:
        import wandb  # optional

        self._error = wandb.errors.Error
        self._folder = folder
        self._run: Any = None
        path = folder / _RUN_ID
        continued = path.read_text() if start_step and path.exists() else None
        try:
            self._run = wandb.init(dir=str(folder), id=continued, resume="allow", **options)
            write_text(path, self._run.id)
        except self._error as error:
            self._give_up(error)

    def write(self, row: Row) -> None:
        if self._run is not None:
            try:
                self._run.log(single_numbers(row), step=row["step"])
            except self._error as error:
                self._give_up(error)

    def close(self) -> None:
        if self._run is not None:
            try:
                self._run.finish()
            except self._error as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._run = None
        reason = " ".join(str(error).split())
        sys.stderr.write(f"{self._folder}: wandb: {reason}; training continues without it\n")
