"""Megatron's indexed datasets: `PREFIX.bin`, all tokens one after the other, and `PREFIX.idx`, where texts begin.

Written by Megatron-core's own builder. Read here, without it: importing megatron.core takes seconds, and its
reader takes a damaged file for a good one.
"""

import struct
import warnings
from functools import cached_property
from pathlib import Path

import numpy as np

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, code of the tokens' type, sequences, documents + 1
_DTYPES: dict[int, type[np.generic]] = {
    1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16,
}  # fmt: skip
_UINT16_BELOW = 65500  # tokens; Megatron's own bound


class IndexedTokens:
    """The tokens under a prefix, memory-mapped, as one stream; whole or refused.

    A document is one or more sequences (here: pieces of a long text); a sequence is never cut by a split.
    """

    def __init__(self, prefix: str) -> None:
        """Raises ValueError, naming file and numbers, unless both files are whole and belong together."""
        self.prefix = prefix
        bin_path, idx_path = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
        for path in (idx_path, bin_path):
            if not path.is_file():
                raise ValueError(
                    f"{path}: no such file (looked from cwd {Path.cwd()}); give the prefix that "
                    'tools/preprocess_data.py wrote, without ".bin"'
                )
        index = (
            np.memmap(idx_path, dtype=np.uint8, mode="r")
            if idx_path.stat().st_size
            else np.zeros(0, np.uint8)
        )
        if index[:9].tobytes() != _MAGIC or len(index) < _HEADER.size:
            raise ValueError(f"{idx_path}: not a Megatron index (it does not begin with MMIDIDX)")
        _, version, code, sequences, bounds = _HEADER.unpack(index[: _HEADER.size].tobytes())
        if version != 1 or code not in _DTYPES:
            raise ValueError(f"{idx_path}: version {version} with token type {code} is not known")
        self.dtype = np.dtype(_DTYPES[code])
        needed = _HEADER.size + sequences * (4 + 8) + bounds * 8
        if len(index) < needed:
            raise ValueError(
                f"{idx_path}: {len(index)} bytes, {sequences} sequences need {needed}; it is cut short"
            )
        self.lengths = _view(index, np.int32, _HEADER.size, sequences)
        pointers = _view(index, np.int64, _HEADER.size + 4 * sequences, sequences)
        self.document_bounds = _view(index, np.int64, _HEADER.size + 12 * sequences, bounds)
        tokens = int(self.lengths.sum(dtype=np.int64))
        size = bin_path.stat().st_size
        if size != tokens * self.dtype.itemsize:
            raise ValueError(
                f"{bin_path}: {size} bytes, its index tells of {tokens} tokens x {self.dtype.itemsize} = "
                f"{tokens * self.dtype.itemsize}; it is cut short, or belongs to another index"
            )
        if not tokens:
            raise ValueError(f"{bin_path}: holds no tokens ({sequences} sequences)")
        if not np.array_equal(pointers, self.offsets[:-1] * self.dtype.itemsize):
            raise ValueError(f"{idx_path}: its sequences do not lie one after the other")
        if self.document_bounds[:1] != 0 or self.document_bounds[-1:] != sequences:
            raise ValueError(
                f"{idx_path}: its documents do not end where its sequences do; it was not finished"
            )
        self.tokens = np.memmap(bin_path, dtype=self.dtype, mode="r")

    @cached_property
    def offsets(self) -> np.ndarray:
        """Where each sequence begins in `tokens`, and where the last one ends, shape [sequences + 1]."""
        return np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])

    @property
    def document_lengths(self) -> np.ndarray:
        """Tokens of each document."""
        return np.diff(self.offsets[self.document_bounds])

    def part(self, first: int, stop: int) -> np.ndarray:
        """The tokens of sequences `first` to `stop`, as a view of the file."""
        return self.tokens[self.offsets[first] : self.offsets[stop]]


def _view(index: np.ndarray, dtype: type[np.generic], start: int, count: int) -> np.ndarray:
    return np.frombuffer(index, dtype=dtype, count=count, offset=start)


def token_dtype(vocab_size: int) -> type[np.generic]:
    """The type in which Megatron stores tokens of such a vocabulary."""
    return np.uint16 if vocab_size < _UINT16_BELOW else np.int32


class IndexedWriter:
    """Writes one prefix; until `finish` has returned there is no index, so nobody takes it for whole."""

    def __init__(self, prefix: Path, vocab_size: int) -> None:
        with warnings.catch_warnings(action="ignore"):  # that Transformer Engine and apex are not there
            from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
        from torch import from_numpy  # here: processes that only encode should not import torch

        self.prefix = prefix
        self._as_tensor = from_numpy
        self._builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=token_dtype(vocab_size))

    def add(self, tokens: np.ndarray, ends_document: bool) -> None:
        """One sequence, and whether its document ends with it."""
        self._builder.add_item(self._as_tensor(tokens))
        if ends_document:
            self._builder.end_document()

    def add_prefix(self, prefix: Path) -> None:
        """All that was written under another prefix."""
        self._builder.add_index(str(prefix))

    def finish(self) -> None:
        partial = f"{self.prefix}.idx.partial"
        self._builder.finalize(partial)
        Path(partial).replace(f"{self.prefix}.idx")
