"""The datasets of a run: their parts, the order of their samples, their checksums."""

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_noloco.data.indexed import Offsets
from megatron_noloco.data.records import RecordDataset
from megatron_noloco.data.samples import JoinedDataset, TokenDataset
from megatron_noloco.plans.sample_order import BLEND_RESOLUTION, BlendedOrder, slots_at, slots_of

# Tokens of a large dataset that are checked and counted at the start; a smaller one is read whole. A sample of the
# rest is checked when it is read.
_EXCERPT_TOKENS = 1 << 24
_FINGERPRINT_TOKENS = 1 << 16
_COUNTED_TOKENS = 1 << 20  # counted at once: bincount widens each token to 8 bytes


# Counter in the checkpoints of a run whose files of text are each in one split, which their places decide. Up to
# version 0.3 a hash of their names did, under another counter.
BY_FILE = "training_data_3"


@dataclass(frozen=True)
class Part:
    """One dataset of a blend."""

    dataset: TokenDataset | RecordDataset
    weight: float


@dataclass(frozen=True)
class Datasets:
    """The training samples of a run, and its validation samples (none if the run never evaluates)."""

    training: list[Part]
    validation: list[Part]
    summary: str  # one line for the banner
    vocab_size: int  # of the model
    by_file: bool = False  # whether each file of text is in one split

    @cached_property
    def train(self) -> JoinedDataset:
        """All training samples; their ids are those of `order`."""
        return JoinedDataset([part.dataset for part in self.training])

    def order(self, seed: int, slot: int | None = None) -> BlendedOrder:
        """Return the order in which a run of this seed, or a slot of a federation, reads `train`."""
        sizes = tuple(len(part.dataset) for part in self.training)
        return BlendedOrder(sizes, tuple(part.weight for part in self.training), seed, slot)

    @cached_property
    def checksums(self) -> dict[str, int]:
        """Checksums of the training data, wherever they lie, by the name of a checkpoint's counter; newest first.

        The first is of all that samples are made of. The second, of 0.2 and before, is of the tokens that have a
        loss; it is another one where the blend is read in another order since. Of large arrays they read excerpts.
        Where each file of text is in one split, there is a single one with another name.
        """
        if self.by_file:
            return {BY_FILE: _checksum(self.training)}
        weights = [part.weight for part in self.training]
        reordered = slots_of(weights) != slots_at(weights, BLEND_RESOLUTION)
        return {
            "training_data_2": _checksum(self.training),
            "training_data": _checksum(self.training, lambda data: (data.tokens,), start=int(reordered)),
        }

    @cached_property
    def fingerprint(self) -> int:
        """A checksum of a small part of all data, which all ranks of a job must have alike."""
        return _checksum(self.training + self.validation, most=_FINGERPRINT_TOKENS)

    @cached_property
    def unigram_entropy(self) -> float:
        """Validation loss, in nats per token, of a unigram model: a trained model must have a smaller one.

        A token's probability is its share of the training tokens, with 1 added to each count so that none is zero.
        Of a large dataset only an excerpt is counted. NaN without validation.
        """
        if not self.validation:
            return math.nan
        probabilities = _shares(self.training, self.vocab_size, pseudocount=1)
        return float(-(_shares(self.validation, self.vocab_size, pseudocount=0) @ np.log(probabilities)))


def excerpt(array: np.ndarray | Offsets, most: int | None = None) -> np.ndarray:
    """Return up to `most` elements (None: `_EXCERPT_TOKENS`), evenly spread over the array in 16 stretches."""
    most = most or _EXCERPT_TOKENS
    if len(array) <= most:
        return array[:]
    starts = np.linspace(0, len(array) - most // 16, 16).astype(int)
    return np.concatenate([array[start : start + most // 16] for start in starts])


def _checksum(
    parts: list[Part],
    contents: Callable[[TokenDataset | RecordDataset], tuple[np.ndarray | Offsets, ...]] = lambda data: (
        data.contents
    ),
    start: int = 0,
    most: int | None = None,
) -> int:
    """Return a checksum of the sizes and weights of datasets, and of excerpts of their contents."""
    checksum = start
    for part in parts:
        size = f"{len(part.dataset)} {len(part.dataset.tokens)} {part.weight}"
        checksum = zlib.crc32(size.encode(), checksum)
        for array in contents(part.dataset):
            checksum = zlib.crc32(np.ascontiguousarray(excerpt(array, most)).data, checksum)
    return checksum


def _shares(parts: list[Part], vocab_size: int, pseudocount: int) -> np.ndarray:
    """Return the relative frequency of each token in a blend, shape [vocab_size].

    Args:
        pseudocount: added to each token's count in each part.
    """
    shares = np.zeros(vocab_size)
    for part in parts:
        tokens = excerpt(part.dataset.tokens)
        counts = np.full(vocab_size, pseudocount)
        for start in range(0, len(tokens), _COUNTED_TOKENS):
            counts += np.bincount(tokens[start : start + _COUNTED_TOKENS], minlength=vocab_size)
        shares += part.weight * (counts / counts.sum())
    return shares
