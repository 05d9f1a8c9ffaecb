"""Initial weights as a plan: a function of (seed, parameter name), whatever the topology.

Every replica starts from the same weights because it draws the same ones, not because somebody broadcast
them; and a model split into stages and shards starts from exactly the weights of the unsplit one.
"""

import hashlib
from collections.abc import Callable

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor, nn

from megatron_noloco.model.shards import global_name, sharded_dimension, take_shard
from megatron_noloco.pipeline.groups import Groups
from megatron_noloco.plans.draws import Stream, draw_words

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"


@torch.no_grad()
def load(
    chunk: nn.Module, groups: Groups, layer_offset: int, tied: bool, read: Callable[[str], Tensor]
) -> None:
    """Fill a model chunk with its part of a model whose full tensors `read` gives by global name.

    Raises ValueError when a tensor has another shape.
    """
    for name, parameter in chunk.named_parameters():
        full = read(EMBEDDING if tied and name == OUTPUT else global_name(name, layer_offset))
        part = take_shard(full, name, groups.position.tp, groups.topology.tp)
        if part.shape != parameter.shape:
            raise ValueError(
                f"{name}: {list(part.shape)} does not fit a parameter of {list(parameter.shape)}"
            )
        parameter.copy_(part)
        _mark(parameter, name)


@torch.no_grad()
def initialise(
    chunk: nn.Module, groups: Groups, *, seed: int, std: float, num_layers: int, layer_offset: int, tied: bool
) -> None:
    """Fill a model chunk with its part of the seed's initial weights, and mark what is sharded.

    Normal with standard deviation `std`; projections back into the residual stream get
    std / sqrt(2 * num_layers) (GPT-2's rule, Megatron's default); norms are ones. When `tied`, the output
    matrix of the last stage is drawn as what it is: a copy of the embedding.
    """
    tp, tp_size = groups.position.tp, groups.topology.tp
    for name, parameter in chunk.named_parameters():
        dimension = sharded_dimension(name)
        if dimension is None:
            parameter.fill_(1.0)
            continue
        full_size = list(parameter.shape)
        full_size[dimension] *= tp_size
        residual = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
        drawn_name = EMBEDDING if tied and name == OUTPUT else global_name(name, layer_offset)
        full = _draw(full_size, drawn_name, seed)
        full.mul_(std / (2 * num_layers) ** 0.5 if residual else std)
        parameter.copy_(take_shard(full, name, tp, tp_size))
        _mark(parameter, name)


def _mark(parameter: nn.Parameter, name: str) -> None:
    """Tell core and DeepSpeed what is sharded: the gradient norm adds up its parts."""
    dimension = sharded_dimension(name)
    if dimension is not None and not hasattr(parameter, "tensor_model_parallel"):
        set_tensor_model_parallel_attributes(parameter, True, dimension, 1)


def _draw(size: list[int], name: str, seed: int) -> Tensor:
    """Standard normal fp32 numbers that depend on (seed, name) alone."""
    digest = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    word = int(draw_words(1, seed, Stream.WEIGHTS, digest)[0])
    return torch.randn(size, generator=torch.Generator().manual_seed(word % 2**63))
