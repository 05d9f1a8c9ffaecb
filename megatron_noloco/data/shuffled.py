"""Training samples of an indexed dataset, whose sequences are shuffled before they are cut into samples.

There are two shuffles, and each is done once:

- Here, the sequences of a dataset (documents, or pieces of long ones), in an order drawn from the run's seed. They
  are laid end to end in that order and cut into samples: neighbours in the files do not share samples.
- In `plans/samples.py`, the samples, anew in every epoch.

Megatron-core's GPTDataset does the first alike, and shuffles samples besides. It keeps both orders on disk, in
tables as long as the dataset has sequences and samples. Both orders here are computed per element, so there are no
indices to make, to share or to find damaged.
"""

from functools import cached_property

import numpy as np

from megatron_noloco.data.dataset import TokenDataset
from megatron_noloco.data.sources import Documents
from megatron_noloco.plans.draws import Stream
from megatron_noloco.plans.shuffle import Shuffle

_BLOCK = 64  # sequences whose common end is remembered: 1/8 byte of memory per sequence
_AT_ONCE = 1 << 14  # blocks, while the ends are added up


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
            tokens: of all sequences, in the order of the file, shape [tokens].
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
        """Of places `first` to `stop` of the shuffled order: where the sequence begins in `tokens`, its length."""
        ids = self._order.at(np.arange(first, min(stop, self._order.size)))
        return self._offsets[ids] - self._offsets[0], self._offsets[ids + 1] - self._offsets[ids]

    @cached_property
    def _block_ends(self) -> np.ndarray:
        """Tokens up to the end of each block of the shuffled order, shape [blocks]."""
        step = _BLOCK * _AT_ONCE
        sums = [
            np.add.reduceat(lengths, np.arange(0, len(lengths), _BLOCK))
            for _, lengths in (
                self._sequences(first, first + step) for first in range(0, self._order.size, step)
            )
        ]
        return np.cumsum(np.concatenate(sums))
