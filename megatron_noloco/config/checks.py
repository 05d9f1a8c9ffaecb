"""Rules between fields: what cannot work, with the equation and its numbers."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megatron_noloco.config.blocks import ParallelConfig, TrainingConfig
from megatron_noloco.config.model_block import ModelConfig
from megatron_noloco.config.noloco_block import NolocoConfig
from megatron_noloco.config.wording import count
from megatron_noloco.plans.grouping import prime_factors
from megatron_noloco.plans.routing import Routing
from megatron_noloco.plans.stability import spread_factor
from megatron_noloco.plans.topology import Topology
from megatron_noloco.spec.architecture import Architecture

# rho of a configuration on the brink is computed as 1 minus a rounding error.
_STABLE_BELOW = 1 - 1e-9


def check_model(model: ModelConfig) -> Iterator[str]:
    hidden, heads, groups = model.hidden_size, model.num_attention_heads, model.query_groups
    if model.kv_channels is None and hidden % heads:
        yield (
            f"model.hidden_size {hidden} does not divide into {count(heads, 'attention head')} "
            f"({hidden} / {heads} = {hidden / heads:.2f}); set model.kv_channels or change one of them"
        )
    elif model.head_size % 2:
        yield f"a head of {count(model.head_size, 'channel')} has no rotary embedding: it must be even"
    if heads % groups:
        yield f"model.num_attention_heads {heads} does not divide into model.num_query_groups {groups}"
    if model.recompute_granularity == "full":
        for name in ("recompute_method", "recompute_num_layers"):
            if getattr(model, name) is None:
                yield f'model.recompute_granularity "full" needs model.{name}'
    else:
        for name in ("recompute_method", "recompute_num_layers"):
            if getattr(model, name) is not None:
                yield f'model.{name} has a meaning only with model.recompute_granularity "full"'


def check_parallel(model: ModelConfig, parallel: ParallelConfig, microbatches: int) -> Iterator[str]:
    yield from _check_stages(model, parallel, microbatches)
    yield from _check_tensor_parallel(model, parallel)


def _check_stages(model: ModelConfig, parallel: ParallelConfig, microbatches: int) -> Iterator[str]:
    layers, stages, chunks = (
        model.num_layers,
        parallel.pipeline_model_parallel_size,
        parallel.virtual_pipeline_model_parallel_size,
    )
    if layers % (stages * chunks):
        virtual = f" x {count(chunks, 'virtual stage')} = {stages * chunks}" if chunks > 1 else ""
        number = f"{count(layers, 'layer')} (model.num_layers)"
        yield f"{number} do not divide into {count(stages, 'stage')}{virtual}"
    elif (model.recompute_num_layers or 1) > layers // (stages * chunks):
        yield (
            f"model.recompute_num_layers {model.recompute_num_layers} is more than the "
            f"{count(layers // (stages * chunks), 'layer')} of a model chunk"
        )
    if chunks > 1 and stages == 1:
        yield (
            f"parallel.virtual_pipeline_model_parallel_size {chunks} needs "
            "parallel.pipeline_model_parallel_size > 1"
        )
    elif chunks > 1 and microbatches % stages:
        yield (
            f"with virtual stages the microbatches must divide into the stages: "
            f"gradient_accumulation_steps {microbatches} / {stages} stages = {microbatches / stages:.2f}"
        )


def _check_tensor_parallel(model: ModelConfig, parallel: ParallelConfig) -> Iterator[str]:
    tp_size = parallel.tensor_model_parallel_size
    sizes = {
        "model.num_attention_heads": model.num_attention_heads,
        "model.num_query_groups": model.query_groups,
        "model.ffn_hidden_size": model.ffn_hidden_size,
    }
    if parallel.sequence_parallel:
        sizes["model.seq_length"] = model.seq_length
    for name, size in sizes.items():
        if size % tp_size:
            quotient = f"{size} / {tp_size} = {size / tp_size:.2f}"
            yield f"{name} {size} does not divide by parallel.tensor_model_parallel_size {tp_size} ({quotient})"
    if model.vocab_size is not None:
        yield from check_vocabulary(model.architecture(), parallel)
    if parallel.sequence_parallel and tp_size == 1:
        yield "parallel.sequence_parallel needs parallel.tensor_model_parallel_size > 1"


def check_vocabulary(architecture: Architecture, parallel: ParallelConfig) -> Iterator[str]:
    rows, tp_size = architecture.padded_vocab_size, parallel.tensor_model_parallel_size
    if rows % tp_size:
        yield (
            f"the padded vocabulary {rows} does not divide by parallel.tensor_model_parallel_size {tp_size} "
            f"({rows} / {tp_size} = {rows / tp_size:.2f}); "
            f"make model.make_vocab_size_divisible_by a multiple of {tp_size}"
        )


def check_method(noloco: NolocoConfig, replicas: int | None) -> Iterator[str]:
    """Whether gossip keeps the replicas together; one replica alone has nobody to drift from.

    Nor have replicas that are one group, but for what a coded payload adds.
    """
    everyone = noloco.active_method == "diloco"
    if noloco.active_method == "none" or replicas == 1 or (everyone and not noloco.pull_error):
        return
    alpha, gamma, n = noloco.outer_momentum, noloco.gamma, math.inf if everyone else noloco.group_size
    rho = spread_factor(alpha, gamma, n, noloco.pull_error)
    if rho >= _STABLE_BELOW:
        payload = f', payload "{noloco.payload}"' if noloco.pull_error else ""
        yield (
            f"noloco: replicas would drift apart: rho = {rho:.3f} >= 1 for outer_momentum (alpha) {alpha}, "
            f"consensus_weight (gamma) {gamma}, group_size (n) {'of all' if everyone else n}{payload}; "
            f"{_stable_suggestion(alpha, gamma, n, noloco.pull_error)}"
        )
    if not everyone and replicas is not None and n > replicas:
        yield f"noloco.group_size {n} is more than the {count(replicas, 'replica')} there are"
    factors = prime_factors(replicas) if replicas is not None and noloco.pairing == "cycle" else ()
    if max(factors, default=1) > n:
        yield (
            f'noloco.pairing "cycle" takes groups of {" and ".join(map(str, sorted(set(factors))))} for '
            f"{count(replicas or 0, 'replica')} (the prime factors), more than noloco.group_size {n}; raise it "
            'or use "random"'
        )


def check_rounds(noloco: NolocoConfig, training: TrainingConfig, replicas: int | None) -> Iterator[str]:
    """Whether there is a round at all; a resumed run is compared by all of its steps, not by those left."""
    if noloco.enabled and replicas != 1 and noloco.local_steps > training.train_iters:
        yield (
            f"noloco.local_steps {noloco.local_steps} is more than training.train_iters {training.train_iters}: "
            "the run would end before its first round; lower it, or set noloco.enabled to false"
        )


def check_copies(
    noloco: NolocoConfig, model: ModelConfig, parallel: ParallelConfig, replicas: int
) -> Iterator[str]:
    """Whether the first and the last stage average a tied embedding with the same replicas."""
    tied = parallel.pipeline_model_parallel_size > 1 and not model.untie_embeddings_and_output_weights
    if tied and noloco.grouping == "stage" and 1 < noloco.group_size_among(replicas) < replicas:
        yield (
            'noloco.grouping "stage" and a tied embedding: the first and the last stage would average their '
            'copies of it with different replicas, and these would drift apart; use "replica", or set '
            "model.untie_embeddings_and_output_weights to true"
        )


def check_phase(noloco: NolocoConfig) -> Iterator[str]:
    """Each fragment has one round in a local phase, and that is merged before its next one."""
    if noloco.fragments > noloco.local_steps:
        yield (
            f"noloco.fragments {noloco.fragments} is more than noloco.local_steps {noloco.local_steps}: each "
            "fragment has its round at a local step of its own; lower it"
        )
    if noloco.delay_steps > noloco.local_steps:
        yield (
            f"noloco.overlap.delay_steps {noloco.delay_steps} is more than noloco.local_steps "
            f"{noloco.local_steps}: a round is merged before the next one begins; lower it"
        )


def _stable_suggestion(alpha: float, gamma: float, n: float, error: float) -> str:
    """The nearest stable setting to two digits: less momentum if that suffices, else another gamma."""
    for hundredths in range(min(99, int(alpha * 100)), -1, -1):
        if spread_factor(hundredths / 100, gamma, n, error) < _STABLE_BELOW:
            return f"outer_momentum {hundredths / 100:.2f} is the largest (to 2 digits) that is stable"
    stable = [g / 100 for g in range(1, 400) if spread_factor(alpha, g / 100, n, error) < _STABLE_BELOW]
    nearest = min(stable, key=lambda candidate: abs(candidate - gamma), default=0.01)
    return f"no outer_momentum is stable with this gamma; consensus_weight {nearest:.2f} is with this alpha"


def check_loss_scale(routing: Routing, deepspeed: dict[str, Any]) -> Iterator[str]:
    fp16 = deepspeed.get("fp16", {})
    if routing.active and fp16.get("enabled", False) and not fp16.get("loss_scale", 0):
        yield (
            "fp16 with a dynamic loss scale does not go together with routing: replicas with different "
            "loss scales would exchange gradients; set a static fp16.loss_scale, or use bf16, or set "
            'noloco.routing.interval to "off" (or parallel.replicas to 1)'
        )


def lay_out(parallel: ParallelConfig, world_size: int) -> Topology:
    """The topology of `world_size` ranks; raises ValueError with the equation when they do not fit."""
    if world_size < 1:
        raise ValueError(f"a run needs at least 1 rank, not {world_size}")
    one = Topology(
        1,
        parallel.pipeline_model_parallel_size,
        parallel.data_parallel_size,
        parallel.tensor_model_parallel_size,
        parallel.virtual_pipeline_model_parallel_size,
        parallel.sequence_parallel,
    )
    size, inside = one.replica_size, f"pipeline {one.pp} x data {one.dp} x tensor {one.tp}"
    fitting, rest = divmod(world_size, size)
    ranks = count(world_size, "rank")
    if parallel.replicas == "auto":
        if rest:
            near = [n for n in (world_size - rest, world_size - rest + size) if n]
            raise ValueError(
                f"{ranks} do not divide into replicas of {inside} = {count(size, 'rank')}; "
                f"start {' or '.join(map(str, near))} ranks"
            )
        return replace(one, replicas=fitting)
    needed = parallel.replicas * size
    if needed != world_size:
        other = "" if rest else f", or set parallel.replicas to {fitting}"
        raise ValueError(
            f"{ranks} {'is' if world_size == 1 else 'are'} not {count(parallel.replicas, 'replica')} x "
            f"{inside} = {needed}; start {count(needed, 'rank')}{other}"
        )
    return replace(one, replicas=parallel.replicas)
