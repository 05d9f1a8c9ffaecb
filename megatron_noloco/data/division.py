"""Divide a dataset into training and validation, and say in a line what it holds."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import astuple, dataclass

import numpy as np

from megatron_noloco.data.blend import Blend, excerpt
from megatron_noloco.data.cache import Entry
from megatron_noloco.data.indexed import Dataset, open_indexed
from megatron_noloco.data.inputs import name_of_text
from megatron_noloco.data.record_samples import RecordSamples
from megatron_noloco.data.samples import Samples, ShuffledSamples, check_vocabulary
from megatron_noloco.data.sources import IndexedSource, Needs, RecordSource, Split, TextSource
from megatron_noloco.data.texts import is_by_file
from megatron_noloco.data.tokenizer import ByteTokenizer, Tokenizer
from megatron_noloco.errors import UserError
from megatron_noloco.plans.sample_order import slots_of

_SPLIT_NAMES = ("training", "validation")
TRAINING, VALIDATION = range(2)


class Division(ABC):
    """A dataset that can be divided.

    Attributes:
        by_file: whether each file of text is in one split.
    """

    by_file = False
    needs: Needs

    @abstractmethod
    def summary(self, training: Blend, validation: Blend | None) -> str:
        """Return a line that says what the data hold."""

    @abstractmethod
    def parts(self, split: int) -> Iterator[tuple[Samples | RecordSamples, float]]:
        """Yield the samples of each dataset in a split, and its weight; raises UserError if there are none."""

    def blend(self, split: int) -> Blend:
        """Return the samples of a split; raises UserError if there are none, and for wrong tokens."""
        parts, weights = zip(*self.parts(split), strict=True)
        for samples in parts:
            check_tokens(samples, self.needs.vocab_size)
        return Blend(parts, weights)


@dataclass(frozen=True)
class TextDivision(Division):
    """Files of text, divided when they were encoded; samples are in the order of the files."""

    source: TextSource
    entry: Entry
    tokenizer: Tokenizer
    needs: Needs

    @property
    def by_file(self) -> bool:  # type: ignore[override]
        return is_by_file(self.entry.facts["files"])

    def parts(self, split: int) -> Iterator[tuple[Samples, float]]:
        name, dataset = name_of_text(self.source.text), self._dataset(split)
        if not len(dataset.tokens):
            problem = _no_share(self.source.split, split, name)
            raise UserError(f"{problem} ({self.entry.facts['files']} files); raise its weight or add text")
        samples = Samples(dataset, self.needs)
        if not isinstance(self.tokenizer, ByteTokenizer):
            samples.hashed_as = np.int32  # as versions up to 0.3 held them
        yield samples, 1.0

    def summary(self, training: Blend, validation: Blend | None) -> str:
        facts = self.entry.facts
        sizes = (len(self._dataset(split).tokens) for split in (TRAINING, VALIDATION))
        return (
            f"{name_of_text(self.source.text)}, {facts['files']} files, {facts['bytes'] / 1e6:.1f} MB, "
            "{} training and {} validation tokens".format(*sizes)
        ) + notes(self.entry, self.tokenizer)

    def _dataset(self, split: int) -> Dataset:
        first, stop = self.entry.facts["splits"][split : split + 2]
        name = _name(split, name_of_text(self.source.text))
        return open_indexed(self.entry.prefix, self.tokenizer).part(first, stop, name)


@dataclass(frozen=True)
class RecordDivision(Division):
    """Records for fine-tuning, divided in their order."""

    source: RecordSource
    entry: Entry
    tokenizer: Tokenizer
    needs: Needs

    def parts(self, split: int) -> Iterator[tuple[RecordSamples, float]]:
        indexed = open_indexed(self.entry.prefix, self.tokenizer)
        bounds = indexed.document_bounds
        first, stop = self.source.split.bounds(len(bounds) - 1)[split : split + 2]
        if first == stop:
            problem = _no_share(self.source.split, split, self.source.path)
            raise UserError(f"{problem} ({len(bounds) - 1} records); raise its weight or add records")
        dataset = indexed.part(int(bounds[first]), int(bounds[stop]), _name(split, self.source.path))
        padding = self.tokenizer.end_of_document
        yield RecordSamples(dataset, self.needs.seq_length, self.source.packed, padding), 1.0

    def summary(self, training: Blend, validation: Blend | None) -> str:
        facts, samples = self.entry.facts, [*training.parts, *(validation.parts if validation else ())]
        cut = sum(part.cut for part in samples if isinstance(part, RecordSamples))
        return (
            f"{self.source.path}, {facts['records']} records ({cut} longer than a sample), {len(training)} "
            f"training samples with {len(samples[0].labels)} tokens in answers{notes(self.entry, self.tokenizer)}"
        )


@dataclass(frozen=True)
class IndexedDivision(Division):
    """Indexed datasets, divided in the order of their sequences; training is shuffled.

    Validation is not, so that every run is evaluated on the same samples.

    Attributes:
        name: what the user calls the dataset; "": its prefix.
        notes: the end of the summary.
    """

    source: IndexedSource
    tokenizer: Tokenizer
    needs: Needs
    name: str = ""
    notes: str = ""

    def parts(self, split: int) -> Iterator[tuple[Samples, float]]:
        source = self.source
        blend = source.train if source.split is not None else (source.train, source.validation)[split]
        if blend is None:
            raise UserError(
                "data.valid_data_path is missing: there is nothing to evaluate on (evaluate: give --data)"
            )
        for prefix, weight in blend.parts:
            dataset = self._dataset(prefix, split)
            yield (ShuffledSamples if split == TRAINING else Samples)(dataset, self.needs), weight

    def _dataset(self, prefix: str, split: int) -> Dataset:
        indexed, shares, name = open_indexed(prefix, self.tokenizer), self.source.split, self.name or prefix
        sequences = len(indexed.lengths)
        if shares is None:
            return indexed.part(0, sequences, name)
        first, stop = shares.bounds(sequences)[split : split + 2]
        dataset = indexed.part(first, stop, _name(split, name))
        if len(dataset.tokens):
            return dataset
        problem = _no_share(shares, split, name)
        if sequences == 1:
            raise UserError(
                f"{problem}: one sequence cannot be divided; preprocess several documents, such as JSON lines, "
                "or give the text itself as data.text"
            )
        raise UserError(
            f"{problem} ({sequences} sequences); raise its weight, or give data.train_data_path and "
            "data.valid_data_path"
        )

    def summary(self, training: Blend, validation: Blend | None) -> str:
        splits = zip(_SPLIT_NAMES, map(_in_words, (training, validation)), strict=True)
        beginnings = "".join(self._check_beginnings())
        return "; ".join(f"{name}: {held}" for name, held in splits) + beginnings + self.notes

    def _check_beginnings(self) -> Iterator[str]:
        """Yield the end of a summary that names each dataset with a BOS that nobody asks for.

        Raises UserError for a dataset that lacks a BOS that the run's documents are to begin with.
        """
        tokenizer, bos = self.tokenizer, self.tokenizer.beginning_of_document
        for prefix in self.source.prefixes:
            begins = open_indexed(prefix, tokenizer).tokens[0] == bos
            if tokenizer.before_document and not begins:
                raise UserError(
                    f"data.prepend_bos: {prefix} does not begin with BOS (token {bos}); preprocess it with "
                    "--prepend-bos, or leave data.prepend_bos out"
                )
            if begins and not tokenizer.before_document and bos != tokenizer.end_of_document:
                advice = "set data.prepend_bos if it was made so, and an export adds it, too"
                yield f"; {prefix} begins with BOS; {advice}"


def _in_words(blend: Blend | None) -> str:
    if blend is None:
        return "none"
    slots = slots_of(blend.weights)
    return ", ".join(
        f"{len(part.labels)} tokens of {part.name} ({100 * slot / sum(slots):.4g} %)"
        for part, slot in zip(blend.parts, slots, strict=True)
    )


def notes(entry: Entry, tokenizer: Tokenizer) -> str:
    """Return the end of a summary: what is left out of an entry, and what is read otherwise than it looks."""
    facts = entry.facts
    counted = {
        "empty_answers": "; empty answers: {}, of which only the end is learnt",
        "joined": "; answers that begin within a token of the prompt: {}, which generation reads apart",
        "learnt_apart": "; later turns learnt apart: {}, which read earlier answers as other tokens",
    }
    as_text = facts.get("special_tokens_as_text", 0)
    as_tokens = facts.get("special_tokens", 0)
    if "records" not in facts and tokenizer.splits_special_tokens:
        as_text, as_tokens = as_tokens, as_text
    spelled = spelled_out(as_text, True) + spelled_out(as_tokens, False)
    return (
        facts["notes"]
        + spelled
        + "".join(line.format(facts[name]) for name, line in counted.items() if facts.get(name))
    )


def spelled_out(special_tokens: int, as_text: bool) -> str:
    """Return the end of a summary that says how special tokens in a text are read; "" if there are none."""
    if not special_tokens:
        return ""
    how = "text" if as_text else "these tokens, not as text"
    return f"; special tokens spelled out: {special_tokens}, read as {how}"


def _name(split: int, of: str) -> str:
    return f"the {_SPLIT_NAMES[split]} split of {of}"


def _no_share(shares: Split, split: int, of: str) -> str:
    return f"data.split: a share of {astuple(shares)[split]:.4g} leaves {_name(split, of)} empty"


def check_tokens(samples: Samples | RecordSamples, vocab_size: int) -> None:
    """Raise UserError for a token outside the vocabulary, or if documents are separated but none ends."""
    tokens = excerpt(samples.contents[0])
    check_vocabulary(tokens, vocab_size, samples.name)
    documents = None if isinstance(samples, RecordSamples) else samples.documents
    if documents is None or not (documents.reset_attention_mask or documents.eod_mask_loss):
        return
    if not (tokens == documents.end_of_document).any():
        field = "reset_attention_mask" if documents.reset_attention_mask else "eod_mask_loss"
        raise UserError(
            f"data.{field}: {samples.name} holds no end-of-document token ({documents.end_of_document}), so its "
            "documents cannot be separated; preprocess it with --append-eod"
        )
