"""States of the loop's own, such as that of a schedule: by the two functions that return it and that load it."""

import io
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_noloco.attach.shards import is_divided
from megatron_noloco.errors import UserError

_LARGEST = 2.0**63  # numbers and counts of a state are smaller
Functions = Mapping[str, tuple[Callable[[], Any], Callable[[Any], object]]]
"""By the name of a state. What is returned is made of numbers, text and tensors."""


def check_functions(registered: object) -> None:
    """Raise UserError for what `attach` cannot register."""
    if not isinstance(registered, Mapping | None):
        raise UserError(f"attach: registered must be a dict of pairs of functions, not {registered!r}")
    for name, pair in (registered or {}).items():
        if not (isinstance(pair, tuple) and len(pair) == 2 and all(map(callable, pair))):
            raise UserError(f"attach: registered {name!r} must be two functions: it is {pair!r}")


def saved(functions: Functions, for_all_ranks: bool = False) -> dict[str, bytes | str]:
    """Return the bytes of each state, or why there are none.

    Args:
        for_all_ranks: whether other ranks are to load them, which have other parts of what is divided.
    """
    found = dict[str, bytes | str]()
    for name, (save, _) in functions.items():
        state = save()
        if for_all_ranks and _holds_a_part(state):
            found[name] = (
                "it has a part of a DTensor, which other ranks cannot load; let it return full_tensor()"
            )
            continue
        try:
            found[name] = content = bytes_of(plain_numbers(state))
            read(content)
        except Exception:  # pickle does not say which
            found[name] = "it is made of more than numbers, text and tensors"
    return found


def loaded(functions: Functions, given: Mapping[str, bytes | str]) -> list[str]:
    """Load the states that were given; return lines about those that begin anew."""
    lines = []
    for name, (_, load) in functions.items():
        state = given.get(name, "it was not given to attach where the state comes from")
        try:
            if isinstance(state, bytes):
                load(read(state))
                continue
        except Exception as error:  # of functions that this package does not know
            state = f"cannot load it: {type(error).__name__}: {error}"
        lines.append(f"{name} begins anew: {state}")
    return lines


def check_alike(own: Any, given: Any) -> None:
    """Raise UserError unless the state of another job may take the place of this job's own.

    The given state has all that the own state has, of the same kinds and shapes, and finite numbers. A number that
    is not finite may only be the own number.
    """
    if isinstance(own, Mapping) and isinstance(given, Mapping) and own.keys() <= given.keys():
        for name, value in given.items():
            check_alike(own.get(name), value)
    elif isinstance(own, list | tuple) and isinstance(given, list | tuple) and len(own) == len(given):
        for pair in zip(own, given, strict=True):
            check_alike(*pair)
    elif not _is_alike(own, given):
        raise UserError("it is made of other values than the state here, or has numbers that are not finite")


def _is_alike(own: Any, given: Any) -> bool:
    """Return whether a value may take the place of another one; None stands for any."""
    if isinstance(given, int | float):
        is_finite = -_LARGEST <= given <= _LARGEST
        return (own is None or isinstance(own, int | float)) and (is_finite or given == own)
    if isinstance(given, Tensor) and isinstance(own, Tensor):
        if own.shape != given.shape or not given.is_floating_point():
            return own.shape == given.shape
        numbers = given.float()  # there is no isfinite for numbers of 8 bits
        return bool((numbers.isfinite() | (numbers == own.to(numbers))).all())
    return own is None or (isinstance(given, str) and isinstance(own, str))


def bytes_of(state: object) -> bytes:
    """Return the bytes of a state, which may hold anything that pickle takes."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def read(content: bytes) -> Any:
    """Return a state of numbers, text and tensors, on the host; nothing in it is executed."""
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def _holds_a_part(value: Any) -> bool:
    if isinstance(value, dict | list | tuple):
        return any(map(_holds_a_part, value.values() if isinstance(value, dict) else value))
    return is_divided(value) and not all(placement.is_replicate() for placement in value.placements)


def plain_numbers(value: Any) -> Any:
    """Return a state with Python's numbers in the place of numpy's, which torch.load refuses."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (list, tuple):
        return type(value)(map(plain_numbers, value))
    if isinstance(value, dict):  # also a Counter, as MultiStepLR has
        return type(value)({plain_numbers(name): plain_numbers(one) for name, one in value.items()})
    return value
