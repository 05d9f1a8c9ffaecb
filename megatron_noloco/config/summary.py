"""The banner: what a run will do, in numbers a person can check before the first step."""

from dataclasses import replace

from megatron_noloco.config.run_config import RunConfig
from megatron_noloco.config.wording import count
from megatron_noloco.model.families import table_of
from megatron_noloco.plans.stability import rounds_to_halve, spread_factor
from megatron_noloco.plans.topology import Topology


def describe(config: RunConfig, topology: Topology, vocab: int | None = None) -> list[str]:
    """The lines of the banner, each `label: what it is`.

    Args:
        vocab: tokens of the tokenizer, where it is already known.
    """
    return [
        f"topology: {_topology(topology)}",
        f"batch per replica: {_replica_batch(config, topology)}",
        f"batch in total: {_total_batch(config, topology)}",
        f"method: {_method(config, topology)}",
        f"routing: {_routing(config, topology)}",
        f"precision: {config.precision}, ZeRO stage {config.zero_stage} over the data-parallel ranks of a replica",
        f"parameters: {_parameters(config, vocab)}",
    ]


def _topology(topology: Topology) -> str:
    parts = (
        count(topology.replicas, "replica"),
        f"pipeline {topology.pp}",
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


def _method(config: RunConfig, topology: Topology) -> str:
    noloco, replicas = config.noloco, topology.replicas
    method = noloco.active_method
    if method == "none":
        return "none (no rounds" + ("; the replicas do not average)" if replicas > 1 else ")")
    knobs = f"{method}, k = {noloco.local_steps}, alpha = {noloco.outer_momentum}, beta = {noloco.outer_lr}"
    if replicas == 1:
        return f"{knobs}; 1 replica has no partner, every round is a bye"
    n = noloco.group_size_among(replicas)
    if method == "diloco":
        return f"{knobs}, n = {n} (all replicas)"
    rho = spread_factor(noloco.outer_momentum, noloco.gamma, n)
    return (
        f"{knobs}, gamma = {noloco.gamma}, n = {n}; rho = {rho:.3f}: "
        f"{rounds_to_halve(rho):.1f} rounds halve the spread"
    )


def _routing(config: RunConfig, topology: Topology) -> str:
    interval = config.noloco.routing.interval
    if interval == "off":
        return "off"
    if topology.pp == 1:
        return f"{interval}, without effect (1 stage)"
    if topology.replicas == 1:
        return f"{interval}, without effect (1 replica)"
    return f"reshuffled every {interval}"


def _parameters(config: RunConfig, vocab: int | None) -> str:
    architecture = config.architecture(vocab or 0)
    known = table_of(architecture).parameter_count
    if architecture.vocab_size:
        return f"{known:,} (padded vocabulary {architecture.padded_vocab_size:,})"
    one_token = replace(architecture, vocab_size=1, padded_vocab_size=1)
    tables = (table_of(one_token).parameter_count - known) // architecture.hidden_size
    return (
        f"{known:,} + {tables} x {architecture.hidden_size} per token of the padded vocabulary (the tokenizer's)"
    )
