"""Fill the weights of a model chunk by the table of its family.

Initial weights are a plan: a function of (seed, parameter name) for any topology. All replicas draw the same
weights without a broadcast, and a model split into stages and tensor-parallel slices has those of the unsplit one.
"""

import hashlib
from collections.abc import Callable, Iterator

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor, nn

from megatron_noloco.model.architecture import Architecture
from megatron_noloco.model.families import Parameter, Table, table_of
from megatron_noloco.plans.draws import Stream, draw_words

Read = Callable[[str], Tensor]  # the full tensor of a parameter, by its name in the unsplit model


def initial_weights(architecture: Architecture, seed: int) -> Read:
    """Return a function that draws a parameter's initial weights, fp32; `Parameter.init` has the distributions."""
    table, std = table_of(architecture), architecture.init_method_std

    def read(name: str) -> Tensor:
        parameter = table.find(name)
        if parameter.init in ("ones", "zeros"):
            return torch.full(parameter.shape, float(parameter.init == "ones"))
        residual = parameter.init == "residual"
        scale = std / (2 * architecture.num_layers) ** 0.5 if residual else std
        drawn = _draw(parameter.shape, parameter.name, seed).mul_(scale)
        for padding in parameter.split(drawn)[len(parameter.hf) :] if parameter.hf else ():
            padding.zero_()  # no round has it: it stays the same in all replicas, whatever steps they take
        return drawn

    return read


def _draw(shape: tuple[int, ...], name: str, seed: int) -> Tensor:
    """Draw standard normal fp32 numbers that depend on (seed, name) alone."""
    digest = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    word = int(draw_words(1, seed, Stream.WEIGHTS, digest)[0])
    return torch.randn(shape, generator=torch.Generator().manual_seed(word % 2**63))


def match_rows(
    chunk: GPTModel, table: Table, first_layer: int, experts: range
) -> Iterator[tuple[Parameter, nn.Parameter]]:
    """Yield every parameter of a model chunk with its row, in the order of the table, which flat vectors have.

    Args:
        first_layer: number of layers before the chunk.
        experts: numbers of the experts of each layer that this rank has.

    Raises ValueError when a parameter has no row, or when a row of the chunk's layers (of the whole model, if the
    chunk is all of it) has no parameter, though it is in no expert of another rank.
    """
    pairs = [
        (table.find(name, first_layer, experts.start), parameter)
        for name, parameter in chunk.named_parameters()
    ]
    found = {row.name for row, _ in pairs}
    whole, layers = chunk.pre_process and chunk.post_process, {row.layer for row, _ in pairs}
    for row in table:
        expected = whole or (row.layer is not None and row.layer in layers)
        if row.expert is not None and row.expert not in experts:
            expected = False
        if expected and row.same_as is None and row.name not in found:
            raise ValueError(
                f"the table of the model's family has a row {row.name}, but no parameter was built"
            )
    place = {row.name: index for index, row in enumerate(table)}
    yield from sorted(pairs, key=lambda pair: place[pair[0].name])


@torch.no_grad()
def fill(parameter: nn.Parameter, row: Parameter, read: Read, tp: int, tp_size: int) -> None:
    """Copy a parameter's slice of the full tensor into it; raises ValueError when the shapes differ."""
    part = row.slice(read(row.source), tp, tp_size)
    if part.shape != parameter.shape:
        raise ValueError(
            f"{row.name}: {list(part.shape)} does not fit a parameter of {list(parameter.shape)}"
        )
    parameter.copy_(part)
    # Core and DeepSpeed must know which parameters are cut: the gradient norm adds up their slices.
    if row.tp_dim is not None and not hasattr(parameter, "tensor_model_parallel"):
        set_tensor_model_parallel_attributes(parameter, True, row.tp_dim, 1)
