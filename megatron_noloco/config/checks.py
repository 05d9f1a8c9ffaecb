"""Rules between fields: what cannot work, with the equation and its numbers."""

from collections.abc import Iterator
from typing import Any

from megatron_noloco.config.blocks import TrainingConfig
from megatron_noloco.config.model_block import ModelConfig
from megatron_noloco.config.parallel_block import ParallelConfig
from megatron_noloco.plans.routing import Routing
from megatron_noloco.settings import FederationSettings, TrainerSettings, federation_problems


def check_federation(
    federation: FederationSettings, noloco: TrainerSettings, parallel: ParallelConfig
) -> Iterator[str]:
    """What separate jobs need, and what the trainer cannot do with them."""
    if federation.slots is None and federation.rendezvous is None:
        return
    yield from federation_problems(federation, noloco)
    if federation.slots is None:
        return
    if not noloco.enabled:
        yield "noloco.enabled false: a federation is there for rounds; set it to true"
    if parallel.replicas not in ("auto", 1):
        yield f"parallel.replicas {parallel.replicas}: a job of a federation is one replica; leave it out"
    if noloco.final_average:
        yield "noloco.final_average needs all replicas at the same time, which a federation does not have"
    if noloco.transport != "auto":
        yield f'noloco.transport "{noloco.transport}": a federation has a transport of its own; leave it out'
    if noloco.routing.interval != "off" and parallel.pipeline_model_parallel_size > 1:
        yield (
            f'noloco.routing.interval "{noloco.routing.interval}": a local step would wait for replicas that are '
            'other jobs; set it to "off"'
        )


def check_rounds(noloco: TrainerSettings, training: TrainingConfig, replicas: int | None) -> Iterator[str]:
    """Whether there is a round at all; a resumed run is compared by all of its steps, not by those left."""
    if noloco.enabled and replicas != 1 and noloco.local_steps > training.train_iters:
        yield (
            f"noloco.local_steps {noloco.local_steps} is more than training.train_iters {training.train_iters}: "
            "the run would end before its first round; lower it, or set noloco.enabled to false"
        )


def check_copies(
    noloco: TrainerSettings, model: ModelConfig, parallel: ParallelConfig, replicas: int
) -> Iterator[str]:
    """Whether the first and the last stage average a tied embedding with the same replicas."""
    tied = parallel.pipeline_model_parallel_size > 1 and not model.untie_embeddings_and_output_weights
    if tied and noloco.grouping == "stage" and 1 < noloco.group_size_among(replicas) < replicas:
        yield (
            'noloco.grouping "stage" and a tied embedding: the first and the last stage would average their '
            'copies of it with different replicas, and these would drift apart; use "replica", or set '
            "model.untie_embeddings_and_output_weights to true"
        )


def check_loss_scale(routing: Routing, deepspeed: dict[str, Any]) -> Iterator[str]:
    fp16 = deepspeed.get("fp16", {})
    if routing.active and fp16.get("enabled", False) and not fp16.get("loss_scale", 0):
        yield (
            "fp16 with a dynamic loss scale does not go together with routing: replicas with different "
            "loss scales would exchange gradients; set a static fp16.loss_scale, or use bf16, or set "
            'noloco.routing.interval to "off" (or parallel.replicas to 1)'
        )
