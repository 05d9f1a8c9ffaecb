"""Open the training and validation data of a run: make the dataset if there is none, map it, divide it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from megatron_noloco.data.blend import Blend
from megatron_noloco.data.corpus import corpus_of, corpus_of_any
from megatron_noloco.data.data_in_words import SPLITS, epochs, indexed_in_words, made_in_words, read_twice
from megatron_noloco.data.indexed import Dataset, IndexedDataset, excerpt, open_indexed
from megatron_noloco.data.record_samples import RecordSamples, documents_apart
from megatron_noloco.data.samples import Samples, ShuffledSamples, check_vocabulary, in_samples
from megatron_noloco.data.sources import IndexedSource, Needs, Prefixes, RecordSource, Source
from megatron_noloco.data.tokenizer import Tokenizer
from megatron_noloco.errors import UserError

TRAINING, VALIDATION = range(2)

# Counters of a checkpoint, with the checksums of the training and of the validation data
TRAINING_DATA, VALIDATION_DATA = "training_data_2", "validation_data"


@dataclass(frozen=True)
class Data:
    """The training samples of a run, and its validation samples (None if the run never evaluates)."""

    training: Blend
    validation: Blend | None
    summary: str  # one line for the banner
    vocab_size: int  # of the model

    @cached_property
    def checksums(self) -> dict[str, int]:
        """Checksums of the training and of the validation data, by the names of a checkpoint's counters.

        All ranks of a job must have the same.
        """
        found = {TRAINING_DATA: self.training.checksum()}
        return found | ({VALIDATION_DATA: self.validation.checksum()} if self.validation else {})

    @cached_property
    def unigram_entropy(self) -> float:
        """Validation loss, in nats per token, of a unigram model: a trained model must have a smaller one.

        A token's probability is its share of the training tokens, with 1 added to each count so that none is zero.
        NaN without validation.
        """
        if self.validation is None:
            return math.nan
        probabilities = self.training.frequencies(self.vocab_size, pseudocount=1)
        return float(-(self.validation.frequencies(self.vocab_size, pseudocount=0) @ np.log(probabilities)))


class Opened:
    """The datasets of a source, mapped.

    Attributes:
        blends: of training and of validation, the datasets before they are divided, each with its share; no
            datasets: nothing is validated on.
    """

    def __init__(self, source: Source, tokenizer: Tokenizer) -> None:
        """Make the dataset, if there is none; raises UserError."""
        self.source, self.tokenizer = source, tokenizer
        if isinstance(source, IndexedSource):
            training = self._blend_of(source.train)
            self.blends = [training, training if source.split else self._blend_of(source.validation or ())]
        else:
            self.blends = [[(corpus_of(source, tokenizer).open(), 1.0)]] * 2

    def _blend_of(self, prefixes: Prefixes) -> list[tuple[IndexedDataset, float]]:
        """Return the datasets with their shares, by their tokens where none are given."""
        datasets = [(open_indexed(prefix, self.tokenizer), share) for prefix, share in prefixes]
        total = sum(len(dataset.tokens) for dataset, _ in datasets)
        return [
            (dataset, len(dataset.tokens) / total if share is None else share) for dataset, share in datasets
        ]

    def blend(self, needs: Needs, split: int) -> Blend:
        """Return the samples of a split; raises UserError if there are none, and for wrong tokens."""
        if not self.blends[split]:
            raise UserError(
                "data.valid_data_path is missing: there is nothing to evaluate on (evaluate: give --data)"
            )
        parts = [self._samples(self._part(dataset, split), needs, split) for dataset, _ in self.blends[split]]
        for part in parts:
            check_vocabulary(excerpt(part.dataset.tokens), needs.vocab_size, part.name)
        return Blend(parts, [share for _, share in self.blends[split]])

    def _part(self, dataset: IndexedDataset, split: int) -> Dataset:
        """Return what a split has of a dataset, in the order of its sequences or records; raises UserError."""
        if self.source.split is None:
            return dataset
        documents = dataset.document_bounds
        whole = isinstance(self.source, RecordSource)  # records, of one or more sequences
        bounds = self.source.split.bounds(len(documents) - 1 if whole else dataset.sequences)
        if whole:
            bounds = documents[bounds].tolist()
        elif not isinstance(self.source, IndexedSource):  # whose split is Megatron's
            bounds[1] = _between_documents(bounds, documents)
        first, stop = bounds[split : split + 2]
        part = dataset.part(first, stop, f"the {SPLITS[split]} split of {dataset.name}")
        if not len(part.tokens):
            raise UserError(
                f"corpus too small: {part.name} is empty; raise its weight in data.split, or add text"
            )
        return part

    def _samples(self, part: Dataset, needs: Needs, split: int) -> Samples | RecordSamples:
        """Return samples; those of validation are not shuffled, so that every run is evaluated on the same."""
        if isinstance(self.source, RecordSource):
            spans, end = part.spans(np.arange(part.sequences)), self.tokenizer.end_of_document
            return RecordSamples(part, spans, needs.seq_length, self.source.packed, end)
        return ShuffledSamples(part, needs) if split == TRAINING else Samples(part, needs)

    def divided(self, needs: Needs) -> Data:
        """Return the data of a run; raises UserError as `open_data` does."""
        training = self.blend(needs, TRAINING)
        validation = self.blend(needs, VALIDATION) if needs.evaluates else None
        if len(training) < needs.global_batch:
            raise UserError(
                f"corpus too small: one global batch needs {in_samples(needs.global_batch, needs.seq_length)}, "
                f"{training.name} has {len(training)}; give more text, or lower train_micro_batch_size_per_gpu, "
                "gradient_accumulation_steps, model.seq_length or the number of replicas"
            )
        blends, datasets = [training, validation], [dataset for blend in self.blends for dataset, _ in blend]
        if isinstance(self.source, IndexedSource):
            lines = indexed_in_words(datasets, blends, self.tokenizer, needs)
        else:
            lines = [made_in_words(datasets[0], blends)]
        lines += epochs(training, needs)
        if validation is not None:
            lines += read_twice(training, validation)
        return Data(training, validation, "; ".join(lines), needs.vocab_size)


def _between_documents(bounds: list[int], documents: np.ndarray) -> int:
    """Return where validation begins: between two documents, so that training reads no part of its documents.

    Within a document where training or validation would else lose half of what it has, as of a single long text.

    Args:
        bounds: see `Split.bounds`.
        documents: the first sequence of each document, and the end.
    """
    start, border, stop, _ = bounds
    place = int(np.searchsorted(documents, border))
    edges = documents[max(0, place - 1) : place + 1].tolist()
    nearest = min(edges, key=lambda edge: abs(edge - border))
    halves_remain = 2 * (nearest - start) >= border - start and 2 * (stop - nearest) >= stop - border
    return nearest if halves_remain else border


def check_source(source: Source, tokenizer: Tokenizer, output_dir: Path) -> None:
    """Raise UserError for damaged datasets, or if what the run writes would be read; nothing is written."""
    if isinstance(source, IndexedSource):
        Opened(source, tokenizer)
    else:
        corpus_of(source, tokenizer).check(output_dir)


def open_data(source: Source, tokenizer: Tokenizer, needs: Needs) -> Data:
    """Open the data of a run; raises UserError, in one line, when something is missing, damaged or too small.

    A training split smaller than one global batch is refused: a single step would see a sample twice.
    """
    return Opened(source, tokenizer).divided(needs)


def open_validation(
    source: Source, tokenizer: Tokenizer, needs: Needs, counters: Mapping[str, float], seq_length: int
) -> Blend:
    """Return a run's validation samples; raises UserError where a split of the data of today may be another one.

    Args:
        counters: of the run's checkpoint, which say what it was trained on.
        seq_length: tokens in a sample of the run.
    """
    opened = Opened(source, tokenizer)
    data = opened.divided(replace(needs, seq_length=seq_length))
    changed = any(
        counters.get(name, checksum) != checksum
        for name, checksum in data.checksums.items()
        if source.split is not None or name == VALIDATION_DATA  # else validation has datasets of its own
    )
    if changed:
        raise UserError(
            "the data have other contents than those that the run was trained on, or another order, so its "
            "validation split is not known (evaluate: give --data)"
        )
    return opened.blend(needs, VALIDATION)


def open_whole(
    data: str, tokenizer: Tokenizer, needs: Needs, cache: str | None = None
) -> tuple[RecordSamples, str]:
    """Return all of a text, of documents or records, or of an indexed dataset (by prefix), each document apart.

    The second value says which files are left out, "" if there are none. Raises UserError.
    """
    dataset, length = open_any(data, tokenizer, cache), needs.seq_length
    if dataset.mask is None:
        spans = documents_apart(dataset, length, tokenizer)
        length = int(spans[1].max()) - 1  # no longer than the longest document
    else:
        spans = dataset.spans(np.arange(dataset.sequences))
    samples = RecordSamples(dataset, spans, length, packed=True, padding=tokenizer.end_of_document)
    check_vocabulary(excerpt(dataset.tokens), needs.vocab_size, dataset.name)
    return samples, dataset.notes


def open_any(data: str, tokenizer: Tokenizer, cache: str | None = None) -> IndexedDataset:
    """Return the dataset of a text, of records, or under a prefix; raises UserError."""
    if Path(f"{data}.idx").exists():
        return open_indexed(data, tokenizer)
    return corpus_of_any(data, tokenizer, cache).open()
