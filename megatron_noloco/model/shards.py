"""Names and shards: where a parameter of one rank's stage sits in the unsplit model."""

import math
import re
from collections.abc import Callable

import torch
from torch import Tensor

# The dimension along which a matrix is cut into shards, by the last words of its name.
SHARDED_DIMENSION = {
    "word_embeddings.weight": 0,
    "output_layer.weight": 0,
    "linear_qkv.weight": 0,
    "linear_fc1.weight": 0,
    "linear_proj.weight": 1,
    "linear_fc2.weight": 1,
}


def sharded_dimension(name: str) -> int | None:
    """The dimension cut into shards, or None for a parameter every shard holds whole (norms)."""
    return next((dim for suffix, dim in SHARDED_DIMENSION.items() if name.endswith(suffix)), None)


def is_stacked(name: str) -> bool:
    """Whether the parts of all shards, one after the other, are the full matrix."""
    return sharded_dimension(name) == 0 and not name.endswith("linear_fc1.weight")


def global_name(name: str, layer_offset: int) -> str:
    """The parameter's name in the unsplit model: `layer_offset` layers lie before this model chunk."""
    return re.sub(
        r"(decoder\.layers\.)(\d+)", lambda match: f"{match[1]}{int(match[2]) + layer_offset}", name
    )


def take_shard(full: Tensor, name: str, tp: int, tp_size: int) -> Tensor:
    """The part of a full matrix that one shard holds. SwiGLU's fc1 is [gate; up], each cut on its own."""
    dimension = sharded_dimension(name)
    if dimension is None:
        return full
    if name.endswith("linear_fc1.weight"):
        gate_and_up = full.view(2, -1, full.size(1))
        return gate_and_up.chunk(tp_size, dim=1)[tp].reshape(-1, full.size(1))
    return full.chunk(tp_size, dim=dimension)[tp]


def merge_shards(parts: list[Tensor], name: str, take: Callable[[int], Tensor] | None = None) -> Tensor:
    """The full matrix from the parts of all shards, in order; the inverse of `take_shard`.

    Memory for it comes from `take`, which gives a flat tensor of a length.
    """
    dimension = sharded_dimension(name)
    if dimension is None or len(parts) == 1:
        return parts[0]
    shape = list(parts[0].shape)
    shape[dimension] *= len(parts)
    full = parts[0].new_empty(shape) if take is None else take(math.prod(shape)).view(shape)
    if name.endswith("linear_fc1.weight"):
        halves = [part.view(2, -1, part.size(1)) for part in parts]
        torch.cat(halves, dim=1, out=full.view(2, -1, full.size(1)))
    else:
        torch.cat(parts, dim=dimension, out=full)
    return full
