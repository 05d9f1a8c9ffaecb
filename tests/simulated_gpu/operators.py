"""Operators on device memory: queued on the current stream, with CUDA's rules for devices and for waiting."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.simulated_gpu.memory import device_memory, is_pinned, is_registered, on_device
from tests.simulated_gpu.streams import Device, Kernel, Order, outside_modes

aten = torch.ops.aten

# CUDA's kernels copy a number to the host: the size of their result, or an argument.
_READ_NUMBERS = {
    aten._local_scalar_dense.default,
    aten._unique2.default,
    aten.bincount.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten.masked_fill.Tensor,
    aten.masked_fill_.Tensor,
    aten.masked_select.default,
    aten.nonzero.default,
    aten.repeat_interleave.Tensor,
}
_INDEX = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
_SHAPE_ALONE = {aten.resize_.default, aten.set_.source_Tensor, aten.set_.source_Storage_storage_offset}

generator = torch.Generator()  # of the random numbers drawn on devices


class Operators(TorchDispatchMode):
    """Sees every operator below autograd, and queues those on device memory.

    Attributes:
        makes: where factories make memory: on the "device", as are the results of all that they call, on the
            "host", or where their arguments lie (None). "beside": as None, but on the device without arguments.
    """

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device
        self.makes: str | None = None

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types:  # of a subclass, such as DTensor: what it does with its local tensors is done on return
            self.device.current.run()
        with torch._C.DisableTorchFunction():
            return self._call(function, args, kwargs or {})

    def _call(self, function: Any, args: Any, kwargs: Any) -> Any:
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        there = [on_device(one) for one in tensors]
        if function is aten.copy_.default and there[0] != there[1]:
            non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            return copy_across(self.device, args[0], args[1], non_blocking)
        is_factory = any(argument.name == "device" for argument in function._schema.arguments)
        if not any(there):
            made = function(*args, **kwargs)
            is_made = self.makes == "device" or (self.makes == "beside" and is_factory and not tensors)
            return self._made(function, made) if is_made else made
        if self.makes == "host" and is_factory:
            return function(*args, **kwargs)
        if function.namespace in ("c10d", "_c10d_functional"):
            # NCCL's stream waits for the current one, the host does not. Here the call is done on return.
            self.device.current.run()
            return self._claimed(function(*args, **kwargs))
        self._check_devices(function, args, tensors, there)
        return self._on_device(function, args, kwargs)

    def _on_device(self, function: Any, args: Any, kwargs: Any) -> Any:
        if function in _SHAPE_ALONE:
            return function(*args, **kwargs)
        if function in _READ_NUMBERS or _by_mask(function, args):
            self.device.wait(str(function))
            return self._claimed(function(*args, **kwargs))
        if self.device.order is Order.AT_ONCE:  # nothing is ever queued
            with _drawing(None) if torch.Tag.nondeterministic_seeded in function.tags else nullcontext():
                return self._claimed(function(*args, **kwargs))
        schema = function._schema
        writes = [one for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write]
        if writes:
            return self._write(function, args, kwargs)
        if any(one.alias_info is not None for one in schema.returns):
            return function(*args, **kwargs)  # a view
        return self._compute(function, args, kwargs)

    def _write(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Queue an operator that writes to its arguments, and return these."""
        launched = _Launch(function, args, kwargs)
        written = [
            value
            for argument, value in _arguments(function._schema, args, kwargs)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        returns = function._schema.returns
        if any(one.alias_info is None for one in returns):  # new tensors as well
            self.device.current.run()
            return self._claimed(function(*args, **kwargs))
        launched.on_blanks()
        self.device.current.put(Kernel(str(function), launched.run, launched.memory))
        return None if not returns else written[0] if len(returns) == 1 else tuple(written)

    def _compute(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Queue an operator that makes new tensors, and return these."""
        launched = _Launch(function, args, kwargs)
        made = launched.on_blanks(always=True)
        results = [one for one in tree_leaves(made) if isinstance(one, Tensor)]
        self._claimed(results)
        if str(function).startswith(("aten.empty", "aten.new_empty")):
            _spoil(results)
            return made
        targets = [one.data for one in results]
        _spoil(results)

        def work() -> None:
            found = [one for one in tree_leaves(launched.run()) if isinstance(one, Tensor)]
            for target, one in zip(targets, found, strict=True):
                target.copy_(one)

        self.device.current.put(Kernel(str(function), work, [*launched.memory, *targets]))
        return made

    def _made(self, function: Any, made: Any) -> Any:
        """Return tensors that a factory made for the device; a kernel fills them."""
        results = [one for one in tree_leaves(made) if isinstance(one, Tensor)]
        self._claimed(results)
        filled = [] if "empty" in str(function) else [(one.data, one.clone()) for one in results]
        _spoil(results)
        for target, values in filled:
            self.device.current.put(
                Kernel(str(function), lambda to=target, of=values: to.copy_(of), [target])
            )
        return made

    def _claimed(self, made: Any) -> Any:
        for one in tree_leaves(made):
            if isinstance(one, Tensor):
                device_memory.set(one, self.device.current)
        return made

    def _check_devices(self, function: Any, args: Any, tensors: list[Tensor], there: list[bool]) -> None:
        if function in _INDEX and there[0]:
            if not all(index is None or on_device(index) for index in args[1]):
                self.device.wait("copy of an index to the device")
            return
        for tensor, is_there in zip(tensors, there, strict=True):
            if not is_there and tensor.dim() > 0:
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and "
                    f"cpu! (in {function}: a tensor of shape {list(tensor.shape)} is in host memory)"
                )


class _Launch:
    """Holds an operator with its arguments as they are when it is queued.

    Attributes:
        memory: its device tensors, each an alias of its own (`Kernel`), whose version autograd does not count.
    """

    def __init__(self, function: Any, args: Any, kwargs: Any) -> None:
        self.function = function
        self.memory: list[Tensor] = []
        self.args, self.kwargs = tree_map(self._kept, args), tree_map(self._kept, kwargs)
        self.is_random = torch.Tag.nondeterministic_seeded in function.tags
        self.seeded = generator.get_state() if self.is_random else None

    def _kept(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if not on_device(value):
            return value.clone()  # a number of the host is read when the kernel is queued
        self.memory.append(value.data)
        return self.memory[-1]

    def on_blanks(self, always: bool = False) -> Any:
        """Return what the operator returns for zeros: tensors of the right shapes. Draws its random numbers.

        The true arguments may not be there yet, and NaN taken for an index would be an error.
        """
        if not (always or self.is_random):
            return None
        with _drawing(None):
            return self.function(*tree_map(_blank, self.args), **tree_map(_blank, self.kwargs))

    def run(self) -> Any:
        """Compute, with the random numbers that `on_blanks` drew."""
        if not self.is_random:
            return self.function(*self.args, **self.kwargs)
        now = generator.get_state()
        with _drawing(self.seeded):
            result = self.function(*self.args, **self.kwargs)
        generator.set_state(now)
        return result


@contextmanager
def _drawing(state: Tensor | None) -> Iterator[None]:
    """Let operators draw from the device's generator inside, from this state on (None: from its own)."""
    host = torch.default_generator
    kept = host.get_state()
    host.set_state(generator.get_state() if state is None else state)
    yield
    generator.set_state(host.get_state())
    host.set_state(kept)


def _blank(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    zeros = torch.zeros(1 + max(0, last), dtype=value.dtype)
    return zeros.as_strided(value.shape, value.stride())


def _spoil(tensors: list[Tensor]) -> None:
    """Fill new memory with what nobody may use: NaN, and for integers 0, since they may be used as indices."""
    for tensor in tensors:
        tensor.data.fill_(torch.nan if tensor.is_floating_point() else 0)


def _by_mask(function: Any, args: Any) -> bool:
    """Return whether it is an index by a mask. To write a single number by a mask, CUDA need not count it."""
    if function not in _INDEX:
        return False
    fills = function is not aten.index.Tensor and args[2].numel() == 1
    return not fills and any(index is not None and index.dtype == torch.bool for index in args[1])


def _arguments(schema: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    yield from zip(schema.arguments, args, strict=False)
    for argument in schema.arguments[len(args) :]:
        if argument.name in kwargs:
            yield argument, kwargs[argument.name]


def copy_across(device: Device, to: Tensor, source: Tensor, non_blocking: bool) -> Tensor:
    """Copy between host and device; returns `to`.

    As with CUDA, the host waits unless it asks not to and its memory is pinned. A copy from pageable memory has
    read it when the call returns.
    """
    to_host = on_device(source)
    # The GPU converts numbers of another type if the copy may be late, else the host does.
    crosses = to if to_host == non_blocking else source
    device.crossed["host" if to_host else "device"] += crosses.itemsize * source.numel()
    with outside_modes():
        host, there = (to.data, source.data) if to_host else (source.data, to.data)
        if non_blocking and is_pinned(host):
            ends = (host, there) if to_host else (there, host)
            memory = [there, host] if is_registered(host) else [there]
            device.current.put(Kernel("copy", lambda: ends[0].copy_(ends[1]), memory))
        elif to_host or not non_blocking:
            device.wait("copy to the host" if to_host else "copy to the device")
            to.copy_(source)
        else:
            kept = source.clone()
            device.current.put(Kernel("copy", lambda: there.copy_(kept), [there]))
    return to
