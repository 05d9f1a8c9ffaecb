"""The fields of a config that a newcomer takes from the job that invites: all others are its own.

Each field says so (`fields.Scope`). A field that is taken holds no path, address, command or other free text.
"""

from collections.abc import Iterator
from typing import Any

from megatron_noloco.config.run_config import RunConfig
from megatron_noloco.data.sources import STANDARD_LIBRARY
from megatron_noloco.fields import Path, Scope, count, dotted, scope_of

_HERE = ("data", "text"), STANDARD_LIBRARY  # every machine has it


def is_taken(path: Path) -> bool:
    """Return whether a newcomer takes a field."""
    return scope_of(RunConfig, path) in (Scope.OFFERED, Scope.SHARED)


def divided(config: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the part of a config that all machines share, and the names of the fields that are left out."""
    agreed, left_out = dict[str, Any](), list[str]()
    for path, value in _leaves(config):
        if is_taken(path) or (path, value) == _HERE:
            block = agreed
            for name in path[:-1]:
                block = block.setdefault(name, {})
            block[path[-1]] = value
        else:
            left_out.append(dotted(path))
    return agreed, left_out


def in_words(config: dict[str, Any]) -> str:
    """Return what a config has, in words: "train_batch_size, optimizer (3 fields), model (9 fields)"."""
    numbers = {name: len([*_leaves(value)]) for name, value in config.items() if isinstance(value, dict)}
    return ", ".join(
        f"{name} ({count(numbers[name], 'field')})" if name in numbers else name for name in config
    )


def _leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(inner, (*path, name))
    else:
        yield path, value
