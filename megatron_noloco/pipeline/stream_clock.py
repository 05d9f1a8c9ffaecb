"""Seconds that a stream spends in a block of the program."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class StreamClock:
    """Measures blocks: on a CPU the time of the host, on a GPU that of the stream, which is behind the host.

    Never waits: a block counts once the stream has passed its end, mostly in the local step after.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._on_gpu = torch.device(device).type == "cuda"
        self._seconds = 0.0
        self._open: list[tuple[torch.cuda.Event, torch.cuda.Event, str]] = []

    @contextmanager
    def running(self, what: str = "") -> Iterator[None]:
        """Measure the block, which does `what`."""
        if not self._on_gpu:
            started = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - started
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self._open.append((begin, end, what))

    def take(self) -> float:
        """Return the seconds of all blocks that have ended and were not taken before."""
        while self._open and self._open[0][1].query():
            begin, end, _ = self._open.pop(0)
            self._seconds += begin.elapsed_time(end) / 1000
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def inside(self) -> str:
        """Return what the block does in which the GPU is; "": it is in none. Any thread may call this."""
        for begin, end, what in list(self._open):
            if not end.query():
                return what if begin.query() else ""
        return ""
