"""Open the training and validation data of a run: make the dataset if there is none, map it, divide it."""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from megatron_noloco.data.blend import Blend, excerpt
from megatron_noloco.data.indexed import Dataset, IndexedDataset, open_indexed
from megatron_noloco.data.inputs import Inputs, find_inputs, find_standard_library
from megatron_noloco.data.kinds import (
    SPLITS,
    TRAINING,
    VALIDATION,
    Documents,
    Kind,
    Preprocessed,
    Records,
    Weighted,
)
from megatron_noloco.data.record_samples import RecordSamples, samples_apart
from megatron_noloco.data.records import find_records, whole_source
from megatron_noloco.data.samples import Samples, check_vocabulary, in_samples
from megatron_noloco.data.sources import (
    STANDARD_LIBRARY,
    IndexedSource,
    Needs,
    RecordSource,
    Source,
)
from megatron_noloco.data.tokenizer import Tokenizer
from megatron_noloco.errors import UserError
from megatron_noloco.plans.sample_order import slots_of

_FINGERPRINT_TOKENS = 1 << 16
_COMPARED = 1 << 10, 1 << 15  # sequences of validation, and of training, that are compared

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
        """Checksums of the training and of the validation data, by the names of a checkpoint's counters."""
        found = {TRAINING_DATA: self.training.checksum()}
        return found | ({VALIDATION_DATA: self.validation.checksum()} if self.validation else {})

    @cached_property
    def fingerprint(self) -> list[int]:
        """Checksums of a small part of all data, which all ranks of a job must have alike."""
        return [blend.checksum(_FINGERPRINT_TOKENS) for blend in (self.training, self.validation) if blend]

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


def kind_of(source: Source, tokenizer: Tokenizer) -> Kind:
    """Return what a source holds; raises UserError if there are no files."""
    if isinstance(source, IndexedSource):
        return Preprocessed(source, tokenizer, Inputs([]))
    if isinstance(source, RecordSource):
        return Records(source, tokenizer, find_records(source.path, source.option))
    is_library = source.path == STANDARD_LIBRARY
    inputs = find_standard_library() if is_library else find_inputs([source.path], source.option)
    return Documents(source, tokenizer, inputs)


def open_data(source: Source, tokenizer: Tokenizer, needs: Needs) -> Data:
    """Open the data of a run; raises UserError, in one line, when something is missing, damaged or too small.

    A training split smaller than one global batch is refused: a single step would see a sample twice.
    """
    kind = kind_of(source, tokenizer)
    kind.open()
    return _divided(kind, needs)


def _divided(kind: Kind, needs: Needs) -> Data:
    """Divide datasets that are mapped; raises UserError as `open_data` does."""
    training = _blend(kind, needs, TRAINING)
    validation = _blend(kind, needs, VALIDATION) if needs.evaluates else None
    if len(training) < needs.global_batch:
        raise UserError(
            f"corpus too small: one global batch needs {in_samples(needs.global_batch, needs.seq_length)}, "
            f"{training.name} has {len(training)}; give more text, or lower train_micro_batch_size_per_gpu, "
            "gradient_accumulation_steps, model.seq_length or the number of replicas"
        )
    lines = [kind.summary(training, validation), *_epochs(training, needs)]
    if validation is not None:
        lines += _read_twice(_datasets(kind, TRAINING), _datasets(kind, VALIDATION))
    return Data(training, validation, "; ".join(lines), needs.vocab_size)


def _epochs(training: Blend, needs: Needs) -> Iterator[str]:
    """Yield how often a run of known length reads the training samples of each dataset."""
    if not needs.steps:
        return
    slots, samples = slots_of(training.weights), needs.steps * needs.global_batch
    epochs = [
        f"{samples * slot / sum(slots) / len(part):.3g} of {part.name}"
        for part, slot in zip(training.parts, slots, strict=True)
    ]
    yield f"epochs in {needs.steps} steps: {', '.join(epochs)}"


def _read_twice(training: list[Dataset], validation: list[Dataset]) -> Iterator[str]:
    """Yield how many sequences of validation are also of training; of large datasets some are compared."""
    evaluated = list(_some_sequences(validation, _COMPARED[0]))
    trained = set(_some_sequences(training, _COMPARED[1], {*map(len, evaluated)}))
    if twice := sum(sequence in trained for sequence in evaluated):
        yield (
            f"sequences of validation that are also training data: {twice} of {len(evaluated)} compared; the loss "
            "on them says nothing of other text"
        )


def _some_sequences(
    datasets: list[Dataset], most: int, sizes: Collection[int] | None = None
) -> Iterator[bytes]:
    """Yield up to `most` sequences of each dataset, evenly spread, as bytes; `sizes`: those of so many bytes."""
    for dataset in datasets:
        places = np.unique(np.linspace(0, dataset.sequences - 1, most, dtype=np.int64))
        begins, ends = (dataset.offsets[at] - dataset.offsets[:1] for at in (places, places + 1))
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            if sizes is None or (end - begin) * np.int32().itemsize in sizes:
                yield dataset.tokens[begin:end].astype(np.int32).tobytes()


def open_validation(
    source: Source, tokenizer: Tokenizer, needs: Needs, counters: Mapping[str, float], seq_length: int
) -> Blend:
    """Return a run's validation samples; raises UserError where a split of the data of today may be another one.

    Args:
        counters: of the run's checkpoint, which say what it was trained on.
        seq_length: tokens in a sample of the run.
    """
    kind = kind_of(source, tokenizer)
    kind.open()
    data = _divided(kind, replace(needs, seq_length=seq_length))
    own = isinstance(source, IndexedSource) and source.validation is not None  # datasets of its own
    changed = any(
        counters.get(name, checksum) != checksum
        for name, checksum in data.checksums.items()
        if not own or name == VALIDATION_DATA
    )
    if changed:
        raise UserError(
            "the data have other contents than those that the run was trained on, or another order, so its "
            "validation split is not known (evaluate: give --data)"
        )
    return _blend(kind, needs, VALIDATION)


def open_whole(
    data: str, tokenizer: Tokenizer, needs: Needs, cache: str | None = None
) -> tuple[RecordSamples, str]:
    """Return all of a text, of documents or records, or of an indexed dataset (by prefix), each document apart.

    The second value says which files are left out, "" if there are none. Raises UserError.
    """
    dataset, notes = open_any(data, tokenizer, cache)
    samples = samples_apart(dataset, needs.seq_length, tokenizer)
    _check_tokens(samples, needs.vocab_size)
    return samples, notes


def open_any(data: str, tokenizer: Tokenizer, cache: str | None = None) -> tuple[IndexedDataset, str]:
    """Return the dataset of a text, of records, or under a prefix, and notes on it; raises UserError."""
    prefix, notes = data, ""
    if not Path(f"{data}.idx").exists():
        entry = kind_of(whole_source(data, cache), tokenizer).make()
        prefix, notes = entry.prefix, entry.facts["notes"].removeprefix("; ")
    return open_indexed(prefix, tokenizer, data), notes


def _blend(kind: Kind, needs: Needs, split: int) -> Blend:
    """Return the samples of a split; raises UserError if there are none, and for wrong tokens."""
    members = _members(kind, split)
    for dataset, _ in members:
        _check_ends(dataset, needs)
    parts = [kind.samples(dataset, needs, split) for dataset in _datasets(kind, split)]
    for part in parts:
        _check_tokens(part, needs.vocab_size)
    return Blend(parts, [weight for _, weight in members])


def _members(kind: Kind, split: int) -> Weighted:
    """Return the datasets of which a split is all or a part; raises UserError."""
    members = kind.validation if kind.source.split is None and split == VALIDATION else kind.training
    if members is None:
        raise UserError(
            "data.valid_data_path is missing: there is nothing to evaluate on (evaluate: give --data)"
        )
    return members


def _datasets(kind: Kind, split: int) -> list[Dataset]:
    """Return the datasets of a split; raises UserError."""
    whole = kind.source.split is None
    return [dataset if whole else _part(kind, dataset, split) for dataset, _ in _members(kind, split)]


def _part(kind: Kind, dataset: IndexedDataset, split: int) -> Dataset:
    """Return the part of a dataset that a split has; raises UserError if there is none."""
    bounds, units = kind.bounds(dataset)
    name = f"the {SPLITS[split]} split of {dataset.name}"
    part = dataset.part(bounds[split], bounds[split + 1], name)
    if not len(part.tokens):
        share = f"{astuple(kind.source.split)[split]:.4g}"
        raise UserError(
            f"data.split: a share of {share} leaves {name} empty ({units} {kind.unit}); raise its weight, "
            f"add {kind.unit}, or give data.train_data_path and data.valid_data_path"
        )
    return part


def _check_tokens(samples: Samples | RecordSamples, vocab_size: int) -> None:
    """Raise UserError for a token outside the vocabulary."""
    check_vocabulary(excerpt(samples.contents[0]), vocab_size, samples.name)


def _check_ends(dataset: IndexedDataset, needs: Needs) -> None:
    """Raise UserError if documents are to be separated, and none of a dataset ends with the token for it."""
    documents = needs.documents
    if documents is None or not (documents.reset_attention_mask or documents.eod_mask_loss):
        return
    if dataset.ends_with(documents.end_of_document):
        return
    field = "reset_attention_mask" if documents.reset_attention_mask else "eod_mask_loss"
    raise UserError(
        f"data.{field}: no document of {dataset.name} ends with the end-of-document token "
        f"({documents.end_of_document}), so documents cannot be separated; preprocess it with --append-eod"
    )
