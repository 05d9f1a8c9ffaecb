"""Records for supervised fine-tuning: prompts and answers; only the tokens of answers have a loss."""

import json
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron_noloco.data.chat import in_words, render_conversation
from megatron_noloco.data.folders import (
    JSON_LINES,
    PARQUET,
    dead_links,
    files_below,
    holds_records,
    once,
    read_once,
)
from megatron_noloco.data.inputs import Input, read_rows
from megatron_noloco.data.samples import IGNORED, Sample, check_index
from megatron_noloco.data.tokenizer import Tokenizer
from megatron_noloco.errors import UserError
from megatron_noloco.files import check_whole_characters

_UNREAD = ("functions", "documents", "chat_template_kwargs")  # beside messages, in other programs
_NAMED = 3  # files in a summary
_BATCH_RECORDS = 1000  # encoded at once
# Texts after which answers are encoded; none is joined with every other text.
_ANCHORS = ("", "\n", "a", "0", ".")


class Record(NamedTuple):
    """One line of a file, encoded; one of several where its turns cannot share a sequence of tokens."""

    tokens: np.ndarray  # shape [tokens]
    answer: np.ndarray  # whether each token belongs to an answer, bool [tokens]
    spelled_out: int = 0  # special tokens that its texts spell out
    as_text: bool = True  # whether these are read as text
    empty: int = 0  # answers without any text, of which only the end is learnt
    joined: int = 0  # answers whose first token reaches into the prompt
    begins: bool = True  # whether it is the first of its line


class _Text(NamedTuple):
    """One line of a file, as the text that the model reads."""

    text: str
    answers: list[tuple[int, int]]  # first character of each answer, and the one after its last
    empty: int  # answers without any text
    from_template: bool  # which ends an answer; otherwise an end-of-document token does, as a part of it
    spelled_out: int = 0  # special tokens in the texts that were given


def record_files(path: str) -> tuple[list[Path], str]:
    """Return the file, or all files of records below the folder, and the end of a summary that counts the others.

    Raises UserError where there is none.
    """
    given = Path(path)
    if not given.exists():
        raise UserError(f"data.sft_data_path: no file or folder at {given} (looked from cwd {Path.cwd()})")
    if not given.is_dir():
        return [given], ""
    files = once(files_below(given))
    records, others = ([file for file in files if holds_records(file) == which] for which in (True, False))
    if not records:
        raise UserError(
            f"data.sft_data_path: no file of records ({', '.join((*JSON_LINES, PARQUET))}) in {given}"
        )
    names = ", ".join(file.name for file in others[:_NAMED]) + ", ..." * (len(others) > _NAMED)
    left_out = f"; left out: {len(others)} files without records ({names})" if others else ""
    return records, left_out + read_once(sum(files.values())) + dead_links([given])


def load_records(path: str, tokenizer: Tokenizer) -> list[Record]:
    """Read and encode all records, in the order of the lines.

    A record is a JSON object with `messages` or with `prompt` and `completion`. The tokenizer's chat template
    renders messages, whose answers are those of the role "assistant"; otherwise the completion is the answer.
    Raises UserError that names file and line of the first line that is not a record, or where there is none.
    """
    texts = (text for file in record_files(path)[0] for text in _read(file, tokenizer))
    records = list[Record]()
    while batch := list(islice(texts, _BATCH_RECORDS)):
        for from_template, group in groupby(batch, key=lambda text: text.from_template):
            alike = list(group)
            ends = [text.text[:end] for text in alike for answer in text.answers for end in answer]
            encoded = iter(tokenizer.encode_batch(ends, from_template))
            for text in alike:
                records += _records(text, [(next(encoded), next(encoded)) for _ in text.answers], tokenizer)
    if not records:
        raise UserError(f"data.sft_data_path: no records in {path}")
    return records


def _records(
    text: _Text, encoded: list[tuple[np.ndarray, np.ndarray]], tokenizer: Tokenizer
) -> Iterator[Record]:
    """Yield what is learnt of a line: its answers, each after the tokens that generation reads before it.

    A later answer needs another record where its prompt does not begin with the tokens of the answers before it.

    Args:
        encoded: the tokens of the text before each answer, and of the text up to its end.
    """
    found: list[tuple[np.ndarray, np.ndarray]] = []
    joined = 0
    for (first, stop), (prompt, whole) in zip(text.answers, encoded, strict=True):
        before, tokens = _apart(prompt, whole, text.text[first:stop], tokenizer, text.from_template)
        joined += before is not prompt
        end = tokenizer.end_of_document  # which a completion may spell out
        if not text.from_template and tokens[-1:].tolist() != [end]:
            tokens = np.append(tokens, end)
        answer = np.repeat([False, True], [len(before), len(tokens)])
        if found and _begins_with(before, found[-1][0]):
            _, learnt = found.pop()
            answer[: len(learnt)] = learnt
        found.append((np.append(before, tokens).astype(prompt.dtype), answer))
    begin, as_text = tokenizer.before_document, tokenizer.splits_special_tokens and not text.from_template
    counted = Record(*found[0], text.spelled_out, as_text, text.empty, joined)
    for place, (tokens, answer) in enumerate(found):
        lead = begin
        if not begin and answer[0]:  # after the end of another document, where generation begins, too
            lead = (tokenizer.end_of_document,)
        elif tuple(tokens[: len(begin)]) == begin:  # a template may write it itself
            lead = ()
        if lead:
            tokens, answer = np.insert(tokens, 0, lead), np.insert(answer, 0, [False] * len(lead))
        counts = counted if place == 0 else Record(tokens, answer, begins=False)
        yield counts._replace(tokens=tokens, answer=answer)


def _apart(
    prompt: np.ndarray, whole: np.ndarray, answer: str, tokenizer: Tokenizer, from_template: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens before an answer, which are those of the prompt where possible, and its own.

    An answer has its tokens after the prompt, or where the tokenizer joins both, after another text. Texts are
    compared, since a tokenizer may begin each text with a space, or letters after others with a mark. Where no
    tokens of its own make up the answer, it begins with the first token that the prompt alone does not have.

    Args:
        whole: the tokens of prompt and answer together.
    """
    if _begins_with(whole, prompt):
        return prompt, whole[len(prompt) :]
    text = tokenizer.decode(whole)
    for anchor in _ANCHORS:
        alone, tokens = tokenizer.encode_batch([anchor, anchor + answer], from_template)
        tokens, found = tokens[len(alone) :], _begins_with(tokens, alone)
        if found and tokenizer.decode(np.append(prompt, tokens)) == text:
            return prompt, tokens
    length = min(len(prompt), len(whole))
    same = int(np.logical_and.accumulate(prompt[:length] == whole[:length]).sum())
    return whole[:same], whole[same:]


def _begins_with(tokens: np.ndarray, first: np.ndarray) -> bool:
    return np.array_equal(tokens[: len(first)], first)


def _read(file: Path, tokenizer: Tokenizer) -> Iterator[_Text]:
    for place, record, _ in read_rows(Input(file, None)):
        try:
            check_whole_characters(json.dumps(record, ensure_ascii=False, default=str))
            text = _text_of(record, tokenizer)
        except UserError as error:
            raise UserError(f"{place}: {error}") from None
        yield text._replace(spelled_out=sum(map(tokenizer.count_special, _strings(record))))


def _strings(value: Any) -> Iterator[str]:
    """Yield each text in a part of a record."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for held in value.values() if isinstance(value, dict) else value:
            yield from _strings(held)


def _text_of(record: Any, tokenizer: Tokenizer) -> _Text:
    given = record
    if isinstance(record, dict):  # null is what datasets write where a record has no such key
        given = {key: value for key, value in record.items() if value is not None}
    match given:
        case {"messages": _, "prompt": _} | {"messages": _, "completion": _}:
            raise UserError(
                'has "messages" and also "prompt" or "completion"; leave out what is not to be learnt'
            )
        case {"weight": weight} if weight != 1:
            raise UserError(f'"weight" {weight!r} of a whole record; give it to a message that is an answer')
        case {"messages": [_, *_] as messages}:
            for key in _UNREAD:
                if given.get(key):
                    raise UserError(f'"{key}" is not given to the chat template; messages and "tools" are')
            return _Text(*render_conversation(messages, given.get("tools"), tokenizer.chat_template), True)
        case {"prompt": str(prompt), "completion": str(completion)}:
            answer = (len(prompt), len(prompt + completion))
            return _Text(prompt + completion, [answer], int(not completion.strip()), False)
    raise UserError(
        f'{in_words(record)}; a record is an object with "messages", a list of objects with "role" and "content", '
        'or with "prompt" and "completion", both text'
    )


class RecordDataset:
    """Samples of one or several whole records, padded with tokens that have no loss.

    A record longer than a sample is cut, and left out if none of its answer remains.

    Attributes:
        tokens: all tokens that have a loss, one record after the other, shape [tokens].
        cut: number of records that were cut or left out.
    """

    def __init__(
        self, records: Sequence[Record], seq_length: int, name: str, packed: bool, padding: int
    ) -> None:
        """Raises UserError when all records are left out.

        Args:
            packed: whether a sample holds as many records as fit, as separate documents; otherwise one.
            padding: the token that pads a sample.
        """
        self.seq_length, self.name, self.packed, self.padding = seq_length, name, packed, padding
        self.cut = sum(len(record.tokens) > seq_length + 1 for record in records)
        fitting = [
            record._replace(tokens=record.tokens[: seq_length + 1], answer=record.answer[: seq_length + 1])
            for record in records
        ]
        self._records = [record for record in fitting if record.answer[1:].any()]
        if not self._records:
            raise UserError(
                f"{name}: none of {len(records)} records has an answer within {seq_length} tokens"
            )
        lengths = [len(record.tokens) - 1 for record in self._records]  # the last token is a label only
        self._samples = pack(lengths, seq_length) if packed else [[place] for place in range(len(lengths))]
        self.tokens = np.concatenate([record.tokens[1:][record.answer[1:]] for record in self._records])

    @property
    def contents(self) -> tuple[np.ndarray, ...]:
        """All that samples are made of: the tokens of all records, which of them are answers, and each length."""
        tokens = np.concatenate([record.tokens for record in self._records])
        answers = np.concatenate([record.answer for record in self._records])
        return tokens, answers, np.array([len(record.tokens) for record in self._records])

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Sample:
        check_index(self, index)
        places = self._samples[index]
        tokens = np.full(self.seq_length, self.padding, dtype=np.int64)
        labels = np.full(self.seq_length, IGNORED, dtype=np.int64)
        documents = np.full(self.seq_length, len(places), dtype=np.int64)
        start = 0
        for number, place in enumerate(places):
            record = self._records[place]
            stop = start + len(record.tokens) - 1
            tokens[start:stop] = record.tokens[:-1]
            # Not np.where: tokens may be unsigned, and the negative IGNORED would become a token.
            labels[start:stop][record.answer[1:]] = record.tokens[1:][record.answer[1:]]
            documents[start:stop] = number
            start = stop
        return Sample(tokens, labels, documents if self.packed else None)


def pack(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Decide which lengths share a sample of `room` tokens; return their indices, sample by sample.

    Best-fit decreasing (Ding et al., arXiv 2404.10830): the longest first, each where it leaves the least room. No
    length may be more than `room`.
    """
    samples: list[list[int]] = []
    by_room: dict[int, list[list[int]]] = defaultdict(list)
    rooms: list[int] = []  # the keys of `by_room` that have samples, ascending
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        fit = bisect_left(rooms, lengths[place])
        if fit == len(rooms):
            samples.append([])
            by_room[room].append(samples[-1])
            rooms.append(room)  # in order: all samples so far have less room than this length
        left = rooms[fit]
        sample = by_room[left].pop()
        if not by_room[left]:
            del rooms[fit]
        sample.append(place)
        left -= lengths[place]
        if not by_room[left]:
            insort(rooms, left)
        by_room[left].append(sample)
    return samples
