"""Samples: the tokens of a dataset cut to equal lengths.

Of indexed datasets the training samples are shuffled, twice and each time computed element by element:

- Here, the sequences of a dataset (documents, or pieces of long ones), in an order drawn from the run's seed. They
  are laid end to end in that order and cut into samples: neighbours in the files do not share samples.
- In `plans/samples.py`, the samples, anew in every epoch.

Megatron-core's GPTDataset does the first alike, and shuffles samples besides. It keeps both orders on disk, in
tables as long as the dataset has sequences and samples. Here there are no indices to make, to share or to find
damaged.
"""

from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np

from megatron_noloco.data.sources import Documents
from megatron_noloco.plans.draws import Stream
from megatron_noloco.plans.shuffle import Shuffle

IGNORED = -100  # a label without a loss; the number that torch and transformers use

_BLOCK = 64  # sequences whose common end is remembered: 1/8 byte of memory per sequence
_AT_ONCE = 1 << 14  # blocks, while the ends are added up


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
    """Tokens in their order: sample i is cut from tokens[i*S : i*S + S + 1], where S = `seq_length`.

    Its tokens are the first S of these, its labels the last S. Neighbouring samples share one token, so that every
    token but the first is a label exactly once.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        seq_length: int,
        name: str = "dataset",
        documents: Documents | None = None,
    ) -> None:
        """Raises ValueError where there is no whole sample.

        Args:
            documents: what is done at the borders of documents; None: nothing.
        """
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
        check_index(self, index)
        read = self._read(index * self.seq_length)
        tokens, labels = read[:-1], read[1:]
        if self.documents is None:
            return Sample(tokens, labels, None)
        ends = tokens == self.documents.end_of_document
        if self.documents.eod_mask_loss:
            labels = np.where(ends, IGNORED, labels)
        # An end belongs to the document that it ends.
        numbers = np.cumsum(ends) - ends if self.documents.reset_attention_mask else None
        return Sample(tokens, labels, numbers)

    def _read(self, start: int) -> np.ndarray:
        """Return S + 1 tokens from place `start` on, int64."""
        return self.tokens[start : start + self.seq_length + 1].astype(np.int64)


class ShuffledDataset(TokenDataset):
    """Samples of sequences that lie end to end in an order drawn from `seed`.

    As many as a TokenDataset of the same tokens has, each token but the first a label at most once.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        offsets: np.ndarray,
        seq_length: int,
        name: str,
        seed: int,
        documents: Documents | None = None,
    ) -> None:
        """Raises ValueError where there is no whole sample.

        Args:
            tokens: the tokens of all sequences, in the order of the file, shape [tokens].
            offsets: where each sequence begins, and where the last one ends, shape [sequences + 1]; counted from
                anywhere, `offsets[0]` being the place of `tokens[0]`.
        """
        super().__init__(tokens, seq_length, name, documents)
        self._offsets = offsets
        self._order = Shuffle(len(offsets) - 1, seed, Stream.DOCUMENTS)

    def _read(self, start: int) -> np.ndarray:
        stop = start + self.seq_length + 1
        block = int(np.searchsorted(self._block_ends, start, side="right"))
        place = int(self._block_ends[block - 1]) if block else 0
        pieces = []
        while place < stop:
            begins, lengths = self._sequences(block * _BLOCK, (block + 1) * _BLOCK)
            for begin, length in zip(begins.tolist(), lengths.tolist(), strict=True):
                first, last = max(start - place, 0), min(stop - place, length)
                if first < last:
                    pieces.append(self.tokens[begin + first : begin + last])
                place += length
            block += 1
        return np.concatenate(pieces, dtype=np.int64)

    def _sequences(self, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return where the sequences at places `first` to `stop` of the order begin in `tokens`; their lengths."""
        ids = self._order.at(np.arange(first, min(stop, self._order.size)))
        return self._offsets[ids] - self._offsets[0], self._offsets[ids + 1] - self._offsets[ids]

    @cached_property
    def _block_ends(self) -> np.ndarray:
        """Tokens up to the end of each block of the shuffled order, shape [blocks]."""
        step = _BLOCK * _AT_ONCE
        sums = [
            np.add.reduceat(lengths, np.arange(0, len(lengths), _BLOCK))
            for first in range(0, self._order.size, step)
            for _, lengths in [self._sequences(first, first + step)]
        ]
        return np.cumsum(np.concatenate(sums))


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
        check_index(self, index)
        number = bisect_right(self._ends, index)
        return self.parts[number][index - (self._ends[number - 1] if number else 0)]


def check_index(dataset: SampleDataset, index: int) -> None:
    """Raise IndexError for a sample that the dataset does not have; negative ones are not counted from the end."""
    if not 0 <= index < len(dataset):
        raise IndexError(f"sample {index} is outside {dataset.name}, which has {len(dataset)}")
