"""The banner: what a run will do, in numbers a person can check before the first step."""

from megatron_noloco.config.blocks import NolocoConfig
from megatron_noloco.config.run_config import RunConfig
from megatron_noloco.config.wording import count
from megatron_noloco.model.families import table_of
from megatron_noloco.plans.routing import Routing
from megatron_noloco.plans.stability import rounds_to_halve, spread_factor
from megatron_noloco.plans.topology import Topology
from megatron_noloco.spec.architecture import Architecture


def describe(config: RunConfig, topology: Topology, architecture: Architecture | None = None) -> list[str]:
    """The lines of the banner, each `label: what it is`.

    Args:
        architecture: None while the tokenizer, and so the vocabulary, is not known.
    """
    lines = [
        f"parallel: {_layout(topology)}",
        f"batch per replica: {_replica_batch(config, topology)}",
        f"batch in total: {_total_batch(config, topology)}",
        f"method: {_method(config.noloco, topology.replicas)}",
        f"routing: {_routing(config.routing(topology))}",
        f"precision: {config.precision}, ZeRO stage {config.zero_stage} over the data-parallel ranks of a replica",
    ]
    if architecture is not None:
        rows = architecture.padded_vocab_size
        lines.append(f"parameters: {table_of(architecture).parameter_count:,} (padded vocabulary {rows:,})")
    return lines


def _layout(topology: Topology) -> str:
    parts = (
        count(topology.replicas, "replica"),
        f"pipeline {topology.pp}" + (f" ({topology.vpp} virtual stages each)" if topology.vpp > 1 else ""),
        f"data {topology.dp}",
        f"tensor {topology.tp}",
    )
    return f"{' x '.join(parts)} = {count(topology.world_size, 'rank')}"


def _replica_batch(config: RunConfig, topology: Topology) -> str:
    samples, seq_length = config.replica_batch, config.model.seq_length
    return (
        f"{config.micro_batch_size:,} per microbatch x {count(config.microbatches, 'microbatch')} x "
        f"{topology.dp} data-parallel = {count(samples, 'sample')}; x {seq_length:,} = "
        f"{count(samples * seq_length, 'token')} per local step"
    )


def _total_batch(config: RunConfig, topology: Topology) -> str:
    samples = topology.replicas * config.replica_batch
    return (
        f"{count(topology.replicas, 'replica')} x {config.replica_batch:,} = {count(samples, 'sample')}; "
        f"x {config.model.seq_length:,} = {count(samples * config.model.seq_length, 'token')} per local step"
    )


def _method(noloco: NolocoConfig, replicas: int) -> str:
    method = noloco.active_method
    if method == "none":
        return "none (no rounds" + ("; the replicas do not average)" if replicas > 1 else ")")
    knobs = f"{method}, k = {noloco.local_steps}, alpha = {noloco.outer_momentum}, beta = {noloco.outer_lr}"
    if replicas == 1:
        return f"{knobs}; 1 replica has no partner, every round is a bye"
    n = noloco.group_size_among(replicas)
    if method == "diloco":
        return f"{knobs}, n = {n} (all replicas)"
    rho = spread_factor(noloco.outer_momentum, noloco.gamma, n, noloco.pull_error)
    return (
        f"{knobs}, gamma = {noloco.gamma}, n = {n}; rho = {rho:.3f}: "
        f"{rounds_to_halve(rho):.1f} rounds halve the spread"
    )


def _routing(routing: Routing) -> str:
    if routing.active:
        return f"reshuffled every {routing.interval}"
    if routing.interval == "off":
        return "off"
    return f"{routing.interval}, without effect ({'1 stage' if routing.pp == 1 else '1 replica'})"
