"""The memory of a rank: the parameters that it has, and what training keeps beside them."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_noloco.config import RunConfig
from megatron_noloco.config.parallel_block import layers_of_chunks
from megatron_noloco.config.round_memory import outer_vectors
from megatron_noloco.engine.layout import GroupKey
from megatron_noloco.model.architecture import Architecture, Precision
from megatron_noloco.model.families import Parameter, family_of, table_of
from megatron_noloco.outer.channels import WINDOW
from megatron_noloco.outer.vectors import BUCKET
from megatron_noloco.plans.topology import Topology

WORKING = {"fp32": 4, "bf16": 2, "fp16": 2}  # bytes of a weight, of a gradient that is sent, of an activation
FP32 = 4
# DeepSpeed pads each group of parameters to a multiple of this number of elements per data-parallel rank.
_ALIGNMENT = 2


@dataclass(frozen=True)
class RankParameters:
    """The parameters of one rank of a pipeline stage, as numbers of elements.

    Attributes:
        parameters: those of its stage and tensor-parallel rank.
        owned: its part of the flat fp32 weights, 1/dp of the parameters (of experts ep/dp), and padding; exchanges
            send these.
        muon: the part of `owned` that Muon updates.
        copied: the part of `parameters` that other ranks of the replica have as well.
    """

    stage: int
    parameters: int
    owned: int
    muon: int
    copied: int


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank, without those of libraries, communicators, and the allocator.

    Attributes:
        held: its parameters.
        device: memory of its GPU, by part. On a CPU this, too, is in the memory of the host.
        host: outer state in the memory of the host.
    """

    held: RankParameters
    device: dict[str, int]
    host: int

    @property
    def device_bytes(self) -> int:
        return sum(self.device.values())


def fullest_stage(config: RunConfig, architecture: Architecture, topology: Topology) -> Memory:
    """Return the memory of a rank of the pipeline stage whose ranks need most of a GPU."""
    stages = parameters_of_stages(config, architecture, topology)
    memories = [memory_of(config, architecture, topology, held) for held in stages]
    return max(memories, key=lambda memory: (memory.device_bytes, memory.host))


def parameters_of_stages(
    config: RunConfig, architecture: Architecture, topology: Topology
) -> list[RankParameters]:
    """Return the parameters of one rank of each pipeline stage; all ranks of a stage have the same number."""
    return [_parameters(config, architecture, topology, stage) for stage in range(topology.pp)]


def _parameters(
    config: RunConfig, architecture: Architecture, topology: Topology, stage: int
) -> RankParameters:
    chunks = layers_of_chunks(config.parallel.split, config.model.num_layers, topology.pp, topology.vpp)
    layers = sum(chunks[stage])
    muon = config.optimizer.type == "Muon"
    groups: Counter[GroupKey] = Counter()
    copied = 0
    for row in _rows(architecture, topology, stage, layers):
        elements = math.prod(row.slice_shape(topology.tp))
        groups[GroupKey.of(row, muon, topology.ep)] += elements
        tied = architecture.tied_embeddings and topology.pp > 1 and row.is_embedding_or_output
        if tied or (topology.tp > 1 and row.tp_dim is None):
            copied += elements
    owners = {key: len(topology.owners(0, experts=not key.everywhere)) for key in groups}
    owned = {key: -(-n // (_ALIGNMENT * owners[key])) * _ALIGNMENT for key, n in groups.items()}
    return RankParameters(
        stage=stage,
        parameters=groups.total(),
        owned=sum(owned.values()),
        muon=sum(n for key, n in owned.items() if key.muon),
        copied=copied,
    )


def _rows(architecture: Architecture, topology: Topology, stage: int, layers: int) -> Iterator[Parameter]:
    """Yield the parameters of a rank of a stage.

    All layers and experts are alike, so the first `layers` of them and the first rank's experts stand for its own.
    """
    first, last = stage == 0, stage == topology.pp - 1
    experts = topology.experts(0, architecture.num_moe_experts or 0)
    for row in table_of(architecture):
        if row.expert is not None and row.expert not in experts:
            continue
        if row.layer is not None:
            if row.layer < layers:
                yield row
        elif row.name.startswith("embedding."):
            if first:
                yield row
        elif last and not (first and row.same_as is not None):
            yield row


def memory_of(
    config: RunConfig, architecture: Architecture, topology: Topology, held: RankParameters
) -> Memory:
    """Return the memory of a rank with these parameters."""
    is_last = held.stage == topology.pp - 1
    gradients = FP32 * held.parameters
    if config.zero_stage == 2:  # this rank's part, and those that wait to be reduced
        bucket = config.zero_optimization.reduce_bucket_size
        gradients = FP32 * held.owned + WORKING[config.precision] * min(held.parameters, bucket)
    device = {
        "weights": WORKING[config.precision] * held.parameters,
        "gradients": gradients,
        "optimizer": FP32 * ((1 + config.optimizer.moments) * held.owned - held.muon),
    }
    computing = {
        "activations": _activations(config, architecture, topology, held.stage),
        "logits": _logits(config, architecture, topology) * is_last,
    }
    step = _step(config, held)  # never beside activations
    device |= computing if sum(computing.values()) > step else {"step of the optimizer": step}
    on_device, on_host = _outer_state(config, topology, held) if config.noloco.enabled else (0, 0)
    return Memory(held, device | {"outer state": on_device}, on_host)


def _outer_state(config: RunConfig, topology: Topology, held: RankParameters) -> tuple[int, int]:
    """Return the bytes of the outer optimizer on the device and on the host, with buckets under way.

    Buckets are those of a round and those of the mean model of an evaluation. The leader of a separate job keeps a
    few pieces instead.
    """
    sizes = {True: 0.0, False: 0.0}
    for vector in outer_vectors(config.noloco, topology):
        sizes[vector.on_device] += vector.bytes * held.owned
    if topology.total_replicas not in (None, 1):
        evaluates = config.evaluation.iters > 0 and config.evaluation.mean_model
        sizes[False] += (1 + evaluates) * FP32 * min(held.owned, WINDOW * BUCKET)
    return round(sizes[True]), round(sizes[False])


def activation_bytes(
    architecture: Architecture, precision: Precision, tp: int, sequence_parallel: bool = False
) -> int:
    """Return the bytes per token that a layer keeps for its backward pass, for our local layers.

    An RMSNorm keeps its input and its normalised input in fp32, a LayerNorm its input in the working precision.
    Both keep their output in the working precision. Attention keeps queries, keys and values as the projection
    gives them (values are a view of all three), queries and keys after rotation, its result, and a number per head
    for its softmax. An MLP with a gate keeps gate and up projection as one, the gate's activation, a copy of the
    up projection, and their product; without a gate it keeps input and result of the activation. With experts each
    token has `moe_router_topk` MLPs, each of which also keeps a copy of its input, and of its product once more.

    Fused kernels (apex, Transformer Engine) keep less. Compare Korthikanti et al., arXiv 2205.05198, section 4.
    """
    a, working = architecture, WORKING[precision]
    queries, keys = a.num_attention_heads * a.kv_channels, a.num_query_groups * a.kv_channels
    inputs = 2 * FP32 if family_of(a).normalization == "RMSNorm" else working
    norms = 2 * (inputs + working) * a.hidden_size
    projected, rotated = queries + 2 * keys, queries + keys
    attention = working * (projected + rotated + queries) + FP32 * a.num_attention_heads
    return norms // (tp if sequence_parallel else 1) + attention // tp + _mlp_bytes(a, precision, tp)


def _mlp_bytes(architecture: Architecture, precision: Precision, tp: int) -> int:
    a, kept = architecture, 5 if family_of(architecture).gated else 2
    if a.moe_router_topk is None:
        return WORKING[precision] * kept * a.ffn_hidden_size // tp
    return WORKING[precision] * a.moe_router_topk * ((kept + 1) * a.ffn_hidden_size // tp + a.hidden_size)


def _activations(config: RunConfig, architecture: Architecture, topology: Topology, stage: int) -> int:
    tokens = config.micro_batch_size * architecture.seq_length
    gathered = 0
    if topology.ep > 1:
        # The tokens of all `ep` ranks, what this rank's experts make of them, and that in fp32.
        each = architecture.hidden_size * (2 * WORKING[config.precision] + FP32)
        gathered = topology.ep * tokens * each
    # 1F1B: a stage has as many microbatches under way as there are stages from it to the last. With virtual stages
    # the first has (pp - 1) / vpp more (arXiv 2104.04473, section 2.2).
    under_way = float(topology.pp - stage)
    if topology.vpp > 1:
        under_way += (topology.pp - 1) / topology.vpp
    under_way = min(under_way, config.microbatches)
    chunks = layers_of_chunks(config.parallel.split, architecture.num_layers, topology.pp, topology.vpp)
    kept, again = _kept(config, architecture, topology, chunks[stage])
    return round(under_way * kept + again + gathered)


def _kept(
    config: RunConfig, architecture: Architecture, topology: Topology, chunks: list[int]
) -> tuple[int, int]:
    """Return the bytes that a microbatch keeps from forward to backward, and those that backward adds to them.

    Args:
        chunks: layers of each model chunk of the stage.
    """
    compute, precision, split = config.compute, config.precision, topology.sequence_parallel
    tokens = config.micro_batch_size * architecture.seq_length
    layers, unit = sum(chunks), compute.recompute_num_layers
    layer = tokens * activation_bytes(architecture, precision, topology.tp, split)
    passing = tokens * architecture.hidden_size * WORKING[precision]  # from layer to layer
    if split:
        passing //= topology.tp
    if compute.recompute_granularity == "full" and unit is not None:
        if compute.recompute_method == "uniform":
            return sum(-(-n // unit) for n in chunks) * passing, min(unit, max(chunks)) * layer
        first = sum(min(unit, n) for n in chunks)
        # Backward begins with the other layers, and what these kept is free when it comes to the first.
        return first * passing + (layers - first) * layer, layer * (first == layers)
    if {"mlp", "moe"} & set(compute.recompute_modules or []):
        mlp = tokens * _mlp_bytes(architecture, precision, topology.tp)
        return layers * (layer - mlp), mlp
    return layers * layer, 0


def _logits(config: RunConfig, architecture: Architecture, topology: Topology) -> int:
    """Return the bytes of one microbatch's logits: their exponentials and their gradient, in fp32."""
    tokens = config.micro_batch_size * architecture.seq_length
    return 2 * FP32 * tokens * architecture.padded_vocab_size // topology.tp


def _step(config: RunConfig, held: RankParameters) -> int:
    """Return the bytes that the inner optimizer's step needs beside gradients and moments.

    These are DeepSpeed's flat copy of the gradients, then a vector for each moment in torch's AdamW. Fused kernels
    need less.
    """
    flat = 0 if config.precision == "bf16" else FP32 * held.owned
    return max(flat, config.optimizer.moments * FP32 * (held.owned - held.muon))
