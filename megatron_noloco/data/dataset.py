"""Datasets: a split's tokens, cut into samples of equal length."""

from dataclasses import dataclass

import numpy as np

from megatron_noloco.data.corpus import Corpus


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
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is outside {self.name}, which has {len(self)}")
        start = index * self.seq_length
        return self.tokens[start : start + self.seq_length + 1].astype(np.int64)


@dataclass(frozen=True)
class Datasets:
    """What a run reads: samples to learn from, and samples to measure on."""

    train: TokenDataset
    validation: TokenDataset


def build_datasets(corpus: Corpus, seq_length: int, global_batch: int) -> Datasets:
    """The datasets of a run whose every step consumes `global_batch` training samples.

    A training split smaller than one global batch is refused: a single step would see a sample twice.
    """
    train = TokenDataset(corpus.train, seq_length, f"the training split of {corpus.name}")
    validation = TokenDataset(corpus.validation, seq_length, f"the validation split of {corpus.name}")
    if len(train) < global_batch:
        raise ValueError(
            f"corpus too small: {train.name} has {len(corpus.train)} tokens = {len(train)} samples of "
            f"{seq_length}, one global batch needs {global_batch}"
        )
    return Datasets(train, validation)
