"""A corpus of text files: find them, split them for training, validation and test, and tokenize them."""

import io
import platform
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import IO

import numpy as np

from megatron_noloco.data.folders import (
    COMPRESSIONS,
    JSON_LINES,
    PARQUET,
    dead_links,
    files_below,
    once,
    read_once,
)
from megatron_noloco.data.sources import Split
from megatron_noloco.data.tokenizer import ByteTokenizer, Tokenizer
from megatron_noloco.errors import UserError
from megatron_noloco.files import check_utf_8, is_utf_8, without_mark

STANDARD_LIBRARY = "python-stdlib"
PIECE_BYTES = 1 << 19  # a longer text is read and encoded in pieces of this size
_ADVICE = f'give a text file, a folder of text files, or "{STANDARD_LIBRARY}"'

_SPLIT_BY_FILE_FROM = 20  # files; with fewer, whole files make too coarse a split
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_BATCH_PIECES = 16  # encoded at once: a tokenizer needs hundreds of bytes per token while it encodes
_GOLDEN = 2654435769  # 2^32 over the golden ratio: multiples of it, modulo 2^32, lie evenly


@dataclass(frozen=True)
class Corpus:
    """Tokens of three splits; an end-of-document token follows each document, and BOS precedes it if asked for."""

    name: str
    files: int
    megabytes: float  # of text, 10^6 bytes, all splits together
    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray
    special_tokens: int  # that the texts spell out
    notes: str  # the end of a summary: how many files are not read, and how many of JSON are read as text
    by_file: bool  # whether each file is in one split


def load_corpus(text: str, split: Split, tokenizer: Tokenizer) -> Corpus:
    """Read and tokenize a whole corpus; every rank that sees the same files gets the same arrays.

    Args:
        text: a text file, a folder of text files, or "python-stdlib": the sources of Python's standard
            library on this machine. Those differ between Python versions, so ranks on machines with
            different Pythons would disagree about the data: `Corpus.name` carries the version.
        split: shares by which the files are divided, or each file where there are fewer than 20.

    Raises UserError where there is no text.
    """
    name, path = text, find_text(text)
    if text == STANDARD_LIBRARY:
        name, files = f"{text} {platform.python_version()}", once(standard_library_files())
    else:
        files = once(_files_of(path))
    documents, others = _read(files, path if path.is_dir() else path.parent)
    if not documents:
        raise _no_text_error(path)
    megabytes = sum(map(len, documents.values())) / 1e6
    by_file = len(documents) >= _SPLIT_BY_FILE_FROM
    parts = _split_by_file(documents, split) if by_file else _split_by_position(documents, split)
    (train, validation, test), special = zip(*(_tokenize(part, tokenizer) for part in parts), strict=True)
    notes = _notes(documents, others) + read_once(sum(files.values()))
    notes += dead_links([path] * (text != STANDARD_LIBRARY))
    return Corpus(name, len(documents), megabytes, train, validation, test, sum(special), notes, by_file)


def _read(files: Iterable[Path], folder: Path) -> tuple[dict[str, bytes], list[int]]:
    """Return texts by names that are the same on every machine, and the bytes of each file that holds none."""
    texts, others = dict[str, bytes](), list[int]()
    for file in files:
        content = without_mark(file.read_bytes())
        if content and is_utf_8([content]):
            texts[file.relative_to(folder).as_posix()] = content
        else:
            others.append(len(content))
    return texts, others


def _notes(names: Iterable[str], others: list[int]) -> str:
    binary, records = (
        sum(size > 0 for size in others),
        sum(name.lower().endswith(JSON_LINES) for name in names),
    )
    parts = [f"{binary} files that are not UTF-8 text ({sum(others):,} bytes)"] * bool(binary)
    parts += [f"{len(others) - binary} empty files"] * (binary < len(others))
    left_out = f"; left out: {', '.join(parts)}" if parts else ""
    return left_out + f"; files of JSON that are read as text: {records}" * (records > 0)


# Files


def find_text(text: str) -> Path:
    """Return the file or folder that `data.text` names; raises UserError when it is not there."""
    path = _library_folder() if text == STANDARD_LIBRARY else Path(text)
    if not path.exists():
        raise UserError(f"data.text: no file or folder at {path} (looked from cwd {Path.cwd()}); {_ADVICE}")
    return path


def check_text(text: str) -> None:
    """Raise UserError when `text` is not there, or when none of its files begins with UTF-8 text."""
    path = find_text(text)
    if not any(map(_is_text, _files_of(path))):
        raise _no_text_error(path)


def _files_of(path: Path) -> list[Path]:
    """Return `path` itself, or the files below that folder.

    Raises UserError where all have the names of files that hold records or are compressed.
    """
    files = files_below(path) if path.is_dir() else [path]
    if files and all(file.name.lower().endswith((*JSON_LINES, PARQUET, *COMPRESSIONS)) for file in files):
        raise UserError(
            f"data.text: {files[0]}: JSON lines, Parquet and compressed files are not read as text; make a "
            'dataset with "data preprocess" and give its prefix (in a config: data.data_path; records for '
            "fine-tuning: data.sft_data_path)"
        )
    return files


def standard_library_files() -> list[Path]:
    """Return the sources of Python's standard library, without its tests: text that every machine has."""
    files = files_below(_library_folder(), _SKIPPED_FOLDERS)
    return [path for path in files if path.suffix == ".py" and _is_text(path)]


def _library_folder() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _is_text(path: Path) -> bool:
    """Return whether a file begins with UTF-8 text."""
    with path.open("rb") as file:
        content = without_mark(read_piece(file))
    return content != b"" and is_utf_8([content])


def _no_text_error(path: Path) -> UserError:
    if path.is_file():
        try:
            check_utf_8(path.read_bytes())
        except UserError as error:
            return UserError(f"data.text: {path}: {error}; {_ADVICE}")
    return UserError(f"data.text: no UTF-8 text in {path}; {_ADVICE}")


# Splits


def _split_by_file(documents: dict[str, bytes], split: Split) -> list[list[bytes]]:
    """Assign whole files to splits by their places, so that the files of each split lie evenly among all."""
    texts = list(documents.values())
    order = sorted(range(len(texts)), key=lambda place: place * _GOLDEN % 2**32)
    return [
        [texts[place] for place in sorted(order[first:stop])]
        for first, stop in pairwise(split.bounds(len(texts)))
    ]


def _split_by_position(documents: dict[str, bytes], split: Split) -> list[list[bytes]]:
    """Assign the beginning of each file to training, what follows to validation, its end to test."""
    parts: list[list[bytes]] = [[], [], []]
    for text in documents.values():
        size = len(text)
        ends = (size * split.train, size * (split.train + split.validation))
        cuts = [0, *(_character_start(text, round(end)) for end in ends), size]
        for part, start, stop in zip(parts, cuts, cuts[1:], strict=False):
            if start < stop:
                part.append(text[start:stop])
    return parts


def _character_start(text: bytes, offset: int) -> int:
    """Return where the UTF-8 character at `offset` begins, so that a cut there divides no character."""
    while offset < len(text) and text[offset] & 0xC0 == 0x80:
        offset -= 1
    return offset


# Tokens


def read_piece(file: IO[bytes]) -> bytes:
    """Read `PIECE_BYTES` of a text and the rest of the last line; return b"" at the end of the file."""
    return file.read(PIECE_BYTES) + file.readline()


def _tokenize(texts: list[bytes], tokenizer: Tokenizer) -> tuple[np.ndarray, int]:
    """Return the tokens of all texts, an end-of-document token after each, shape [tokens].

    The second value is the number of special tokens that the texts spell out.
    """
    dtype = np.uint16 if isinstance(tokenizer, ByteTokenizer) else np.int32
    begin, end = (np.array(t, dtype) for t in (tokenizer.before_document, [tokenizer.end_of_document]))
    parts, special, begins = [np.empty(0, dtype)], 0, True
    pieces = ((piece, last) for text in texts for piece, last in _pieces(text))
    while batch := list(islice(pieces, _BATCH_PIECES)):
        decoded = [piece.decode() for piece, _ in batch]
        special += sum(map(tokenizer.count_special, decoded))
        for ids, (_, last) in zip(tokenizer.encode_batch(decoded), batch, strict=True):
            parts += [*[begin] * begins, ids, *[end] * last]
            begins = last
    return np.concatenate(parts, dtype=dtype), special


def _pieces(text: bytes) -> Iterator[tuple[bytes, bool]]:
    """Yield a text in the same pieces as preprocessing, each with whether it is the last."""
    file = io.BytesIO(text)
    while piece := read_piece(file):
        yield piece, file.tell() == len(text)
