"""Initial weights as a plan: a function of (seed, parameter name), whatever the topology.

Every replica starts from the same weights because it draws the same ones, not because somebody broadcast
them; and a model split into stages and shards starts from exactly the weights of the unsplit one.
"""

import hashlib
import re

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor, nn

from megatron_noloco.model.groups import Groups
from megatron_noloco.plans.draws import Stream, draw_words

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"

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


def global_name(name: str, layer_offset: int) -> str:
    """The parameter's name in the unsplit model: `layer_offset` layers lie before this model chunk."""
    return re.sub(
        r"(decoder\.layers\.)(\d+)", lambda match: f"{match[1]}{int(match[2]) + layer_offset}", name
    )


def take_shard(full: Tensor, name: str, shard: int, shards: int) -> Tensor:
    """The part of a full matrix that one shard holds. SwiGLU's fc1 is [gate; up], each cut on its own."""
    dimension = sharded_dimension(name)
    if dimension is None:
        return full
    if name.endswith("linear_fc1.weight"):
        gate_and_up = full.view(2, -1, full.size(1))
        return gate_and_up.chunk(shards, dim=1)[shard].reshape(-1, full.size(1))
    return full.chunk(shards, dim=dimension)[shard]


@torch.no_grad()
def initialise(
    chunk: nn.Module, groups: Groups, *, seed: int, std: float, num_layers: int, layer_offset: int, tied: bool
) -> None:
    """Fill a model chunk with its part of the seed's initial weights, and mark what is sharded.

    Normal with standard deviation `std`; projections back into the residual stream get
    std / sqrt(2 * num_layers) (GPT-2's rule, Megatron's default); norms are ones. When `tied`, the output
    matrix of the last stage is drawn as what it is: a copy of the embedding.
    """
    shard, shards = groups.position.shard, groups.topology.shards
    for name, parameter in chunk.named_parameters():
        dimension = sharded_dimension(name)
        if dimension is None:
            parameter.fill_(1.0)
            continue
        full_size = list(parameter.shape)
        full_size[dimension] *= shards
        residual = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
        drawn_name = EMBEDDING if tied and name == OUTPUT else global_name(name, layer_offset)
        full = _draw(full_size, drawn_name, seed)
        full.mul_(std / (2 * num_layers) ** 0.5 if residual else std)
        parameter.copy_(take_shard(full, name, shard, shards))
        if not hasattr(parameter, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(parameter, True, dimension, 1)


def _draw(size: list[int], name: str, seed: int) -> Tensor:
    """Standard normal fp32 numbers that depend on (seed, name) alone."""
    digest = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    word = int(draw_words(1, seed, Stream.WEIGHTS, digest)[0])
    return torch.randn(size, generator=torch.Generator().manual_seed(word % 2**63))
