"""Open the training and validation data of a run: make the dataset if there is none, map it, divide it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from megatron_noloco.data.blend import Blend
from megatron_noloco.data.cache import cache_folder, find_entry
from megatron_noloco.data.division import TRAINING, VALIDATION, Division, check_tokens
from megatron_noloco.data.folders import check_outside
from megatron_noloco.data.indexed import Dataset, open_indexed
from megatron_noloco.data.inputs import STANDARD_LIBRARY
from megatron_noloco.data.made import check_begins, make, recipe
from megatron_noloco.data.samples import Samples, in_samples
from megatron_noloco.data.sources import (
    WHOLE,
    IndexedSource,
    Needs,
    Source,
    TextSource,
)
from megatron_noloco.data.tokenizer import Tokenizer
from megatron_noloco.errors import UserError
from megatron_noloco.files import check_writable

_FINGERPRINT_TOKENS = 1 << 16

# Counter in the checkpoints of a run whose files of text are each in one split, which their places decide. Up to
# version 0.3 a hash of their names did, under another counter.
BY_FILE = "training_data_3"


@dataclass(frozen=True)
class Data:
    """The training samples of a run, and its validation samples (None if the run never evaluates)."""

    training: Blend
    validation: Blend | None
    summary: str  # one line for the banner
    vocab_size: int  # of the model
    by_file: bool = False  # whether each file of text is in one split

    @cached_property
    def checksums(self) -> dict[str, int]:
        """Checksums of the training data, wherever they lie, by the name of a checkpoint's counter; newest first.

        The first is of all that samples are made of. The second, of 0.2 and before, is of the tokens that have a
        loss. If each file of text is in one split, there is a single one with another name.
        """
        if self.by_file:
            return {BY_FILE: self.training.checksum()}
        return {
            "training_data_2": self.training.checksum(),
            "training_data": self.training.checksum_of_labels(),
        }

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


def open_data(source: Source, tokenizer: Tokenizer, needs: Needs) -> Data:
    """Open the data of a run; raises UserError, in one line, when something is missing, damaged or too small.

    A training split smaller than one global batch is refused: a single step would see a sample twice.
    """
    division = Division.of(source, tokenizer, needs)
    training = division.blend(TRAINING)
    validation = division.blend(VALIDATION) if needs.evaluates else None
    if len(training) < needs.global_batch:
        raise UserError(
            f"corpus too small: one global batch needs {in_samples(needs.global_batch, needs.seq_length)}, "
            f"{training.name} has {len(training)}"
        )
    summary = division.summary(training, validation)
    return Data(training, validation, summary, needs.vocab_size, division.by_file)


def open_validation(
    source: Source, tokenizer: Tokenizer, needs: Needs, counters: Mapping[str, float]
) -> Blend:
    """Return a run's validation samples alone; raises UserError.

    Args:
        counters: of the run's checkpoint, which say how it divided files of text.
    """
    division = Division.of(source, tokenizer, needs)
    if division.by_file != (BY_FILE in counters):
        raise UserError(
            "data.text: the run divided its files otherwise than they are divided today, so its validation split "
            "is not known (evaluate: give --data)"
        )
    return division.blend(VALIDATION)


def open_whole(
    data: str, tokenizer: Tokenizer, needs: Needs, cache: str | None = None
) -> tuple[Samples, str]:
    """Return all of a text, of documents in JSON lines or Parquet, or of an indexed dataset (by prefix).

    The second value says which files are left out, "" if there are none. Raises UserError.
    """
    prefix, notes = data, ""
    try:
        if not Path(f"{data}.idx").exists():
            entry = make(TextSource(data, WHOLE, cache), tokenizer, needs.shown)
            prefix, notes = entry.prefix, entry.facts["notes"]
        tokens = open_indexed(prefix, tokenizer).tokens
    except UserError as error:
        raise UserError(f"--data: {str(error).removeprefix('data.text: ')}") from None
    samples = Samples(Dataset(tokens, name=data), needs)
    check_tokens(samples, needs.vocab_size)
    return samples, notes.removeprefix("; ")


def check_source(source: Source, tokenizer: Tokenizer, output_dir: Path) -> None:
    """Raise UserError if nothing can be read, or what the run writes would be read; nothing is written."""
    if isinstance(source, IndexedSource):
        for prefix in source.prefixes:
            open_indexed(prefix, tokenizer)
        return
    ours, option = recipe(source, tokenizer), "data.sft_data_path"
    if isinstance(source, TextSource):
        option = "data.text"
        check_begins(ours.inputs, source.text)
    folder = cache_folder(source.cache)
    if ours.source != STANDARD_LIBRARY:
        outputs = {"training.output_dir": output_dir, "data.cache": folder}
        check_outside(outputs, Path(ours.source), option)
    if find_entry(folder, ours.digest) is None:
        check_writable(folder, "data.cache")
