"""Sample order: which sample a microbatch holds, as a pure function of how many were consumed before it."""

from dataclasses import dataclass

import numpy as np

from megatron_noloco.plans.draws import Stream, draw_words

_FEISTEL_ROUNDS = 4


@dataclass(frozen=True)
class SampleOrder:
    """An endless sequence of sample ids in which every epoch visits each of `samples` exactly once.

    Each epoch has a permutation of its own, evaluated per element by a small Feistel network (with cycle
    walking where `samples` is not a power of four): no table, so the order of a trillion samples costs nothing.
    """

    samples: int
    seed: int

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError(f"a sample order needs at least one sample, not {self.samples}")

    def ids(self, first: int, count: int) -> np.ndarray:
        """Sample ids at places first .. first+count-1 of the sequence, shape [count]."""
        places = np.arange(first, first + count, dtype=np.int64)
        epochs, offsets = np.divmod(places, self.samples)
        ids = np.empty(count, dtype=np.int64)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            ids[chosen] = self._permute(offsets[chosen], int(epoch))
        return ids

    def _permute(self, offsets: np.ndarray, epoch: int) -> np.ndarray:
        half_bits = max(1, ((self.samples - 1).bit_length() + 1) // 2)
        mask = np.uint64((1 << half_bits) - 1)
        shift = np.uint64(half_bits)
        keys = draw_words(_FEISTEL_ROUNDS, self.seed, Stream.SAMPLES, epoch)
        values = offsets.astype(np.uint64)
        outside = np.ones(len(values), dtype=bool)
        while outside.any():  # cycle walking: the network permutes 4**half_bits >= samples values
            walking = values[outside]
            left, right = walking >> shift, walking & mask
            for key in keys:
                left, right = right, left ^ (_mix(right ^ key) & mask)
            values[outside] = (left << shift) | right
            outside = values >= self.samples
        return values.astype(np.int64)


def _mix(words: np.ndarray) -> np.ndarray:
    """A bijective scrambler of 64-bit words (the SplitMix64 finaliser)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


@dataclass(frozen=True)
class BatchPlan:
    """How the samples of a step are dealt to microbatches.

    The samples of one step are consecutive in the order: replica by replica, in it lane by lane, in it
    microbatch by microbatch. N lanes of m microbatches therefore read what one lane of N*m would.
    """

    replicas: int
    lanes: int
    microbatches: int  # per lane and step
    micro_batch_size: int  # samples
    start_step: int = 0  # steps before it were made with other batches (other replicas, say) ...
    start_sample: int = 0  # ... and consumed so many samples

    @property
    def replica_batch(self) -> int:
        """Samples one replica consumes per step."""
        return self.lanes * self.microbatches * self.micro_batch_size

    @property
    def global_batch(self) -> int:
        """Samples all replicas consume per step."""
        return self.replicas * self.replica_batch

    def first(self, step: int, replica: int, lane: int, microbatch: int) -> int:
        """The place in the sample order of the first sample of a microbatch."""
        within = ((replica * self.lanes + lane) * self.microbatches + microbatch) * self.micro_batch_size
        return self.consumed(step) + within

    def consumed(self, step: int) -> int:
        """Samples all replicas have consumed before `step`."""
        return self.start_sample + (step - self.start_step) * self.global_batch
