"""The kinds of input: of what each makes its dataset, how that is divided, its samples, its line in the banner."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from megatron_noloco.data.blend import Blend
from megatron_noloco.data.cache import Entry, Recipe, cache_folder, find_entry, obtain
from megatron_noloco.data.encode import Counts, Sequence, check_lost, encode, read_documents
from megatron_noloco.data.formats import Advance
from megatron_noloco.data.indexed import Dataset, IndexedDataset, IndexedWriter, open_indexed
from megatron_noloco.data.inputs import Inputs, check_outside
from megatron_noloco.data.record_samples import RecordSamples
from megatron_noloco.data.records import encode_records
from megatron_noloco.data.samples import Samples, ShuffledSamples
from megatron_noloco.data.sources import STANDARD_LIBRARY, Needs, Prefixes
from megatron_noloco.data.tokenizer import Tokenizer
from megatron_noloco.errors import UserError
from megatron_noloco.files import check_writable, outside
from megatron_noloco.plans.sample_order import slots_of

TRAINING, VALIDATION = range(2)
SPLITS = ("training", "validation")
_FIRST_DOCUMENTS = 1 << 16  # whose ends are looked at, of a dataset that is there


Weighted = list[tuple[IndexedDataset, float]]
"""The datasets of a blend, before they are divided, each with its share."""


class Kind(ABC):
    """A kind of input, and the files of a source that hold it; its dataset is made once, in the cache.

    Attributes:
        unit: what a split divides, in words.
        has_answers: whether only answers have a loss.
        training: once opened, the datasets of training; with a split those of validation, too.
        validation: if each split has datasets of its own; None: there are none.
        facts: about the dataset that was made.
        key: of JSON lines that hold documents, or the column of a table.
        append_eod: whether a document ends with the tokenizer's end-of-document token.
    """

    unit: ClassVar[str]
    has_answers = False
    training: Weighted
    validation: Weighted | None = None
    facts: Mapping[str, Any] = {}
    key = "text"
    append_eod = True

    def __init__(self, source: Any, tokenizer: Tokenizer, inputs: Inputs) -> None:
        self.source, self.tokenizer, self.inputs = source, tokenizer, inputs

    @property
    def recipe(self) -> Recipe:
        """What the dataset is made of."""
        tokenizer = self.tokenizer
        settings: dict[str, Any] = {
            "kind": [type(self).__name__, self.key, self.append_eod],
            "tokenizer": [tokenizer.digest, tokenizer.files_digest if self.has_answers else ""],
            "special tokens": [tokenizer.splits_special_tokens, *tokenizer.before_document],
        }
        if self.has_answers and (renderer := tokenizer.chat_template.renderer):
            settings["renderer"] = renderer
        return Recipe(self.source.path, self.inputs.files, settings, self._write)

    def make(self) -> Entry:
        """Return the dataset, from the cache or made now; raises UserError for what cannot be read."""
        return obtain(cache_folder(self.source.cache), self.recipe)

    def open(self) -> None:
        """Map the dataset; raises UserError."""
        entry, source = self.make(), self.source
        check_lost(entry.facts, source.max_lost, f"{source.option} {source.name}", "data.max_lost_characters")
        self.facts = entry.facts
        self.training = [(open_indexed(entry.prefix, self.tokenizer, self.source.name), 1.0)]

    def check(self, output_dir: Path) -> None:
        """Raise UserError if nothing can be read, or what the run writes would be read; nothing is written."""
        if not any(item.bytes for item in self.inputs.files):
            raise self.empty()
        source, folder = self.source, cache_folder(self.source.cache)
        if source.path != STANDARD_LIBRARY:
            outputs = {"training.output_dir": output_dir, "data.cache": folder}
            check_outside(outputs, Path(source.path), source.option)
        if find_entry(folder, self.recipe.digest) is None:
            check_writable(folder, "data.cache")

    def check_first(self) -> None:
        """Read and encode the first rows, unless the dataset is there; raises UserError where that fails."""
        if self.inputs.files and find_entry(cache_folder(self.source.cache), self.recipe.digest) is None:
            next(iter(self.sequences(Counts(lambda _: None))), None)

    @abstractmethod
    def sequences(self, counts: Counts) -> Iterable[Sequence]:
        """Yield the sequences of the dataset; counts what they hold."""

    @abstractmethod
    def bounds(self, dataset: IndexedDataset) -> tuple[list[int], int]:
        """Return the first sequence of each split and the end of the last one, and the number of units."""

    @abstractmethod
    def samples(self, dataset: Dataset, needs: Needs, split: int) -> Samples | RecordSamples:
        """Return the samples of a split."""

    @abstractmethod
    def summary(self, training: Blend, validation: Blend | None) -> str:
        """Return a line that says what the data hold."""

    def empty(self, notes: str = "") -> UserError:
        """Return the error for files that hold nothing; `notes`: what is left out."""
        return UserError(
            f"{self.source.option}: no {type(self).__name__.lower()} in {self.source.path}{notes}"
        )

    def _write(self, prefix: Path, advance: Advance) -> dict[str, Any]:
        """Write the dataset under a prefix; return facts about it."""
        counts = Counts(advance)
        with IndexedWriter(prefix, self.tokenizer.vocab_size, masked=self.has_answers) as writer:
            for sequence in self.sequences(counts):
                writer.add(*sequence)
            facts = counts.facts(self.tokenizer, self.inputs.notes)
            if not len(writer):
                raise self.empty(facts["notes"])
            writer.finish()
        return {"tokenizer": self.tokenizer.digest, **facts}


class Documents(Kind):
    """Texts, and rows of JSON lines, Parquet and Arrow.

    Documents are divided in the order of their sequences. Those of training are shuffled; those of validation are
    not, so that every run is evaluated on the same samples.
    """

    unit = "sequences"

    def sequences(self, counts: Counts) -> Iterable[Sequence]:
        pieces = read_documents(self.inputs.files, self.key, counts)
        return encode(pieces, self.tokenizer, self.append_eod, counts)

    def bounds(self, dataset: IndexedDataset) -> tuple[list[int], int]:
        return self.source.split.bounds(dataset.sequences), dataset.sequences

    def samples(self, dataset: Dataset, needs: Needs, split: int) -> Samples:
        return ShuffledSamples(dataset, needs) if split == TRAINING else Samples(dataset, needs)

    def summary(self, training: Blend, validation: Blend | None) -> str:
        facts = self.facts
        size = f"{facts['documents']:,} documents in {facts['files']:,} files, {facts['bytes'] / 1e6:.1f} MB"
        tokens = " and ".join(
            f"{len(blend.parts[0].labels)} {name}"
            for name, blend in zip(SPLITS, (training, validation), strict=True)
            if blend is not None
        )
        return f"{self.source.name}, {size}, {tokens} tokens{facts['notes']}"


class Preprocessed(Documents):
    """Indexed datasets that are there: of `data preprocess`, or of Megatron."""

    def open(self) -> None:
        source = self.source
        self.training = self._opened(source.train)
        self.validation = source.validation and self._opened(source.validation)

    def check(self, output_dir: Path) -> None:
        self.open()

    def _opened(self, prefixes: Prefixes) -> Weighted:
        """Return the datasets with their shares, by their tokens where none are given."""
        datasets = [(open_indexed(prefix, self.tokenizer), share) for prefix, share in prefixes]
        total = sum(len(dataset.tokens) for dataset, _ in datasets)
        return [
            (dataset, len(dataset.tokens) / total if share is None else share) for dataset, share in datasets
        ]

    def summary(self, training: Blend, validation: Blend | None) -> str:
        """Raise UserError for a dataset that lacks a BOS that the run's documents are to begin with."""
        words = (
            f"{name}: {_in_words(blend)}" for name, blend in zip(SPLITS, (training, validation), strict=True)
        )
        line, tokenizer = "; ".join(words), self.tokenizer
        bos = tokenizer.beginning_of_document
        datasets = {dataset.name: dataset for dataset, _ in self.training + (self.validation or [])}
        for prefix, dataset in datasets.items():
            if not dataset.ends_with(tokenizer.end_of_document, _FIRST_DOCUMENTS):
                line += (
                    f"; documents of {prefix} have no end-of-document token (preprocess with --append-eod)"
                )
            begins = dataset.tokens[0] == bos
            if tokenizer.before_document and not begins:
                raise UserError(
                    f"data.prepend_bos: {prefix} does not begin with BOS (token {bos}); preprocess it with "
                    "--prepend-bos, or leave data.prepend_bos out"
                )
            if begins and not tokenizer.before_document and bos != tokenizer.end_of_document:
                advice = "set data.prepend_bos if it was made so, and an export adds it, too"
                line += f"; {prefix} begins with BOS; {advice}"
        return line


class Records(Kind):
    """Prompts and answers for fine-tuning, divided in their order."""

    unit = "records"
    has_answers = True

    def sequences(self, counts: Counts) -> Iterable[Sequence]:
        return encode_records(self.inputs.files, self.tokenizer, counts)

    def bounds(self, dataset: IndexedDataset) -> tuple[list[int], int]:
        records = len(dataset.document_bounds) - 1
        return dataset.document_bounds[self.source.split.bounds(records)].tolist(), records

    def samples(self, dataset: Dataset, needs: Needs, split: int) -> RecordSamples:
        return RecordSamples(dataset, needs.seq_length, self.source.packed, self.tokenizer.end_of_document)

    def summary(self, training: Blend, validation: Blend | None) -> str:
        learnt, tokens = len(training.parts[0].labels), training.tokens_per_sample * len(training)
        line = (
            f"{self.source.name}, {self.facts['records']} records, {len(training)} training samples with {learnt} "
            f"tokens in answers, {100 * learnt / tokens:.3g} % of all"
        )
        too_long, left_out = self._records_that_do_not_fit([training, *([validation] if validation else [])])
        if len(too_long):
            line += f"; records longer than a sample, cut: {len(too_long)} (first {self._place(too_long[0])})"
        if len(left_out):
            line += f"; records left out, since no answer fits: {len(left_out)} (first {self._place(left_out[0])})"
        return line + self.facts["notes"]

    def _records_that_do_not_fit(self, blends: list[Blend]) -> list[np.ndarray]:
        """Return the numbers of the records that are cut, and of those that are left out.

        The blends follow each other in the dataset from its beginning.
        """
        parts = [part for blend in blends for part in blend.parts if isinstance(part, RecordSamples)]
        too_long = np.concatenate([part.too_long for part in parts])
        left_out = np.concatenate([part.left_out for part in parts])
        bounds = self.training[0][0].document_bounds
        firsts = bounds[bounds < len(too_long)]
        gone = np.logical_and.reduceat(left_out, firsts)
        cut = np.logical_or.reduceat(too_long, firsts) & ~gone
        return [np.flatnonzero(cut), np.flatnonzero(gone)]

    def _place(self, record: int) -> str:
        """Return the place of a record in words, by its number in the dataset."""
        for name, number in self.facts["records_of_files"]:
            if record < number:
                return f"record {record + 1} of {outside(name)}"
            record -= number
        raise AssertionError("no file has the record")


def _in_words(blend: Blend | None) -> str:
    if blend is None:
        return "none"
    slots = slots_of(blend.weights)
    return ", ".join(
        f"{len(part.labels)} tokens of {part.name} ({100 * slot / sum(slots):.4g} %)"
        for part, slot in zip(blend.parts, slots, strict=True)
    )
