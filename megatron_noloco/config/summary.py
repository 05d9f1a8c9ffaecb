"""The banner: what a run will do and keep, in numbers that a person can check before the first step."""

import json
import math
from collections.abc import Mapping
from itertools import chain
from typing import Any

from megatron_noloco.config.blocks import CheckpointConfig
from megatron_noloco.config.names import count
from megatron_noloco.config.noloco_block import TrainerSettings
from megatron_noloco.config.parallel_block import in_words, layers_of_chunks
from megatron_noloco.config.rates import describe_rates
from megatron_noloco.config.round_memory import outer_state
from megatron_noloco.config.run_config import RunConfig
from megatron_noloco.engine.schedules import WSD
from megatron_noloco.model.architecture import Architecture
from megatron_noloco.model.families import table_of
from megatron_noloco.plans.routing import Routing
from megatron_noloco.plans.stability import rounds_to_halve
from megatron_noloco.plans.topology import Topology
from megatron_noloco.settings import FederationSettings, NolocoSettings, rho


def describe_data(config: RunConfig, topology: Topology) -> list[str]:
    """Return the lines of data, tokenizer and length of a run, each `label: what it is`."""
    data, iterations = config.data, config.training.train_iters
    names = ("text", "data_path", "train_data_path", "valid_data_path", "sft_data_path")
    given = {name: getattr(data, name) for name in names if getattr(data, name) is not None}
    tokens = iterations * topology.replicas * config.replica_batch * config.model.seq_length
    whose = "of each replica" if topology.separate_jobs else "of all replicas"
    tokenizer = data.tokenizer_type + f", {data.tokenizer_model}" * (data.tokenizer_model is not None)
    return [
        "data: " + ", ".join(f"{name} {_setting(value)}" for name, value in given.items()),
        f"tokenizer: {tokenizer}",
        f"length: {count(iterations, 'local step')}, {count(tokens, 'token')} {whose}",
    ]


def facts_in_words(config: RunConfig, topology: Topology) -> dict[str, str]:
    """Return what the run is, by label: lines of the banner, which `run.json` keeps as well."""
    facts = {"parallel": _layout(config, topology)}
    if topology.total_replicas is not None:
        facts["batch in total"] = _total_batch(config, topology.total_replicas)
    return facts | {
        "method": _method(config.noloco, topology.total_replicas),
        "optimizer": _optimizer(config, None),
        "schedule": _schedule(config.as_deepspeed().get("scheduler")),
    }


def describe(
    config: RunConfig,
    topology: Topology,
    architecture: Architecture | None = None,
    by_recipe: Mapping[str, Any] | None = None,
) -> list[str]:
    """Return the lines of the banner, each `label: what it is`.

    Args:
        by_recipe: see `Resolved`.
        architecture: None while the tokenizer, and so the vocabulary, is not known.
    """
    facts = facts_in_words(config, topology) | {"optimizer": _optimizer(config, architecture)}
    said = {label: f"{label}: {text}" for label, text in facts.items()}
    lines = [
        said["parallel"],
        f"batch per replica: {_replica_batch(config, topology)}",
        *([said["batch in total"]] if "batch in total" in said else []),
        said["method"],
        *_by_recipe(by_recipe or {}, topology.total_replicas),
        f"routing: {_routing(config.routing(topology))}",
        said["optimizer"],
        said["schedule"],
        *describe_rates(config),
        f"precision: {config.precision}, ZeRO stage {config.zero_stage} over the data-parallel ranks of a replica",
    ]
    if topology.separate_jobs:
        lines.insert(1, f"federation: {_federation(config.federation, topology)}")
    if config.noloco.enabled:
        if config.noloco.method == "noloco" and topology.total_replicas != 1:
            lines.append(f"spread: {_spread(config.noloco, topology.total_replicas)}")
        if config.noloco.fragments > 1:
            lines.append(f"fragments: {_fragments(config.noloco)}")
        if topology.total_replicas != 1:
            lines.append(f"overlap: {_overlap(config.noloco)}")
        lines.append(f"outer state: {outer_state(config.noloco, topology)}")
    lines.append(f"checkpoints: {_checkpoints(config.checkpoint)}")
    if architecture is not None:
        rows = architecture.padded_vocab_size
        lines.append(f"parameters: {table_of(architecture).parameter_count:,} (padded vocabulary {rows:,})")
    return lines


def _layout(config: RunConfig, topology: Topology) -> str:
    chunks = layers_of_chunks(config.parallel.split, config.model.num_layers, topology.pp, topology.vpp)
    uneven = len(set(chain(*chunks))) > 1
    return topology.in_words(topology.replicas) + f"; stages of {in_words(chunks)} layers" * uneven


def _checkpoints(checkpoint: CheckpointConfig) -> str:
    interval = checkpoint.save_interval
    if interval == 0:
        return "at the end, and when the run is stopped"
    often = "every 30 minutes" if interval == "auto" else f"every {count(interval, 'local step')}"
    return f"{often} and at the end; the last {checkpoint.keep_last} are kept"


def _federation(federation: FederationSettings, topology: Topology) -> str:
    secure = "encrypted and authenticated" if federation.encryption == "tls" else "not encrypted"
    site = f", at site {federation.site}" if federation.site else ""
    return f"this job is replica {topology.slot}{site}; exchanges {secure}"


def _replica_batch(config: RunConfig, topology: Topology) -> str:
    samples, seq_length = config.replica_batch, config.model.seq_length
    return (
        f"{config.micro_batch_size:,} per microbatch x {count(config.microbatches, 'microbatch')} x "
        f"{topology.dp} data-parallel = {count(samples, 'sample')}; x {seq_length:,} = "
        f"{count(samples * seq_length, 'token')} per local step"
    )


def _total_batch(config: RunConfig, replicas: int) -> str:
    samples = replicas * config.replica_batch
    return (
        f"{count(replicas, 'replica')} x {config.replica_batch:,} = {count(samples, 'sample')}; "
        f"x {config.model.seq_length:,} = {count(samples * config.model.seq_length, 'token')} per local step"
    )


def _method(noloco: TrainerSettings, replicas: int | None) -> str:
    method = noloco.active_method
    if method == "none":
        return "none (no rounds" + ("; the replicas do not average)" if replicas != 1 else ")")
    momentum = f"{noloco.outer_momentum}{' (Nesterov)' if noloco.outer_nesterov else ''}"
    k = f"k = {noloco.local_steps}"
    if noloco.most_waiting is not None:
        k += f" at first, then as many as keep waiting below {100 * noloco.most_waiting:g} %"
    knobs = f"{method} in {noloco.payload}, {k}, alpha = {momentum}, beta = {noloco.outer_lr}"
    if replicas == 1:
        return f"{knobs}; 1 replica, which takes outer steps without a partner"
    groups = noloco.among(replicas)
    if method == "diloco":
        return f"{knobs}, n = {groups.size} (all replicas)"
    drawn = f"n = {groups.size}"
    if (cycle := groups.cycle) is not None:
        drawn = f"cycles of {' x '.join(map(str, cycle.inside))}"
        if cycle.across:
            sites = math.prod(cycle.across)
            drawn += f" inside each of {sites} sites, and between them in one of {cycle.interval} rounds"
    return f"{knobs}, gamma = {noloco.gamma}, {drawn}"


def _by_recipe(by_recipe: Mapping[str, Any], replicas: int | None) -> list[str]:
    """Return a line with the settings of the method that the file leaves to its recipe, if there are any."""
    named = ", ".join(f"{name} {value}" for name, value in by_recipe.items())
    if not named or replicas == 1:
        return []
    return [f"by recipe: {named} (for {replicas} replicas, or as a run that is continued began)"]


def _spread(noloco: TrainerSettings, replicas: int | None) -> str:
    factor = rho(noloco, replicas)
    return (
        f"without local steps, {rounds_to_halve(factor):.1f} rounds would halve the standard deviation of the "
        f"weights over the replicas (rho = {factor:.3f}, explained in docs/method.md)"
    )


def _optimizer(config: RunConfig, architecture: Architecture | None) -> str:
    block = config.as_deepspeed()["optimizer"]
    params: dict[str, Any] = block["params"]
    name = block["type"]
    if name == "Muon" and architecture is not None:
        table = table_of(architecture)
        linear = sum(math.prod(row.shape) for row in table if row.linear)
        name += (
            f" for {linear:,} weights of linear maps in layers, AdamW for {table.parameter_count - linear:,}"
        )
    text = ", ".join([name, *(f"{name} {_setting(value)}" for name, value in params.items())])
    if "betas" in params and params["betas"][1]:
        steps = math.log(0.5) / math.log(params["betas"][1])
        tokens = steps * config.replica_batch * config.model.seq_length
        text += f"; half-life of the second moment {steps:,.1f} local steps, {tokens:,.0f} tokens per replica"
    return text


def _schedule(block: dict[str, Any] | None) -> str:
    if block is None:
        return "none, the learning rate stays"
    name, params = block["type"], block.get("params", {})
    if name == "WSD":
        return f"{name}, {WSD(**params)}"
    given = ((key, value) for key, value in params.items() if value is not None)
    return ", ".join([name, *(f"{key} {_setting(value)}" for key, value in given)])


def _setting(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_setting, value))
    return f"{value:g}" if isinstance(value, float) else json.dumps(value).strip('"')


def _fragments(noloco: NolocoSettings) -> str:
    parts, local_steps = noloco.fragments, noloco.local_steps
    return (
        f"{parts}, each 1/{parts} of a rank's weights and exchanged once in {count(local_steps, 'local step')}; "
        f"one every {local_steps / parts:g}"
    )


def _overlap(noloco: NolocoSettings) -> str:
    if noloco.overlap_steps == 0:
        return "none, training waits for every exchange"
    if noloco.overlap_steps == "auto":
        when = (
            "as many local steps after it began as hide the exchanges of the first rounds (auto, at most k)"
        )
    else:
        when = f"{count(noloco.overlap_steps, 'local step')} after it began"
    return f"training goes on during an exchange; a round is merged {when}"


def _routing(routing: Routing) -> str:
    if routing.active:
        return f"reshuffled every {routing.interval}"
    if routing.interval == "off":
        return "off"
    return f"{routing.interval}, without effect ({'1 stage' if routing.pp == 1 else '1 replica'})"
