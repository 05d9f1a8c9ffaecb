"""What each rank of a replica holds of the model."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_noloco.config import RunConfig
from megatron_noloco.config.deepspeed_optimizer import is_muon
from megatron_noloco.config.layers import layers_of_chunks
from megatron_noloco.engine.layout import Kind
from megatron_noloco.model.architecture import Architecture
from megatron_noloco.model.families import Parameter, table_of
from megatron_noloco.plans.topology import Topology

# DeepSpeed pads a group of parameters to a multiple of so many elements on every data-parallel rank.
_ALIGNMENT = 2


@dataclass(frozen=True)
class Held:
    """The weights of one rank, counted in elements.

    Attributes:
        layers: whole ones.
        parameters: of its stage and tensor-parallel rank.
        owned: its part of the flat fp32 weights, 1/dp of the parameters and padding: what it exchanges.
        muon: those of the owned that have Muon.
        copied: of the parameters those that other ranks of the replica hold as well.
        predicts: whether it is of the last stage.
    """

    layers: int
    parameters: int
    owned: int
    muon: int
    copied: int
    predicts: bool


def held_by_stages(config: RunConfig, architecture: Architecture, topology: Topology) -> list[Held]:
    """Of one rank of each pipeline stage; the others of a stage hold as much."""
    return [_held(config, architecture, topology, stage) for stage in range(topology.pp)]


def _held(config: RunConfig, architecture: Architecture, topology: Topology, stage: int) -> Held:
    chunks = layers_of_chunks(config.parallel.split, config.model.num_layers, topology.pp, topology.vpp)
    layers = sum(chunks[stage])
    block = config.deepspeed["optimizer"]
    groups: Counter[Kind] = Counter()
    copied = 0
    for row in _rows(architecture, topology, stage, layers):
        elements = math.prod(row.slice_shape(topology.tp))
        decoupled = block["params"].get("decoupled_lr") is not None
        groups[Kind.of(row, is_muon(block), decoupled)] += elements
        if (topology.tp > 1 and row.tp_dim is None) or _is_tied(row, architecture, topology):
            copied += elements
    owned = {kind: -(-n // (_ALIGNMENT * topology.dp)) * _ALIGNMENT for kind, n in groups.items()}
    return Held(
        layers=layers,
        parameters=groups.total(),
        owned=sum(owned.values()),
        muon=sum(n for kind, n in owned.items() if kind.muon),
        copied=copied,
        predicts=stage == topology.pp - 1,
    )


def _rows(architecture: Architecture, topology: Topology, stage: int, layers: int) -> Iterator[Parameter]:
    """The parameters of a stage; all layers are alike, so that it does not matter which ones it has."""
    first, last = stage == 0, stage == topology.pp - 1
    for row in table_of(architecture):
        if row.layer is not None:
            if row.layer < layers:
                yield row
        elif row.name.startswith("embedding."):
            if first:
                yield row
        elif last and not (first and row.same_as is not None):
            yield row


def _is_tied(row: Parameter, architecture: Architecture, topology: Topology) -> bool:
    return architecture.tied_embeddings and topology.pp > 1 and row.is_embedding_or_output
