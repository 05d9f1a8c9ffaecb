"""Some ranges of a vector, seen as a vector of their own."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

from torch import Tensor

from megatron_noloco.outer.mean import MeanPiece

Ranges = Sequence[tuple[int, int]]
"""Elements start..stop of a vector; no two ranges overlap."""


class Spans:
    """The elements of some ranges of a vector, in the order given."""

    def __init__(self, ranges: Ranges) -> None:
        self.ranges = ranges
        self._places = list(accumulate((stop - start for start, stop in ranges), initial=0))

    @property
    def length(self) -> int:
        """Elements of all ranges."""
        return self._places[-1]

    def within(self, start: int, stop: int) -> Iterator[tuple[slice, slice]]:
        """Elements start..stop of our vector, in pieces: the place of each in our vector and in the whole one."""
        for index in range(bisect_right(self._places, start) - 1, len(self.ranges)):
            if self._places[index] >= stop:
                break
            first, last = max(start, self._places[index]), min(stop, self._places[index + 1])
            shift = self.ranges[index][0] - self._places[index]
            yield slice(first, last), slice(first + shift, last + shift)

    def gather(self, vector: Tensor, out: Tensor) -> Tensor:
        """Fill `out`, of our length, from the whole vector."""
        for ours, place in self.within(0, self.length):
            out[ours] = vector[place]
        return out

    def scatter(self, ours: Tensor, out: Tensor) -> None:
        """Write our vector to its places in the whole one."""
        for within, place in self.within(0, self.length):
            out[place] = ours[within]

    def place(self, piece: MeanPiece) -> Iterator[MeanPiece]:
        """A piece of our vector, as pieces of the whole one."""
        for ours, place in self.within(piece.start, piece.stop):
            mean = piece.mean[ours.start - piece.start : ours.stop - piece.start]
            yield MeanPiece(place.start, place.stop, mean)
