"""Flat vectors in safetensors files, one for each group of the inner optimizer, read piece by piece."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from megatron_noloco.checkpoint.catalog import WEIGHTS
from megatron_noloco.engine.layout import FlatPart

OUTER_VECTORS = (WEIGHTS, "outer_momentum", "correction")  # an element for each weight of a rank
_PIECE = 1 << 24  # elements read with the file opened once


def cut(tensors: Mapping[str, Tensor], layout: Sequence[FlatPart]) -> dict[str, Tensor]:
    """The state of the outer optimizer as a file has it: vector NAME is cut into NAME.0, NAME.1, ... by group."""
    lengths = [part.length for part in layout]
    pieces = {
        f"{name}.{group}": piece
        for name in OUTER_VECTORS
        if name in tensors
        for group, piece in enumerate(tensors[name].split(lengths))
    }
    return pieces | {name: tensor for name, tensor in tensors.items() if name not in OUTER_VECTORS}


@dataclass(frozen=True)
class FlatVector:
    """Numbers in fp32 under one name of a file.

    The file is opened again for every piece. The library maps it into memory, and what was read of a mapped file
    counts as memory of the process until the map is closed: 1.6 GB read through one open file were 1.6 GB in use,
    read like this 64 MB. Opening takes 7 ms.
    """

    path: Path
    name: str

    @cached_property
    def length(self) -> int:
        with safe_open(self.path, framework="pt") as file:
            return int(file.get_slice(self.name).get_shape()[0])

    def read(self, start: int, stop: int) -> Tensor:
        """Elements `start` to `stop`, in memory of their own."""
        piece = torch.empty(stop - start)
        self.read_into(piece, start)
        return piece

    def read_into(self, piece: Tensor, start: int) -> None:
        """Fill `piece` with the elements from `start` on."""
        for part in piece.split(_PIECE):
            with safe_open(self.path, framework="pt") as file:
                part.copy_(file.get_slice(self.name)[start : start + len(part)])
            start += len(part)
