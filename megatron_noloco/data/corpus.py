"""Text files: which of them are read, how they are split for training, validation and test, and their tokens."""

import codecs
import hashlib
import io
import os
import platform
import sysconfig
from collections.abc import Collection, Iterable, Iterator
from dataclasses import astuple, dataclass
from itertools import islice
from pathlib import Path
from typing import IO

import numpy as np

from megatron_noloco.data.sources import Split
from megatron_noloco.data.tokenizer import ByteTokenizer, Tokenizer

STANDARD_LIBRARY = "python-stdlib"
PIECE_BYTES = 1 << 19  # of a text that is encoded at once
_CHOICES = f'give a text file, a folder of text files, or "{STANDARD_LIBRARY}"'

_SPLIT_BY_FILE_FROM = 20  # files; with fewer, whole files make too coarse a split
_NOT_SOURCES = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_PIECES_AT_ONCE = 16


@dataclass(frozen=True)
class Document:
    """One text file."""

    name: str  # POSIX path relative to the folder of the corpus: the same on every machine
    text: bytes  # UTF-8


@dataclass(frozen=True)
class Corpus:
    """Tokens of three splits; an end-of-document token follows each document."""

    name: str
    files: int
    megabytes: float  # of text, 10^6 bytes, all splits together
    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray


def load_corpus(text: str, split: Split, tokenizer: Tokenizer) -> Corpus:
    """Read and tokenize a whole corpus; every rank that sees the same files gets the same arrays.

    Args:
        text: a text file, a folder of text files, or "python-stdlib": the sources of Python's standard
            library on this machine. Those differ between Python versions, so ranks on machines with
            different Pythons would disagree about the data: `Corpus.name` carries the version.
        split: of the files, or of each file where there are fewer than 20.

    Raises ValueError where there is no text, or none for training or for validation with a share above zero.
    """
    name, path = text, find_text(text)
    folder = path if path.is_dir() else path.parent
    if text == STANDARD_LIBRARY:
        name, paths = f"{text} {platform.python_version()}", standard_library_files()
    else:
        paths = text_files(path)
    documents = [Document(path.relative_to(folder).as_posix(), path.read_bytes()) for path in paths]
    megabytes = sum(len(document.text) for document in documents) / 1e6
    by_file = len(documents) >= _SPLIT_BY_FILE_FROM
    parts = _split_by_file(documents, split) if by_file else _split_by_position(documents, split)
    for split_name, share, part in zip(("train", "validation"), astuple(split), parts, strict=False):
        if share > 0 and not part:
            raise ValueError(
                f"data.split: a share of {share:.4g} leaves the {split_name} split of {name} empty "
                f"({len(documents)} files, {megabytes:.3g} MB); raise its weight or add text"
            )
    train, validation, test = (_join(part, tokenizer) for part in parts)
    return Corpus(name, len(documents), megabytes, train, validation, test)


# Files


def find_text(text: str) -> Path:
    """Return the file or folder that `data.text` names; raises ValueError when it is not there."""
    path = _library_folder() if text == STANDARD_LIBRARY else Path(text).expanduser()
    if not path.exists():
        raise ValueError(f"data.text: no file or folder at {path} (looked from cwd {Path.cwd()}); {_CHOICES}")
    return path


def check_text(text: str) -> None:
    """Raise ValueError where `find_text` does, or where the beginning of no file is UTF-8 text."""
    path = find_text(text)
    if not any(map(_begins_as_text, files_below(path) if path.is_dir() else [path])):
        raise _no_text(path)


def text_files(path: Path) -> list[Path]:
    """Return `path` itself, or every file in that folder, however deep, that holds UTF-8 text.

    Hidden files and folders (.git, editors' backups) and empty files are left out.
    Raises ValueError where no file remains.
    """
    files = _readable(files_below(path) if path.is_dir() else [path])
    if not files:
        raise _no_text(path)
    return files


def standard_library_files() -> list[Path]:
    """Return the sources of Python's standard library, without its tests: text that every machine has."""
    return _readable(path for path in files_below(_library_folder(), _NOT_SOURCES) if path.suffix == ".py")


def files_below(folder: Path, skipped: Collection[str] = ()) -> list[Path]:
    """Return the files below `folder`, without hidden ones and `skipped` folders, by relative POSIX path."""
    found: list[Path] = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
        paths = [Path(parent, name) for name in files if not name.startswith(".")]
        found += [path for path in paths if path.is_file()]
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def _library_folder() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _readable(paths: Iterable[Path]) -> list[Path]:
    """Return those of `paths` that hold text: at least one byte, and all of it UTF-8."""
    return [path for path in paths if _is_text(path.read_bytes(), final=True)]


def _begins_as_text(path: Path) -> bool:
    with path.open("rb") as file:
        return _is_text(file.read(PIECE_BYTES), final=False)


def _is_text(content: bytes, final: bool) -> bool:
    """Return whether the content is UTF-8 text and not empty; unless `final`, it may end within a character."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(content, final)
    except UnicodeDecodeError:
        return False
    return len(content) > 0


def _no_text(path: Path) -> ValueError:
    return ValueError(f"data.text: no UTF-8 text in {path}; {_CHOICES}")


# Splits


def _split_by_file(documents: list[Document], split: Split) -> list[list[bytes]]:
    """Assign whole files to splits, each by a hash of its name: adding a file moves no other file."""
    parts: list[list[bytes]] = [[], [], []]
    for document in documents:
        digest = hashlib.sha256(os.fsencode(document.name)).digest()
        point = int.from_bytes(digest[:6], "big") / 2**48  # 48 bits: exact, and below 1
        parts[(point >= split.train) + (point >= split.train + split.validation)].append(document.text)
    return parts


def _split_by_position(documents: list[Document], split: Split) -> list[list[bytes]]:
    """Assign the beginning of each file to training, what follows to validation, its end to test."""
    parts: list[list[bytes]] = [[], [], []]
    for document in documents:
        size = len(document.text)
        ends = (size * split.train, size * (split.train + split.validation))
        cuts = [0, *(_character_start(document.text, round(end)) for end in ends), size]
        for part, start, stop in zip(parts, cuts, cuts[1:], strict=False):
            if start < stop:
                part.append(document.text[start:stop])
    return parts


def _character_start(text: bytes, place: int) -> int:
    """Return `place`, or a little before it, where a character of UTF-8 would be cut in two."""
    while place < len(text) and text[place] & 0xC0 == 0x80:
        place -= 1
    return place


# Tokens


def read_piece(file: IO[bytes]) -> bytes:
    """Read `PIECE_BYTES` of a text, and on to the end of the line; empty at the end of the file."""
    return file.read(PIECE_BYTES) + file.readline()


def _join(texts: list[bytes], tokenizer: Tokenizer) -> np.ndarray:
    """Return the tokens of all texts, an end of document after each, shape [tokens]."""
    if not isinstance(tokenizer, ByteTokenizer):
        end = np.array([tokenizer.end_of_document])
        parts = [np.empty(0, dtype=np.int32)]
        pieces = ((piece, last) for text in texts for piece, last in _pieces(text))
        # Some at a time: a tokenizer needs hundreds of bytes for a token while it encodes.
        while batch := list(islice(pieces, _PIECES_AT_ONCE)):
            encoded = tokenizer.encode_batch([piece.decode() for piece, _ in batch])
            for ids, (_, last) in zip(encoded, batch, strict=True):
                parts += [ids, end] if last else [ids]
        return np.concatenate(parts, dtype=np.int32)
    tokens = np.full(sum(map(len, texts)) + len(texts), tokenizer.end_of_document, dtype=np.uint16)
    place = 0
    for text in texts:
        tokens[place : place + len(text)] = np.frombuffer(text, dtype=np.uint8)
        place += len(text) + 1
    return tokens


def _pieces(text: bytes) -> Iterator[tuple[bytes, bool]]:
    """Cut a text as preprocessing cuts long ones; with each piece, whether it is the last."""
    file = io.BytesIO(text)
    while piece := read_piece(file):
        yield piece, file.tell() == len(text)
