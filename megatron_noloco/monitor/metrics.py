"""Records the numbers of one rank, and reduces them to one row for all ranks of its replica.

`record(name, value)` takes the numbers of `numbers.TABLE`, which says how they are reduced.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_noloco.job.activity import now
from megatron_noloco.monitor.numbers import number_of
from megatron_noloco.monitor.reductions import Reduction, Sample
from megatron_noloco.monitor.writers import Writer

Value = float | Tensor | list[int] | str


class Record(Protocol):
    """Defines the type of `Metrics.record`, which code that measures something takes as an argument."""

    def __call__(self, name: str, value: Value, weight: float = 1.0) -> None: ...


def unrecorded(name: str, value: Value, weight: float = 1.0) -> None:
    """Record nothing: a `Record` for code that runs without `Metrics`."""


@contextmanager
def timed(record: Record, name: str) -> Iterator[None]:
    """Record the seconds that the host spends in the block; does not wait for a device."""
    started = time.perf_counter()
    yield
    record(name, time.perf_counter() - started)


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
        self.writers = [*writers]
        self._counters: dict[str, Any] = dict(counters or {})
        self._samples: dict[str, list[Sample]] = {}

    def record(self, name: str, value: Value, weight: float = 1.0) -> None:
        """Keep `value` for the next row of steps.

        A 0-d tensor is read only when that row is written, so that recording never waits for a device; it must not
        change before. Not all ranks need to record a number; a rank may record it several times in a step.

        Raises ValueError for a number that the table does not have, or not in rows of steps.
        """
        if _reduction_of(name).per == "run":
            value = self._counters[name] = self._counters.get(name, 0) + value
        self._samples.setdefault(name, []).append(Sample(value, weight))

    def write_steps(self, step: int, steps: int) -> None:
        """Write one row about the last `steps` local steps, up to `step`.

        A collective over the replica's ranks, which must call it after the same step.
        """
        own = {
            name: _reduction_of(name).over_steps(samples, steps)
            for name, samples in _read(self._samples).items()
        }
        self._samples = {}
        now.part("gathering the numbers of the replica's ranks")
        by_rank: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(by_rank, own, group=self._group)
        samples: dict[str, list[Sample]] = {}
        for recorded in by_rank:
            for name, sample in recorded.items():
                samples.setdefault(name, []).append(sample)
        numbers = {name: _reduction_of(name).over_ranks(samples[name]) for name in sorted(samples)}
        self.write("step", step, numbers)

    def write(self, kind: str, step: int, numbers: Mapping[str, Any]) -> None:
        """Write one row of numbers that are the same on all ranks of the replica, without communication."""
        row = {"kind": kind, "step": step, "replica": self.replica, **numbers}
        for writer in self.writers:
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
        for writer in self.writers:
            writer.close()


def _reduction_of(name: str) -> Reduction:
    reduction = number_of(name).reduction
    if reduction is None:
        raise ValueError(f"the number {name!r} belongs to other rows than those of local steps")
    return reduction


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
