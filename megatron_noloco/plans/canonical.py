"""The canonical vector: all weights of the unsplit model in one order, and where a rank's weights lie in it.

A parameter is a matrix of the vector, row by row: the first dimension, and the product of the others. The
matrices are in the order of their names, so whoever knows names and shapes knows the vector. In any layout, a rank
has a few rectangles of a parameter: tensor parallelism cuts rows or columns, and a partition of ZeRO begins and
ends within a row.
"""

import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, product
from math import prod
from typing import Any, NamedTuple


class Rectangle(NamedTuple):
    """Rows top..top + rows and columns left..left + width of a matrix."""

    top: int
    left: int
    rows: int
    width: int


class Matrix(NamedTuple):
    """A parameter in the canonical vector: elements start..start + rows * columns."""

    start: int
    rows: int
    columns: int

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.columns

    @property
    def whole(self) -> Rectangle:
        return Rectangle(0, 0, self.rows, self.columns)


class Block(NamedTuple):
    """A rectangle of a matrix whose elements lie one after the other, row by row, in a vector of a rank.

    Attributes:
        own: index of its first element in the rank's vector.
        matrix: of which it is a part.
    """

    own: int
    matrix: Matrix
    top: int
    left: int
    rows: int
    width: int

    @property
    def place(self) -> Rectangle:
        """Where it lies in the matrix."""
        return Rectangle(self.top, self.left, self.rows, self.width)

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.rows * self.width

    @property
    def first(self) -> int:
        """Index of its first element in the canonical vector."""
        return self.matrix.start + self.top * self.matrix.columns + self.left

    @property
    def last(self) -> int:
        """Index of its last element in the canonical vector."""
        return self.first + (self.rows - 1) * self.matrix.columns + self.width - 1

    def part(self, begin: int, end: int) -> Iterator["Block"]:
        """Yield elements begin..end of the block, as at most three blocks."""
        while begin < end:
            row, column = divmod(begin, self.width)
            if column or end - begin < self.width:  # the rest of a row
                rows, width = 1, min(self.width - column, end - begin)
            else:
                rows, width = (end - begin) // self.width, self.width
            place = Rectangle(self.top + row, self.left + column, rows, width)
            yield Block(self.own + begin, self.matrix, *place)
            begin += rows * width

    def between(self, start: int, stop: int) -> Iterator["Block"]:
        """Yield what lies in elements start..stop of the canonical vector, as at most three blocks."""
        yield from self.part(self.before(start), self.before(stop))

    def before(self, index: int) -> int:
        """Return how many elements of the block lie before an element of the canonical vector."""
        row, column = divmod(index - self.matrix.start, self.matrix.columns)
        if row < self.top:
            return 0
        if row >= self.top + self.rows:
            return self.size
        return (row - self.top) * self.width + min(max(column - self.left, 0), self.width)


def matrices(shapes: Mapping[str, Sequence[int]]) -> dict[str, Matrix]:
    """Return the matrix of each parameter in the order of the vector, from the shapes of the unsplit model.

    The order is that of the names, in which numbers are compared as numbers: layers.2 is before layers.10.
    """
    ordered = sorted(shapes.items(), key=lambda item: _key(item[0]))
    sizes = accumulate((prod(shape) for _, shape in ordered), initial=0)
    return {
        name: Matrix(start, prod(shape[:1]), prod(shape[1:]))
        for start, (name, shape) in zip(sizes, ordered, strict=False)
    }


def _key(name: str) -> tuple[list[str | int], str]:
    """Return what names are sorted by; the name itself decides between "1" and "01"."""
    pieces = re.split(r"([0-9]+)", name)  # text and digits in turn
    return [int(piece) if at % 2 else piece for at, piece in enumerate(pieces)], name


def box(shape: Sequence[int], firsts: Sequence[int], sizes: Sequence[int]) -> Iterator[Rectangle]:
    """Yield the rectangles of a tensor's matrix that make up a box of the tensor, one after the other.

    Args:
        shape: of the tensor.
        firsts, sizes: where the box begins in each dimension, and how far it goes there.
    """
    lacking = 2 - len(shape)
    shape, sizes = (*shape, *[1] * lacking), (*sizes, *[1] * lacking)
    firsts = (*firsts, *[0] * lacking)
    cut = max(at for at, size in enumerate(sizes) if at < 2 or size < shape[at])
    inside = prod(shape[cut + 1 :])
    if cut == 1:
        yield Rectangle(firsts[0], firsts[1] * inside, sizes[0], sizes[1] * inside)
        return
    for row, *middle in product(*(range(firsts[at], firsts[at] + sizes[at]) for at in range(cut))):
        left = 0
        for index, length in zip((*middle, firsts[cut]), shape[1 : cut + 1], strict=True):
            left = left * length + index
        yield Rectangle(row, left * inside, 1, sizes[cut] * inside)


def blocks(matrix: Matrix, slices: Iterable[Rectangle], begin: int, end: int, own: int) -> Iterator[Block]:
    """Yield the blocks of a part of a slice of a parameter.

    Args:
        slices: rectangles of the matrix that make up the slice, one after the other.
        begin, end: elements of the slice of which the part consists.
        own: index of element `begin` in the rank's vector.

    Rows beyond the matrix, such as padding of the vocabulary, have no block.
    """
    before = 0
    for place in slices:
        whole = Block(own + before - begin, matrix, *place)
        for block in whole.part(max(begin - before, 0), min(end - before, whole.size)):
            yield from block.between(matrix.start, matrix.stop)
        before += whole.size


class Piece(NamedTuple):
    """Elements begin..end of a parameter, or of a rank's part of it, which lie at `own` in the rank's vector."""

    parameter: Any
    begin: int
    end: int
    own: int


def in_turn(parameters: Iterable[tuple[Any, int]]) -> Iterator[tuple[Any, int, int]]:
    """Yield parameters with their lengths, and where each begins in a flat vector of all, one after the other."""
    at = 0
    for parameter, length in parameters:
        yield parameter, length, at
        at += length


def pieces_between(
    laid: Iterable[tuple[Any, int, int]], start: int, stop: int, own: int = 0
) -> Iterator[Piece]:
    """Yield what elements start..stop of a flat vector have of each parameter, if need be with nothing of it.

    Args:
        laid: parameters, their lengths, and where they begin in the flat vector.
        own: index of element `start` in the rank's vector.
    """
    for parameter, length, at in laid:
        begin, end = (min(max(edge - at, 0), length) for edge in (start, stop))
        yield Piece(parameter, begin, end, own + max(at - start, 0))


class Holding:
    """What one rank has of the canonical vector.

    Args:
        blocks: of the rank; `own` is their place in a vector of the rank.
        copies: those of the blocks that another rank of the replica has as well, and sends.
    """

    def __init__(self, blocks: Iterable[Block], copies: Collection[Block] = ()) -> None:
        self._blocks = sorted(blocks, key=lambda block: block.first)
        self._sizes = [0, *accumulate(block.size for block in self._blocks)]
        self._firsts = [block.first for block in self._blocks]
        self._copies = set(copies)

    @property
    def stop(self) -> int:
        """The end of the canonical vector, as far as this rank has a part of it."""
        return max((block.last + 1 for block in self._blocks), default=0)

    def before(self, index: int) -> int:
        """Return how many of the rank's elements lie before an element of the canonical vector."""
        at = bisect_left(self._firsts, index)  # blocks of a rank do not interleave: only the last may be cut
        return self._sizes[at - 1] + self._blocks[at - 1].before(index) if at else 0

    def between(self, start: int, stop: int, given: bool = False) -> list[Block]:
        """Return what lies in elements start..stop of the canonical vector, in this order.

        Args:
            given: whether to leave out copies.
        """
        found: list[Block] = []
        for at in range(max(bisect_left(self._firsts, start) - 1, 0), len(self._blocks)):
            block = self._blocks[at]
            if block.first >= stop:
                break
            if not (given and block in self._copies):
                found += block.between(start, stop)
        return found

    def ascending(self, start: int = 0) -> "Holding":
        """Return the same with places in a vector of the rank's elements from `start` on, in canonical order."""
        first = self.before(start)
        moved = [
            block._replace(own=own - first) for block, own in zip(self._blocks, self._sizes, strict=False)
        ]
        copies = [new for old, new in zip(self._blocks, moved, strict=True) if old in self._copies]
        return Holding(moved, copies)
