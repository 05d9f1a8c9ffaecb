"""Encode documents: text becomes sequences of tokens, with the tokens of begin and end."""

from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import numpy as np

from megatron_noloco.data.formats import Advance, Piece, text_problem
from megatron_noloco.data.inputs import Input, left_out
from megatron_noloco.data.tokenizer import Tokenizer

Item = TypeVar("Item")

_LEFT_OUT = {"not_text": "file{} not in UTF-8", "empty_files": "empty file{}"}
# Counts of what is read otherwise than it looks, in a summary.
_NOTES = {
    "beside_records": "documents that are files of text beside records: {}",
    "json_as_text": "files of JSON that are read as text: {}",
    "spelled_as_text": "special tokens spelled out: {}, read as text",
    "spelled_as_tokens": "special tokens spelled out: {}, read as these tokens, not as text",
    "empty_answers": "empty answers: {}, of which only the end is learnt",
    "endless": "answers after which the chat template writes no special token: {}, so generation goes on there",
    "dated": "conversations whose chat template asks for the date: {}, it is 1 January 2025 in all",
    "joined": "answers that begin within a token of the prompt: {}, which generation reads apart",
    "learnt_apart": "later turns learnt apart: {}, which read earlier answers as other tokens",
}

# Encoded at once: many texts, also of small files, for many cores. It takes about 0.3 GB of memory.
_CHARACTERS = 1 << 23


class Sequence(NamedTuple):
    """A document, or a piece of a long one."""

    tokens: np.ndarray  # shape [tokens]
    ends: bool  # whether it is the last of its document
    mask: np.ndarray | None = None  # whether each token has a loss, bool [tokens]; None: each has


class Counts(Counter[str]):
    """Counts of what is read, and the files that are left out, in their order, by the name of their count."""

    def __init__(self, advance: Advance) -> None:
        super().__init__()
        self.advance = advance  # is told how many bytes are read
        self.left_out: dict[str, dict[Input, None]] = {}

    def leave_out(self, name: str, item: Input) -> None:
        files = self.left_out.setdefault(name, {})
        files[item] = None
        self[name] = len(files)  # a file is read once for each key


def read_documents(inputs: list[Input], key: str, counts: Counts) -> Iterator[Piece]:
    """Read inputs in order; leave out, and count, empty files, and files in folders that are not text."""
    records = any(item.kind != "text" for item in inputs)
    for item in inputs:
        if item.kind == "text":
            # Of a file that was given itself the reader finds what is no text.
            if (item.folder is not None or not item.bytes) and why_left_out(item, counts):
                counts.advance(item.bytes)
                continue
            counts["beside_records"] += records
        yield from item.pieces(key, counts.advance)


def why_left_out(item: Input, counts: Counts, decompressed: bool = True) -> str:
    """Return why a file is no text, and count it; "" if it is."""
    is_empty = item.bytes == item.mark
    problem = "is empty" if is_empty else text_problem(item.path, decompressed)
    if problem:
        counts.leave_out("empty_files" if is_empty else "not_text", item)
    return problem


def encode(
    pieces: Iterable[Piece], tokenizer: Tokenizer, append_eod: bool, counts: Counts
) -> Iterator[Sequence]:
    """Yield the sequence of each piece; leave out, and count, documents without tokens.

    Counts documents, tokens and the special tokens that texts spell out (see `spelled_as`).
    """
    none = tokenizer.encode("")
    begin = np.array(tokenizer.before_document, none.dtype)
    end = np.array([tokenizer.end_of_document] * append_eod, none.dtype)
    for group in read_ahead(_groups(pieces)):
        texts = [piece.text for piece in group]
        counts[spelled_as(tokenizer)] += sum(map(tokenizer.count_special, texts))
        # A single call of the tokenizer, which encodes on all cores.
        for piece, tokens in zip(group, tokenizer.encode_batch(texts), strict=True):
            if piece.begins and piece.ends and not len(tokens):
                counts["empty"] += 1
                continue
            first, last = begin if piece.begins else none, end if piece.ends else none
            sequence = np.concatenate([first, tokens, last])
            counts["tokens"] += len(sequence)
            counts["documents"] += piece.ends
            yield Sequence(sequence, piece.ends)


def spelled_as(tokenizer: Tokenizer, from_template: bool = False) -> str:
    """Return the name under which special tokens that a text spells out are counted: as what they are read."""
    return "spelled_as_text" if tokenizer.splits_special_tokens and not from_template else "spelled_as_tokens"


def notes_of(counts: Counts, of_files: str) -> str:
    """Return the end of a summary: what is left out, and what is read otherwise than it looks.

    Args:
        of_files: notes on the files that were found.
    """
    found = [left_out(counts.left_out[name], words) for name, words in _LEFT_OUT.items() if counts[name]]
    if empty := counts["empty"]:
        found.append(f"{empty} empty document{'s' * (empty > 1)}")
    notes = [f"left out: {', '.join(found)}"] * bool(found)
    notes += [text.format(counts[name]) for name, text in _NOTES.items() if counts[name]]
    return "".join(f"; {note}" for note in notes) + of_files


def _groups(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Group pieces that are encoded at once."""
    group, characters = list[Piece](), 0
    for piece in pieces:
        group.append(piece)
        characters += len(piece.text)
        if characters >= _CHARACTERS:
            yield group
            group, characters = [], 0
    if group:
        yield group


def read_ahead(items: Iterator[Item]) -> Iterator[Item]:
    """Yield the items, each read by a thread while the one before it is used."""
    with ThreadPoolExecutor(1, thread_name_prefix="read-ahead") as thread:
        following = thread.submit(next, items, None)
        while (item := following.result()) is not None:
            following = thread.submit(next, items, None)
            yield item
