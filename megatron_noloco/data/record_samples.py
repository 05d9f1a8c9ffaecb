"""Samples of records for fine-tuning, of which several may share one."""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from megatron_noloco.data.indexed import Dataset
from megatron_noloco.data.samples import IGNORED, Array, Sample, check_index
from megatron_noloco.errors import UserError

_BATCH_RECORDS = 1 << 10  # records whose masks are added up at once


class RecordSamples:
    """Samples of one or several whole records (sequences), padded with tokens that have no loss.

    A record longer than a sample is cut, and left out if none of its answer remains.

    Attributes:
        cut: number of records that were cut or left out.
    """

    def __init__(self, dataset: Dataset, seq_length: int, packed: bool, padding: int) -> None:
        """Raise UserError when all records are left out.

        Args:
            packed: whether a sample holds as many records as fit, as separate documents; otherwise one.
            padding: the token that pads a sample.
        """
        assert dataset.mask is not None
        assert dataset.offsets is not None
        self.seq_length, self.name, self.packed, self.padding = seq_length, dataset.name, packed, padding
        self._tokens, self._mask = dataset.tokens, dataset.mask
        offsets = dataset.offsets[:] - dataset.offsets[:1]
        lengths = np.diff(offsets)
        self.cut = int((lengths > seq_length + 1).sum())
        lengths = np.minimum(lengths, seq_length + 1)
        learnt = self._learnt(offsets[:-1], lengths)
        fit = learnt > 0
        self._begins, self._lengths, self._learnt_lengths = offsets[:-1][fit], lengths[fit], learnt[fit]
        if not fit.any():
            raise UserError(
                f"{self.name}: none of {len(fit)} records has an answer within {seq_length} tokens"
            )
        inputs = self._lengths - 1  # the last token is a label only
        samples = pack(inputs.tolist(), seq_length) if packed else [[place] for place in range(len(inputs))]
        self._ends = np.cumsum([len(places) for places in samples])
        self._places = np.concatenate(samples, dtype=np.int64)

    def _learnt(self, begins: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return how many tokens of each record have a loss, the first token aside, int64 [records]."""
        found = []
        for first in range(0, len(begins), _BATCH_RECORDS):
            starts = begins[first : first + _BATCH_RECORDS]
            ends = starts + lengths[first : first + _BATCH_RECORDS]
            sums = np.cumsum(np.insert(self._mask[starts[0] : ends[-1]], 0, 0), dtype=np.int64)
            found.append(sums[ends - starts[0]] - sums[starts + 1 - starts[0]])
        return np.concatenate(found)

    def _record(self, place: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of a record, as far as they fit, and whether each has a loss."""
        read = slice(self._begins[place], self._begins[place] + self._lengths[place])
        return self._tokens[read], self._mask[read]

    def _learnt_of(self, place: int) -> np.ndarray:
        tokens, answer = self._record(place)
        return tokens[1:][answer[1:]]

    @property
    def labels(self) -> Array:
        """All tokens that have a loss, one record after the other."""
        return _Joined(self._learnt_lengths, self._learnt_of)

    @property
    def contents(self) -> tuple[Array, ...]:
        """All that samples are made of: the tokens of all records, which of them are answers, and each length."""
        tokens = _Joined(self._lengths, lambda place: self._record(place)[0])
        return tokens, _Joined(self._lengths, lambda place: self._record(place)[1]), self._lengths

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> Sample:
        check_index(self, index)
        places = self._places[self._ends[index - 1] if index else 0 : self._ends[index]]
        tokens = np.full(self.seq_length, self.padding, dtype=np.int64)
        labels = np.full(self.seq_length, IGNORED, dtype=np.int64)
        documents = np.full(self.seq_length, len(places), dtype=np.int64)
        start = 0
        for number, place in enumerate(places):
            record, answer = self._record(place)
            stop = start + len(record) - 1
            tokens[start:stop] = record[:-1]
            # Not np.where: tokens may be unsigned, and the negative IGNORED would become a token.
            labels[start:stop][answer[1:]] = record[1:][answer[1:]]
            documents[start:stop] = number
            start = stop
        return Sample(tokens, labels, documents if self.packed else None)


class _Joined:
    """Rows of numbers, one after the other, each read when it is needed."""

    def __init__(self, lengths: np.ndarray, row: Callable[[int], np.ndarray]) -> None:
        self._ends, self._row = np.cumsum(lengths), row

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, places: slice) -> np.ndarray:
        start, stop, _ = places.indices(len(self))
        first, last = np.searchsorted(self._ends, [start, stop - 1], side="right").tolist()
        before = int(self._ends[first - 1]) if first else 0
        return np.concatenate([self._row(row) for row in range(first, last + 1)])[
            start - before : stop - before
        ]


def pack(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Decide which lengths share a sample of `room` tokens; return their indices, sample by sample.

    Best-fit decreasing (Ding et al., arXiv 2404.10830): the longest first, each where it leaves the least room. No
    length may be more than `room`.
    """
    samples: list[list[int]] = []
    by_room: dict[int, list[list[int]]] = defaultdict(list)
    rooms: list[int] = []  # the keys of `by_room` that have samples, ascending
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        fit = bisect_left(rooms, lengths[place])
        if fit == len(rooms):
            samples.append([])
            by_room[room].append(samples[-1])
            rooms.append(room)  # in order: all samples so far have less room than this length
        left = rooms[fit]
        sample = by_room[left].pop()
        if not by_room[left]:
            del rooms[fit]
        sample.append(place)
        left -= lengths[place]
        if not by_room[left]:
            insort(rooms, left)
        by_room[left].append(sample)
    return samples
