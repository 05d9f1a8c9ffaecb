"""Make indexed datasets of text and of records, in the cache."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from megatron_noloco.data.cache import Entry, Recipe, cache_folder, obtain
from megatron_noloco.data.encode import Advance, encode, read_documents
from megatron_noloco.data.folders import dead_links, read_once
from megatron_noloco.data.indexed import IndexedWriter
from megatron_noloco.data.inputs import (
    STANDARD_LIBRARY,
    Input,
    begins_as_text,
    find_inputs,
    read_text,
    standard_library,
)
from megatron_noloco.data.records import encode_records, find_records
from megatron_noloco.data.sources import RecordSource, TextSource
from megatron_noloco.data.texts import divide, find_texts
from megatron_noloco.data.tokenizer import Tokenizer
from megatron_noloco.errors import UserError
from megatron_noloco.files import check_utf_8

_ADVICE = f'give a text file, a folder of text files, or "{STANDARD_LIBRARY}"'
_KEY = "text"  # of JSON lines and Parquet


def make(source: TextSource | RecordSource, tokenizer: Tokenizer, shown: bool) -> Entry:
    """Return the dataset of a source, from the cache, or made now.


    The facts of a text that is divided have `splits`, the first sequence of each split and the end of the last.
    Raises UserError for a source without text or records, and for what cannot be read.
    """
    return obtain(cache_folder(source.cache), recipe(source, tokenizer), shown)


def recipe(source: TextSource | RecordSource, tokenizer: Tokenizer) -> Recipe:
    """Return what the dataset of a source is made of; raises UserError when there are no files."""
    settings = {
        "tokenizer": [tokenizer.digest, tokenizer.files_digest],
        "special tokens": [tokenizer.splits_special_tokens, *tokenizer.before_document],
    }
    if isinstance(source, RecordSource):
        inputs, left_out = find_records(source.path)
        return Recipe(
            source.path, inputs, settings | {"kind": "records"}, _records(inputs, tokenizer, left_out)
        )
    inputs = find_text(source)
    if is_of_records(inputs):
        return Recipe(source.text, inputs, settings | {"kind": "documents"}, _documents(inputs, tokenizer))
    divided = {"kind": "text", "split": astuple(source.split)}
    return Recipe(source.text, inputs, settings | divided, _text(source, inputs, tokenizer))


def find_text(source: TextSource) -> list[Input]:
    """Return the files of a text; raises UserError when there are none."""
    try:
        inputs = find_inputs([source.text], "data.text")
    except UserError as error:
        raise UserError(f"{error}; {_ADVICE}") from None
    if not inputs:
        raise UserError(f"data.text: no UTF-8 text in {source.text}; {_ADVICE}")
    return inputs


def is_of_records(inputs: Sequence[Input]) -> bool:
    """Return whether all files hold records or are compressed; beside plain text, JSON is text."""
    return not any(item.is_plain_text for item in inputs)


def check_begins(source: TextSource) -> None:
    """Raise UserError if there is no text, as far as the beginning of each file says."""
    inputs = find_text(source)
    if not is_of_records(inputs) and not any(begins_as_text(item.path) for item in inputs):
        raise _no_text_error(inputs, source.text)


def _no_text_error(inputs: Sequence[Input], text: str) -> UserError:
    if inputs[0].folder is None:
        try:
            check_utf_8(inputs[0].path.read_bytes())
        except UserError as error:
            return UserError(f"data.text: {text}: {error}; {_ADVICE}")
    return UserError(f"data.text: no UTF-8 text in {text}; {_ADVICE}")


Write = Callable[[Path, Advance], dict[str, Any]]


def _text(source: TextSource, inputs: list[Input], tokenizer: Tokenizer) -> Write:
    def write(prefix: Path, advance: Advance) -> dict[str, Any]:
        counts, splits = Counter[str](), [0]
        texts = find_texts(inputs, counts)
        if not texts:
            raise _no_text_error(inputs, source.text)
        with IndexedWriter(prefix, tokenizer.vocab_size) as writer:
            for documents in divide(texts, source.split):
                pieces = (piece for text in documents for piece in read_text(*text))
                writer.write(encode(pieces, tokenizer, True, counts, advance))
                splits.append(len(writer))
            writer.finish(tokenizer)
        return {**counts, "splits": splits, "notes": _left_out(counts) + _notes(inputs)}

    return write


def _left_out(counts: Counter[str]) -> str:
    binary, empty, json = (counts[name] for name in ("binary_files", "empty_files", "json_as_text"))
    parts = [f"{binary} files that are not UTF-8 text ({counts['binary_bytes']:,} bytes)"] * (binary > 0)
    parts += [f"{empty} empty files"] * (empty > 0)
    left_out = f"; left out: {', '.join(parts)}" if parts else ""
    return left_out + f"; files of JSON that are read as text: {json}" * (json > 0)


def _documents(inputs: list[Input], tokenizer: Tokenizer) -> Write:
    def write(prefix: Path, advance: Advance) -> dict[str, Any]:
        counts = Counter[str]()
        pieces = read_documents(inputs, _KEY, counts, advance)
        with IndexedWriter(prefix, tokenizer.vocab_size) as writer:
            writer.write(encode(pieces, tokenizer, True, counts, advance))
            if not len(writer):
                raise UserError(f"data.text: no documents in {inputs[0].folder or inputs[0].path}")
            writer.finish(tokenizer)
        empty = f"; left out: {counts['empty']} empty documents" * (counts["empty"] > 0)
        return {**counts, "notes": empty + _notes(inputs)}

    return write


def _records(inputs: list[Input], tokenizer: Tokenizer, left_out: str) -> Write:
    def write(prefix: Path, advance: Advance) -> dict[str, Any]:
        counts = Counter[str]()
        with IndexedWriter(prefix, tokenizer.vocab_size, masked=True) as writer:
            writer.write(encode_records(inputs, tokenizer, counts, advance))
            if not len(writer):
                raise UserError(f"data.sft_data_path: no records in {inputs[0].folder or inputs[0].path}")
            writer.finish(tokenizer)
        return {**counts, "notes": left_out + _notes(inputs)}

    return write


def _notes(inputs: Sequence[Input]) -> str:
    """Return the end of a summary that counts links."""
    folders = {item.folder for item in inputs if item.folder is not None} - {standard_library()}
    return read_once(sum(item.further_paths for item in inputs)) + dead_links(folders)
