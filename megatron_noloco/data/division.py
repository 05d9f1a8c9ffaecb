"""Divide the dataset of a source into training and validation, and say in a line what it holds."""

from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

import numpy as np

from megatron_noloco.data.blend import Blend, excerpt
from megatron_noloco.data.indexed import Dataset, Indexed, open_indexed
from megatron_noloco.data.inputs import name_of_text
from megatron_noloco.data.made import make
from megatron_noloco.data.record_samples import RecordSamples
from megatron_noloco.data.samples import Samples, ShuffledSamples, check_vocabulary
from megatron_noloco.data.sources import IndexedSource, Needs, Prefixes, RecordSource, Source, Split
from megatron_noloco.data.texts import is_by_file
from megatron_noloco.data.tokenizer import ByteTokenizer, Tokenizer
from megatron_noloco.errors import UserError
from megatron_noloco.plans.sample_order import slots_of

_SPLIT_NAMES = ("training", "validation")
TRAINING, VALIDATION = range(2)


class Member(NamedTuple):
    """A dataset of a blend, before it is divided."""

    indexed: Indexed
    weight: float
    name: str  # for the user


@dataclass(frozen=True)
class Division:
    """Divides the datasets of a source.

    Text was divided when it was encoded, and its samples are in the order of the files. Records are divided in
    their order, all other datasets in the order of their sequences; of these training is shuffled, and validation
    is not, so that every run is evaluated on the same samples.

    Attributes:
        train: the datasets of training; with a split those of validation, too.
        validation: if each split has datasets of its own; None: there are none.
        facts: about a dataset that was made of text or records; empty: of another one.
    """

    source: Source
    tokenizer: Tokenizer
    needs: Needs
    train: list[Member]
    validation: list[Member] | None
    facts: Mapping[str, Any]

    @classmethod
    def of(cls, source: Source, tokenizer: Tokenizer, needs: Needs) -> "Division":
        """Open the datasets of a source, made now if they are not there; raises UserError."""
        if isinstance(source, IndexedSource):

            def members(prefixes: Prefixes) -> list[Member]:
                return [
                    Member(open_indexed(prefix, tokenizer), share, prefix) for prefix, share in prefixes.parts
                ]

            validation = members(source.validation) if source.validation else None
            return cls(source, tokenizer, needs, members(source.train), validation, {})
        entry = make(source, tokenizer, needs.shown)
        name = source.path if isinstance(source, RecordSource) else name_of_text(source.text)
        member = Member(open_indexed(entry.prefix, tokenizer), 1.0, name)
        return cls(source, tokenizer, needs, [member], None, entry.facts)

    @property
    def kind(self) -> str:
        return self.facts.get("kind", "documents")

    @property
    def by_file(self) -> bool:
        """Whether each file of text is in one split."""
        return self.kind == "text" and is_by_file(self.facts["files"])

    def blend(self, split: int) -> Blend:
        """Return the samples of a split; raises UserError if there are none, and for wrong tokens."""
        members = self.train if self.source.split is not None else (self.train, self.validation)[split]
        if members is None:
            raise UserError(
                "data.valid_data_path is missing: there is nothing to evaluate on (evaluate: give --data)"
            )
        parts = [self._samples(self._dataset(member, split), split) for member in members]
        for samples in parts:
            check_tokens(samples, self.needs.vocab_size)
        return Blend(parts, [member.weight for member in members])

    def _dataset(self, member: Member, split: int) -> Dataset:
        """Return a dataset's part in a split; raises UserError if it is empty."""
        indexed, shares = member.indexed, self.source.split
        if shares is None:
            return indexed.part(0, len(indexed.lengths), member.name)
        bounds, unit, count = self._bounds(indexed, shares)
        name = f"the {_SPLIT_NAMES[split]} split of {member.name}"
        dataset = indexed.part(bounds[split], bounds[split + 1], name)
        if len(dataset.tokens):
            return dataset
        problem = f"data.split: a share of {astuple(shares)[split]:.4g} leaves {name} empty"
        if self.kind != "documents":
            raise UserError(
                f"{problem} ({count} {unit}); raise its weight or add {unit.replace('files', 'text')}"
            )
        if count == 1:
            raise UserError(
                f"{problem}: one sequence cannot be divided; preprocess several documents, such as JSON lines, "
                "or give the text itself as data.text"
            )
        raise UserError(
            f"{problem} ({count} {unit}); raise its weight, or give data.train_data_path and data.valid_data_path"
        )

    def _bounds(self, indexed: Indexed, shares: Split) -> tuple[list[int], str, int]:
        """Return the first sequence of each split, what is divided, and how many there are."""
        if self.kind == "text":
            return self.facts["splits"], "files", self.facts["files"]
        if self.kind == "records":
            records = len(indexed.document_bounds) - 1
            return indexed.document_bounds[shares.bounds(records)].tolist(), "records", records
        return shares.bounds(len(indexed.lengths)), "sequences", len(indexed.lengths)

    def _samples(self, dataset: Dataset, split: int) -> Samples | RecordSamples:
        if isinstance(self.source, RecordSource):
            padding = self.tokenizer.end_of_document
            return RecordSamples(dataset, self.needs.seq_length, self.source.packed, padding)
        if self.kind == "documents" and split == TRAINING:
            return ShuffledSamples(dataset, self.needs)
        samples = Samples(dataset, self.needs)
        if self.kind == "text" and not isinstance(self.tokenizer, ByteTokenizer):
            samples.hashed_as = np.int32  # as versions up to 0.3 held them
        return samples

    def summary(self, training: Blend, validation: Blend | None) -> str:
        """Return a line that says what the data hold."""
        facts, name = self.facts, self.train[0].name
        if self.kind == "text":
            offsets = np.diff(self.train[0].indexed.offsets[np.array(facts["splits"])])
            return (
                f"{name}, {facts['files']} files, {facts['bytes'] / 1e6:.1f} MB, {offsets[TRAINING]} training and "
                f"{offsets[VALIDATION]} validation tokens{self._notes()}"
            )
        if self.kind == "records":
            parts = [*training.parts, *(validation.parts if validation else ())]
            cut = sum(part.cut for part in parts if isinstance(part, RecordSamples))
            return (
                f"{name}, {facts['records']} records ({cut} longer than a sample), {len(training)} training "
                f"samples with {len(parts[0].labels)} tokens in answers{self._notes()}"
            )
        splits = zip(_SPLIT_NAMES, map(_in_words, (training, validation)), strict=True)
        beginnings = "".join(self._check_beginnings()) if not facts else self._notes()
        return "; ".join(f"{name}: {held}" for name, held in splits) + beginnings

    def _notes(self) -> str:
        """Return the end of a summary: what is left out, and what is read otherwise than it looks."""
        facts = self.facts
        counted = {
            "empty_answers": "; empty answers: {}, of which only the end is learnt",
            "joined": "; answers that begin within a token of the prompt: {}, which generation reads apart",
            "learnt_apart": "; later turns learnt apart: {}, which read earlier answers as other tokens",
        }
        lines = [line.format(facts[name]) for name, line in counted.items() if facts.get(name)]
        return facts["notes"] + spelled_out(facts) + "".join(lines)

    def _check_beginnings(self) -> Iterator[str]:
        """Yield the end of a summary that names each dataset with a BOS that nobody asks for.

        Raises UserError for a dataset that lacks a BOS that the run's documents are to begin with.
        """
        tokenizer, bos = self.tokenizer, self.tokenizer.beginning_of_document
        datasets = {member.name: member.indexed for member in self.train + (self.validation or [])}
        for prefix, indexed in datasets.items():
            begins = indexed.tokens[0] == bos
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


def spelled_out(counts: Mapping[str, Any]) -> str:
    """Return the end of a summary that says how special tokens in a text are read; "" if there are none."""
    read_as = {"special_tokens_as_text": "text", "special_tokens": "these tokens, not as text"}
    return "".join(
        f"; special tokens spelled out: {counts[name]}, read as {how}"
        for name, how in read_as.items()
        if counts.get(name)
    )


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
