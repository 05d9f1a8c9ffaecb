"""Buffers of the outer optimizer."""

import math

import torch
from torch import Tensor

HOST = torch.device("cpu")


def buffer(length: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """A vector; in host memory it is pinned where there is an accelerator, so that copies are fast."""
    pinned = device.type == "cpu" and torch.cuda.is_available()
    return torch.empty(length, dtype=dtype, device=device, pin_memory=pinned)


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
