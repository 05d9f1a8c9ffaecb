"""Read and write Megatron's indexed datasets: tokens in `PREFIX.bin`, where texts begin in `PREFIX.idx`.

Records for fine-tuning have a mask of what is learnt in `PREFIX.mask`: a byte, 0 or 1, for each token.

The format is that of Megatron-core's `datasets/indexed_dataset.py`; tests compare both ways. Megatron-core itself
is not used: importing it takes seconds in every process, and its reader accepts damaged files.
"""

import struct
from array import array
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from megatron_noloco.data.cache import Made, made_at
from megatron_noloco.data.tokenizer import Tokenizer
from megatron_noloco.errors import UserError
from megatron_noloco.files import sync

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, code of the tokens' type, sequences, documents + 1
_DTYPES: dict[int, type[np.generic]] = {
    1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16,
}  # fmt: skip
_PIECE = 1 << 16  # numbers of an index that are compared at once
_FIRST_DOCUMENTS = 1 << 16  # whose ends are looked at
# Tokens of a large dataset that are checked and counted at the start; a smaller one is read whole. A sample of the
# rest is checked when it is read.
_EXCERPT_TOKENS = 1 << 24
_UINT16_BELOW = 65500  # tokens in the vocabulary; Megatron's bound


@dataclass(frozen=True)
class Dataset:
    """Sequences of tokens, one after the other; of an indexed dataset, or of a part of it, memory-mapped.

    Attributes:
        tokens: shape [tokens].
        offsets: where each sequence begins, and where the last one ends, shape [sequences + 1]; the first token
            has the first offset.
        mask: whether each token has a loss, shape [tokens]; None: each has.
        name: for the user.
    """

    tokens: np.ndarray
    offsets: "np.ndarray | Offsets"
    mask: np.ndarray | None
    name: str

    @property
    def sequences(self) -> int:
        """How many there are."""
        return len(self.offsets) - 1

    def some_labels(self) -> np.ndarray:
        """Return tokens that have a loss: all, or of a large dataset an excerpt."""
        tokens = excerpt(self.tokens)
        return tokens if self.mask is None else tokens[excerpt(self.mask)]

    def spans(self, sequences: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return where sequences begin in the tokens, and their lengths."""
        begins = self.offsets[sequences]
        return begins - self.offsets[:1], self.offsets[sequences + 1] - begins


@dataclass(frozen=True)
class IndexedDataset(Dataset):
    """All of an indexed dataset. A document is one or more sequences (here: pieces of a long text).

    Attributes:
        document_bounds: the first sequence of each document, and the end, int64 [documents + 1].
        made: what is known of it; None of a dataset that was not made here.
    """

    offsets: "Offsets"
    document_bounds: np.ndarray
    made: Made | None = None

    @property
    def notes(self) -> str:
        """What was read otherwise than it looks when it was made; "" if nothing was, or is known."""
        return "" if self.made is None else self.made.notes.removeprefix("; ")

    def ends_with(self, token: int) -> bool:
        """Return whether any of its first documents ends with a token."""
        ends = self.offsets[self.document_bounds[1 : _FIRST_DOCUMENTS + 1]]
        return bool((self.tokens[ends[ends > 0] - 1] == token).any())

    def part(self, first: int, stop: int, name: str = "dataset") -> "Dataset":
        """Return sequences `first` to `stop`, as views of the files."""
        start, end = self.offsets[np.array([first, stop])]
        mask = None if self.mask is None else self.mask[start:end]
        return Dataset(self.tokens[start:end], self.offsets.part(first, stop), mask, name)


def read_indexed(prefix: str) -> IndexedDataset:
    """Return the indexed dataset under a prefix, memory-mapped.

    Raises UserError, naming file and numbers, unless all files are complete and belong together.
    """
    bin_path, idx_path, mask = (Path(f"{prefix}.{suffix}") for suffix in ("bin", "idx", "mask"))
    for path in (idx_path, bin_path):
        if not path.is_file():
            raise UserError(
                f'{path}: no such file (looked from cwd {Path.cwd()}); give the path of a dataset without ".bin", '
                "such as data/corpus_text_document; data.text takes text, data.sft_data_path records"
            )
    dtype, lengths, begins, bounds = _read_index(idx_path)
    sequences, tokens = len(lengths), int(lengths.sum(dtype=np.int64))
    for path, width in ((bin_path, dtype.itemsize), (mask, 1)):
        if path.exists() and (size := path.stat().st_size) != tokens * width:
            raise UserError(
                f"{path}: {size} bytes, its index says {tokens} tokens x {width} = {tokens * width}; it is cut "
                "short, or belongs to another index"
            )
    if not tokens:
        raise UserError(f"{bin_path}: holds no tokens ({sequences} sequences)")
    bytes_between = ((np.diff(begins[piece]), lengths[piece][:-1]) for piece in _pieces(sequences))
    if (
        begins[0] != 0
        or lengths.min() < 0
        or not all(np.array_equal(found, own * np.int64(dtype.itemsize)) for found, own in bytes_between)
        or bounds[:1] != 0
        or bounds[-1:] != sequences
        or not all((np.diff(bounds[piece]) >= 0).all() for piece in _pieces(len(bounds)))
    ):
        raise UserError(
            f"{idx_path}: its sequences or documents do not lie one after the other, to the end; it was not "
            "finished, or is altered"
        )
    offsets = Offsets(begins, tokens * dtype.itemsize, dtype.itemsize)
    learnt = _mapped(mask, np.bool_) if mask.exists() else None
    return IndexedDataset(_mapped(bin_path, dtype), offsets, learnt, prefix, bounds)


class Offsets:
    """Where sequences begin in the tokens, and where the last one ends, read from the mapped index.

    The ranks of a host share its pages. As an array they would take 8 bytes of every rank for each sequence.
    """

    def __init__(self, begins: np.ndarray, end: int, itemsize: int) -> None:
        """Keep the mapped bytes at which sequences begin, int64 [sequences], and at which the last one ends."""
        self._begins, self._end, self._itemsize = begins, end, itemsize

    def __len__(self) -> int:
        return len(self._begins) + 1

    def __getitem__(self, places: slice | np.ndarray) -> np.ndarray:
        """Return these offsets, in tokens, int64."""
        if isinstance(places, slice):
            places = np.arange(*places.indices(len(self)))
        last = len(self._begins) - 1
        begins = self._begins[np.minimum(places, last)]
        return np.where(places > last, self._end, begins) // self._itemsize

    def part(self, first: int, stop: int) -> "Offsets":
        """Return the offsets of sequences `first` to `stop`, still in the index."""
        end = self._begins[stop] if stop < len(self._begins) else self._end
        return Offsets(self._begins[first:stop], int(end), self._itemsize)


def excerpt(array: np.ndarray | Offsets) -> np.ndarray:
    """Return up to `_EXCERPT_TOKENS` elements, evenly spread over the array in 16 stretches."""
    if len(array) <= _EXCERPT_TOKENS:
        return array[:]
    length = _EXCERPT_TOKENS // 16
    starts = np.linspace(0, len(array) - length, 16).astype(int)
    return np.concatenate([array[start : start + length] for start in starts])


def _pieces(number: int) -> Iterator[slice]:
    """Yield slices of so many numbers; neighbours have one in common."""
    return (slice(start, start + _PIECE + 1) for start in range(0, number, _PIECE))


def open_indexed(prefix: str, tokenizer: Tokenizer, name: str = "") -> IndexedDataset:
    """Open a dataset; raises UserError as `read_indexed` does, and where it was made with another tokenizer.

    Args:
        name: for the user; "": the prefix.
    """
    dataset = read_indexed(prefix)
    made = made_at(prefix)
    if made is not None and made.tokenizer not in ("", tokenizer.digest):
        raise UserError(
            f"{prefix}: the dataset was made with another tokenizer than that of the block data; set the same, or "
            f"preprocess the text again (if this one has only further tokens, remove {prefix}.facts.json)"
        )
    return replace(dataset, name=name or prefix, made=made)


def _mapped(path: Path, dtype: Any) -> np.ndarray:
    """Map a file of numbers. A view, since each slice of a memmap costs a microsecond of Python."""
    return np.memmap(path, dtype=dtype, mode="r").view(np.ndarray)


def _read_index(path: Path) -> tuple[np.dtype, np.ndarray, np.ndarray, np.ndarray]:
    """Map an .idx file into memory; raises UserError unless it is complete.

    Returns the type of tokens; the length of each sequence, int32 [sequences]; the byte of the .bin file at which
    each begins, int64 [sequences]; the first sequence of each document, and the end, int64 [documents + 1].
    """
    index = np.memmap(path, dtype=np.uint8, mode="r") if path.stat().st_size else np.zeros(0, np.uint8)
    header = index[: _HEADER.size].tobytes().ljust(_HEADER.size, b"\0")
    magic, version, code, sequences, bounds = _HEADER.unpack(header)
    if (magic, version) != (_MAGIC, _VERSION) or code not in _DTYPES:
        raise UserError(f"{path}: not a Megatron index (MMIDIDX, version 1, a type of whole numbers)")
    needed = _HEADER.size + sequences * (4 + 8) + bounds * 8
    if len(index) < needed:
        raise UserError(f"{path}: {len(index)} bytes, {sequences} sequences need {needed}; it is cut short")
    starts = [_HEADER.size + sequences * size for size in (0, 4, 4 + 8)]
    return (
        np.dtype(_DTYPES[code]),
        np.frombuffer(index, np.int32, sequences, starts[0]),
        np.frombuffer(index, np.int64, sequences, starts[1]),
        np.frombuffer(index, np.int64, bounds, starts[2]),
    )


class Sequence(NamedTuple):
    """A document, or a piece of a long one."""

    tokens: np.ndarray  # shape [tokens]
    ends: bool  # whether it is the last of its document
    mask: np.ndarray | None = None  # whether each token has a loss, bool [tokens]; None: each has


def write_indexed(prefix: Path, sequences: Iterable[Sequence], vocab_size: int, masked: bool = False) -> int:
    """Write a dataset to the disk, its index last; return the number of sequences.

    Args:
        masked: whether the sequences have masks.
    """
    code = 8 if vocab_size < _UINT16_BELOW else 4
    dtype, lengths, bounds = np.dtype(_DTYPES[code]), array("i"), array("q", [0])
    with ExitStack() as stack:
        files = [stack.enter_context(_written(f"{prefix}.{name}")) for name in ("bin", "mask")[: 1 + masked]]
        for tokens, ends, mask in sequences:
            files[0].write(tokens.astype(dtype).data)
            if mask is not None:
                files[1].write(mask.data)
            lengths.append(len(tokens))
            if ends:
                bounds.append(len(lengths))
    sizes = np.array(lengths, dtype=np.int32)
    begins = (np.cumsum(sizes, dtype=np.int64) - sizes) * dtype.itemsize
    header = _HEADER.pack(_MAGIC, _VERSION, code, len(sizes), len(bounds))
    with _written(f"{prefix}.idx") as index:
        index.writelines([header, *(part.tobytes() for part in (sizes, begins, np.array(bounds)))])
    return len(sizes)


@contextmanager
def _written(path: str) -> Iterator[IO[bytes]]:
    """Open a new file, which is on the disk in the end."""
    with open(path, "wb") as file:
        yield file
    sync(Path(path))
