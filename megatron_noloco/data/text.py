"""Text: files, each a document, which are divided among training, validation and test."""

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np

from megatron_noloco.data.blend import Blend
from megatron_noloco.data.encode import Counts, encode, why_left_out
from megatron_noloco.data.encode import Sequence as Encoded
from megatron_noloco.data.formats import read_text
from megatron_noloco.data.indexed import Dataset
from megatron_noloco.data.inputs import JSON_LINES, Input
from megatron_noloco.data.kinds import SPLITS, Kind
from megatron_noloco.data.samples import Samples
from megatron_noloco.data.sources import STANDARD_LIBRARY, Needs, Split
from megatron_noloco.data.tokenizer import ByteTokenizer
from megatron_noloco.errors import UserError

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

    def parts(self, counts: Counts) -> Iterator[Iterator[Encoded]]:
        for texts in divide(find_texts(self.inputs.files, counts), self.source.split):
            read = (read_text(text.item.path, counts.advance, text.start, text.stop) for text in texts)
            yield encode(chain.from_iterable(read), self.tokenizer, True, counts)

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


def find_texts(inputs: Sequence[Input], counts: Counts) -> list[TextRange]:
    """Return the whole content of each file that is text; count the others. Raises UserError for a given file."""
    texts = []
    for item in inputs:
        if problem := why_left_out(item, counts, decompressed=False):
            if item.folder is None:
                advice = f'give a text file, a folder of text files, or "{STANDARD_LIBRARY}"'
                raise UserError(f"data.text: {item.path}: {problem}; {advice}")
            continue
        texts.append(TextRange(item, item.mark, item.bytes))
        counts["bytes"] += texts[-1].stop - texts[-1].start
        counts["files"] += 1
        counts["json_as_text"] += item.path.suffix.lower() in JSON_LINES
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
