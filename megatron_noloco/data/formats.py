"""Read what is in a file: text, lines of JSON, rows of Parquet; text and JSON also compressed."""

import io
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

from megatron_noloco.errors import UserError
from megatron_noloco.files import (
    check_utf_8,
    check_whole_characters,
    json_object,
    utf_8_problem,
    without_mark,
)

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
PIECE_BYTES = 1 << 19  # a longer text is read and encoded in pieces of this size
_PARQUET_ROWS = 256  # in a batch: the size of a row is known only after reading it


Advance = Callable[[int], object]  # called with the bytes on disk that were read since the call before
Row = tuple[str, Any]  # a line of JSON or a row of Parquet: its place for the user, its content


class Piece(NamedTuple):
    """A document, or a piece of a long text."""

    text: str
    begins: bool = True  # whether it is the first of its document
    ends: bool = True  # whether it is the last


def text_problem(path: Path, decompressed: bool = True) -> str:
    """Return why a file is not UTF-8 text from beginning to end; "" if it is."""
    with _opened(path, decompressed) as (_, file):
        return utf_8_problem(iter(partial(file.read, PIECE_BYTES), b""))


def read_text(path: Path, advance: Advance, start: int = 0, stop: int | None = None) -> Iterator[Piece]:
    """Read a text as one document, a long one in pieces of whole lines; raises UserError that names the file.

    Args:
        stop: the byte after the last one; None: all is read, decompressed, and must begin as UTF-8 does.
    """

    def rest() -> bytes:
        if stop is None:
            return file.read(PIECE_BYTES) + file.readline()
        return file.read(min(PIECE_BYTES, stop - file.tell())) + file.readline(max(0, stop - file.tell()))

    with _opened(path, decompressed=stop is None) as (raw, file):
        if start:
            file.seek(start)
        begins, before, piece = True, start, rest() if start else without_mark(rest())
        try:
            if stop is None:
                check_utf_8(piece)
            while piece or begins:
                following, place, text = rest(), raw.tell(), piece.decode()
                if "\0" in text:
                    raise UserError(text_problem(path))
                advance(place - before)
                yield Piece(text, begins, not following)
                begins, before, piece = False, place, following
        except UnicodeDecodeError:
            raise UserError(f"{path}: {text_problem(path)}") from None
        except UserError as error:
            raise UserError(f"{path}: {error}") from None


def read_texts(rows: Iterable[Row], key: str) -> Iterator[Piece]:
    """Yield the text under a key of each row; raises UserError that names the place."""
    for place, fields in rows:
        other = "`data preprocess --json-keys` takes another"
        if not isinstance(fields, dict):
            raise UserError(f"{place}: not a JSON object; each line must hold one")
        if key not in fields:
            raise UserError(f"{place}: no key {key!r}; there are {', '.join(fields)} ({other})")
        text = fields[key]
        if text is not None and not isinstance(text, str):
            raise UserError(f"{place}: {key!r} holds {type(text).__name__}, not text ({other})")
        try:
            check_whole_characters(text or "")
        except UserError as error:
            raise UserError(f"{place}: {error}") from None
        yield Piece(text or "")


def read_lines(path: Path, advance: Advance) -> Iterator[Row]:
    """Yield each line of JSON that is not blank; raises UserError that names the line.

    pyarrow's reader parses faster, but its errors name no line, and it requires the same type under a key in every
    line.
    """
    number = at = 0
    with _opened(path) as (raw, file):
        while lines := file.readlines(PIECE_BYTES):
            advance(raw.tell() - at)
            at = raw.tell()
            for number, line in enumerate(lines, number + 1):  # noqa: B020, evaluated once
                if not line.isspace():
                    place = f"{path}, line {number}"
                    try:
                        content = _parse(line)
                    except UserError as error:
                        raise UserError(f"{place}: {error}") from None
                    yield place, content


def _parse(line: bytes) -> Any:
    check_utf_8(line)
    try:
        content = json.loads(without_mark(line).decode(), object_pairs_hook=json_object)
        if not isinstance(content, list):
            return content
        reason = "a list"
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


def read_parquet(path: Path, advance: Advance, columns: Iterable[str] | None = None) -> Iterator[Row]:
    """Yield the rows of a Parquet file, with values as JSON has them; raises UserError that names the file.

    Args:
        columns: which must be there; None: all.
    """
    import pyarrow  # optional
    from pyarrow import parquet

    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            chosen = names if columns is None else list(columns)
            missing = [name for name in chosen if name not in names]
            if missing:
                raise UserError(f"{path}: no column {missing[0]!r}; there are {', '.join(names)}")
            if repeated := [name for name in chosen if names.count(name) > 1]:
                raise UserError(f"{path}: the column {repeated[0]!r} is there twice; leave one out")
            rows, size = max(1, file.metadata.num_rows), path.stat().st_size
            types = ((name, file.schema_arrow.field(name).type) for name in chosen)
            nested = {name: kind for name, kind in types if pyarrow.types.is_nested(kind)}
            for batch in file.iter_batches(_PARQUET_ROWS, columns=chosen):
                for row in batch.to_pylist():
                    number += 1
                    row |= {name: _as_json(row[name], kind) for name, kind in nested.items()}
                    yield f"{path}, row {number}", row
                advance(size * number // rows - size * (number - batch.num_rows) // rows)
    except UnicodeDecodeError as error:
        raise UserError(f"{path}, after row {number}: not UTF-8 text ({error.reason})") from None
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a valid Parquet file ({str(error).splitlines()[0]})") from None


def _as_json(value: Any, kind: Any) -> Any:
    """Return a value of a column as a line of JSON would have it: a map as an object, objects without nulls.

    In Parquet an object has the keys of all rows, which are null where a row lacks them.

    Args:
        kind: its type in Arrow.
    """
    from pyarrow import types

    if value is None or not types.is_nested(kind):
        return value
    if types.is_map(kind):
        return {key: _as_json(held, kind.item_type) for key, held in value}
    if types.is_struct(kind):
        return {of.name: _as_json(held, of.type) for of in kind if (held := value[of.name]) is not None}
    return [_as_json(held, kind.value_type) for held in value]


@contextmanager
def _opened(path: Path, decompressed: bool = True) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
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
