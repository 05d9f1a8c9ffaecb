"""What a run asks of its checkpoints, and which of its settings may change when it continues from one."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Dotted names, or the blocks above them. A change would load other weights, or repeat and skip samples.
_FIXED = (
    "model",
    "data",
    "training.seed",
    "optimizer.type",
    "bf16.enabled",
    "fp16",
    "data_types",
)
# What another layout may ask for: padding that tensor parallelism divides, and other memory for activations.
_FREE = (
    "model.make_vocab_size_divisible_by",
    "model.recompute_granularity",
    "model.recompute_method",
    "model.recompute_num_layers",
    "model.recompute_modules",
)
_NOT_REPORTED = (
    "training",
    "checkpoint",
    "evaluation",
    "tensorboard",
    "parallel.replicas",
    "noloco.deadline_seconds",
    "noloco.transport",
)


@dataclass(frozen=True)
class CheckpointSettings:
    """What a run asks of its checkpoints.

    Attributes:
        folder: holds a folder per saved step.
        run: the JSON of the run, as it is written into each manifest.
        completed: gives the JSON of a saved run the defaults of the fields that are newer than it.
        keep_last: number of complete checkpoints that are kept.
        async_save: whether training continues while a copy of the state is being written.
        load: "auto" (the newest intact checkpoint in `folder`), "none", or a step folder.
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
        """The seed of the run."""
        return int(self.run["training"]["seed"])

    def changes(self, saved: dict[str, Any]) -> list[str]:
        """Return a line for each setting that changed since a run with the JSON `saved`.

        Raises ValueError, with a line for each, when settings changed that a resumed run cannot change.
        """
        refused, allowed = [], []
        for name, before, after in _differences(self.completed(saved), self.run):
            line = f"{name}: {json.dumps(before)} in the checkpoint, {json.dumps(after)} now"
            if _within(name, _FIXED) and name not in _FREE:
                refused.append(line)
            elif not _within(name, _NOT_REPORTED):
                allowed.append(line)
        if refused:
            remedy = "a resume cannot change it: change it back, or start anew in another training.output_dir"
            raise ValueError("\n".join(f"{line}; {remedy}" for line in refused))
        return allowed


def _within(name: str, names: tuple[str, ...]) -> bool:
    return any(name == other or name.startswith(other + ".") for other in names)


def _differences(before: Any, after: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the dotted name and both values of every setting that differs."""
    if isinstance(before, dict) or isinstance(after, dict):
        before, after = _block(before), _block(after)
        for key in sorted({*before, *after}):
            inner = f"{name}.{key}" if name else key
            yield from _differences(before.get(key), after.get(key), inner)
    elif before != after:
        yield name, before, after


def _block(block: Any) -> dict[str, Any]:
    """Return the settings of a block; one of DeepSpeed's that is left out or switched off has none."""
    return block if isinstance(block, dict) and block.get("enabled") is not False else {}
