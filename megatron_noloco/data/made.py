"""Make indexed datasets of text and of records, in the cache."""

from collections import Counter, abc
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from megatron_noloco.data.cache import Entry, Recipe, cache_folder, obtain
from megatron_noloco.data.encode import Advance, Sequence, encode, read_documents
from megatron_noloco.data.folders import dead_links, read_once
from megatron_noloco.data.indexed import IndexedWriter
from megatron_noloco.data.inputs import (
    STANDARD_LIBRARY,
    Input,
    begins_as_text,
    find_inputs,
    read_text,
    standard_library,
    standard_library_files,
)
from megatron_noloco.data.records import encode_records, find_records
from megatron_noloco.data.sources import WHOLE, RecordSource, Split, TextSource
from megatron_noloco.data.texts import divide, find_texts
from megatron_noloco.data.tokenizer import Tokenizer
from megatron_noloco.errors import UserError
from megatron_noloco.files import check_utf_8

_ADVICE = f'give a text file, a folder of text files, or "{STANDARD_LIBRARY}"'
_KEY = "text"  # of JSON lines and Parquet


def make(source: TextSource | RecordSource, tokenizer: Tokenizer, shown: bool) -> Entry:
    """Return the dataset of a source, from the cache, or made now.

    Its facts have a `kind`; and `splits`, of a text the first sequence of each split, and the end of the last.
    Raises UserError for a source without text or records, and for what cannot be read.
    """
    return obtain(cache_folder(source.cache), recipe(source, tokenizer), shown)


def recipe(source: TextSource | RecordSource, tokenizer: Tokenizer) -> Recipe:
    """Return what the dataset of a source is made of; raises UserError if there are no files."""
    if isinstance(source, RecordSource):
        inputs, left_out = find_records(source.path)
        maker = _Maker("records", source.path, inputs, tokenizer, left_out)
    else:
        inputs = find_text(source)
        kind = "documents" if is_of_records(inputs) else "text"
        maker = _Maker(kind, source.text, inputs, tokenizer, split=source.split)
    settings = {
        "kind": maker.kind,
        "split": astuple(maker.split) if maker.kind == "text" else None,
        "tokenizer": [tokenizer.digest, tokenizer.files_digest if maker.kind == "records" else ""],
        "special tokens": [tokenizer.splits_special_tokens, *tokenizer.before_document],
    }
    return Recipe(maker.source, inputs, settings, maker.write)


@dataclass(frozen=True)
class _Maker:
    """Writes the dataset of a source.

    Attributes:
        kind: "text", divided when it is encoded; "documents"; "records".
        left_out: the end of a summary.
        split: of a text.
    """

    kind: str
    source: str
    inputs: list[Input]
    tokenizer: Tokenizer
    left_out: str = ""
    split: Split = WHOLE

    def write(self, prefix: Path, advance: Advance) -> dict[str, Any]:
        """Write the dataset under a prefix; return facts about it, with the first sequence of each part."""
        counts, splits = Counter[str](), [0]
        with IndexedWriter(prefix, self.tokenizer.vocab_size, masked=self.kind == "records") as writer:
            for sequences in self._parts(counts, advance):
                writer.write(sequences)
                splits.append(len(writer))
            if not len(writer):
                raise self._nothing()
            writer.finish(self.tokenizer)
        notes = self.left_out + _left_out(counts) + _links(self.inputs)
        return {**counts, "kind": self.kind, "splits": splits, "notes": notes}

    def _parts(self, counts: Counter[str], advance: Advance) -> Iterator[Iterator[Sequence]]:
        if self.kind == "records":
            yield encode_records(self.inputs, self.tokenizer, counts, advance)
            return
        parts = [read_documents(self.inputs, _KEY, counts, advance)]
        if self.kind == "text":
            divided = divide(find_texts(self.inputs, counts), self.split)
            parts = [chain.from_iterable(read_text(*text) for text in texts) for texts in divided]
        for pieces in parts:
            yield encode(pieces, self.tokenizer, True, counts, advance)

    def _nothing(self) -> UserError:
        if self.kind == "text":
            return _no_text_error(self.inputs, self.source)
        option = "sft_data_path" if self.kind == "records" else "text"
        return UserError(f"data.{option}: no {self.kind} in {self.source}")


def find_text(source: TextSource) -> list[Input]:
    """Return the files of a text; raises UserError when there are none."""
    if source.text == STANDARD_LIBRARY:
        return [Input(file, standard_library()) for file in standard_library_files()]
    try:
        inputs = find_inputs([source.text], "data.text")
    except UserError as error:
        raise UserError(f"{error}; {_ADVICE}") from None
    if not inputs:
        raise UserError(f"data.text: no UTF-8 text in {source.text}; {_ADVICE}")
    return inputs


def is_of_records(inputs: abc.Sequence[Input]) -> bool:
    """Return whether all files hold records or are compressed; beside plain text, JSON is text."""
    return not any(item.is_plain_text for item in inputs)


def check_begins(inputs: abc.Sequence[Input], text: str) -> None:
    """Raise UserError if there is no text, as far as the beginning of each file says."""
    if not is_of_records(inputs) and not any(begins_as_text(item.path) for item in inputs):
        raise _no_text_error(inputs, text)


def _no_text_error(inputs: abc.Sequence[Input], text: str) -> UserError:
    if inputs[0].folder is None:
        try:
            with inputs[0].path.open("rb") as file:
                check_utf_8(file.read(4))
        except UserError as error:
            return UserError(f"data.text: {text}: {error}; {_ADVICE}")
    return UserError(f"data.text: no UTF-8 text in {text}; {_ADVICE}")


def _left_out(counts: Counter[str]) -> str:
    binary, empty, json = (counts[name] for name in ("binary_files", "empty_files", "json_as_text"))
    parts = [f"{binary} files that are not UTF-8 text ({counts['binary_bytes']:,} bytes)"] * (binary > 0)
    parts += [f"{counts['not_text']} files that are not UTF-8 text"] * (counts["not_text"] > 0)
    parts += [f"{empty} empty files"] * (empty > 0)
    parts += [f"{counts['empty']} empty documents"] * (counts["empty"] > 0)
    left_out = f"; left out: {', '.join(parts)}" if parts else ""
    return left_out + f"; files of JSON that are read as text: {json}" * (json > 0)


def _links(inputs: list[Input]) -> str:
    folders = {item.folder for item in inputs if item.folder is not None} - {standard_library()}
    return read_once(sum(item.further_paths for item in inputs)) + dead_links(folders)
