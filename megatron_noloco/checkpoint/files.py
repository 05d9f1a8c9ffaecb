"""Files as a manifest describes them, and whether they still are what it says."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

FORMAT = 3
_READ_BYTES = 1 << 20


class DamagedCheckpointError(ValueError):
    """A file is missing, cut short or altered; the message names it."""


@dataclass(frozen=True)
class FileRecord:
    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> "FileRecord":
        return cls(path.stat().st_size, checksum(path))


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
