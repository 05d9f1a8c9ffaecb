"""The order of a round's work and the local steps' on an accelerator; on a CPU all is done when a call returns.

A CUDA stream does its work in the order in which the host queued it, and the host runs ahead of it. A round on the
stream of the local steps would wait for all that they have queued with every piece of the mean that lands.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """A stream for work on what no local step reads or writes: slow weights, momentum, corrections, and means that
    are formed on the accelerator. Its kernels are short, and go before those of the local steps.

    Whoever uses both sees to it that the stream of the local steps has written what is read here (`wait_for`).
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    @contextmanager
    def used(self) -> Iterator[None]:
        """Work inside is queued on the stream, and done on leaving: messages may then be overwritten."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()


def wait_for(device: torch.device) -> None:
    """Until the current stream has done what is queued."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
