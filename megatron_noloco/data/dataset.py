"""Datasets: tokens cut into samples of equal length, and several of them as one."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np


class SampleDataset(Protocol):
    """What microbatches are made of."""

    name: str
    seq_length: int

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> np.ndarray:
        """Sample `index`, int64, shape [seq_length + 1]: inputs are [:-1], labels are [1:]."""
        ...


class TokenDataset:
    """Sample i is tokens[i*S : i*S + S + 1], S = `seq_length`: inputs are [:-1], labels are [1:].

    Neighbouring samples share one token, so that every token but the first is a label exactly once.
    """

    def __init__(self, tokens: np.ndarray, seq_length: int, name: str = "dataset") -> None:
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

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.seq_length

    def __getitem__(self, index: int) -> np.ndarray:
        """Sample `index`, int64, shape [S + 1]."""
        self._check(index)
        start = index * self.seq_length
        return self.tokens[start : start + self.seq_length + 1].astype(np.int64)

    def _check(self, index: int) -> None:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is outside {self.name}, which has {len(self)}")


class JoinedDataset:
    """The samples of several datasets, one dataset after the other."""

    def __init__(self, parts: Sequence[SampleDataset]) -> None:
        self.parts = parts
        self.seq_length = parts[0].seq_length
        self.name = f"the blend of {', '.join(part.name for part in parts)}"
        self._ends = list(accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> np.ndarray:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is outside {self.name}, which has {len(self)}")
        number = bisect_right(self._ends, index)
        return self.parts[number][index - (self._ends[number - 1] if number else 0)]
