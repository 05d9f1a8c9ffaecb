"""One worker's share of preprocessing: a bite of records becomes tokens."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from megatron_noloco.data.inputs import Bite
from megatron_noloco.data.sources import TokenizerChoice
from megatron_noloco.data.tokenizer import Tokenizer, build_tokenizer


@dataclass(frozen=True)
class Encoding:
    """How records become documents."""

    tokenizer: TokenizerChoice
    json_keys: tuple[str, ...]
    append_eod: bool


@dataclass(frozen=True)
class Encoded:
    """The sequences of a bite under one key."""

    sequences: list[np.ndarray]
    ends_document: bool  # with the last sequence; all others end theirs
    empty: int  # records without text, left out


def encode(bite: Bite, encoding: Encoding) -> dict[str, Encoded]:
    """The bite's sequences by key; raises ValueError that names file and line of what cannot be read."""
    keys = encoding.json_keys
    rows = list(_rows(bite, keys))
    tokenizer = _tokenizer(encoding.tokenizer)
    return {
        key: _encode([row[column] for row in rows], bite, encoding, tokenizer)
        for column, key in enumerate(keys)
    }


def _rows(bite: Bite, keys: tuple[str, ...]) -> Iterator[list[str]]:
    """The texts of each record, in the order of `keys`."""
    path, kind = bite.input.path, bite.input.kind
    for number, record in enumerate(bite.records, bite.first):
        if kind == "text":
            try:
                yield [record.decode()]
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}: not UTF-8 text ({error.reason})") from None
            continue
        place = _place(bite, number)
        fields = _parse_line(record, place) if kind == "jsonl" else record
        yield [_text(fields, key, place) for key in keys]


def _place(bite: Bite, number: int) -> str:
    return f"{bite.input.path}, {'row' if bite.input.kind == 'parquet' else 'line'} {number}"


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _parse_line(line: bytes, place: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except ValueError as error:  # not UTF-8, or not JSON
        raise ValueError(f"{place}: not JSON ({error})") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{place}: not a JSON object")
    return fields


def _text(fields: dict[str, Any], key: str, place: str) -> str:
    if key not in fields:
        raise ValueError(f"{place}: no key {key!r}; there are {', '.join(fields)} (--json-keys)")
    text = fields[key]
    if text is not None and not isinstance(text, str):
        raise ValueError(f"{place}: {key!r} holds {type(text).__name__}, not text (--json-keys)")
    return text or ""


def _encode(texts: list[str], bite: Bite, encoding: Encoding, tokenizer: Tokenizer) -> Encoded:
    try:
        sequences = tokenizer.encode_batch(texts)
    except (TypeError, UnicodeEncodeError):
        bad = next(number for number, text in enumerate(texts, bite.first) if not _is_unicode(text))
        raise ValueError(
            f"{_place(bite, bad)}: holds half a character (a surrogate such as \\ud83d without its other half)"
        ) from None
    if bite.holds_whole_documents:
        sequences = [tokens for tokens in sequences if len(tokens)]
    if encoding.append_eod:
        for index in range(len(sequences) if bite.ends_document else len(sequences) - 1):
            tokens = sequences[index]
            sequences[index] = np.append(tokens, tokens.dtype.type(tokenizer.end_of_document))
    return Encoded(sequences, bite.ends_document, len(texts) - len(sequences))


@cache
def _tokenizer(choice: TokenizerChoice) -> Tokenizer:
    """Built once per process."""
    return build_tokenizer(choice)
