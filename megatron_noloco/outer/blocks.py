"""Some blocks of a coded vector."""

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_noloco.outer.mean import MeanPiece
from megatron_noloco.outer.payload import BLOCK
from megatron_noloco.outer.spans import Spans

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


def spans_of(chosen: Tensor, length: int) -> Spans:
    """The chosen blocks of a vector of `length` elements."""
    return Spans([(first * BLOCK, min(last * BLOCK, length)) for first, last in runs(chosen)])
