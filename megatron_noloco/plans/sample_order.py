"""Which samples a microbatch holds: a pure function of the seed and of how many were consumed before it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_noloco.errors import UserError
from megatron_noloco.plans.draws import Shuffle, Stream

BLEND_RESOLUTION = 10_000  # places in the cycle of a blend, about
_FINER = (100_000, 1_000_000)  # where shares of such a cycle are not exact enough
_BLEND_ERROR = 1e-4  # the largest difference between a weight and its share


@dataclass(frozen=True)
class Order:
    """Computes an endless sequence of sample ids drawn from several parts in fixed proportions.

    The parts take turns in a short cycle that repeats, in which each part has slots in proportion to its weight,
    spread evenly. Each epoch of a part visits each of its samples exactly once, in a `Shuffle` of its own: no
    table, so the order of a trillion samples costs nothing. A part that is small for its weight begins its next
    epoch while others are still in an earlier one. Ids count through the parts.
    """

    sizes: tuple[int, ...]  # samples in each part
    weights: tuple[float, ...]  # adding up to 1
    seed: int
    slot: int | None = None  # each replica of a federation has an order of its own; None: one job has all

    def __post_init__(self) -> None:
        if min(self.sizes) < 1:
            raise UserError(f"a sample order needs at least one sample, not {min(self.sizes)}")

    @classmethod
    def of(cls, samples: int, seed: int) -> "Order":
        """Return the order of a single part."""
        return cls((samples,), (1.0,), seed)

    @cached_property
    def slots(self) -> tuple[int, ...]:
        """Places of each part in a cycle."""
        return slots_of(self.weights)

    @cached_property
    def _cycle(self) -> tuple[np.ndarray, np.ndarray]:
        """The part at each place of the cycle, and how many places before it that part has."""
        shares = np.array(self.slots) / sum(self.slots)
        taken = np.zeros(len(shares), dtype=np.int64)
        turns, before = (np.empty(sum(self.slots), dtype=np.int64) for _ in range(2))
        for place in range(len(turns)):
            turn = int((shares * (place + 1) - taken).argmax())  # the first of those that are furthest behind
            turns[place], before[place] = turn, taken[turn]
            taken[turn] += 1
        return turns, before

    def ids(self, first: int, count: int) -> np.ndarray:
        """Return the sample ids at places first .. first+count-1 of the sequence, shape [count]."""
        turns, before = self._cycle
        cycles, places = np.divmod(np.arange(first, first + count, dtype=np.int64), len(turns))
        ids = np.empty(count, dtype=np.int64)
        base = 0
        for part, size in enumerate(self.sizes):
            chosen = turns[places] == part
            if chosen.any():
                start = int((cycles * self.slots[part] + before[places])[chosen][0])
                # consecutive places hold consecutive samples of each part
                ids[chosen] = base + self._of_part(part, start, int(chosen.sum()))
            base += size
        return ids

    def _of_part(self, part: int, first: int, count: int) -> np.ndarray:
        """Return the ids within a part at places first .. first+count-1 of its own sequence, shape [count]."""
        size = self.sizes[part]
        epochs, offsets = np.divmod(np.arange(first, first + count, dtype=np.int64), size)
        ids = np.empty(count, dtype=np.int64)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            counters: tuple[int, ...] = (int(epoch), part) if part else (int(epoch),)
            if self.slot is not None:
                counters = (int(epoch), part, self.slot)
            ids[chosen] = Shuffle(size, self.seed, Stream.SAMPLES, counters).at(offsets[chosen])
        return ids


def slots_of(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the places of each part in a cycle: its weight to 1/10000, and at least one.

    Raises UserError where so many weights are so small that a cycle of a million places cannot have them.
    """
    for resolution in (BLEND_RESOLUTION, *_FINER):
        slots = slots_at(weights, resolution)
        shares = [slot / sum(slots) for slot in slots]
        errors = [abs(share - weight) for share, weight in zip(shares, weights, strict=True)]
        if max(errors) <= _BLEND_ERROR:
            return slots
    place = errors.index(max(errors))
    raise UserError(
        f"has weights too small for 1/10000: the share {weights[place]:.5f} would be {shares[place]:.5f}, since "
        f"each part has at least 1/{resolution:,}; leave out the smallest, or raise them"
    )


def slots_at(weights: Sequence[float], resolution: int) -> tuple[int, ...]:
    """Return the places of each part in a cycle of about `resolution`, without what they have in common."""
    slots = [max(1, round(weight * resolution)) for weight in weights]
    common = math.gcd(*slots)
    return tuple(slot // common for slot in slots)


@dataclass(frozen=True)
class BatchPlan:
    """Divides the samples of a step among replicas, data-parallel ranks and microbatches.

    The samples of one step are consecutive in the order: replica by replica, within it data-parallel rank by rank,
    within it microbatch by microbatch. dp = N with m microbatches reads what dp = 1 with N*m would.

    In a federation each replica has an order of its own, and its plan is that of one replica.
    """

    replicas: int  # of this job
    dp: int
    microbatches: int  # per data-parallel rank and step
    micro_batch_size: int  # samples
    start_step: int = 0  # steps before it had other batches (of other replicas, say) ...
    start_sample: int = 0  # ... and consumed this many samples
    slot: int = 0  # number of the first replica

    @property
    def replica_batch(self) -> int:
        """Samples one replica consumes per step."""
        return self.dp * self.microbatches * self.micro_batch_size

    @property
    def global_batch(self) -> int:
        """Samples all replicas of this job consume per step."""
        return self.replicas * self.replica_batch

    def first(self, step: int, replica: int, dp: int, microbatch: int) -> int:
        """Return the place in the sample order of the first sample of a microbatch."""
        within = (
            ((replica - self.slot) * self.dp + dp) * self.microbatches + microbatch
        ) * self.micro_batch_size
        return self.consumed(step) + within

    def consumed(self, step: int) -> int:
        """Return how many samples all replicas of this job have consumed before `step`."""
        return self.start_sample + (step - self.start_step) * self.global_batch
