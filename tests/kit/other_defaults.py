"""A plugin of pytest: the tests run in a program that has set another default dtype and device.

    pytest -p tests.kit.other_defaults tests/theorems/test_outer.py

What the tests make themselves is as before: factories have the usual defaults, unless the package calls them.
"""

import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

_FLOATS = ("empty", "linspace", "ones", "rand", "randn", "zeros")
_OF_NUMBERS = ("arange", "full", "tensor")  # whose dtype depends on the numbers


def _package_calls() -> bool:
    """Whether the nearest caller that is not a library is the package."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        root = frame.f_globals.get("__name__", "").partition(".")[0]
        if root in ("tests", "tools", "megatron_noloco"):
            return root == "megatron_noloco"
        frame = frame.f_back
    return False


def _with_usual_defaults(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        if _package_calls():
            return factory(*args, **kwargs)
        if kwargs.get("device") is None:
            kwargs["device"] = "cpu"
        if kwargs.get("dtype") is not None or kwargs.get("out") is not None:
            return factory(*args, **kwargs)
        if factory.__name__ in _FLOATS:
            return factory(*args, **kwargs | {"dtype": torch.float32})
        made = factory(*args, **kwargs)
        return made.float() if made.dtype == torch.float64 else made

    return make


def pytest_configure() -> None:
    for name in (*_FLOATS, *_OF_NUMBERS):
        setattr(torch, name, _with_usual_defaults(getattr(torch, name)))
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
