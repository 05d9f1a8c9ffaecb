"""Buffers of the outer optimizer."""

import torch
from torch import Tensor

HOST = torch.device("cpu")


def buffer(length: int, device: torch.device) -> Tensor:
    """An fp32 vector; in host memory it is pinned where there is an accelerator, so that copies are fast."""
    pinned = device.type == "cpu" and torch.cuda.is_available()
    return torch.empty(length, dtype=torch.float32, device=device, pin_memory=pinned)
