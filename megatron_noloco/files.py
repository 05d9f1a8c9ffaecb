"""Files that are written whole or not at all, and what they hold: JSON objects, text of other systems.

A file is written under another name, synced, then renamed.
"""

import codecs
import hashlib
import json
import os
import re
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from stat import S_IMODE
from typing import TYPE_CHECKING, Any

from megatron_noloco.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

_LONGEST_LINE = 500  # characters of a text from another machine


@contextmanager
def writing(path: Path | str, option: str) -> Iterator[None]:
    """Around the first write to a place that the user chose by this option: an OSError becomes a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}; give another {option}") from None


def check_writable(folder: Path, option: str) -> None:
    """Raise UserError if no file can be made in the folder, or in the existing one that will contain it."""
    with writing(folder, option):
        absolute = folder.absolute()
        there = next(path for path in (absolute, *absolute.parents) if path.exists())
        with tempfile.TemporaryFile(dir=there):
            pass


@contextmanager
def naming_file(path: Path) -> Iterator[None]:
    """Around writes to a file, whose errors would not say to which (disk full); those of opening it do."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


def write_tensors(path: Path, tensors: dict[str, "Tensor"], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file; raises OSError, which does not name the file, for what the system refuses."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path.touch()  # its mode is that of the umask; save_file puts a file of mode 0600 in its place
    mode = path.stat().st_mode
    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:
        if (errno := _errno_of(error)) is None:
            raise
        raise OSError(errno, os.strerror(errno)) from None
    path.chmod(S_IMODE(mode))


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file, then put it in place; a crash leaves the old file or none."""
    # Ranks on several hosts may have the same process id, and write the same file at the same time.
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        with naming_file(path):
            write(partial)
            put_in_place(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a small file in UTF-8, complete or not at all."""
    write_whole(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def read_object(path: Path, advice: str) -> dict[str, Any]:
    """Return the JSON object in a file; raises UserError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; {advice}") from None
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise UserError(f"{path}: not a JSON object; {advice}")
    return content


def sha256_of(content: Any) -> str:
    """Return the hex SHA-256 of what JSON can hold."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def json_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON from its pairs, as json's object_pairs_hook.

    Raises UserError for a key that is there twice, of which json itself would keep the last.
    """
    if len(found := dict(pairs)) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        others = ", ".join(f'"{name}"' for name in found if name != repeated)
        beside = f" (beside {others})" * bool(others)
        raise UserError(f'the key "{repeated}" is there twice{beside}; leave one out')
    return found


def without_mark(content: bytes) -> bytes:
    """Return UTF-8 text without the byte order mark at its beginning, which is no part of it."""
    return content.removeprefix(codecs.BOM_UTF8)


def check_whole_characters(text: str) -> None:
    """Raise UserError for half a character, which JSON can escape and no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(
            "holds half a character (a surrogate such as \\ud83d without its other half)"
        ) from None


def check_utf_8(content: bytes) -> None:
    """Raise UserError for text of UTF-16 or UTF-32, which the mark or zeros among its first 4 bytes show."""
    if content[:4] == bytes(4):
        raise UserError("not UTF-8 text: it begins with bytes 0x00, as what a crash left of a file")
    encoding = json.detect_encoding(content[:4])
    if encoding not in ("utf-8", "utf-8-sig"):
        name = encoding.upper().replace("-LE", "LE").replace("-BE", "BE")  # as iconv has them
        raise UserError(
            f"not UTF-8 text: it begins as {name} does (iconv -f {name} -t UTF-8 would convert it)"
        )


def outside(value: Any) -> Any:
    """Return a text from another machine as a short line of printable ASCII; of JSON, the same with all its texts.

    Whatever another machine says passes here before it reaches a terminal, a log or a file.
    """
    if isinstance(value, Mapping):
        return {outside(name): outside(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return list(map(outside, value))
    if not isinstance(value, str):
        return value
    return re.sub("[^ -~]", lambda found: ascii(found[0])[1:-1], value[:_LONGEST_LINE])[:_LONGEST_LINE]


def utf_8_problem(pieces: Iterable[bytes]) -> str:
    """Return why pieces of bytes, in their order, are not UTF-8 text: the first wrong byte; "" if they are.

    A zero is wrong: archives of text (tar) have zeros, and files after a crash.
    """
    decoder, done = codecs.getincrementaldecoder("utf-8")(), 0
    try:
        for piece in pieces:
            if not done:
                check_utf_8(piece)
            text, zero, _ = piece.partition(b"\0")
            decoder.decode(text, final=bool(zero))
            if zero:
                return f"not UTF-8 text: byte 0x00 at offset {done + len(text)}"
            done += len(piece)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        kept = len(decoder.getstate()[0])  # of the pieces before: the beginning of a character
        return f"not UTF-8 text: byte {error.object[error.start]:#04x} at offset {done - kept + error.start}"
    except UserError as error:
        return str(error)
    return ""


def put_in_place(finished: Path, path: Path) -> None:
    """Rename a finished file so that a power cut leaves `path` complete, as it was, or absent."""
    sync(finished)
    finished.replace(path)
    sync(path.parent)


def _errno_of(error: Exception) -> int | None:
    """Return the system's error behind one of safetensors; its text, as in 0.8, ends with "(os error 28)"."""
    refused = re.search(r"\(os error (\d+)\)", str(error))
    return int(refused[1]) if refused else None


def sync(path: Path) -> None:
    """Write the bytes of a file, or the renames in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
