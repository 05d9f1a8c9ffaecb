"""Encode text into Megatron's indexed datasets, in the order of the inputs.

A dataset gets its name, `PREFIX_KEY_document.{bin,idx}`, when it is complete: a run that was stopped is run again.
`PREFIX_KEY_document.tokenizer.sha256` tells its tokenizer from others.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_noloco.data.auto_tokenizer import check_folder
from megatron_noloco.data.folders import check_outside
from megatron_noloco.data.indexed import IndexedWriter
from megatron_noloco.data.inputs import Input, Piece, is_text, read_pieces
from megatron_noloco.data.sources import TokenizerChoice
from megatron_noloco.data.tokenizer import build_tokenizer
from megatron_noloco.errors import UserError
from megatron_noloco.files import writing

# Encoded at once: many texts, also of small files, for many cores. It takes about 0.3 GB of memory.
_CHARACTERS = 1 << 23


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
    beside_records: int = 0  # documents that are files of text, in a job that also reads records


def check(job: Job) -> None:
    """Raise UserError when a job cannot be carried out; nothing is written."""
    if not job.prefix.name:
        raise UserError(f"--output-prefix {job.prefix}: names no file; give one such as data/corpus")
    for place, key in enumerate(job.encoding.json_keys):
        if key in job.encoding.json_keys[:place]:
            raise UserError(f"--json-keys {key}: is given more than once; give each key once")
        if "/" in key:
            raise UserError(
                f'--json-keys {key}: its dataset would be a file with this name, which cannot have "/"'
            )
    text = next((item.path for item in job.inputs if item.kind == "text"), None)
    if text is not None and len(job.encoding.json_keys) > 1:
        raise UserError(f"--json-keys: {text} is plain text, which has no keys; give one key, or JSON lines")
    for folder in {item.folder for item in job.inputs if item.folder is not None}:
        check_outside(job.prefix, "--output-prefix", folder, "--input")
    check_folder(build_tokenizer(job.encoding.tokenizer))


def preprocess(job: Job, advance: Callable[[int], None]) -> Tally:
    """Carry out a job that passed `check`, and call `advance` with the input bytes of what is written.

    Raises UserError for an input that cannot be read, and for a dataset that exists or is being written. A file
    gets its name when it is complete.
    """
    tokenizer = build_tokenizer(job.encoding.tokenizer)
    none = tokenizer.encode("")
    begin = np.array(tokenizer.before_document, none.dtype)
    end = np.array([tokenizer.end_of_document] * job.encoding.append_eod, none.dtype)
    writers: dict[str, IndexedWriter] = {}
    tally = Tally()
    try:
        with writing(job.prefix, "--output-prefix"):
            job.prefix.parent.mkdir(parents=True, exist_ok=True)
            for key in job.encoding.json_keys:
                writers[key] = IndexedWriter(job.output(key), tokenizer.vocab_size)
        for group in _groups(job, tally, advance):
            for column, writer in enumerate(writers.values()):
                texts = [piece.texts[column] for piece in group]
                tally.special_tokens += sum(map(tokenizer.count_special, texts))
                # A single call of the tokenizer, which encodes on all cores.
                for piece, tokens in zip(group, tokenizer.encode_batch(texts), strict=True):
                    if piece.begins and piece.ends and not len(tokens):
                        tally.empty += 1
                        continue
                    first, last = begin if piece.begins else none, end if piece.ends else none
                    sequence = np.concatenate([first, tokens, last])
                    writer.add(sequence, piece.ends)
                    tally.tokens += len(sequence)
                    tally.documents += piece.ends
            advance(sum(piece.read_bytes for piece in group))
        if not tally.documents:
            raise UserError(
                f"nothing was written: {tally.empty} documents are empty, {tally.not_text} files are no UTF-8 text"
            )
        for writer in writers.values():
            writer.finish(tokenizer)
    finally:
        for writer in writers.values():
            writer.discard()
    return tally


def _groups(job: Job, tally: Tally, advance: Callable[[int], None]) -> Iterator[list[Piece]]:
    """Read all inputs, in order, in groups of pieces that are encoded at once; count those that are no text."""
    group, characters = list[Piece](), 0
    records = any(item.kind != "text" for item in job.inputs)
    for item in job.inputs:
        if not is_text(item):
            tally.not_text += 1
            advance(item.bytes)
            continue
        tally.beside_records += records and item.kind == "text" and item.bytes > 0
        for piece in read_pieces(item, job.encoding.json_keys):
            group.append(piece)
            characters += sum(map(len, piece.texts))
            if characters >= _CHARACTERS:
                yield group
                group, characters = [], 0
    if group:
        yield group
