"""One flat vector in a safetensors file, read piece by piece.

Not memory-mapped: pages of a mapped file count as the process's memory, and reading a model through them
would show (and on a small machine be) the size of the model.
"""

import json
from pathlib import Path

import torch
from torch import Tensor


class FlatVector:
    """Numbers in fp32 under one name of a file; use as a context manager."""

    def __init__(self, path: Path, name: str) -> None:
        self._file = path.open("rb")
        header_bytes = int.from_bytes(self._file.read(8), "little")
        entry = json.loads(self._file.read(header_bytes))[name]
        assert entry["dtype"] == "F32", f"{path}: {name} is {entry['dtype']}"
        first, last = entry["data_offsets"]
        self._start = 8 + header_bytes + first
        self.length = (last - first) // 4

    def __enter__(self) -> "FlatVector":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, start: int, stop: int) -> Tensor:
        """Elements `start` to `stop`, in memory of their own."""
        piece = torch.empty(stop - start)
        self.read_into(piece, start)
        return piece

    def read_into(self, piece: Tensor, start: int) -> None:
        """Fill `piece` with the elements from `start` on."""
        self._file.seek(self._start + 4 * start)
        read_bytes = self._file.readinto(piece.numpy())  # type: ignore[arg-type]
        assert read_bytes == piece.nbytes, f"{self._file.name}: ends early"
