"""Where a training step reads numbers of tensors: on a GPU each such read waits for all that is queued there."""

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
# Operators that must know numbers of their input to go on, and methods that copy all of it to the host.
_OPERATORS = {
    _aten._local_scalar_dense.default,
    _aten.equal.default,
    _aten.masked_select.default,
    _aten.nonzero.default,
    _aten.repeat_interleave.Tensor,
    _aten._unique2.default,
}
_METHODS = {Tensor.cpu, Tensor.numpy, Tensor.tolist}
_WHOSE = ("megatron_noloco.", "deepspeed.", "megatron.core.", "torch.optim.", "torch.distributed.")


class HostReads(TorchFunctionMode):
    """Counts, inside, the reads of this thread by the module that reads, in intervals that `cut` separates.

    On a CPU nothing tells a host's tensor from a device's: reads of both count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.intervals: list[Counter[str]] = [Counter()]
        self._operators = _Operators(self._count)

    def cut(self) -> None:
        self.intervals.append(Counter())

    def __enter__(self) -> "HostReads":
        self._operators.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._operators.__exit__(*error)

    def __torch_function__(
        self, function: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function in _METHODS:
            self._count()
        return function(*args, **(kwargs or {}))

    def _count(self) -> None:
        self.intervals[-1][_reader(sys._getframe())] += 1


class _Operators(TorchDispatchMode):
    def __init__(self, count: Callable[[], None]) -> None:
        super().__init__()
        self._count = count

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function in _OPERATORS or _looks_where_true(function, args):
            self._count()
        return function(*args, **(kwargs or {}))


def _looks_where_true(function: Any, args: tuple[Any, ...]) -> bool:
    """Whether it is an index by a mask. To write one number by a mask, nobody has to know where it is true."""
    if function not in (_aten.index.Tensor, _aten.index_put_.default):
        return False
    fills = function is _aten.index_put_.default and args[2].numel() == 1
    return not fills and any(index is not None and index.dtype == torch.bool for index in args[1])


def _reader(frame: FrameType | None) -> str:
    """The innermost module that is an engine's, ours, or of these parts of torch."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if name.startswith(_WHOSE):
            return name
        frame = frame.f_back
    return "elsewhere"
