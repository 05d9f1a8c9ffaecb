"""Files that are complete or absent: written under another name, synced, then renamed. For every package."""

import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def writing(path: Path | str, option: str) -> Iterator[None]:
    """Around the first write to a place that the user chose by this option: an OSError becomes a ValueError."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{path}: cannot be written: {error.strerror}; give another {option}") from None


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file, then put it in place; a crash leaves the old file or none."""
    # Ranks on several hosts may have the same process id, and write the same file at the same time.
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        write(partial)
        put_in_place(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """A small text file, complete or not at all."""
    write_whole(path, lambda partial: partial.write_text(text))


def put_in_place(finished: Path, path: Path) -> None:
    """Rename a finished file so that a power cut leaves `path` complete, as it was, or absent."""
    _sync(finished)
    finished.replace(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    """The bytes of a file, or the renames in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
