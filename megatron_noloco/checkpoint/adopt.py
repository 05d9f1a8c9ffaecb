"""A replica that is new, or was away for long, takes over a checkpoint of another job of its federation."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from megatron_noloco.checkpoint import catalog

_ATTEMPTS = 3  # while its owner removes what it has just listed


def adopt(checkpoints: Path, others: Sequence[Path], margin: int) -> None:
    """Copy the newest complete step of `others` to `checkpoints`, where that has none as new.

    A copy, because its owner will remove the step. It is verified like any other when it is continued from.

    Args:
        others: folders like `checkpoints`.
        margin: local steps that theirs must be ahead.
    """
    newest = max((catalog.step_of(path) or 0 for path in catalog.steps(checkpoints)), default=-1)
    for _ in range(_ATTEMPTS):
        theirs = [path for folder in others for path in catalog.steps(folder)]
        ahead = [path for path in theirs if (catalog.step_of(path) or 0) > newest + margin]
        for folder in sorted(ahead, key=lambda path: path.name, reverse=True):
            if catalog.is_complete(folder) and _copied(folder, checkpoints / folder.name):
                return


def _copied(folder: Path, destination: Path) -> bool:
    partial = destination.with_name(f".{destination.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(folder, partial)
        partial.rename(destination)
    except OSError:  # removed meanwhile; or the disk is full, and the run begins with what it has
        shutil.rmtree(partial, ignore_errors=True)
        return False
    return True
