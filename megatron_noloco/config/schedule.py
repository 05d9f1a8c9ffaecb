"""The params of a schedule of ours, in the block `scheduler`, which otherwise has DeepSpeed's form."""

from collections.abc import Iterator
from dataclasses import MISSING, fields
from typing import Any

from megatron_noloco.config.wording import Problem, is_size, unknown_key, wrong_value
from megatron_noloco.engine.schedules import DECAYS, SCHEDULES

_AT_LEAST = {"warmup_num_steps": 0, "decay_num_steps": 1, "total_num_steps": 1}


def problems_in(name: str, params: dict[str, Any]) -> Iterator[Problem]:
    """What is wrong with the params of schedule `name`; an "auto" that is left, or reported, passes."""
    known = {field.name: field for field in fields(SCHEDULES[name])}
    problems = [
        Problem(("scheduler",), f"scheduler.params.{key} is missing ({_expected(key)})")
        for key, field in known.items()
        if field.default is MISSING and key not in params
    ]
    for key, value in params.items():
        path = ("scheduler", "params", key)
        if key not in known:
            problems.append(unknown_key(path, known))
        elif value != "auto" and not _is_sound(key, value):
            problems.append(wrong_value(path, _expected(key), value))
    yield from problems
    if problems or "auto" in params.values():
        return
    try:
        SCHEDULES[name](**params)
    except ValueError as error:
        yield Problem(("scheduler",), f"scheduler.params: {error}")


def _is_sound(key: str, value: Any) -> bool:
    if key == "decay_type":
        return isinstance(value, str) and value in DECAYS
    if key == "min_ratio":
        return is_size(value) and value <= 1
    return type(value) is int and value >= _AT_LEAST[key]


def _expected(key: str) -> str:
    if key == "decay_type":
        return " or ".join(f'"{name}"' for name in DECAYS)
    if key == "min_ratio":
        return "a number from 0 to 1"
    return f"an integer >= {_AT_LEAST[key]}" + ' or "auto"' * (key == "total_num_steps")
