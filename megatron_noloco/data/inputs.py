"""Read the inputs of preprocessing: text, JSON lines and Parquet, plain or compressed, files or folders."""

import codecs
import io
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import IO, Any, Literal

from megatron_noloco.data.corpus import (
    COMPRESSIONS,
    JSON_LINES,
    PARQUET,
    PIECE_BYTES,
    files_below,
    read_piece,
)
from megatron_noloco.data.encodings import check_utf_8, check_whole_characters, without_mark

_PARQUET_ROWS = 256  # in a batch: the size of a row is known only after reading it


@dataclass(frozen=True)
class Input:
    """One file to preprocess."""

    path: Path
    folder: Path | None  # the given folder in which the file was found; None: the file itself was given

    @property
    def kind(self) -> Literal["text", "jsonl", "parquet"]:
        name = plain_name(self.path)
        if name.endswith(PARQUET):
            return "parquet"
        return "jsonl" if name.endswith(JSON_LINES) else "text"

    @property
    def bytes(self) -> int:
        """Size on disk."""
        return self.path.stat().st_size


@dataclass(frozen=True)
class Batch:
    """Consecutive records of one input."""

    input: Input
    first: int  # number of the first record, from 1: a line of JSON, a row of Parquet, a piece of text
    records: list[Any]  # bytes of text or of a JSON line; a dict of columns for Parquet
    ends_document: bool  # False: the last record, a long text, continues in the next batch
    read_bytes: int  # bytes of the input on disk since the batch before

    @property
    def begins_document(self) -> bool:
        """Whether the first record begins a document: it is no further piece of a long text."""
        return self.input.kind != "text" or self.first == 1

    @property
    def holds_whole_documents(self) -> bool:
        return self.begins_document and self.ends_document

    def texts(self, keys: tuple[str, ...]) -> list[list[str]]:
        """Return the texts of each record in the order of `keys`, "" for null, without blank lines.

        Raises ValueError that names the file, and the line or row, of a record that cannot be read.
        """
        if self.input.kind == "text":
            try:
                return [[record.decode()] for record in self.records]
            except UnicodeDecodeError as error:
                raise ValueError(f"{self.input.path}: not UTF-8 text ({error.reason})") from None
        unit = "row" if self.input.kind == "parquet" else "line"
        rows = []
        for number, record in enumerate(self.records, self.first):
            if isinstance(record, bytes) and record.isspace():  # a line between records
                continue
            try:
                fields = record if isinstance(record, dict) else parse_json(record)
                rows.append([_text(fields, key) for key in keys])
            except ValueError as error:
                raise ValueError(f"{self.input.path}, {unit} {number}: {error}") from None
        return rows


def plain_name(path: Path) -> str:
    """Return the name of a file in small letters, without the suffix of a compression."""
    name = path.name.lower()
    return next((name.removesuffix(suffix) for suffix in COMPRESSIONS if name.endswith(suffix)), name)


def parse_json(line: bytes) -> Any:
    """Parse one line of a file of JSON lines; raises ValueError."""
    check_utf_8(line)
    try:
        return json.loads(without_mark(line).decode())
    except json.JSONDecodeError as error:
        reason = f"{error.msg}, column {error.pos + 1}"
    except (ValueError, RecursionError) as error:  # not UTF-8, or nested too deeply
        reason = str(error)
    raise ValueError(f"not JSON ({reason}); each line must hold one whole JSON object")


def _text(fields: Any, key: str) -> str:
    if not isinstance(fields, dict):
        raise ValueError("not a JSON object; each line must hold one")
    if key not in fields:
        raise ValueError(f"no key {key!r}; there are {', '.join(fields)} (--json-keys)")
    text = fields[key]
    if text is not None and not isinstance(text, str):
        raise ValueError(f"{key!r} holds {type(text).__name__}, not text (--json-keys)")
    check_whole_characters(text or "")
    return text or ""


def find_inputs(paths: Iterable[str]) -> list[Input]:
    """Return the files named by `paths`; folders are searched recursively, without hidden files.

    Raises ValueError when a path is missing or there is nothing to read.
    """
    found: list[tuple[Path, Path | None]] = []
    for given in paths:
        path = Path(given).expanduser()
        if not path.exists():
            raise ValueError(f"--input {given}: no such file or folder (looked from cwd {Path.cwd()})")
        found += [(file, path) for file in files_below(path)] if path.is_dir() else [(path, None)]
    inputs = [Input(*file) for file in found]
    if not any(item.bytes for item in inputs):
        raise ValueError(f"--input {' '.join(paths)}: holds no files with text")
    return inputs


def read_batches(item: Input, columns: list[str]) -> Iterator[Batch]:
    """Read the records of one input in order; raises ValueError when the file is damaged.

    Memory holds one batch at a time. JSON is read as lines and parsed by `Batch.texts`: pyarrow's reader parses
    faster, but its errors name no line, and it requires the same type under a key in every line.

    Args:
        columns: the columns to read from a Parquet file.
    """
    if item.kind == "parquet":
        yield from _read_parquet(item, columns)
        return
    read = _read_lines if item.kind == "jsonl" else _read_text
    with opened(item.path) as (raw, file):
        yield from read(item, raw, file)


@contextmanager
def opened(path: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Open a file, and what it holds before compression; raises ValueError where it cannot be decompressed."""
    try:
        with path.open("rb") as raw:
            yield raw, _decompressed(path, raw)
    except OSError as error:
        if path.suffix.lower() not in COMPRESSIONS:
            raise
        raise ValueError(f"{path}: cannot be decompressed ({error})") from None


def _decompressed(path: Path, raw: IO[bytes]) -> IO[bytes]:
    compression = COMPRESSIONS.get(path.suffix.lower())
    if compression is None:
        return raw
    return io.BufferedReader(_pyarrow(path).CompressedInputStream(raw, compression), PIECE_BYTES)


def _pyarrow(path: Path) -> ModuleType:
    try:
        import pyarrow
    except ImportError:
        raise ValueError(
            f"{path}: Parquet and compressed files need a package: pip install pyarrow"
        ) from None
    return pyarrow


def _read_lines(item: Input, raw: IO[bytes], file: IO[bytes]) -> Iterator[Batch]:
    first, before = 1, 0
    while lines := file.readlines(PIECE_BYTES):
        place = raw.tell()
        yield Batch(item, first, lines, True, place - before)
        first, before = first + len(lines), place


def _read_text(item: Input, raw: IO[bytes], file: IO[bytes]) -> Iterator[Batch]:
    """Read a file as one document, a long one in pieces of whole lines.

    A file that was found in a folder and is not UTF-8 (a picture, an archive) gives a batch without records.
    """
    if item.folder is not None and not _is_text(item):
        yield Batch(item, 1, [], True, item.bytes)
        return
    number, before, piece = 1, 0, without_mark(read_piece(file))
    try:
        check_utf_8(piece)
    except ValueError as error:
        raise ValueError(f"{item.path}: {error}") from None
    while piece or number == 1:
        following = read_piece(file)
        place = raw.tell()
        yield Batch(item, number, [piece], not following, place - before)
        number, piece, before = number + 1, following, place


def _is_text(item: Input) -> bool:
    """Return whether a whole file is UTF-8 text."""
    with opened(item.path) as (_, file):
        pieces = iter(partial(file.read, PIECE_BYTES), b"")
        try:
            first = next(pieces, b"")
            check_utf_8(first)
            return all(True for _ in codecs.iterdecode(chain([first], pieces), "utf-8"))
        except ValueError:
            return False


def _read_parquet(item: Input, columns: list[str]) -> Iterator[Batch]:
    pyarrow = _pyarrow(item.path)
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(item.path) as file:
            names = file.schema_arrow.names
            missing = [name for name in columns if name not in names]
            if missing:
                raise ValueError(f"{item.path}: no column {missing[0]!r}; there are {', '.join(names)}")
            first, rows = 1, max(1, file.metadata.num_rows)
            for batch in file.iter_batches(_PARQUET_ROWS, columns=columns):
                records = batch.to_pylist()
                done, before = (item.bytes * count // rows for count in (first - 1 + len(records), first - 1))
                yield Batch(item, first, records, True, done - before)
                first += len(records)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise ValueError(f"{item.path}: not a valid Parquet file ({str(error).splitlines()[0]})") from None
