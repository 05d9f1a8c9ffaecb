"""The banner: what a run will do and keep, in numbers that a person can check before the first step."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from megatron_noloco.config.data_block import SOURCES
from megatron_noloco.config.parallel_block import in_words, layers_of_chunks
from megatron_noloco.config.rates import rates_in_words
from megatron_noloco.config.round_memory import outer_vectors, rounds_at_a_time
from megatron_noloco.config.run_config import RunConfig
from megatron_noloco.engine.schedules import WSD
from megatron_noloco.fields import count
from megatron_noloco.model.architecture import Architecture
from megatron_noloco.model.families import table_of
from megatron_noloco.plans.stability import rounds_to_halve
from megatron_noloco.plans.topology import Topology
from megatron_noloco.settings import rho


@dataclass(frozen=True)
class Known:
    """What is known of a run when it is described.

    Attributes:
        architecture: None while the tokenizer, and so the vocabulary, is not known.
        by_recipe: see `Resolved`.
        data: summary of data that have been read; "" before.
    """

    config: RunConfig
    topology: Topology
    architecture: Architecture | None = None
    by_recipe: Mapping[str, Any] = field(default_factory=dict)
    data: str = ""

    @property
    def replicas(self) -> int | None:
        return self.topology.total_replicas

    @property
    def has_partners(self) -> bool:
        return self.config.noloco.enabled and self.replicas != 1


def describe(run: Known) -> list[str]:
    """Return the lines of the banner, each `label: what it is`."""
    facts = facts_in_words(run).items()
    return [f"{label}: {line}" for label, text in facts for line in text.splitlines()]


def facts_in_words(run: Known) -> dict[str, str]:
    """Return what is known of a run, by label; `run.json` keeps it. Rates may have several lines."""
    return {label: text for label, fact in FACTS.items() if (text := fact(run))}


def _layout(run: Known) -> str:
    topology, config = run.topology, run.config
    chunks = layers_of_chunks(config.parallel.split, config.model.num_layers, topology.pp, topology.vpp)
    uneven = len(set(chain(*chunks))) > 1
    return topology.in_words(topology.replicas) + f"; stages of {in_words(chunks)} layers" * uneven


def _federation(run: Known) -> str:
    federation, topology = run.config.federation, run.topology
    if not topology.separate_jobs:
        return ""
    site = f", at site {federation.site}" if federation.site else ""
    return f"this job is replica {topology.slot}{site}; exchanges encrypted and authenticated"


def _replica_batch(run: Known) -> str:
    config, dp = run.config, run.config.parallel.data_parallel_size
    of_microbatches = count(config.microbatches, "microbatch")
    factors = f"{config.micro_batch_size:,} per microbatch x {of_microbatches} x {dp} data-parallel"
    return _product(factors, config.replica_batch, config.model.seq_length)


def _total_batch(run: Known) -> str:
    config, replicas = run.config, run.replicas
    if replicas is None:
        return ""
    factors = f"{count(replicas, 'replica')} x {config.replica_batch:,}"
    return _product(factors, replicas * config.replica_batch, config.model.seq_length)


def _product(factors: str, samples: int, seq_length: int) -> str:
    tokens = count(samples * seq_length, "token")
    return f"{factors} = {count(samples, 'sample')}; x {seq_length:,} = {tokens} per local step"


def _method(run: Known) -> str:
    noloco, replicas = run.config.noloco, run.replicas
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


def _by_recipe(run: Known) -> str:
    """Return the settings of the method that the file leaves to its recipe, if there are any."""
    named = ", ".join(f"{name} {value}" for name, value in run.by_recipe.items())
    if not named or run.replicas == 1:
        return ""
    return f"{named} (for {run.replicas} replicas, or as a run that is continued began)"


def _routing(run: Known) -> str:
    routing = run.config.routing(run.topology)
    if routing.active:
        return f"reshuffled every {routing.interval}"
    if routing.interval == "off":
        return "off"
    return f"{routing.interval}, without effect ({'1 stage' if routing.pp == 1 else '1 replica'})"


def _optimizer(run: Known) -> str:
    config, block = run.config, run.config.as_deepspeed()["optimizer"]
    params: dict[str, Any] = block["params"]
    name = block["type"]
    if name == "Muon" and run.architecture is not None:
        table = table_of(run.architecture)
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


def _schedule(run: Known) -> str:
    block = run.config.as_deepspeed().get("scheduler")
    if block is None:
        return "none, the learning rate stays"
    name, params = block["type"], block.get("params", {})
    if name == "WSD":
        return f"{name}, {WSD(**params)}"
    given = ((key, value) for key, value in params.items() if value is not None)
    return ", ".join([name, *(f"{key} {_setting(value)}" for key, value in given)])


def _precision(run: Known) -> str:
    config = run.config
    return f"{config.precision}, ZeRO stage {config.zero_stage} over the data-parallel ranks of a replica"


def _spread(run: Known) -> str:
    if not run.has_partners or run.config.noloco.method != "noloco":
        return ""
    factor = rho(run.config.noloco, run.replicas)
    return (
        f"without local steps, {rounds_to_halve(factor):.1f} rounds would halve the standard deviation of the "
        f"weights over the replicas (rho = {factor:.3f}, explained in docs/method.md)"
    )


def _fragments(run: Known) -> str:
    noloco = run.config.noloco
    parts, local_steps = noloco.fragments, noloco.local_steps
    if not noloco.enabled or parts == 1:
        return ""
    return (
        f"{parts}, each 1/{parts} of a rank's weights and exchanged once in {count(local_steps, 'local step')}; "
        f"one every {local_steps / parts:g}"
    )


def _overlap(run: Known) -> str:
    steps = run.config.noloco.overlap_steps
    if not run.has_partners:
        return ""
    if steps == 0:
        return "none, training waits for every exchange"
    when = "as many local steps after it began as hide the exchanges of the first rounds (auto, at most k)"
    if steps != "auto":
        when = f"{count(steps, 'local step')} after it began"
    return f"training goes on during an exchange; a round is merged {when}"


def _outer_state(run: Known) -> str:
    noloco = run.config.noloco
    if not noloco.enabled:
        return ""
    vectors = outer_vectors(noloco, run.topology)
    at_a_time = rounds_at_a_time(noloco)
    rounds = f" for each of {at_a_time} rounds" * (at_a_time > 1)
    there = ", ".join(vector.name for vector in vectors if vector.on_device)
    return (
        f"{sum(vector.bytes for vector in vectors):.3g} bytes per parameter ("
        + ", ".join(f"{vector.name} {vector.bytes:.2g}" for vector in vectors)
        + ")"
        + f", and at most 128 MiB to receive in{rounds}" * (run.replicas != 1)
        + (f"; on the accelerator: {there}" if there else "")
    )


def _checkpoints(run: Known) -> str:
    checkpoint = run.config.checkpoint
    interval = checkpoint.save_interval
    if interval == 0:
        return "at the end, and when the run is stopped"
    often = "every 30 minutes" if interval == "auto" else f"every {count(interval, 'local step')}"
    return f"{often} and at the end; the last {checkpoint.keep_last} are kept"


def _parameters(run: Known) -> str:
    if run.architecture is None:
        return ""
    rows = run.architecture.padded_vocab_size
    return f"{table_of(run.architecture).parameter_count:,} (padded vocabulary {rows:,})"


def _data(run: Known) -> str:
    given = {name: getattr(run.config.data, name) for name in SOURCES}
    named = (f"{name} {_setting(value)}" for name, value in given.items() if value is not None)
    return run.data or ", ".join(named)


def _tokenizer(run: Known) -> str:
    data = run.config.data
    return data.tokenizer_type + f", {data.tokenizer_model}" * (data.tokenizer_model is not None)


def _length(run: Known) -> str:
    config, topology, steps = run.config, run.topology, run.config.training.train_iters
    tokens = steps * topology.replicas * config.replica_batch * config.model.seq_length
    whose = "of each replica" if topology.separate_jobs else "of all replicas"
    return f"{count(steps, 'local step')}, {count(tokens, 'token')} {whose}"


def _setting(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_setting, value))
    return f"{value:g}" if isinstance(value, float) else json.dumps(value).strip('"')


# The lines in their order. An empty text leaves its line out.
FACTS: dict[str, Callable[[Known], str]] = {
    "parallel": _layout,
    "federation": _federation,
    "batch per replica": _replica_batch,
    "batch in total": _total_batch,
    "method": _method,
    "by recipe": _by_recipe,
    "routing": _routing,
    "optimizer": _optimizer,
    "schedule": _schedule,
    "rates": lambda run: rates_in_words(run.config),
    "precision": _precision,
    "spread": _spread,
    "fragments": _fragments,
    "overlap": _overlap,
    "outer state": _outer_state,
    "checkpoints": _checkpoints,
    "parameters": _parameters,
    "data": _data,
    "tokenizer": _tokenizer,
    "length": _length,
}
