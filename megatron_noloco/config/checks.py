"""Rules between fields: what cannot work, with the equation and its numbers."""

from collections.abc import Iterator
from typing import Any

from megatron_noloco.config.blocks import TrainingConfig
from megatron_noloco.config.model_block import ModelConfig
from megatron_noloco.config.noloco_block import NolocoConfig
from megatron_noloco.config.parallel_block import ParallelConfig
from megatron_noloco.config.wording import count
from megatron_noloco.plans.grouping import prime_factors
from megatron_noloco.plans.routing import Routing


def check_method(noloco: NolocoConfig, replicas: int | None) -> Iterator[str]:
    """Whether gossip keeps the replicas together; one replica alone has nobody to drift from.

    Nor have replicas that are one group, but for what a coded payload adds.
    """
    everyone = noloco.active_method == "diloco"
    if noloco.active_method == "none" or replicas == 1:
        return
    n = noloco.group_size
    factors = prime_factors(replicas) if replicas is not None and noloco.pairing == "cycle" else ()
    if problem := noloco.gossip(replicas).problem:
        yield f"noloco: {problem}"
    if not everyone and replicas is not None and n > replicas:
        yield f"noloco.group_size {n} is more than the {count(replicas, 'replica')} there are"
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
    if noloco.overlap.mode == "none" and noloco.overlap.delay_steps not in ("auto", 0):
        yield (
            f"noloco.overlap.delay_steps {noloco.overlap.delay_steps} has no effect with noloco.overlap.mode "
            '"none"; set the mode to "delayed", or leave delay_steps out'
        )
    if noloco.delay_steps > noloco.local_steps:
        yield (
            f"noloco.overlap.delay_steps {noloco.delay_steps} is more than noloco.local_steps "
            f"{noloco.local_steps}: a round is merged before the next one begins; lower it"
        )


def check_loss_scale(routing: Routing, deepspeed: dict[str, Any]) -> Iterator[str]:
    fp16 = deepspeed.get("fp16", {})
    if routing.active and fp16.get("enabled", False) and not fp16.get("loss_scale", 0):
        yield (
            "fp16 with a dynamic loss scale does not go together with routing: replicas with different "
            "loss scales would exchange gradients; set a static fp16.loss_scale, or use bf16, or set "
            'noloco.routing.interval to "off" (or parallel.replicas to 1)'
        )
