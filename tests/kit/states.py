"""Numbers that no state of another job should hold."""

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

WRONG: tuple[Any, ...] = (
    math.nan,
    math.inf,
    -1,
    -1.5,
    10**400,
    10**5000,
    2**62,
    None,
    True,
    "x",
    [],
    {},
    {"step": "x"},
)


def leaves(facts: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield where each value of nested objects is."""
    if isinstance(facts, dict) and facts:
        for name, value in facts.items():
            yield from leaves(value, (*path, name))
    else:
        yield path


def changed(facts: Any, path: tuple[str, ...], change: Callable[[dict[str, Any], str], object]) -> Any:
    facts = copy.deepcopy(facts)
    at = facts
    for name in path[:-1]:
        at = at[name]
    change(at, path[-1])
    return facts
