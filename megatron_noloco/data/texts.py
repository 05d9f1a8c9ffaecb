"""Divide files of text among training, validation and test."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from megatron_noloco.data.folders import JSON_LINES
from megatron_noloco.data.inputs import Input, is_text
from megatron_noloco.data.sources import Split
from megatron_noloco.files import without_mark

_SPLIT_BY_FILE_FROM = 20  # files; with fewer, whole files make too coarse a split
_GOLDEN = 2654435769  # 2^32 over the golden ratio: multiples of it, modulo 2^32, lie evenly


class TextRange(NamedTuple):
    """Bytes of a file that become one document."""

    item: Input
    start: int  # after the byte order mark
    stop: int


def divide(texts: Sequence[TextRange], split: Split) -> list[list[TextRange]]:
    """Return the documents of training, validation and test.

    With 20 files or more each file is in one split, else each is cut into the three.
    """
    return _by_file(texts, split) if is_by_file(len(texts)) else _by_position(texts, split)


def is_by_file(files: int) -> bool:
    return files >= _SPLIT_BY_FILE_FROM


def find_texts(inputs: Sequence[Input], counts: Counter[str]) -> list[TextRange]:
    """Return the whole content of each file that is text; count the others."""
    texts = []
    for item in inputs:
        with item.path.open("rb") as file:
            head = file.read(3)
        mark, stop = len(head) - len(without_mark(head)), item.bytes
        size = stop - mark
        if size and is_text(item, decompressed=False):
            texts.append(TextRange(item, mark, stop))
            counts["bytes"] += size
            counts["files"] += 1
            counts["json_as_text"] += item.path.name.lower().endswith(JSON_LINES)
        else:
            counts["binary_files" if size else "empty_files"] += 1
            counts["binary_bytes"] += size
    return texts


def _by_file(texts: Sequence[TextRange], split: Split) -> list[list[TextRange]]:
    """Assign whole files to splits by their places, so that the files of each split lie evenly among all."""
    order = sorted(range(len(texts)), key=lambda place: place * _GOLDEN % 2**32)
    return [
        [texts[place] for place in sorted(order[first:stop])]
        for first, stop in pairwise(split.bounds(len(texts)))
    ]


def _by_position(texts: Sequence[TextRange], split: Split) -> list[list[TextRange]]:
    """Assign the beginning of each file to training, what follows to validation, its end to test."""
    parts: list[list[TextRange]] = [[], [], []]
    for text in texts:
        size = text.stop - text.start
        ends = (size * split.train, size * (split.train + split.validation))
        cuts = [text.start, *(_character_start(text, text.start + round(end)) for end in ends), text.stop]
        for part, (start, stop) in zip(parts, pairwise(cuts), strict=True):
            if start < stop:
                part.append(TextRange(text.item, start, stop))
    return parts


def _character_start(text: TextRange, place: int) -> int:
    """Return where the UTF-8 character at byte `place` begins, so that a cut there divides no character."""
    first = max(text.start, place - 3)
    with text.item.path.open("rb") as file:
        file.seek(first)
        before = file.read(place + 1 - first)
    while place < text.stop and before[place - first] & 0xC0 == 0x80:
        place -= 1
    return place
