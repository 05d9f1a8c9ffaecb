"""Files that are whole or absent: written aside, synced, renamed, and described by a manifest."""

import hashlib
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

FORMAT = 1
_READ_BYTES = 1 << 20


class DamagedCheckpointError(ValueError):
    """A file is missing, cut short or altered; the message names it."""


@dataclass(frozen=True)
class FileRecord:
    bytes: int
    sha256: str


def write_whole(path: Path, write: Callable[[Path], None]) -> FileRecord:
    """Let `write` fill a temporary file, then put it in place; a crash leaves the old file or none."""
    # Ranks on several hosts may have the same process id, and write `latest` at the same time.
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        write(partial)
        record = FileRecord(partial.stat().st_size, checksum(partial))
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(path.parent)
    return record


def write_text(path: Path, text: str) -> None:
    """A small text file, whole or not at all."""

    def fill(partial: Path) -> None:
        partial.write_text(text)

    write_whole(path, fill)


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(path: Path) -> str:
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256", _bufsize=_READ_BYTES).hexdigest()


def verify(folder: Path, files: dict[str, FileRecord]) -> None:
    """Raise DamagedCheckpointError unless every file is there, of its size and with its checksum."""
    for name, expected in files.items():
        path = folder / name
        try:
            size = path.stat().st_size
            if size != expected.bytes:
                raise DamagedCheckpointError(f"{path}: {size} bytes instead of {expected.bytes}")
            if checksum(path) != expected.sha256:
                raise DamagedCheckpointError(f"{path}: checksum does not match its manifest")
        except OSError as error:
            raise DamagedCheckpointError(f"{path}: {error.strerror}") from None
