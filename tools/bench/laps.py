"""The stopwatch of all benchmarks."""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


class Laps:
    """Seconds of named laps, repeat by repeat; those of warm-ups are not kept.

    A repeat runs all variants, so that noise of the machine affects them alike.

    Attributes: `wall` and `cpu` are the seconds by name, of the slowest rank; `cpu` counts this process.
    """

    def __init__(
        self,
        repeats: int,
        warm_ups: int = 0,
        barrier: Callable[[], object] = lambda: None,
        slowest: Callable[[float], float] = lambda seconds: seconds,
    ) -> None:
        self.wall: dict[str, list[float]] = defaultdict(list)
        self.cpu: dict[str, list[float]] = defaultdict(list)
        self._repeats = range(-warm_ups, repeats)
        self._barrier, self._slowest = barrier, slowest
        self._repeat = 0

    def __iter__(self) -> Iterator[int]:
        """Yield the number of each repeat, negative for warm-ups."""
        for repeat in self._repeats:
            self._repeat = repeat
            yield repeat

    @contextmanager
    def lap(self, name: str) -> Iterator[None]:
        """Measure what the context does; all ranks begin together."""
        self._barrier()
        started, cpu_started = time.perf_counter(), time.process_time()
        yield
        seconds = time.perf_counter() - started, time.process_time() - cpu_started
        for kept, taken in zip((self.wall, self.cpu), map(self._slowest, seconds), strict=True):
            if self._repeat >= 0:
                kept[name].append(taken)

    def in_turn(self, names: Iterable[str]) -> list[str]:
        """Return the names in an order that rotates with the repeats."""
        listed = list(names)
        turn = self._repeat % len(listed)
        return listed[turn:] + listed[:turn]

    def medians(self) -> dict[str, float]:
        """Return the median of the seconds by name."""
        return {name: statistics.median(times) for name, times in self.wall.items()}


def rounded(seconds: dict[str, float], digits: int, over: float = 1.0) -> dict[str, float]:
    """Return seconds by name, or their ratios to others."""
    return {name: round(value / over, digits) for name, value in seconds.items()}


def slowest(seconds: float) -> float:
    """Return the longest time of all ranks of the process group."""
    worst = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return float(worst)
