"""Marks host memory that counts as device memory, or as pinned memory. The marks are those of all threads."""

import threading
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

Mark = TypeVar("Mark")
_FORGET_AT = 20_000  # entries, of which most are of storages that are gone


class Marks(Generic[Mark]):
    """Keeps a mark for each of some storages, for as long as the storage lives."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._marks: dict[int, tuple[StorageWeakRef, Mark]] = {}

    def set(self, tensor: Tensor, mark: Mark) -> None:
        """Mark the storage of a tensor, unless it has a mark."""
        storage = tensor.untyped_storage()
        with self._lock:
            if len(self._marks) > _FORGET_AT:
                self._marks = {key: one for key, one in self._marks.items() if not one[0].expired()}
            # The weak reference keeps the address of the storage from being used again.
            self._marks.setdefault(storage._cdata, (StorageWeakRef(storage), mark))

    def get(self, tensor: Tensor) -> Mark | None:
        """Return the mark of the tensor's storage; None where it has none."""
        found = self._marks.get(tensor.untyped_storage()._cdata)
        return found[1] if found else None


device_memory: Marks[Any] = Marks()  # the mark is the stream that allocated the memory
_pinned: Marks[bool] = Marks()
_registered: dict[int, int] = {}  # bytes of pinned ranges by their first address, of cudaHostRegister


def on_device(value: object) -> bool:
    """Return whether this is a tensor in device memory."""
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return False
    try:
        return device_memory.get(value) is not None
    except NotImplementedError:  # a subclass without a storage of its own
        return False


def pinned_copy(tensor: Tensor, device: object = None) -> Tensor:
    """Return a copy in pinned memory, as `Tensor.pin_memory` does."""
    if on_device(tensor):
        raise RuntimeError(f"cannot pin {tensor.type()!r}: only dense CPU tensors can be pinned")
    return pin(tensor.clone())


def pin(tensor: Tensor) -> Tensor:
    """Count the memory of a tensor as pinned; returns the tensor."""
    _pinned.set(tensor, True)
    return tensor


def is_pinned(tensor: Tensor) -> bool:
    """Return whether a tensor lies in pinned host memory."""
    if on_device(tensor):
        return False
    return is_registered(tensor) or _pinned.get(tensor) is not None


def is_registered(tensor: Tensor) -> bool:
    """Return whether a host tensor lies in memory that the program pinned itself: freed, it is gone at once."""
    first = tensor.data_ptr()
    return any(start <= first < start + size for start, size in list(_registered.items()))


class Runtime:
    """Stands for CUDA's runtime library, as far as it is called (`torch.cuda.cudart`)."""

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        """Pin a range of host memory; returns CUDA's error code, 0 for none."""
        if address in _registered:
            return 712  # cudaErrorHostMemoryAlreadyRegistered
        _registered[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        """Undo `cudaHostRegister`; returns CUDA's error code, 0 for none."""
        return 0 if _registered.pop(address, None) else 713  # cudaErrorHostMemoryNotRegistered
