"""Find and read inputs: text, JSON lines and Parquet, plain or compressed, files or folders."""

import io
import json
import platform
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from megatron_noloco.data.folders import COMPRESSIONS, JSON_LINES, PARQUET, files_below, once, plain_name
from megatron_noloco.errors import UserError
from megatron_noloco.files import check_utf_8, check_whole_characters, is_utf_8, without_mark

STANDARD_LIBRARY = "python-stdlib"  # as data.text: the sources of Python's standard library on this machine
PIECE_BYTES = 1 << 19  # a longer text is read and encoded in pieces of this size
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_PARQUET_ROWS = 256  # in a batch: the size of a row is known only after reading it


@dataclass(frozen=True)
class Input:
    """One file to read."""

    path: Path
    folder: Path | None  # the given folder in which the file was found; None: the file itself was given
    further_paths: int = 0  # to the same file, which is read once

    @property
    def name(self) -> str:
        """Name that is the same wherever the given file or folder lies."""
        return self.path.name if self.folder is None else self.path.relative_to(self.folder).as_posix()

    @property
    def kind(self) -> Literal["text", "jsonl", "parquet"]:
        name = plain_name(self.path)
        if name.endswith(PARQUET):
            return "parquet"
        return "jsonl" if name.endswith(JSON_LINES) else "text"

    @property
    def is_plain_text(self) -> bool:
        """Whether the name says neither records nor a compression."""
        return self.kind == "text" and self.path.suffix.lower() not in COMPRESSIONS

    @property
    def bytes(self) -> int:
        """Size on disk."""
        return self.path.stat().st_size


class Piece(NamedTuple):
    """A document, or a piece of a long text."""

    text: str
    read_bytes: int  # of the input on disk since the piece before
    begins: bool = True  # whether it is the first of its document
    ends: bool = True  # whether it is the last


def find_inputs(places: Iterable[str], option: str) -> list[Input]:
    """Return the files at `places`; folders are searched recursively, without hidden files.

    Raises UserError, which names the option that gave the places, when a place does not exist.
    """
    found: list[tuple[Path, Path | None]] = []
    for place in places:
        path = Path(place).expanduser()
        if not path.exists():
            raise UserError(f"{option}: no file or folder at {place} (looked from cwd {Path.cwd()})")
        found += [(file, path) for file in files_below(path)] if path.is_dir() else [(path, None)]
    folders = dict(reversed(found))
    files = once([file for file, _ in found])
    return [Input(file, folders[file], further) for file, further in files.items()]


def standard_library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def standard_library_files() -> list[Path]:
    """Return the sources of Python's standard library, without its tests: text that every machine has."""
    files = files_below(standard_library(), _SKIPPED_FOLDERS)
    return [path for path in files if path.suffix == ".py" and begins_as_text(path)]


def name_of_text(text: str) -> str:
    """Return the name of a text for the user; the standard library differs between versions of Python."""
    return f"{text} {platform.python_version()}" if text == STANDARD_LIBRARY else text


def begins_as_text(path: Path) -> bool:
    """Return whether a file begins with UTF-8 text."""
    with path.open("rb") as file:
        content = without_mark(file.read(PIECE_BYTES) + file.readline())
    return content != b"" and is_utf_8([content])


def is_text(item: Input, decompressed: bool = True) -> bool:
    """Return whether a file is UTF-8 text from beginning to end."""
    with opened(item.path, decompressed) as (_, file):
        return is_utf_8(iter(partial(file.read, PIECE_BYTES), b""))


# Reading


def read_pieces(item: Input, key: str) -> Iterator[Piece]:
    """Read the documents of one input in order, without blank lines.

    Raises UserError that names the file, and the line or row, when the input cannot be read.

    Args:
        key: of JSON, or the column of a Parquet file.
    """
    if item.kind == "text":
        yield from read_text(item)
        return
    for place, row, read_bytes in read_rows(item, [key]):
        try:
            text = _text(row, key)
        except ValueError as error:
            raise UserError(f"{place}: {error}") from None
        yield Piece(text, read_bytes)


def read_rows(item: Input, columns: Iterable[str] | None = None) -> Iterator[tuple[str, Any, int]]:
    """Yield of each row of Parquet, or line of JSON that is not blank: its place, its content, the bytes read.

    JSON is read as lines: pyarrow's reader parses faster, but its errors name no line, and it requires the same
    type under a key in every line. Raises UserError that names the place.

    Args:
        columns: of Parquet, which must be there; None: all.
    """
    if item.kind == "parquet":
        yield from _read_parquet(item, columns)
        return
    with opened(item.path) as (raw, file):
        yield from _read_lines(item, raw, file)


def read_text(item: Input, start: int = 0, stop: int | None = None) -> Iterator[Piece]:
    """Read a text as one document, a long one in pieces of whole lines.

    Args:
        stop: the byte after the last one; None: all is read, decompressed, and must begin as UTF-8 does.
    """

    def rest() -> bytes:
        if stop is None:
            return file.read(PIECE_BYTES) + file.readline()
        return file.read(min(PIECE_BYTES, stop - file.tell())) + file.readline(max(0, stop - file.tell()))

    with opened(item.path, decompressed=stop is None) as (raw, file):
        if start:
            file.seek(start)
        begins, before, piece = True, start, rest() if start else without_mark(rest())
        try:
            if stop is None:
                check_utf_8(piece)
            while piece or begins:
                following, place = rest(), raw.tell()
                yield Piece(piece.decode(), place - before, begins, not following)
                begins, before, piece = False, place, following
        except UnicodeDecodeError as error:
            raise UserError(f"{item.path}: not UTF-8 text ({error.reason})") from None
        except UserError as error:
            raise UserError(f"{item.path}: {error}") from None


def parse_json(line: bytes) -> Any:
    """Parse one line of a file of JSON lines; raises UserError."""
    check_utf_8(line)
    try:
        return json.loads(without_mark(line).decode(), object_pairs_hook=_object)
    except _RepeatedKeyError:
        raise
    except json.JSONDecodeError as error:
        reason = f"{error.msg}, column {error.pos + 1}"
    except (ValueError, RecursionError) as error:  # not UTF-8, or nested too deeply
        reason = str(error)
    problem = f"not JSON ({reason}); each line must hold one whole JSON object"
    if without_mark(line).lstrip().startswith(b"["):
        problem += ": for a file that is one list, `jq -c '.[]' FILE` writes them"
    raise UserError(problem)


class _RepeatedKeyError(UserError):
    """An object of JSON has a key twice, of which Python's parser would keep the last."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    held = dict(pairs)
    if len(held) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for place, name in enumerate(names) if name in names[:place])
        raise _RepeatedKeyError(f'the key "{repeated}" is there twice; leave one out')
    return held


def _text(fields: Any, key: str) -> str:
    if not isinstance(fields, dict):
        raise UserError("not a JSON object; each line must hold one")
    other = "`data preprocess --json-keys` takes another"
    if key not in fields:
        raise UserError(f"no key {key!r}; there are {', '.join(fields)} ({other})")
    text = fields[key]
    if text is not None and not isinstance(text, str):
        raise UserError(f"{key!r} holds {type(text).__name__}, not text ({other})")
    check_whole_characters(text or "")
    return text or ""


@contextmanager
def opened(path: Path, decompressed: bool = True) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Open a file, and what it holds before compression; raises UserError when it cannot be decompressed."""
    try:
        with path.open("rb") as raw:
            compression = COMPRESSIONS.get(path.suffix.lower())
            if compression is None or not decompressed:
                yield raw, raw
            else:
                import pyarrow  # optional

                stream = pyarrow.CompressedInputStream(raw, compression)
                yield raw, io.BufferedReader(stream, PIECE_BYTES)
    except OSError as error:
        if path.suffix.lower() not in COMPRESSIONS:
            raise
        raise UserError(f"{path}: cannot be decompressed ({error})") from None


def _read_lines(item: Input, raw: IO[bytes], file: IO[bytes]) -> Iterator[tuple[str, Any, int]]:
    number = before = 0
    while lines := file.readlines(PIECE_BYTES):
        read = raw.tell() - before
        before += read
        for number, line in enumerate(lines, number + 1):  # noqa: B020, evaluated once
            if not line.isspace():
                place = f"{item.path}, line {number}"
                try:
                    content = parse_json(line)
                except ValueError as error:
                    raise UserError(f"{place}: {error}") from None
                yield place, content, read
                read = 0


def _read_parquet(item: Input, columns: Iterable[str] | None) -> Iterator[tuple[str, Any, int]]:
    import pyarrow  # optional
    from pyarrow import parquet

    number = 0
    try:
        with parquet.ParquetFile(item.path) as file:
            names = file.schema_arrow.names
            chosen = names if columns is None else list(columns)
            missing = [name for name in chosen if name not in names]
            if missing:
                raise UserError(f"{item.path}: no column {missing[0]!r}; there are {', '.join(names)}")
            rows, size = max(1, file.metadata.num_rows), item.bytes
            for batch in file.iter_batches(_PARQUET_ROWS, columns=chosen):
                for row in batch.to_pylist():
                    number += 1
                    read = size * number // rows - size * (number - 1) // rows
                    yield f"{item.path}, row {number}", row, read
    except UnicodeDecodeError as error:
        raise UserError(f"{item.path}, after row {number}: not UTF-8 text ({error.reason})") from None
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{item.path}: not a valid Parquet file ({str(error).splitlines()[0]})") from None
