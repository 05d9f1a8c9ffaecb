"""The simulated GPU: `installed` replaces `torch.cuda`, `Gpu` gives a thread a device.

with installed():
    with Gpu() as gpu:             # in each thread
        ...
    print(gpu.waits)
"""

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.simulated_gpu.memory import Runtime, is_pinned, on_device, pin, pinned_copy
from tests.simulated_gpu.operators import Operators, copy_across, generator
from tests.simulated_gpu.streams import CUDA, Device, Event, Order, Stream, Wait, here, set_here

_entered = threading.local()
_run_backward = torch.autograd.graph._engine_run_backward


class Gpu(TorchFunctionMode):
    """Gives this thread a simulated GPU inside.

    Args:
        order: which streams run their kernels at once.
    """

    def __init__(self, order: Order = Order.LATE) -> None:
        super().__init__()
        self._device = Device(order)
        self._operators = Operators(self._device)

    @property
    def waits(self) -> Counter[Wait]:
        """How often the host waited for the device, by source line."""
        return self._device.waits

    @property
    def crossed(self) -> Counter[str]:
        """Bytes copied to the "host", and to the "device"."""
        return self._device.crossed

    def __enter__(self) -> "Gpu":
        set_here(self._device)
        self._device.start()
        self._operators.__enter__()
        super().__enter__()
        _entered.gpu = self
        return self

    def __exit__(self, *error: Any) -> None:
        _entered.gpu = None
        super().__exit__(*error)
        self._operators.__exit__(*error)
        set_here(None)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if own := _OWN.get(function):
            return own(self, function, args, kwargs)
        device, pinned = kwargs.get("device"), kwargs.pop("pin_memory", False)
        if device is None:
            # A function of C++ makes memory where its first argument lies.
            beside = not hasattr(function, "__code__") and bool(args) and on_device(args[0])
            made = self._made("beside" if beside else None, function, args, kwargs)
        elif _is_cuda(device):
            made = self._made("device", function, args, {**kwargs, "device": "cpu"})
            if function in (torch.tensor, torch.as_tensor):
                self._device.wait("copy of a Python number to the device")
        else:
            made = self._made("host", function, args, kwargs)
        return pin(made) if pinned else made

    def _made(self, where: str | None, function: Any, args: Any, kwargs: Any) -> Any:
        before, self._operators.makes = self._operators.makes, where
        try:
            return function(*args, **kwargs)
        finally:
            self._operators.makes = before

    # In the place of functions and methods of torch

    def _device_of(self, function: Any, args: Any, kwargs: Any) -> torch.device:
        return CUDA if on_device(args[0]) else function(*args)

    def _no_numpy(self, function: Any, args: Any, kwargs: Any) -> Any:
        if on_device(args[0]):
            raise TypeError(
                "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host "
                "memory first."
            )
        return function(*args, **kwargs)

    def _read_all(self, function: Any, args: Any, kwargs: Any) -> Any:
        if on_device(args[0]):
            self._device.wait("copy to the host")
        return function(*args, **kwargs)

    def _to(self, function: Any, args: Any, kwargs: Any) -> Tensor:
        tensor, *others = args
        copy = kwargs.pop("copy", False)
        wanted = [CUDA if type(one) is int else one for one in (*others, kwargs.pop("device", None))]
        if wanted and wanted[-1] is None:
            wanted.pop()
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*wanted, **kwargs)
        is_there = on_device(tensor)
        if wanted and isinstance(wanted[0], Tensor):
            goes_there = on_device(wanted[0])
        else:
            goes_there = is_there if device is None else device.type == "cuda"
        dtype = dtype or tensor.dtype
        if goes_there == is_there:
            return Tensor.to(tensor, dtype=dtype, copy=copy, non_blocking=non_blocking)
        return self._moved(tensor, dtype, non_blocking)

    def _moved(self, tensor: Tensor, dtype: torch.dtype, non_blocking: bool) -> Tensor:
        """Return a copy in the memory where the tensor is not."""
        if tensor.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError("a copy between host and device that autograd records is not simulated")
        where = "host" if on_device(tensor) else "device"
        made = self._made(where, torch.empty_like, (tensor,), {"dtype": dtype})
        if where == "host" and non_blocking:
            pin(made)  # as torch does: the copy is there once the stream is waited for
        return copy_across(self._device, made, tensor, non_blocking)

    def _cpu(self, function: Any, args: Any, kwargs: Any) -> Tensor:
        return self._to(function, (args[0], "cpu"), {})

    def _cuda(self, function: Any, args: Any, kwargs: Any) -> Tensor:
        return self._to(function, (args[0], CUDA), {"non_blocking": kwargs.get("non_blocking", False)})


def _is_cuda(device: Any) -> bool:
    return isinstance(device, int) or torch.device(device).type == "cuda"


_OWN: dict[Any, Any] = {
    Tensor.device.__get__: Gpu._device_of,  # type: ignore[attr-defined]
    Tensor.is_cuda.__get__: lambda _, f, args, k: on_device(args[0]),  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: lambda _, f, args, k: not on_device(args[0]),  # type: ignore[attr-defined]
    Tensor.get_device: lambda _, f, args, k: 0 if on_device(args[0]) else -1,
    Tensor.is_pinned: lambda _, f, args, k: is_pinned(args[0]),
    Tensor.numpy: Gpu._no_numpy,
    Tensor.__array__: Gpu._no_numpy,
    Tensor.tolist: Gpu._read_all,
    Tensor.__reduce_ex__: Gpu._read_all,
    Tensor.to: Gpu._to,
    Tensor.cpu: Gpu._cpu,
    Tensor.cuda: Gpu._cuda,
}


def _backward(*args: Any, **kwargs: Any) -> Any:
    """Run autograd's engine in the mode, which torch leaves for `Tensor.backward`: hooks run inside."""
    gpu = getattr(_entered, "gpu", None)
    if gpu is None:
        return _run_backward(*args, **kwargs)
    TorchFunctionMode.__enter__(gpu)
    try:
        return _run_backward(*args, **kwargs)
    finally:
        TorchFunctionMode.__exit__(gpu, None, None, None)


def _record_stream(tensor: Tensor, stream: Stream) -> None:
    here().recorded.add((tensor.untyped_storage()._cdata, stream))


def _resize(storage: torch.UntypedStorage, size: int) -> Any:
    """Do as `UntypedStorage.resize_`, with which FSDP2 frees memory; kernels that use it run before."""
    if here().pending[storage._cdata]:
        for stream in here().streams:
            stream.run()
    return torch._C.StorageBase.resize_(storage, size)


@contextlib.contextmanager
def installed(uuid: str = "simulated") -> Iterator[None]:
    """Replace what Python code asks of `torch.cuda`, in all threads.

    Args:
        uuid: of the GPU, by which processes recognise that they share one.
    """
    runtime = Runtime()
    properties = SimpleNamespace(
        uuid=uuid, name="simulated", total_memory=80 << 30, major=9, minor=0, multi_processor_count=132
    )
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "is_bf16_supported": True,
        "_lazy_init": None,
        "device_count": 1,
        "current_device": 0,
        "set_device": None,
        "cudart": runtime,
        "get_device_properties": properties,
        "get_device_name": properties.name,
        "get_device_capability": (9, 0),
        "mem_get_info": (80 << 30, 80 << 30),
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_reserved": 0,
        "reset_peak_memory_stats": None,
        "memory_stats": {},
        "empty_cache": None,
    }
    replaced: dict[str, Any] = {
        name: lambda *_, answer=answer, **__: answer for name, answer in answers.items()
    }
    replaced |= {
        "Stream": Stream,
        "Event": Event,
        "stream": lambda stream: here().use(stream),
        "current_stream": lambda device=None: here().current,
        "default_stream": lambda device=None: here().default,
        "synchronize": lambda device=None: here().synchronize(),
        "set_sync_debug_mode": lambda mode: setattr(here(), "sync_debug_mode", mode),
        "default_generators": (generator,),
        "manual_seed": generator.manual_seed,
        "manual_seed_all": generator.manual_seed,
    }
    random = {
        "get_rng_state": lambda device=None: generator.get_state(),
        "set_rng_state": lambda state, device=None: generator.set_state(state),
    }
    methods = {"pin_memory": pinned_copy, "record_stream": _record_stream}
    nothing = dict.fromkeys(("range_push", "range_pop"), lambda *_: None)
    with contextlib.ExitStack() as stack:
        for module, names in (
            (torch.cuda, replaced | random),
            (torch.cuda.random, random),
            (torch.cuda.nvtx, nothing),
            (Tensor, methods),
            (torch.UntypedStorage, {"resize_": _resize}),
            (torch.autograd, {"_engine_run_backward": _backward}),
        ):
            for name, value in names.items():
                stack.enter_context(mock.patch.object(module, name, value))
        yield
