"""Encode documents: text becomes sequences of tokens, with the tokens of begin and end. Count what is read."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from megatron_noloco.data.cache import Made
from megatron_noloco.data.formats import PIECE, Advance, Input, Piece, cut
from megatron_noloco.data.indexed import Sequence
from megatron_noloco.data.inputs import OTHERS, POINTERS, hub_repository_of, in_words, split_of, why_left_out
from megatron_noloco.data.tokenizer import Tokenizer
from megatron_noloco.errors import UserError
from megatron_noloco.files import outside

Item = TypeVar("Item")

# Counts of what is read otherwise than it looks, in a summary.
_NOTES = {
    "beside_records": "documents that are files of text beside records: {}",
    "spelled_as_text": "special tokens spelled out: {}, read as text (split_special_tokens false: as tokens)",
    "spelled_as_tokens": "special tokens spelled out: {}, read as these tokens, not as text",
    "empty_answers": "empty answers: {}, of which only the end is learnt",
    "endless": "answers after which the chat template writes no special token: {}, so generation goes on there",
    "joined": "answers that begin within a token of the prompt: {}, which generation reads apart",
    "learnt_apart": "later turns in samples of their own: {}, since the template writes earlier answers otherwise",
}

_CHARACTERS = 1 << 21  # encoded at once: pieces for 32 cores
_LONGEST = 1 << 18  # characters of a text of a record that are encoded as a whole
ROLES = ("system", "user", "assistant", "tool")  # which templates know
_EXAMPLES = 3  # of characters that are lost
# Of a small text, in characters: pieces of 4 KB, but 40 of them, so that each split gets some.
_SMALL_PIECE, _FEWEST_PIECES, _MANY_PIECES = 1 << 12, 40, 1000


class Counts(Counter[str]):
    """Counts of what is read.

    Attributes:
        left_out: the files that are not read, by the reason.
        lost: how often each character that no token stands for was met.
        lost_in: the first file that holds each.
        roles: how often messages have each role of which a template may know nothing.
        splits: the number of files of each split, by their names.
    """

    def __init__(self, advance: Advance) -> None:
        super().__init__()
        self.advance = advance  # is told how many bytes are read
        self.left_out: dict[str, list[Input]] = {}
        self.lost, self.lost_in = Counter[str](), dict[str, str]()
        self.roles, self.splits = Counter[str](), Counter[str]()

    def count_texts(
        self, pairs: list[tuple[str, str]], tokenizer: Tokenizer, from_template: bool = False
    ) -> None:
        """Count the special tokens that texts spell out, as what they are read, and the characters that are lost.

        Args:
            pairs: texts, each with the name of its file.
            from_template: whether special tokens are these tokens in any case.
        """
        texts = [text for text, _ in pairs]
        as_text = tokenizer.splits_special_tokens and not from_template
        spelled = "spelled_as_text" if as_text else "spelled_as_tokens"
        self[spelled] += sum(map(tokenizer.count_special, texts))
        self["characters"] += sum(map(len, texts))
        lost = tokenizer.count_lost(texts)
        self.lost.update(lost)
        for character in lost.keys() - self.lost_in.keys():
            self.lost_in[character] = next(file for text, file in pairs if character in text)

    def made(self, source: str, tokenizer: Tokenizer) -> Made:
        """Return what is known of a dataset, once all of it is read."""
        found = [in_words(files, reason) for reason, files in self.left_out.items()]
        if empty := self["empty"]:
            found.append(f"{empty} empty document{'s' * (empty > 1)}")
        notes = [f"left out: {', '.join(found)}"] * bool(found)
        notes += [text.format(self[name]) for name, text in _NOTES.items() if self[name]]
        lost, number = "", self.lost.total()
        share = number / max(1, self["characters"])
        if number:
            most = [character for character, _ in self.lost.most_common(_EXAMPLES)]
            examples = ", ".join(f"{one!r} in {outside(self.lost_in[one])}" for one in most)
            lost = (
                f"{number:,} of {self['characters']:,} characters ({100 * share:.2g} %), such as {examples}"
            )
            notes.append(f"no token stands for {lost}")
        if self.roles:
            named = ", ".join(f'"{outside(role)}" ({count})' for role, count in self.roles.most_common())
            notes.append(
                f"messages of other roles than {', '.join(ROLES)}: {named}, nothing is learnt of them"
            )
        if len(self.splits) > 1 and self.splits.keys() - {OTHERS, "train"}:
            named = ", ".join(f"{split} ({count})" for split, count in self.splits.items())
            notes.append(f"files of several splits are read: {named}")
        if off := tokenizer.content["switched_off"]:
            notes.append(f"switched off in the tokenizer, which draws tokens at random: {off}")
        read = {name: self[name] for name in ("files", "bytes", "documents", "tokens", "records")}
        summary = "".join(f"; {note}" for note in notes)
        return Made(source, tokenizer.digest, **read, lost_share=share, lost=lost, notes=summary)


def files_to_read(
    inputs: Collection[Input], keys: Collection[str], counts: Counts, rows_alone: bool = False
) -> Iterator[Input]:
    """Yield the files that hold something to read, and count the others; arguments as of `why_left_out`.

    A repository of the Hugging Face Hub that has rows has no other data: its texts are a card and licences.

    Raises UserError as `why_left_out` does.
    """
    with_rows = {hub_repository_of(item.path) for item in inputs if item.kind != "text"} - {None}
    for item in inputs:
        reason = why_left_out(item, keys, rows_alone or hub_repository_of(item.path) in with_rows)
        if reason:
            counts.left_out.setdefault(reason, []).append(item)
            counts.advance(item.bytes)
            continue
        if split := split_of(item):
            counts.splits[split] += 1
        yield item


def read_documents(files: Iterable[Input], total: int, key: str, counts: Counts) -> Iterator[Piece]:
    """Read documents, of rows the text under a key; raises UserError that names the file, and the place.

    Args:
        total: bytes of all inputs.
    """
    texts = 0
    for item in files:
        texts += item.kind == "text"
        counts["files"] += 1
        counts["bytes"] += item.bytes
        yield from item.pieces(key, counts.advance, _piece_of(total) if item.kind == "text" else PIECE)
    if texts < counts["files"]:
        counts["beside_records"] = texts
    elif rows := [item for item in counts.left_out.get(POINTERS, ()) if item.kind != "text"]:
        raise UserError(
            f"{rows[0].path}: a pointer of Git LFS, and there is no other file of rows; `git lfs pull` fetches it"
        )


def _piece_of(total: int) -> int:
    """Return the characters of a piece of a text, of inputs with so many bytes in all."""
    return min(PIECE, max(total // _MANY_PIECES, min(total // _FEWEST_PIECES, _SMALL_PIECE), 1))


def encode(
    pieces: Iterable[Piece], tokenizer: Tokenizer, append_eod: bool, counts: Counts
) -> Iterator[Sequence]:
    """Yield the sequence of each piece; leave out, and count, documents without tokens.

    Counts documents, tokens, and what `Counts.count_texts` counts.
    """
    none = tokenizer.encode("")
    begin = np.array(tokenizer.before_document, none.dtype)
    end = np.array([tokenizer.end_of_document] * append_eod, none.dtype)
    for group in read_ahead(in_groups(pieces, lambda piece: len(piece.text))):
        counts.count_texts([(piece.text, piece.file) for piece in group], tokenizer)
        texts = [piece.text for piece in group]
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


def encode_each(texts: Iterable[str], tokenizer: Tokenizer, from_template: bool) -> Iterator[np.ndarray]:
    """Yield the tokens of each text, few texts at a time; one of more than `_LONGEST` characters in pieces."""
    pieces = (piece for text in texts for piece in cut([text], _LONGEST))
    tokens = list[np.ndarray]()
    for group in in_groups(pieces, lambda piece: len(piece.text)):
        encoded = tokenizer.encode_batch([piece.text for piece in group], from_template)
        for piece, found in zip(group, encoded, strict=True):
            tokens.append(found)
            if piece.ends:
                yield np.concatenate(tokens)
                tokens.clear()


def in_groups(items: Iterable[Item], characters: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Group what is encoded at once, by its characters."""
    group, total = list[Item](), 0
    for item in items:
        group.append(item)
        total += characters(item) + 1  # so that empty documents count, too
        if total >= _CHARACTERS:
            yield group
            group, total = [], 0
    if group:
        yield group


def read_ahead(items: Iterator[Item]) -> Iterator[Item]:
    """Yield the items, each read by a thread while the one before it is used."""
    with ThreadPoolExecutor(1, thread_name_prefix="read-ahead") as thread:
        following = thread.submit(next, items, None)
        while (item := following.result()) is not None:
            following = thread.submit(next, items, None)
            yield item
