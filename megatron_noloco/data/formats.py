"""Read what is in a file: text, lines of JSON, rows of Parquet and Arrow; text and JSON also compressed.

Memory does not grow with a file, only with its largest document: a text is read in pieces, records one by one.
"""

import io
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from megatron_noloco.errors import UserError, prefix_errors_with
from megatron_noloco.files import (
    check_utf_8,
    check_whole_characters,
    json_object,
    utf_8_problem,
    without_mark,
)

JSON_LINES, TABLES = (".jsonl", ".json", ".ndjson"), (".parquet", ".arrow", ".feather")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
PIECE = 1 << 16  # characters of a text that are read and encoded as one sequence
_BATCH_BYTES = 1 << 24  # of rows of Parquet that are read at once
_BATCH_ROWS = 256
_LONGEST_LINE = 1 << 24  # bytes of a first line that is looked at
OTHER_KEY = (
    "`data preprocess --json-keys` takes another; chats go to data.sft_data_path, --data sft_data_path=FILE"
)
# What a piece of a longer text ends with, where it has one: as encoders like it, a space begins the next piece.
_ENDS = (("\n", 1), (" ", 0))

Advance = Callable[[int], object]  # called with the bytes on disk that were read since the call before
Row = tuple[str, dict[str, Any]]  # a line of JSON or a row of a table: its place for the user, its content


class Piece(NamedTuple):
    """A document, or a piece of a long text."""

    text: str
    begins: bool = True  # whether it is the first of its document
    ends: bool = True  # whether it is the last
    file: str = ""  # name of its file


@dataclass(frozen=True)
class Input:
    """One file to read.

    Attributes:
        folder: the given folder in which the file was found; None: the file itself was given.
    """

    path: Path
    folder: Path | None

    @property
    def name(self) -> str:
        """Name that is the same wherever the given file or folder lies."""
        return self.path.name if self.folder is None else self.path.relative_to(self.folder).as_posix()

    @property
    def kind(self) -> Literal["text", "jsonl", "table"]:
        """What the file holds by its name, compressed or not."""
        if self.path.name.lower().endswith(TABLES):
            return "table"
        return "jsonl" if unpacked_name(self.path).endswith(JSON_LINES) else "text"

    @property
    def status(self) -> os.stat_result:
        """Size and times of the file; of a link that leads nowhere, its own."""
        return self.path.stat(follow_symlinks=self.path.exists())

    @property
    def bytes(self) -> int:
        """Size on disk."""
        return self.status.st_size

    def rows(self, advance: Advance, columns: Iterable[str] | None = None) -> Iterator[Row]:
        """Return the lines of JSON or the rows of a table; `columns`: of a table, None: all."""
        if self.kind == "table":
            return _read_table(self.path, advance, columns)
        return _read_lines(self.path, advance)

    def pieces(self, key: str, advance: Advance, size: int) -> Iterator[Piece]:
        """Yield the documents in order, without blank lines; raises UserError that names the file, and the place.

        Args:
            key: of JSON, or the column of a table.
            size: characters of a document that are a piece of their own.
        """
        if self.kind == "text":
            documents = iter([_read_text(self.path, advance)])
        else:
            rows = self.rows(advance, [key])
            documents = (iter([_text_of(place, fields, key)]) for place, fields in rows)
        for document in documents:
            for piece in cut(document, size):
                yield piece._replace(file=self.name)


def first_bytes(path: Path, number: int) -> bytes:
    """Return the first bytes on disk; raises UserError for a file that cannot be read."""
    with _opened(path) as (raw, _):
        return raw.read(number)


def text_problem(path: Path) -> str:
    """Return why a file is not UTF-8 text from beginning to end; "" if it is."""
    with _opened(path) as (_, file):
        return utf_8_problem(iter(partial(file.read, PIECE), b""))


def cut(parts: Iterable[str], size: int) -> Iterator[Piece]:
    """Yield a document in pieces of at most `size` characters, which end with a line or word where they can.

    Args:
        parts: the text, in its order.
    """
    rest, begins = "", True
    for part in parts:
        text, start = rest + part, 0
        while len(text) - start > size:
            ends = (text.rfind(end, start + 1, start + size) + after for end, after in _ENDS)
            stop = next((end for end in ends if end > start + size // 2), start + size)
            yield Piece(text[start:stop], begins, False)
            begins, start = False, stop
        rest = text[start:] if start else text
    yield Piece(rest, begins)


def _read_text(path: Path, advance: Advance) -> Iterator[str]:
    """Read a text in parts of `PIECE` characters; raises UserError that names the file."""
    before = 0
    with _opened(path) as (raw, file):
        reader = io.TextIOWrapper(file, "utf-8-sig", newline="")
        try:
            while part := reader.read(PIECE):
                if "\0" in part:
                    raise UserError(f"{path}: {text_problem(path)}")
                advance(raw.tell() - before)
                before = raw.tell()
                yield part
        except UnicodeDecodeError:
            raise UserError(f"{path}: {text_problem(path)}") from None
        finally:
            reader.detach()


def _text_of(place: str, fields: dict[str, Any], key: str) -> str:
    """Return the text under a key of a row, "" for null; raises UserError that names the place."""
    with prefix_errors_with(place):
        if key not in fields:
            raise UserError(f"no key {key!r}; there are {', '.join(fields)} ({OTHER_KEY})")
        text = "" if fields[key] is None else fields[key]
        if not isinstance(text, str):
            raise UserError(f"{key!r} holds {type(text).__name__}, not text ({OTHER_KEY})")
        check_whole_characters(text)
    return text


def first_object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object that is the whole first line of a file; None if there is none."""
    with _opened(path) as (_, file):
        try:
            first = json.loads(without_mark(file.readline(_LONGEST_LINE)))
        except (ValueError, RecursionError):
            return None
        return first if isinstance(first, dict) else None


def _read_lines(path: Path, advance: Advance) -> Iterator[Row]:
    """Yield each line of JSON that is not blank; raises UserError that names the line.

    pyarrow's reader parses faster, but its errors name no line, and it requires the same type under a key in every
    line.
    """
    before = 0
    with _opened(path) as (raw, file):
        for number, line in enumerate(file, 1):
            if number % _BATCH_ROWS == 1:  # each call takes as long as a short line
                advance(raw.tell() - before)
                before = raw.tell()
            if not line.isspace():
                place = f"{path}, line {number}"
                with prefix_errors_with(place):
                    content = _parse(line)
                yield place, content
        advance(path.stat().st_size - before)


def _parse(line: bytes) -> dict[str, Any]:
    check_utf_8(line)
    try:
        content = json.loads(without_mark(line), object_pairs_hook=json_object)
        if isinstance(content, dict):
            return content
        reason = "no object"
    except UserError:
        raise
    except json.JSONDecodeError as error:
        reason = f"not JSON ({error.msg}, column {error.pos + 1})"
    except (ValueError, RecursionError) as error:  # not UTF-8, or nested too deeply
        reason = f"not JSON ({error})"
    problem = f"{reason}; each line must hold one whole JSON object"
    if without_mark(line).lstrip().startswith(b"["):
        problem += ": for a file that is one list, `jq -c '.[]' FILE` writes them"
    raise UserError(problem)


def _read_table(path: Path, advance: Advance, columns: Iterable[str] | None = None) -> Iterator[Row]:
    """Yield the rows of a Parquet or Arrow file, with values as JSON has them; raises UserError.

    Args:
        columns: which must be there; None: all.
    """
    import pyarrow  # optional

    number, done, size = 0, 0, path.stat().st_size
    try:
        names, total, read = _open_table(path)
        chosen = names if columns is None else list(columns)
        for name in chosen:
            if name not in names:
                raise UserError(f"{path}: no column {name!r}; there are {', '.join(names)} ({OTHER_KEY})")
            if names.count(name) > 1:
                raise UserError(f"{path}: the column {name!r} is there twice; leave one out")
        for batch in read(chosen):
            for row in range(batch.num_rows):  # one by one, since a batch of long texts is large
                number += 1
                held = zip(chosen, batch.columns, strict=True)
                values = {name: column[row].as_py(maps_as_pydicts="lossy") for name, column in held}
                yield f"{path}, row {number}", values
            now = size * number // total if total else size  # of a stream the rows are not known
            advance(now - done)
            done = now
    except UnicodeDecodeError as error:
        raise UserError(f"{path}, row {number}: not UTF-8 text ({error.reason})") from None
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a valid {path.suffix} file ({str(error).splitlines()[0]})") from None


def _open_table(path: Path) -> tuple[list[str], int | None, Callable[[list[str]], Iterable[Any]]]:
    """Return the names of the columns, the number of rows if it is known, and what reads columns in batches.

    Arrow has a format for streams, in which `datasets` of Hugging Face saves and caches, and one for files.
    """
    import pyarrow
    from pyarrow import parquet

    if path.suffix.lower() == ".parquet":
        file = parquet.ParquetFile(path, buffer_size=PIECE)
        groups = (file.metadata.row_group(group) for group in range(file.num_row_groups))
        unpacked, rows = sum(group.total_byte_size for group in groups), max(1, file.metadata.num_rows)
        at_once = min(_BATCH_ROWS, max(1, _BATCH_BYTES * rows // max(1, unpacked)))
        return file.schema_arrow.names, rows, lambda chosen: file.iter_batches(at_once, columns=chosen)
    mapped = pyarrow.memory_map(str(path))
    try:
        reader: Any = pyarrow.ipc.open_stream(mapped)
        batches: Iterable[Any] = reader
    except pyarrow.ArrowInvalid:
        reader = pyarrow.ipc.open_file(mapped)
        batches = map(reader.get_batch, range(reader.num_record_batches))
    return reader.schema.names, None, lambda chosen: (batch.select(chosen) for batch in batches)


def unpacked_name(path: Path) -> str:
    """Return the name of a file, in small letters, without the suffix of a compression."""
    name = path.name.lower()
    return next((name.removesuffix(suffix) for suffix in COMPRESSIONS if name.endswith(suffix)), name)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Open a file, and what it holds before compression; raises UserError for what cannot be read."""
    suffix = path.suffix.lower()
    try:
        with path.open("rb") as raw:
            if suffix not in COMPRESSIONS:
                yield raw, raw
            else:
                import pyarrow  # optional

                stream = pyarrow.CompressedInputStream(raw, COMPRESSIONS[suffix])
                yield raw, io.BufferedReader(stream, PIECE)
    except OSError as error:
        if suffix not in COMPRESSIONS or error.filename is not None:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from None
        advice = ""
        if "memory" in str(error):  # of zstd, whose window is limited to 128 MB
            advice = f"; `zstd -d --long=31 {path.name}` unpacks what was written with --long"
        raise UserError(f"{path}: cannot be decompressed ({error}){advice}") from None
