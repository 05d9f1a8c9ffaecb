"""The memory of a rank, part by part."""

from dataclasses import dataclass

from megatron_noloco.config import RunConfig
from megatron_noloco.config.outer_memory import bytes_of_rounds, bytes_of_state
from megatron_noloco.model.architecture import Architecture, Precision
from megatron_noloco.plans.topology import Topology
from megatron_noloco.preflight.held import Held, held_by_stages

WORKING = {"fp32": 4, "bf16": 2, "fp16": 2}  # bytes of a weight, a gradient that is sent, an activation
_FP32 = 4


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank, by part.

    Attributes:
        device: on its GPU; on a CPU, all of it is in the memory of the host.
        host: in the memory of the host.
    """

    device: dict[str, int]
    host: dict[str, int]

    @property
    def device_bytes(self) -> int:
        return _total(self.device)

    @property
    def host_bytes(self) -> int:
        return _total(self.host)


def memory_of(
    config: RunConfig, architecture: Architecture, topology: Topology, held: Held, stage: int
) -> Memory:
    """Of a rank of a stage. What libraries and the allocator take beside it is not counted.

    Args:
        held: by a rank of this stage.
    """
    working = WORKING[config.precision]
    moments = 2 * held.owned - held.muon  # AdamW has two, Muon one
    device = {
        "weights": working * held.parameters,
        "gradients": _FP32 * held.parameters,
        "master weights": _FP32 * held.owned,
        "inner optimizer": _FP32 * moments,
    }
    computing = {
        "activations": _activations(config, architecture, topology, held, stage),
        "logits": _logits(config, architecture, topology) * held.predicts,
    }
    stepping = {"step of the inner optimizer": _step(config, held)}
    device |= computing if _total(computing) > _total(stepping) else stepping  # they do not come together
    outer, kept = {}, {}
    if config.noloco.enabled:
        replicas, kept_aside = topology.ensemble, bool(topology.slots)
        of_state = bytes_of_state(config.noloco)
        of_rounds = bytes_of_rounds(config.noloco, replicas, kept_aside)
        kept = {" and ".join(of_state): round(held.owned * sum(of_state.values()))}
        outer = {"rounds": round(held.owned * sum(of_rounds.values()))}
    if config.noloco.slow_weights == "host":
        return Memory(device, kept | outer)
    return Memory(device | kept, outer)


def fullest_stage(
    config: RunConfig, architecture: Architecture, topology: Topology
) -> tuple[int, Held, Memory]:
    """The pipeline stage whose ranks need most, by its number; what one of them holds, and its memory."""
    stages = [
        (stage, held, memory_of(config, architecture, topology, held, stage))
        for stage, held in enumerate(held_by_stages(config, architecture, topology))
    ]
    return max(stages, key=lambda found: found[2].device_bytes + found[2].host_bytes)


def activation_bytes(
    architecture: Architecture, precision: Precision, tp: int, sequence_parallel: bool = False
) -> int:
    """What the backward pass of a layer keeps for each token, in our local layers.

    Norms keep their input and their normalised input in fp32 and their output in the working precision, p bytes.
    Then there are queries, keys and values as the projection gives them, queries and keys after rotation, the
    attention's result and its copy in the order of tokens, and a number per head for its softmax. Of the MLP: gate
    and up projection as one, the gate's activation, a copy of the up projection, and their product. With
    experts, each token has `moe_router_topk` MLPs.

    Fused kernels (apex, Transformer Engine) keep less. Compare Korthikanti et al., arXiv 2205.05198, section 4.
    """
    a, working = architecture, WORKING[precision]
    queries, keys = a.num_attention_heads * a.kv_channels, a.num_query_groups * a.kv_channels
    norms = 2 * (2 * _FP32 + working) * a.hidden_size
    attention = working * (queries + 2 * keys + keys + 2 * queries) + _FP32 * a.num_attention_heads
    mlp = working * 5 * a.ffn_hidden_size * (a.moe_router_topk or 1)
    return norms // (tp if sequence_parallel else 1) + (attention + mlp) // tp


def _total(parts: dict[str, int]) -> int:
    return sum(parts.values())


def _step(config: RunConfig, held: Held) -> int:
    """Beside gradients and moments: DeepSpeed's flat copy of gradients, then two vectors of torch's AdamW.

    NVIDIA's fused kernels need less.
    """
    flat = 0 if config.precision == "bf16" else _FP32 * held.owned
    return max(flat, 2 * _FP32 * (held.owned - held.muon))


def _activations(
    config: RunConfig, architecture: Architecture, topology: Topology, held: Held, stage: int
) -> int:
    tokens = config.micro_batch_size * architecture.seq_length
    split = topology.sequence_parallel
    layer = tokens * activation_bytes(architecture, config.precision, topology.tp, split)
    passing = tokens * architecture.hidden_size * WORKING[config.precision]  # from layer to layer
    if split:
        passing //= topology.tp
    # 1F1B: a stage has as many microbatches under way as there are stages from it to the last. With virtual stages
    # the first has (pp - 1) / vpp more (arXiv 2104.04473, section 2.2).
    under_way = float(topology.pp - stage)
    if topology.vpp > 1:
        under_way += (topology.pp - 1) / topology.vpp
    under_way = min(under_way, config.microbatches)
    if config.compute.recompute_granularity == "full":
        return round(under_way * held.layers * passing + layer)
    return round(under_way * held.layers * layer)


def _logits(config: RunConfig, architecture: Architecture, topology: Topology) -> int:
    """Of one microbatch, in fp32: their exponentials, and their gradient."""
    tokens = config.micro_batch_size * architecture.seq_length
    return 2 * _FP32 * tokens * architecture.padded_vocab_size // topology.tp
