"""Recording on one rank, and one row for all ranks of its replica."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_noloco.job.activity import now
from megatron_noloco.monitor.reduction import Reduction, Sample
from megatron_noloco.monitor.writers import Writer

Value = float | Tensor | list[int]


class Record(Protocol):
    """What measures a number is handed one of these; see `Metrics.record`."""

    def __call__(self, name: str, value: Value, reduction: Reduction, weight: float = 1.0) -> None: ...


def unrecorded(name: str, value: Value, reduction: Reduction, weight: float = 1.0) -> None:
    """A `Record` that keeps nothing."""


@contextmanager
def timed(record: Record, name: str, reduction: Reduction) -> Iterator[None]:
    """Record the seconds that the host spends inside; nobody waits for a device."""
    started = time.perf_counter()
    yield
    record(name, time.perf_counter() - started, reduction)


class Metrics:
    """The numbers of one rank; rows of the whole replica.

    No message about numbers ever leaves a replica: TensorBoard overlays the replicas' runs.

    Args:
        replica: named in each row.
        group: all ranks of the replica; must be able to carry CPU tensors.
        writers: where rows go; may differ from rank to rank, and be empty.
        counters: what the run had counted when it was saved, see `counters`.
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

        A 0-d tensor is kept as it is, and read only when that row is written: recording never waits for a device.
        It must not be written to in between. Not all ranks need to record a name; a rank may record it several
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
        """One row about the last `steps` local steps, up to `step`.

        Gathers over the replica's ranks, all of which must call it after the same step.
        """
        own = {
            name: (self._reductions[name], self._reductions[name].over_steps(samples, steps))
            for name, samples in _read(self._samples).items()
        }
        self._samples = {}
        now.part("gathering the numbers of the replica's ranks")
        everyones: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(everyones, own, group=self._group)
        reductions: dict[str, Reduction] = {}
        samples: dict[str, list[Sample]] = {}
        for name, (reduction, sample) in ((name, held[name]) for held in everyones for name in held):
            reductions[name] = reduction
            samples.setdefault(name, []).append(sample)
        self.write(
            "step", step, {name: reductions[name].over_ranks(samples[name]) for name in sorted(samples)}
        )

    def write(self, kind: str, step: int, numbers: Mapping[str, Any]) -> None:
        """One row of numbers that are already the replica's; no communication."""
        row = {"kind": kind, "step": step, "replica": self.replica, **numbers}
        for writer in self._writers:
            writer.write(row)

    def count(self, name: str, value: float | None) -> None:
        """Set a counter that is not recorded, or forget it (None)."""
        self._counters.pop(name, None)
        if value is not None:
            self._counters[name] = value

    @property
    def counters(self) -> dict[str, float]:
        """What a checkpoint of this rank has to keep: what is counted since the start of the run."""
        return {name: _number(value) for name, value in self._counters.items()}

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


def _read(recorded: Mapping[str, Sequence[Sample]]) -> dict[str, list[Sample]]:
    """Numbers in the place of tensors. A read waits for a device, so those of one device are read together."""
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


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value
