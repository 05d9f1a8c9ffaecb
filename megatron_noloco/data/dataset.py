"""Datasets: tokens cut into samples of equal length, and several of them as one."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np

from megatron_noloco.data.sources import Documents

IGNORED = -100  # a label without a loss; the number that torch and transformers use


class Sample(NamedTuple):
    """What a model reads and is to predict; each int64, shape [seq_length]."""

    tokens: np.ndarray
    labels: np.ndarray  # after each token the next one, or IGNORED
    documents: np.ndarray | None  # the number of each token's document; None: all attend to all before them


class SampleDataset(Protocol):
    """What microbatches are made of."""

    name: str
    seq_length: int

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...


class TokenDataset:
    """Sample i is of tokens[i*S : i*S + S + 1], S = `seq_length`: what is read are [:-1], labels are [1:].

    Neighbouring samples share one token, so that every token but the first is a label exactly once.

    Args:
        documents: what is done at the borders of documents; None: nothing.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        seq_length: int,
        name: str = "dataset",
        documents: Documents | None = None,
    ) -> None:
        if seq_length < 1:
            raise ValueError(f"seq_length must be at least 1, not {seq_length}")
        if len(tokens) < seq_length + 1:
            raise ValueError(
                f"corpus too small: {name} has {len(tokens)} tokens, one sample needs "
                f"seq_length + 1 = {seq_length + 1}"
            )
        self.tokens = tokens
        self.seq_length = seq_length
        self.name = name
        self.documents = documents

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.seq_length

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is outside {self.name}, which has {len(self)}")
        return self._sample(self._read(index * self.seq_length))

    def _read(self, start: int) -> np.ndarray:
        """S + 1 tokens from place `start` on, int64."""
        return self.tokens[start : start + self.seq_length + 1].astype(np.int64)

    def _sample(self, read: np.ndarray) -> Sample:
        tokens, labels = read[:-1], read[1:]
        if self.documents is None:
            return Sample(tokens, labels, None)
        ends = tokens == self.documents.end_of_document
        if self.documents.eod_mask_loss:
            labels = np.where(ends, IGNORED, labels)
        # An end belongs to the document that it ends.
        numbers = np.cumsum(ends) - ends if self.documents.reset_attention_mask else None
        return Sample(tokens, labels, numbers)


class JoinedDataset:
    """The samples of several datasets, one dataset after the other."""

    def __init__(self, parts: Sequence[SampleDataset]) -> None:
        self.parts = parts
        self.seq_length = parts[0].seq_length
        self.name = f"the blend of {', '.join(part.name for part in parts)}"
        self._ends = list(accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is outside {self.name}, which has {len(self)}")
        number = bisect_right(self._ends, index)
        return self.parts[number][index - (self._ends[number - 1] if number else 0)]
