"""Some blocks of a vector, taken out of it and put back."""

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate

import torch
from torch import Tensor

from megatron_noloco.outer.mean import MeanPiece
from megatron_noloco.outer.payload import BLOCK

_NONE = torch.zeros(1, dtype=torch.int8)


def runs(chosen: Tensor) -> Iterator[tuple[int, int]]:
    """Where a bool vector is true: first..last, ascending."""
    edges = torch.diff(chosen.to(torch.int8), prepend=_NONE, append=_NONE).nonzero().view(-1).tolist()
    return zip(edges[::2], edges[1::2], strict=True)


def of_mean(mean: Tensor, first_block: int, chosen: Tensor) -> Iterator[MeanPiece]:
    """The chosen blocks of `mean`, which begins at block `first_block` of the vector."""
    for first, last in runs(chosen):
        piece = mean[first * BLOCK : last * BLOCK]
        start = (first_block + first) * BLOCK
        yield MeanPiece(start, start + len(piece), piece)


class Chosen:
    """The chosen blocks of a vector of `length` elements, one after the other as a vector of their own."""

    def __init__(self, chosen: Tensor, length: int) -> None:
        self._spans = [(first * BLOCK, min(last * BLOCK, length)) for first, last in runs(chosen)]
        self._places = list(accumulate((stop - start for start, stop in self._spans), initial=0))

    @property
    def length(self) -> int:
        """Elements chosen."""
        return self._places[-1]

    def gather(self, vector: Tensor, out: Tensor) -> Tensor:
        """Fill `out`, of the chosen length, from the whole vector."""
        for (start, stop), place in zip(self._spans, self._places, strict=False):
            out[place : place + stop - start] = vector[start:stop]
        return out

    def place(self, piece: MeanPiece) -> Iterator[MeanPiece]:
        """A piece of the vector of chosen blocks, as pieces of the whole one."""
        for index in range(bisect_right(self._places, piece.start) - 1, len(self._spans)):
            if self._places[index] >= piece.stop:
                break
            first, last = max(piece.start, self._places[index]), min(piece.stop, self._places[index + 1])
            shift = self._spans[index][0] - self._places[index]
            mean = piece.mean[first - piece.start : last - piece.start]
            yield MeanPiece(first + shift, last + shift, mean)
