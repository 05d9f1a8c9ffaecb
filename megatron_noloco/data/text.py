"""Text: files, each a document, which are divided among training, validation and test."""

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron_noloco.data.blend import Blend
from megatron_noloco.data.encode import Advance, Counts, encode
from megatron_noloco.data.encode import Sequence as Encoded
from megatron_noloco.data.formats import begins_as_text, read_text, text_problem
from megatron_noloco.data.indexed import Dataset
from megatron_noloco.data.inputs import JSON_LINES, Input, Inputs, find_inputs, find_standard_library
from megatron_noloco.data.kinds import SPLITS, Kind
from megatron_noloco.data.samples import Samples
from megatron_noloco.data.sources import STANDARD_LIBRARY, Needs, Split, TextSource
from megatron_noloco.data.tokenizer import ByteTokenizer
from megatron_noloco.errors import UserError
from megatron_noloco.files import without_mark

_ADVICE = f'give a text file, a folder of text files, or "{STANDARD_LIBRARY}"'
_SPLIT_BY_FILE_FROM = 20  # files; with fewer, whole files make too coarse a split
_GOLDEN = 2654435769  # 2^32 over the golden ratio: multiples of it, modulo 2^32, lie evenly


class TextRange(NamedTuple):
    """Bytes of a file that become one document."""

    item: Input
    start: int  # after the byte order mark
    stop: int


class Text(Kind):
    """Files of text, divided when they are encoded; samples are in the order of the files."""

    unit = "files"
    splits_files = True

    @property
    def by_file(self) -> bool:
        return is_by_file(self.facts["files"])

    def check(self, output_dir: Path) -> None:
        if not any(begins_as_text(item.path) for item in self.inputs.files):
            raise self.empty()
        super().check(output_dir)

    def parts(self, counts: Counts, advance: Advance) -> Iterator[Iterator[Encoded]]:
        for texts in divide(find_texts(self.inputs.files, counts), self.source.split):
            pieces = chain.from_iterable(read_text(text.item.path, text.start, text.stop) for text in texts)
            yield encode(pieces, self.tokenizer, True, counts, advance)

    def bounds(self, dataset: Dataset) -> tuple[list[int], int]:
        return self.facts["splits"], self.facts["files"]

    def samples(self, dataset: Dataset, needs: Needs, split: int) -> Samples:
        samples = Samples(dataset, needs)
        if not isinstance(self.tokenizer, ByteTokenizer):
            samples.hashed_as = np.int32  # as versions up to 0.3 held them
        return samples

    def summary(self, training: Blend, validation: Blend | None) -> str:
        facts, ((dataset, _),) = self.facts, self.training
        assert dataset.offsets is not None
        tokens = np.diff(dataset.offsets[np.array(facts["splits"])])
        split = " and ".join(f"{number} {name}" for number, name in zip(tokens, SPLITS, strict=False))
        size = f"{facts['files']} file{'s' * (facts['files'] > 1)}, {facts['bytes'] / 1e6:.1f} MB"
        return f"{dataset.name}, {size}, {split} tokens{facts['notes']}"

    def empty(self) -> UserError:
        text, first = self.source.path, self.inputs.files[0]
        if first.folder is None:
            problem = text_problem(first.path, decompressed=False) or "is empty"
            return UserError(f"data.text: {text}: {problem}; {_ADVICE}")
        return _no_text_in(text)


def find_text(source: TextSource) -> Inputs:
    """Return the files of a text; raises UserError when there are none."""
    if source.path == STANDARD_LIBRARY:
        return find_standard_library()
    try:
        inputs = find_inputs([source.path], source.option)
    except UserError as error:
        raise UserError(f"{error}; {_ADVICE}") from None
    if not inputs.files:
        raise _no_text_in(source.path)
    return inputs


def _no_text_in(path: str) -> UserError:
    return UserError(f"data.text: no UTF-8 text in {path}; {_ADVICE}")


def find_texts(inputs: Sequence[Input], counts: Counts) -> list[TextRange]:
    """Return the whole content of each file that is text; count the others."""
    texts = []
    for item in inputs:
        with item.path.open("rb") as file:
            head = file.read(3)
        mark, stop = len(head) - len(without_mark(head)), item.bytes
        size = stop - mark
        if size and not text_problem(item.path, decompressed=False):
            texts.append(TextRange(item, mark, stop))
            counts["bytes"] += size
            counts["files"] += 1
            counts["json_as_text"] += item.path.suffix.lower() in JSON_LINES
        else:
            counts.leave_out("not_text" if size else "empty_files", item)
    return texts


def is_by_file(files: int) -> bool:
    """Return whether each file of a text is in one split."""
    return files >= _SPLIT_BY_FILE_FROM


def divide(texts: Sequence[TextRange], split: Split) -> list[list[TextRange]]:
    """Return the documents of training, validation and test.

    With 20 files or more each file is in one split, by its place, so that the files of each split lie evenly among
    all. Otherwise the beginning of each file is for training, what follows for validation, its end for test.
    """
    if is_by_file(len(texts)):
        order = sorted(range(len(texts)), key=lambda place: place * _GOLDEN % 2**32)
        bounds = pairwise(split.bounds(len(texts)))
        return [[texts[place] for place in sorted(order[first:stop])] for first, stop in bounds]
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
