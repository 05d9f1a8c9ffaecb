"""Records for supervised fine-tuning: prompts and answers, of which only the answers have a loss."""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron_noloco.data.corpus import files_below
from megatron_noloco.data.inputs import parse_json
from megatron_noloco.data.samples import IGNORED, Sample, check_index
from megatron_noloco.data.tokenizer import Tokenizer

_ENCODED_AT_ONCE = 1000  # records


class Record(NamedTuple):
    """One line of a file, encoded."""

    tokens: np.ndarray  # shape [tokens]
    answer: np.ndarray  # whether each token belongs to an answer, bool [tokens]


class _Text(NamedTuple):
    """One line of a file, as the text that the model reads."""

    text: str
    answers: list[tuple[int, int]]  # first character of each answer, and the one after its last
    ends: bool  # whether an end-of-document token follows, which then belongs to the answer


def record_files(path: str) -> list[Path]:
    """Return the file, or all .jsonl files below the folder; raises ValueError when there are none."""
    given = Path(path).expanduser()
    if not given.exists():
        raise ValueError(f"data.sft_data_path: no file or folder at {given} (looked from cwd {Path.cwd()})")
    files = [file for file in files_below(given) if file.suffix == ".jsonl"] if given.is_dir() else [given]
    if not files:
        raise ValueError(f"data.sft_data_path: no .jsonl file in {given}")
    return files


def load_records(path: str, tokenizer: Tokenizer) -> list[Record]:
    """Read and encode all records, in the order of the lines.

    A record is a JSON object with `messages`, which the tokenizer's chat template renders, and whose answers are
    the messages of the role "assistant"; or with `prompt` and `completion`, where the completion is the answer.
    Raises ValueError that names file and line of the first line that is no record.
    """
    texts = (text for file in record_files(path) for text in _read(file, tokenizer))
    records = []
    while some := list(islice(texts, _ENCODED_AT_ONCE)):
        encoded = tokenizer.encode_with_starts([text.text for text in some])
        for text, (tokens, starts) in zip(some, encoded, strict=True):
            answer = np.zeros(len(tokens), dtype=bool)
            for first, stop in text.answers:
                answer |= (starts >= first) & (starts < stop)
            if text.ends:
                tokens, answer = np.append(tokens, tokenizer.end_of_document), np.append(answer, True)
            records.append(Record(tokens, answer))
    return records


def _read(file: Path, tokenizer: Tokenizer) -> Iterator[_Text]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    text = _text_of(parse_json(line), tokenizer)
                    text.text.encode()  # JSON can hold halves of characters, which no tokenizer takes
                    yield text
                except ValueError as error:
                    raise ValueError(f"{file}, line {number}: {error}") from None


def _text_of(record: Any, tokenizer: Tokenizer) -> _Text:
    match record:
        case {"messages": [_, *_] as messages}:
            if all(isinstance(message, dict) and "role" in message for message in messages):
                return _conversation(messages, record.get("tools"), tokenizer)
            raise ValueError('each of messages must be an object with "role" and "content"')
        case {"prompt": str(prompt), "completion": str(completion)}:
            return _Text(prompt + completion, [(len(prompt), len(prompt + completion))], True)
    raise ValueError(
        'must be an object with "messages", a list, or with "prompt" and "completion", both text'
    )


def _conversation(messages: list[dict[str, Any]], tools: Any, tokenizer: Tokenizer) -> _Text:
    """Render a conversation and find its answers.

    An answer is what the template adds to the turns before it, when these already ask for an answer.
    """
    whole = tokenizer.render(messages, tools)
    answers = []
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            before = tokenizer.render(messages[:place], tools, asks=True)
            through = tokenizer.render(messages[: place + 1], tools)
            if not (through.startswith(before) and whole.startswith(through)):
                raise ValueError(
                    f"the chat template renders message {place + 1} or those before in another way when others "
                    "follow, so the answer in it cannot be found; split the conversation there, or use a template "
                    "whose turns do not depend on later ones"
                )
            answers.append((len(before), len(through)))
    if not answers:
        raise ValueError('no message has the role "assistant": there is nothing to learn')
    return _Text(whole, answers, False)


class RecordDataset:
    """Samples of whole records, one or several in each, filled up with tokens that have no loss.

    A record longer than a sample is cut, and left out where nothing of an answer remains.

    Attributes:
        tokens: the tokens that have a loss, shape [tokens].
        cut: number of records that were cut or left out.
    """

    def __init__(
        self, records: Sequence[Record], seq_length: int, name: str, packed: bool, padding: int
    ) -> None:
        """Raises ValueError when no record remains.

        Args:
            packed: whether a sample holds as many records as there is room for, as separate documents; else one.
            padding: the token that fills a sample up.
        """
        self.seq_length, self.name, self.packed, self.padding = seq_length, name, packed, padding
        self.cut = sum(len(record.tokens) > seq_length + 1 for record in records)
        fitting = [
            Record(record.tokens[: seq_length + 1], record.answer[: seq_length + 1]) for record in records
        ]
        self._records = [record for record in fitting if record.answer[1:].any()]
        if not self._records:
            raise ValueError(
                f"{name}: none of {len(records)} records has an answer within {seq_length} tokens"
            )
        lengths = [len(record.tokens) - 1 for record in self._records]  # the last token is a label only
        self._samples = pack(lengths, seq_length) if packed else [[place] for place in range(len(lengths))]
        self.tokens = np.concatenate([record.tokens[1:][record.answer[1:]] for record in self._records])

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
            # Not by np.where: tokens may be unsigned, and IGNORED would become one of them.
            labels[start:stop][record.answer[1:]] = record.tokens[1:][record.answer[1:]]
            documents[start:stop] = number
            start = stop
        return Sample(tokens, labels, documents if self.packed else None)


def pack(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Decide which lengths share one sample of `room` tokens; returns their places, sample by sample.

    Best-fit decreasing (Ding et al., arXiv 2404.10830): the longest first, each where it leaves the least room. No
    length may be more than `room`.
    """
    samples: list[list[int]] = []
    by_room: dict[int, list[list[int]]] = defaultdict(list)
    rooms: list[int] = []  # the keys of `by_room` with samples, ascending
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        fit = bisect_left(rooms, lengths[place])
        if fit == len(rooms):
            samples.append([])
            by_room[room].append(samples[-1])
            rooms.append(room)  # no more than the others: all have less room than the length
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
