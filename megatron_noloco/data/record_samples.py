"""Samples of records for fine-tuning, of which several may share one."""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from megatron_noloco.data.indexed import Dataset, IndexedDataset
from megatron_noloco.data.samples import IGNORED, Sample
from megatron_noloco.data.tokenizer import Tokenizer
from megatron_noloco.errors import UserError

Spans = tuple[np.ndarray, np.ndarray]
"""Where records begin in the tokens of a dataset, and their lengths, each int64 [records]."""


class RecordSamples:
    """Samples of one or several whole records (sequences), padded with tokens that have no loss.

    A record longer than a sample is cut, and left out if none of its answer remains.

    Attributes:
        cut: number of sequences that are longer than a sample, and cut.
        left_out: number of sequences that are left out.
        dataset, contents, learnt, tokens_per_sample: see `Samples`.
    """

    def __init__(self, dataset: Dataset, spans: Spans, seq_length: int, packed: bool, padding: int) -> None:
        """Raise UserError when all records are left out.

        Args:
            spans: the records.
            packed: whether a sample holds as many records as fit, as separate documents; otherwise one.
            padding: the token that pads a sample.
        """
        self.seq_length, self.name, self.packed, self.padding = seq_length, dataset.name, packed, padding
        self.dataset, self._tokens = dataset, dataset.tokens
        self._mask = np.broadcast_to(True, len(dataset.tokens)) if dataset.mask is None else dataset.mask
        begins, lengths = spans
        too_long = lengths > seq_length + 1
        lengths = np.minimum(lengths, seq_length + 1)
        # The first token of a record is no label.
        labels = zip((begins + 1).tolist(), (begins + lengths).tolist(), strict=True)
        learnt = np.array(
            [np.count_nonzero(self._mask[first:stop]) for first, stop in labels], dtype=np.int64
        )
        fit = learnt > 0
        self.cut, self.left_out = int((too_long & fit).sum()), int((~fit).sum())
        self._begins, self._lengths, self.learnt = begins[fit], lengths[fit], int(learnt.sum())
        if not fit.any():
            raise UserError(
                f"{self.name}: none of {len(fit)} records has an answer within {seq_length} tokens; give a larger "
                "seq_length"
            )
        inputs = self._lengths - 1  # the last token is a label only
        samples = pack(inputs.tolist(), seq_length) if packed else [[place] for place in range(len(inputs))]
        self._ends = np.cumsum([len(places) for places in samples])
        self._places = np.concatenate(samples, dtype=np.int64)
        self.contents = self._tokens, self._mask, self._lengths
        self.tokens_per_sample = float(inputs.sum()) / len(self)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> Sample:
        assert 0 <= index < len(self), index
        places = self._places[self._ends[index - 1] if index else 0 : self._ends[index]]
        tokens = np.full(self.seq_length, self.padding, dtype=np.int64)
        labels = np.full(self.seq_length, IGNORED, dtype=np.int64)
        documents = np.full(self.seq_length, len(places), dtype=np.int64)
        start = 0
        for number, place in enumerate(places):
            read = slice(self._begins[place], self._begins[place] + self._lengths[place])
            record, answer = self._tokens[read], self._mask[read]
            stop = start + len(record) - 1
            tokens[start:stop] = record[:-1]
            # Not np.where: tokens may be unsigned, and the negative IGNORED would become a token.
            labels[start:stop][answer[1:]] = record[1:][answer[1:]]
            documents[start:stop] = number
            start = stop
        return Sample(tokens, labels, documents if self.packed else None)


def documents_apart(dataset: IndexedDataset, seq_length: int, tokenizer: Tokenizer) -> Spans:
    """Return the documents of a dataset as the records of an evaluation, which reads each apart from the others.

    A document begins with its BOS, or after the end of the one before. Every other token of its text is a label
    once; its end is none, so that losses compare with those of other programs. A document longer than a sample is
    cut into several.

    Raises UserError where there is no token to predict.
    """
    end, bos = tokenizer.end_of_document, tokenizer.beginning_of_document
    edges = dataset.offsets[dataset.document_bounds]
    edges = edges[np.insert(np.diff(edges) > 0, 0, True)]  # without empty documents
    firsts, lasts = edges[:-1].copy(), edges[1:].copy()
    lasts -= dataset.tokens[lasts - 1] == end
    begins_itself = (dataset.tokens[firsts] == bos) & (bos != end)
    firsts -= (dataset.tokens[firsts - 1] == end) & ~begins_itself & (firsts > 0)
    has_text = lasts - firsts > 1
    if not has_text.any():
        raise UserError(
            f"{dataset.name}: holds no text of two tokens, of which the second could be predicted"
        )
    firsts, lasts = firsts[has_text], lasts[has_text]
    pieces = -(-(lasts - firsts - 1) // seq_length)
    number = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    begins = np.repeat(firsts, pieces) + number * seq_length
    return begins, np.minimum(np.repeat(lasts, pieces) - begins, seq_length + 1)


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
