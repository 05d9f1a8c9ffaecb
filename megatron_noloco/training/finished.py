"""`finished.json`: a job of a federation writes it when its last checkpoint is the model of several replicas.

A job of the same run folder that comes back when all others are gone learns from the file that the run has ended.
Without it the job would train alone, to another model.
"""

import json
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from megatron_noloco.checkpoint.resume import Start
from megatron_noloco.checkpoint.run_settings import CheckpointSettings
from megatron_noloco.files import json_object, outside, write_text
from megatron_noloco.settings import MOST_SLOTS

_NAME = "finished.json"
_LONGEST = 2**16  # bytes
_MOST_IN_LINE = 8  # replicas


class Finished(NamedTuple):
    """What a job says at its end.

    Attributes:
        step: local steps of the training.
        replicas: slots with one model.
    """

    step: int
    replicas: list[int]


def write(folder: Path, step: int, replicas: Collection[int]) -> None:
    """Write the file of a replica. Nothing is lost where the disk refuses it."""
    with suppress(OSError):
        write_text(folder / _NAME, json.dumps({"step": step, "replicas": sorted(replicas)}) + "\n")


def remove(folder: Path) -> None:
    """Remove the file of a replica that trains again."""
    (folder / _NAME).unlink(missing_ok=True)


def read(folder: Path) -> Finished | None:
    """Return what the job of a replica has written; None where the file is missing or malformed."""
    path = folder / _NAME
    try:
        content = b""
        if path.is_file():  # another user may have put a pipe there
            with path.open("rb") as file:
                content = file.read(_LONGEST)
        found = json.loads(content, object_pairs_hook=json_object)
        step, replicas = found["step"], found["replicas"]
        slots = {slot for slot in replicas if type(slot) is int and 0 <= slot < MOST_SLOTS}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    is_sound = type(step) is int and type(replicas) is list and 1 < len(slots) == len(replicas)
    return Finished(step, sorted(slots)) if is_sound else None


def why_ended(settings: CheckpointSettings, start: Start, steps: int) -> str:
    """Return why a job of a federation that meets nobody is not to train; "" where it is.

    Args:
        steps: local steps of the whole training.
    """
    folder = settings.folder.parent
    if start.step >= steps or settings.load != "auto":  # a step folder or "none" asks to train
        return ""
    siblings = sorted(folder.parent.glob("replica_*"))
    ended = {path: found for path in siblings if (found := read(path)) is not None and found.step == steps}
    if not ended or folder in ended:  # its own last checkpoint was removed or damaged
        return ""
    path = max(ended, key=lambda path: len(ended[path].replicas))
    named = list(map(str, ended[path].replicas))
    more = f" and {len(named) - _MOST_IN_LINE} more" * (len(named) > _MOST_IN_LINE)
    remedy = "give another training.output_dir"
    if start.saved is not None:
        remedy = f"set checkpoint.load to {start.saved.folder}"
    return (
        f"the run has ended: replicas {', '.join(named[:_MOST_IN_LINE])}{more} finished with one model "
        f"({path.with_name(outside(path.name))}); this replica would train alone from step {start.step}, to "
        f"another model; to do so all the same, {remedy}"
    )
