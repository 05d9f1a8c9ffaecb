"""Buffers of the outer optimizer."""

import math
import mmap
import weakref

import numpy as np
import torch
from torch import Tensor

HOST = torch.device("cpu")
_PORTABLE = 1  # cudaHostRegisterPortable


def buffer(length: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """A vector; in host memory it is pinned where there is an accelerator, so that copies are fast."""
    if device.type == "cpu" and torch.cuda.is_available():
        return _pinned(length, dtype)
    return torch.empty(length, dtype=dtype, device=device)


def _pinned(length: int, dtype: torch.dtype) -> Tensor:
    """Of this size, and given back: what `pin_memory` takes is rounded up to a power of two, and kept for good."""
    size = max(1, length * dtype.itemsize)
    memory = np.frombuffer(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    failure = int(torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, size, _PORTABLE))
    if failure:
        raise MemoryError(f"{size:,} bytes of host memory could not be pinned: CUDA's error {failure}")
    weakref.finalize(memory, torch.cuda.cudart().cudaHostUnregister, memory.ctypes.data).atexit = False
    return torch.from_numpy(memory)[: length * dtype.itemsize].view(dtype)


class Kept:
    """Named vectors that are kept from round to round."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def take(self, name: str, dtype: torch.dtype, *shape: int, device: torch.device = HOST) -> Tensor:
        """The one of this name, allocated anew only when it was shorter, of another type or elsewhere."""
        length = math.prod(shape)
        held = self._held.get(name)
        if held is None or len(held) < length or (held.dtype, held.device) != (dtype, device):
            held = self._held[name] = buffer(length, device, dtype)
        return held[:length].view(shape)

    def forget(self) -> None:
        """Leave them to whoever still holds them."""
        self._held.clear()
