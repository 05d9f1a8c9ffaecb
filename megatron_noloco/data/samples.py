"""Samples: the tokens of a dataset cut to equal lengths.

Validation data are cut in the order of the files. Training data are shuffled twice:

- `ShuffledSamples` lays the sequences (documents, or pieces of long ones) end to end in an order drawn from the
  run's seed, and cuts them into samples, so that neighbours in the files do not share samples.
- `plans/sample_order.py` shuffles the samples, anew in every epoch.

Megatron-core's GPTDataset shuffles both as well, and keeps the orders in index files. Here every element of an
order is computed when it is needed, so there are no index files to build, share or verify.

Records for fine-tuning become samples in `record_samples.py`.
"""

from functools import cached_property
from typing import NamedTuple

import numpy as np

from megatron_noloco.data.indexed import Dataset, Offsets
from megatron_noloco.data.sources import Needs
from megatron_noloco.errors import UserError
from megatron_noloco.plans.draws import Shuffle, Stream

IGNORED = -100  # label without a loss, as in torch and transformers

_BLOCK = 64  # sequences; the end of each block is kept: 1/8 byte of memory per sequence, the rest is mapped
_BATCH_BLOCKS = 1 << 14  # blocks whose lengths are added up at once


class Sample(NamedTuple):
    """Input and labels of a model; each int64, shape [seq_length]."""

    tokens: np.ndarray
    labels: np.ndarray  # the next token of each, or IGNORED
    documents: np.ndarray | None  # the number of each token's document in the sample; None: not separated


class Samples:
    """Samples in the order of the tokens: sample i is cut from tokens[i*S : i*S + S + 1], where S = `seq_length`.

    The first S of these are its tokens, the last S its labels. Neighbouring samples share one token, so that each
    token but the first is a label once; a rest shorter than a sample is left out.

    Attributes:
        dataset: of which samples are made.
        contents: all that samples are made of: first the tokens.
        learnt: number of tokens that have a loss.
        tokens_per_sample: mean number of tokens in a sample, padding left out.
    """

    def __init__(self, dataset: Dataset, needs: Needs) -> None:
        """Raise UserError when there are fewer than S + 1 tokens."""
        self.needs, self.seq_length = needs, needs.seq_length
        self.dataset, self.tokens, self.name = dataset, dataset.tokens, dataset.name
        self.contents: tuple[np.ndarray | Offsets, ...] = (self.tokens,)
        self.learnt = len(self.tokens)
        self.tokens_per_sample = float(self.seq_length)
        if len(self.tokens) < self.seq_length + 1:
            raise UserError(
                f"corpus too small: {self.name} has {len(self.tokens)} tokens, one sample needs "
                f"seq_length + 1 = {self.seq_length + 1}; give more text, or lower seq_length"
            )

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.seq_length

    def __getitem__(self, index: int) -> Sample:
        """Return a sample; raises UserError for tokens that no check at the start has read."""
        assert 0 <= index < len(self), index
        read, lasts = self._read(index * self.seq_length)
        check_vocabulary(read, self.needs.vocab_size, f"sample {index} of {self.name}")
        tokens, labels = read[:-1], read[1:]
        if not (self.needs.reset_attention_mask or self.needs.eod_mask_loss):
            return Sample(tokens, labels, None)
        ends = read == self.needs.end_of_document
        ends[lasts] = True  # the next piece of a long document lies elsewhere
        ends = ends[:-1]
        if self.needs.eod_mask_loss:
            labels = np.where(ends, IGNORED, labels)
        # An end-of-document token belongs to the document that it ends.
        numbers = np.cumsum(ends) - ends if self.needs.reset_attention_mask else None
        return Sample(tokens, labels, numbers)

    def _read(self, start: int) -> tuple[np.ndarray, list[int]]:
        """Return S + 1 tokens from offset `start` on, int64, and where in them shuffled sequences end."""
        return self.tokens[start : start + self.seq_length + 1].astype(np.int64), []


class ShuffledSamples(Samples):
    """Samples of sequences that are laid end to end in an order drawn from the seed.

    There are as many as without shuffling, and each token is a label at most once.
    """

    def __init__(self, dataset: Dataset, needs: Needs) -> None:
        """Raise UserError when there is no whole sample."""
        super().__init__(dataset, needs)
        self.contents = self.tokens, dataset.offsets
        self._order = Shuffle(dataset.sequences, needs.seed, Stream.DOCUMENTS)

    def _read(self, start: int) -> tuple[np.ndarray, list[int]]:
        stop = start + self.seq_length + 1
        block = int(np.searchsorted(self._block_ends, start, side="right"))
        place = int(self._block_ends[block - 1]) if block else 0
        pieces, lasts = [], []
        while place < stop:
            begins, lengths = self._sequences(block * _BLOCK, (block + 1) * _BLOCK)
            for begin, length in zip(begins.tolist(), lengths.tolist(), strict=True):
                first, last = max(start - place, 0), min(stop - place, length)
                if first < last:
                    pieces.append(self.tokens[begin + first : begin + last])
                    if last == length:
                        lasts.append(place + length - 1 - start)
                place += length
            block += 1
        return np.concatenate(pieces, dtype=np.int64), lasts

    def _sequences(self, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return where sequences `first` to `stop` of the shuffled order begin in `tokens`, and their lengths."""
        return self.dataset.spans(self._order.at(np.arange(first, min(stop, self._order.size))))

    @cached_property
    def _block_ends(self) -> np.ndarray:
        """The offset, in tokens of the shuffled order, at which each block ends, shape [blocks]."""
        step = _BLOCK * _BATCH_BLOCKS
        sums = [
            np.add.reduceat(lengths, np.arange(0, len(lengths), _BLOCK))
            for first in range(0, self._order.size, step)
            for _, lengths in [self._sequences(first, first + step)]
        ]
        return np.cumsum(np.concatenate(sums))


def in_samples(number: int, seq_length: int) -> str:
    """Return a number of samples in words."""
    return f"{number} {'sample' if number == 1 else 'samples'} of {seq_length} tokens"


def check_vocabulary(tokens: np.ndarray, vocab_size: int, name: str) -> None:
    """Raise UserError for a token outside the vocabulary. `name` says what holds the tokens."""
    smallest, largest = int(tokens.min()), int(tokens.max())
    if smallest < 0 or largest >= vocab_size:
        raise UserError(
            f"{name} holds token {smallest if smallest < 0 else largest}, the vocabulary has {vocab_size} (from 0 "
            "on): it is damaged, or was made with another tokenizer (data.tokenizer_model)"
        )
