"""Encode text into Megatron's indexed datasets, in the order of the inputs.

A dataset gets its name, `PREFIX_KEY_document.{bin,idx}`, when it is complete: a run that was stopped is run again.
`PREFIX_KEY_document.tokenizer.sha256` tells its tokenizer from others.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from megatron_noloco.data.auto_tokenizer import check_folder
from megatron_noloco.data.corpus import check_outside
from megatron_noloco.data.indexed import IndexedWriter
from megatron_noloco.data.inputs import Batch, Input, read_batches
from megatron_noloco.data.sources import TokenizerChoice
from megatron_noloco.data.tokenizer import Tokenizer, build_tokenizer
from megatron_noloco.files import writing

# Encoded at once: many texts, also of small files, for many cores. It takes about 0.3 GB of memory.
_CHARACTERS = 1 << 23

Rows = list[list[str]]  # the texts of each record of a batch, one for each key


@dataclass(frozen=True)
class Encoding:
    """How records become documents."""

    tokenizer: TokenizerChoice
    json_keys: tuple[str, ...]
    append_eod: bool


@dataclass(frozen=True)
class Job:
    """What one command preprocesses: inputs, output and settings."""

    inputs: list[Input]
    prefix: Path
    encoding: Encoding

    def output(self, key: str) -> Path:
        """Return the prefix of the finished dataset of `key`."""
        return self.prefix.with_name(f"{self.prefix.name}_{key}_document")


@dataclass
class Tally:
    """Counts of what was preprocessed, all keys together."""

    documents: int = 0
    tokens: int = 0
    empty: int = 0
    special_tokens: int = 0  # that the texts spell out
    not_text: int = 0  # files found in folders and left out, since they are not UTF-8


def check(job: Job) -> None:
    """Raise ValueError when a job cannot be carried out; nothing is written."""
    if not job.prefix.name:
        raise ValueError(f"--output-prefix {job.prefix}: names no file; give one such as data/corpus")
    for place, key in enumerate(job.encoding.json_keys):
        if key in job.encoding.json_keys[:place]:
            raise ValueError(f"--json-keys {key}: is given more than once; give each key once")
        if "/" in key:
            raise ValueError(
                f'--json-keys {key}: its dataset would be a file with this name, which cannot have "/"'
            )
    text = next((item.path for item in job.inputs if item.kind == "text"), None)
    if text is not None and len(job.encoding.json_keys) > 1:
        raise ValueError(f"--json-keys: {text} is plain text, which has no keys; give one key, or JSON lines")
    for folder in {item.folder for item in job.inputs if item.folder is not None}:
        check_outside(job.prefix, "--output-prefix", folder, "--input")
    check_folder(build_tokenizer(job.encoding.tokenizer))


def preprocess(job: Job, advance: Callable[[int], None]) -> Tally:
    """Carry out a job that passed `check`, and call `advance` with the input bytes of each batch that is written.

    Raises ValueError for an input that cannot be read, and for a dataset that exists or is being written. A file
    gets its name when it is complete.
    """
    tokenizer = build_tokenizer(job.encoding.tokenizer)
    writers: dict[str, IndexedWriter] = {}
    tally = Tally()
    try:
        with writing(job.prefix, "--output-prefix"):
            job.prefix.parent.mkdir(parents=True, exist_ok=True)
            for key in job.encoding.json_keys:
                writers[key] = IndexedWriter(job.output(key), tokenizer.vocab_size)
        for group in _groups(job):
            for column, writer in enumerate(writers.values()):
                for batch, rows, sequences in _encode(group, column, job.encoding, tokenizer):
                    tally.special_tokens += sum(tokenizer.count_special(row[column]) for row in rows)
                    tally.empty += len(rows) - len(sequences)
                    for number, sequence in enumerate(sequences, 1):
                        ends = batch.ends_document or number < len(sequences)
                        writer.add(sequence, ends)
                        tally.tokens += len(sequence)
                        tally.documents += ends
            tally.not_text += sum(not batch.records for batch, _ in group)
            advance(sum(batch.read_bytes for batch, _ in group))
        if not tally.documents:
            raise ValueError(
                f"nothing was written: {tally.empty} documents are empty, {tally.not_text} files are no UTF-8 text"
            )
        for writer in writers.values():
            writer.finish(tokenizer)
    finally:
        for writer in writers.values():
            writer.discard()
    return tally


def _groups(job: Job) -> Iterator[list[tuple[Batch, Rows]]]:
    """Read all inputs, in order, in groups of batches that are encoded at once.

    Raises ValueError that names the file, and the line or row, of a record that cannot be read.
    """
    keys, group, characters = job.encoding.json_keys, list[tuple[Batch, Rows]](), 0
    for item in job.inputs:
        for batch in read_batches(item, list(keys)):
            group.append((batch, batch.texts(keys)))
            characters += sum(len(text) for row in group[-1][1] for text in row)
            if characters >= _CHARACTERS:
                yield group
                group, characters = [], 0
    if group:
        yield group


def _encode(
    group: list[tuple[Batch, Rows]], column: int, encoding: Encoding, tokenizer: Tokenizer
) -> Iterator[tuple[Batch, Rows, list[np.ndarray]]]:
    """Encode the texts of a key, and yield those of each batch; empty documents are left out.

    It is one call of the tokenizer, which encodes on all cores.
    """
    encoded = iter(tokenizer.encode_batch([row[column] for _, rows in group for row in rows]))
    for batch, rows in group:
        sequences = list(islice(encoded, len(rows)))
        if batch.holds_whole_documents:
            sequences = [tokens for tokens in sequences if len(tokens)]
        if tokenizer.before_document:
            for index in range(0 if batch.begins_document else 1, len(sequences)):
                tokens = sequences[index]
                sequences[index] = np.insert(tokens, 0, tokenizer.before_document)
        if encoding.append_eod:
            for index in range(len(sequences) if batch.ends_document else len(sequences) - 1):
                tokens = sequences[index]
                sequences[index] = np.append(tokens, tokens.dtype.type(tokenizer.end_of_document))
        yield batch, rows, sequences
