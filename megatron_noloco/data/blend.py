"""A blend: the samples of one or several datasets, their order, their checksum."""

import zlib
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from megatron_noloco.data.indexed import excerpt
from megatron_noloco.data.record_samples import RecordSamples
from megatron_noloco.data.samples import Sample, Samples
from megatron_noloco.plans.sample_order import Order


class Blend:
    """The samples of datasets, one dataset after the other, and the proportions in which training reads them.

    Attributes:
        parts: the datasets.
        weights: the share of each, adding up to 1.
    """

    def __init__(self, parts: Sequence[Samples | RecordSamples], weights: Sequence[float] = (1.0,)) -> None:
        self.parts, self.weights = tuple(parts), tuple(weights)
        self.seq_length = parts[0].seq_length
        self.name = "the blend of " * (len(parts) > 1) + ", ".join(part.name for part in parts)
        self._ends = list(accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Sample:
        number = bisect_right(self._ends, index)
        return self.parts[number][index - (self._ends[number - 1] if number else 0)]

    @property
    def tokens_per_sample(self) -> float:
        """Mean number of tokens in a sample, padding left out."""
        return sum(
            weight * part.tokens_per_sample for part, weight in zip(self.parts, self.weights, strict=True)
        )

    def order(self, seed: int, slot: int | None = None) -> Order:
        """Return the order in which a run of this seed, or a slot of a federation, reads the samples."""
        return Order(tuple(map(len, self.parts)), self.weights, seed, slot)

    def checksum(self) -> int:
        """Return a checksum of the sizes and weights of the datasets, and of excerpts of all that samples hold."""
        checksum = 0
        for part, weight in zip(self.parts, self.weights, strict=True):
            checksum = zlib.crc32(f"{len(part)} {part.learnt} {weight}".encode(), checksum)
            for array in part.contents:
                checksum = zlib.crc32(np.ascontiguousarray(excerpt(array)).data, checksum)
        return checksum

    def frequencies(self, vocab_size: int, pseudocount: int) -> np.ndarray:
        """Return the relative frequency of each token that has a loss, shape [vocab_size].

        Of a large dataset only an excerpt is counted.

        Args:
            pseudocount: added to each token's count in each dataset.
        """
        shares = np.zeros(vocab_size)
        for part, weight in zip(self.parts, self.weights, strict=True):
            counts = pseudocount + np.bincount(part.dataset.some_labels(), minlength=vocab_size)
            shares += weight * (counts / counts.sum())
        return shares


SampleDataset = Samples | RecordSamples | Blend
"""A dataset of which microbatches are made."""
