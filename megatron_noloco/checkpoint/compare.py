"""What may differ between the run that wrote a checkpoint and the run that continues it."""

import json
from collections.abc import Iterator
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
_IRRELEVANT = (
    "training",
    "checkpoint",
    "evaluation",
    "tensorboard",
    "parallel.replicas",
    "noloco.deadline_seconds",
    "noloco.transport",
)


def changes(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """A line for each setting of a run's JSON that changed; raises ValueError for those that must not."""
    refused, allowed = [], []
    for name, before, after in _differences(saved, now):
        line = f"{name}: {json.dumps(before)} in the checkpoint, {json.dumps(after)} now"
        if _within(name, _FIXED) and name not in _FREE:
            refused.append(line)
        elif not _within(name, _IRRELEVANT):
            allowed.append(line)
    if refused:
        raise ValueError(
            "\n".join(
                f"{line}; a resume cannot change it: change it back, or start anew in another training.output_dir"
                for line in refused
            )
        )
    return allowed


def _within(name: str, names: tuple[str, ...]) -> bool:
    return any(name == fixed or name.startswith(fixed + ".") for fixed in names)


def _differences(before: Any, after: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(before, dict) or isinstance(after, dict):
        before, after = _settings(before), _settings(after)
        for key in sorted({*before, *after}):
            inner = f"{name}.{key}" if name else key
            yield from _differences(before.get(key), after.get(key), inner)
    elif before != after:
        yield name, before, after


def _settings(block: Any) -> dict[str, Any]:
    """A block of DeepSpeed's may be left out, or switched off: then it has none."""
    return block if isinstance(block, dict) and block.get("enabled") is not False else {}
