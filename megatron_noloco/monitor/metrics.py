"""Records the numbers of one rank, and reduces them to one row for all ranks of its replica.

A new number needs one call, `record(name, value, reduction)`. The name ("train/loss") is the key in
`metrics.jsonl` and the tag in TensorBoard. The reduction says how values combine over the local steps of a log
interval, and over the ranks of a replica.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_noloco.job.activity import now
from megatron_noloco.monitor.writers import Writer

Value = float | Tensor | list[int] | str


class Sample(NamedTuple):
    """Holds a value and its weight in a weighted mean."""

    value: Any  # a number; only `last` takes anything else, such as a list
    weight: float = 1.0


Combine = Callable[[Sequence[Sample]], Sample]


def last(samples: Sequence[Sample]) -> Sample:
    """Return the newest sample; among ranks, that of the highest rank."""
    return samples[-1]


def total(samples: Sequence[Sample]) -> Sample:
    """Return the sum of the values."""
    return Sample(sum(sample.value for sample in samples), _weight(samples))


def largest(samples: Sequence[Sample]) -> Sample:
    """Return the sample with the largest value."""
    return max(samples, key=lambda sample: sample.value)


def mean(samples: Sequence[Sample]) -> Sample:
    """Return sum(w * x) / sum(w); nan where all weights are zero."""
    weight = _weight(samples)
    return Sample(sum(x * w for x, w in samples) / weight if weight else math.nan, weight)


def root_mean_square(samples: Sequence[Sample]) -> Sample:
    """Return sqrt(sum(w * x^2) / sum(w)); nan where all weights are zero. A nan of weight zero does not count."""
    weight = _weight(samples)
    squares = sum(x**2 * w for x, w in samples if w)
    return Sample(math.sqrt(squares / weight) if weight else math.nan, weight)


def _weight(samples: Sequence[Sample]) -> float:
    return sum(sample.weight for sample in samples)


@dataclass(frozen=True)
class Reduction:
    """Defines how the values of one name become one: `steps` over a log interval, then `ranks` over the replica.

    Attributes:
        per: "step": the interval's sum (`steps` must be `total`) is divided by its local steps. "run": values add
            up since the start of the run, resumes included (`steps` must be `last`); record one in every local
            step, if only a zero, so that every row has the sum.
    """

    steps: Combine
    ranks: Combine
    per: Literal["step", "interval", "run"] = "interval"

    def over_steps(self, samples: Sequence[Sample], steps: int) -> Sample:
        """Reduce one rank's values of an interval of `steps` local steps."""
        value, weight = _combined(self.steps, samples)
        return Sample(value / steps if self.per == "step" else value, weight)

    def over_ranks(self, samples: Sequence[Sample]) -> Any:
        """Reduce the values of the ranks that recorded one, in rank order."""
        return _combined(self.ranks, samples).value


def _combined(combine: Combine, samples: Sequence[Sample]) -> Sample:
    """Combine several samples; a single one stays as it is, to the last bit."""
    return samples[0] if len(samples) == 1 else combine(samples)


LAST = Reduction(last, last)  # the same on all ranks: a learning rate
LAST_SUM = Reduction(last, total)  # of the last time, summed over ranks: bytes of a round
LAST_MAX = Reduction(last, largest)  # of the last time, on the slowest rank: seconds of a round
RMS = Reduction(last, root_mean_square)  # of the last time, weighted by elements: a standard deviation
MEAN = Reduction(mean, mean)
SUM = Reduction(total, total)
PER_STEP = Reduction(total, mean, per="step")  # seconds in a local step, mean of the ranks
SLOWEST = Reduction(total, largest, per="step")  # seconds in a local step, of the slowest rank
TOTAL = Reduction(last, total, per="run")  # since the start of the run, summed over ranks
TOTAL_MAX = Reduction(last, largest, per="run")  # since the start of the run, the largest of the ranks


class Record(Protocol):
    """Defines the type of `Metrics.record`, which code that measures something takes as an argument."""

    def __call__(self, name: str, value: Value, reduction: Reduction, weight: float = 1.0) -> None: ...


def unrecorded(name: str, value: Value, reduction: Reduction, weight: float = 1.0) -> None:
    """Record nothing: a `Record` for code that runs without `Metrics`."""


@contextmanager
def timed(record: Record, name: str, reduction: Reduction) -> Iterator[None]:
    """Record the seconds that the host spends in the block; does not wait for a device."""
    started = time.perf_counter()
    yield
    record(name, time.perf_counter() - started, reduction)


class Metrics:
    """Records the numbers of one rank, and writes rows about the whole replica.

    No message about numbers ever leaves a replica: TensorBoard overlays the replicas' runs.

    Args:
        replica: of this rank; each row has it.
        group: all ranks of the replica; must have a backend for CPU tensors.
        writers: of this rank; the ranks of a replica may have different writers, or none.
        counters: `counters` in the checkpoint that the run continues.
    """

    def __init__(
        self,
        replica: int,
        group: dist.ProcessGroup,
        writers: Sequence[Writer] = (),
        counters: Mapping[str, float] | None = None,
    ) -> None:
        self.replica = replica
        self._group = group
        self._writers = writers
        self._counters: dict[str, Any] = dict(counters or {})
        self._reductions: dict[str, Reduction] = {}
        self._samples: dict[str, list[Sample]] = {}

    def record(self, name: str, value: Value, reduction: Reduction, weight: float = 1.0) -> None:
        """Keep `value` for the next row of steps.

        A 0-d tensor is read only when that row is written, so that recording never waits for a device; it must not
        change before. Not all ranks need to record a name; a rank may record it several
        times in a step.

        Raises ValueError when the name was recorded with another reduction before.
        """
        known = self._reductions.setdefault(name, reduction)
        if known != reduction:
            raise ValueError(f"metric {name!r} has two reductions: {known} and {reduction}")
        if reduction.per == "run":
            value = self._counters[name] = self._counters.get(name, 0) + value
        self._samples.setdefault(name, []).append(Sample(value, weight))

    def write_steps(self, step: int, steps: int) -> None:
        """Write one row about the last `steps` local steps, up to `step`.

        A collective over the replica's ranks, which must call it after the same step.
        """
        own = {
            name: (self._reductions[name], self._reductions[name].over_steps(samples, steps))
            for name, samples in _read(self._samples).items()
        }
        self._samples = {}
        now.part("gathering the numbers of the replica's ranks")
        by_rank: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(by_rank, own, group=self._group)
        reductions: dict[str, Reduction] = {}
        samples: dict[str, list[Sample]] = {}
        for recorded in by_rank:
            for name, (reduction, sample) in recorded.items():
                reductions[name] = reduction
                samples.setdefault(name, []).append(sample)
        self.write(
            "step", step, {name: reductions[name].over_ranks(samples[name]) for name in sorted(samples)}
        )

    def write(self, kind: str, step: int, numbers: Mapping[str, Any]) -> None:
        """Write one row of numbers that are the same on all ranks of the replica, without communication."""
        row = {"kind": kind, "step": step, "replica": self.replica, **numbers}
        for writer in self._writers:
            writer.write(row)

    def count(self, name: str, value: float | None) -> None:
        """Set a counter that checkpoints keep but no row has; None removes it."""
        self._counters.pop(name, None)
        if value is not None:
            self._counters[name] = value

    @property
    def counters(self) -> dict[str, float]:
        """The counters that this rank's checkpoint has to keep: sums over the run, and those set by `count`."""
        return {
            name: value.item() if isinstance(value, Tensor) else value
            for name, value in self._counters.items()
        }

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


def _read(recorded: Mapping[str, Sequence[Sample]]) -> dict[str, list[Sample]]:
    """Replace tensors by numbers. A read waits for the device, so tensors of one device are read together."""
    values = (sample.value for samples in recorded.values() for sample in samples)
    tensors = {id(value): value for value in values if isinstance(value, Tensor)}
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for key, tensor in tensors.items():
        alike.setdefault((tensor.device, tensor.dtype), []).append(key)
    numbers: dict[int, Any] = {}
    for keys in alike.values():
        numbers |= zip(keys, torch.stack([tensors[key] for key in keys]).tolist(), strict=True)
    return {
        name: [Sample(numbers.get(id(value), value), weight) for value, weight in samples]
        for name, samples in recorded.items()
    }
