"""What preprocessing reads: text, JSON lines and Parquet, plain or compressed, files or folders of them."""

import codecs
import gzip
import io
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from megatron_noloco.data.corpus import PIECE_BYTES, files_below, read_piece

BITE_BYTES = PIECE_BYTES  # of text handed to a worker at once
_COMPRESSED_BYTES = 1 << 16  # read at once
_JSON_LINES = (".jsonl", ".json", ".ndjson")

Kind = Literal["text", "jsonl", "parquet"]


@dataclass(frozen=True)
class Input:
    """One file."""

    path: Path
    folder: Path | None  # the one that was given, where it was found; None where it was given itself
    number: int  # its place among all inputs, from 0

    @property
    def kind(self) -> Kind:
        name = self.path.name.removesuffix(".gz").removesuffix(".zst").lower()
        if name.endswith(".parquet"):
            return "parquet"
        return "jsonl" if name.endswith(_JSON_LINES) else "text"

    @property
    def bytes(self) -> int:
        """On disk."""
        return self.path.stat().st_size


@dataclass(frozen=True)
class Bite:
    """Some consecutive records of one input: enough work for one worker at a time."""

    input: Input
    first: int  # number of the first record, from 1: a line of JSON, a row of Parquet, a piece of text
    records: list[Any]  # bytes of text or of a JSON line; a dict of columns for Parquet
    ends_document: bool  # False: the last record goes on in the next bite (a long text)
    read_bytes: int  # of the input on disk, since the bite before

    @property
    def place(self) -> tuple[int, int]:
        """Grows along the inputs."""
        return self.input.number, self.first

    @property
    def holds_whole_documents(self) -> bool:
        return self.input.kind != "text" or (self.first == 1 and self.ends_document)


def find_inputs(paths: Iterable[str]) -> list[Input]:
    """The files meant by `paths`, folders searched in depth; hidden files are left out of folders.

    Raises ValueError when a path is missing or there is nothing to read.
    """
    found: list[tuple[Path, Path | None]] = []
    for given in paths:
        path = Path(given).expanduser()
        if not path.exists():
            raise ValueError(f"--input {given}: no such file or folder (looked from cwd {Path.cwd()})")
        found += [(file, path) for file in files_below(path)] if path.is_dir() else [(path, None)]
    inputs = [Input(*file, number) for number, file in enumerate(found)]
    if not any(item.bytes for item in inputs):
        raise ValueError(f"--input {' '.join(paths)}: holds no files with text")
    return inputs


def read_bites(item: Input, columns: list[str]) -> Iterator[Bite]:
    """The records of one input, in order; raises ValueError when the file is damaged.

    Args:
        columns: those to read of a Parquet file.
    """
    if item.kind == "parquet":
        yield from _read_parquet(item, columns)
        return
    read = _read_lines if item.kind == "jsonl" else _read_text
    try:
        with item.path.open("rb") as raw:
            yield from read(item, raw, _decompress(item.path, raw))
    except (EOFError, gzip.BadGzipFile, zlib.error, _zstd_error()) as error:
        raise ValueError(f"{item.path}: cannot be decompressed ({error})") from None


def _decompress(path: Path, raw: IO[bytes]) -> IO[bytes]:
    if path.suffix == ".gz":
        return gzip.open(raw)  # type: ignore[return-value]
    if path.suffix != ".zst":
        return raw
    try:
        import zstandard
    except ImportError:
        raise ValueError(f"{path}: zstd needs a package: pip install zstandard") from None
    return io.BufferedReader(_Frames(zstandard.ZstdDecompressor(), raw))


class _Frames(io.RawIOBase):
    """The contents of all zstd frames in a file; the library's own reader takes a file cut short for whole."""

    def __init__(self, decompressor: Any, raw: IO[bytes]) -> None:
        self._decompressor, self._raw = decompressor, raw
        self._frame: Any = None  # the one begun
        self._compressed = self._content = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._content:
            self._compressed = self._compressed or self._raw.read(_COMPRESSED_BYTES)
            if not self._compressed:
                if self._frame is not None:
                    raise EOFError("it ends within a frame")
                return 0
            self._frame = self._frame or self._decompressor.decompressobj()
            self._content = self._frame.decompress(self._compressed)
            self._compressed = self._frame.unused_data
            if self._frame.eof:
                self._frame = None
        taken = self._content[: len(buffer)]
        buffer[: len(taken)] = taken
        self._content = self._content[len(taken) :]
        return len(taken)


def _zstd_error() -> type[Exception]:
    try:
        from zstandard import ZstdError
    except ImportError:
        return EOFError
    return ZstdError


def _read_lines(item: Input, raw: IO[bytes], file: IO[bytes]) -> Iterator[Bite]:
    first, before = 1, 0
    while lines := file.readlines(BITE_BYTES):
        place = raw.tell()
        yield Bite(item, first, lines, True, place - before)
        first, before = first + len(lines), place


def _read_text(item: Input, raw: IO[bytes], file: IO[bytes]) -> Iterator[Bite]:
    """A file is one document; a long one goes out in pieces, cut at ends of lines.

    Folders hold pictures and archives, too: a file found there that is not UTF-8 gives a bite without records.
    """
    if item.folder is not None and not _is_text(item):
        yield Bite(item, 1, [], True, item.bytes)
        return
    number, before, piece = 1, 0, read_piece(file)
    while piece:
        following = read_piece(file)
        place = raw.tell()
        yield Bite(item, number, [piece], not following, place - before)
        number, piece, before = number + 1, following, place


def _is_text(item: Input) -> bool:
    """To the end, before any of it is taken."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with item.path.open("rb") as raw:
        file = _decompress(item.path, raw)
        try:
            while piece := file.read(BITE_BYTES):
                decoder.decode(piece)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            return False
    return True


def _read_parquet(item: Input, columns: list[str]) -> Iterator[Bite]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ValueError(f"{item.path}: Parquet needs a package: pip install pyarrow") from None
    try:
        with parquet.ParquetFile(item.path) as file:
            missing = [name for name in columns if name not in file.schema_arrow.names]
            if missing:
                raise ValueError(
                    f"{item.path}: no column {missing[0]!r}; there are {', '.join(file.schema_arrow.names)}"
                )
            first, rows = 1, max(1, file.metadata.num_rows)
            for batch in file.iter_batches(batch_size=256, columns=columns):
                records = batch.to_pylist()
                done, before = (item.bytes * count // rows for count in (first - 1 + len(records), first - 1))
                yield Bite(item, first, records, True, done - before)
                first += len(records)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise ValueError(f"{item.path}: not a sound Parquet file ({str(error).splitlines()[0]})") from None
