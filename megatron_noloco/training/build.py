"""Builds a run from its parts. Imports Megatron-core and DeepSpeed."""

from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_noloco.checkpoint.checkpointer import Checkpointer
from megatron_noloco.checkpoint.restore import restore
from megatron_noloco.config import RunConfig
from megatron_noloco.data.microbatches import MicrobatchSource, Reader, StepLoader
from megatron_noloco.engine.replica import ReplicaEngine
from megatron_noloco.huggingface.weight_files import PretrainedWeights
from megatron_noloco.job.agreement import vote
from megatron_noloco.model.stage import Stage, build_stage
from megatron_noloco.outer import (
    Channel,
    Exchange,
    mean_model,
)
from megatron_noloco.outer.health import Health
from megatron_noloco.pipeline import cpu
from megatron_noloco.pipeline.groups import PATIENCE, Groups, build_groups
from megatron_noloco.training.averaging import build_final_average, build_outer, choices
from megatron_noloco.training.evaluator import Evaluator
from megatron_noloco.training.joined import Joined, checkpoint_settings
from megatron_noloco.training.outputs import build_monitor
from megatron_noloco.training.prepare import Prepared
from megatron_noloco.training.replica_state import ReplicaState
from megatron_noloco.training.run import Run, Schedule

# Of a call between microbatches: a GPU has more queued than that, or is asked again behind the backward pass.
_PROGRESS_SECONDS = 0.005


def build(prepared: Prepared, joined: Joined, progress: str = "auto") -> Run:
    """Return this rank's part of the run, in the state that `joined.start` names."""
    prepared = replace(prepared, config=joined.config)
    config, topology = prepared.config, prepared.topology
    transport, start, membership = joined.transport, joined.start, joined.membership
    groups, stage = _model(prepared)
    at, place, routing = groups.position, topology.place(dist.get_rank()), config.routing(topology)
    plan = replace(prepared.plan, start_step=start.step, start_sample=start.sample)
    monitor = build_monitor(prepared, joined, groups, plan, progress)
    record = monitor.metrics.record

    engine = ReplicaEngine(stage, groups, config.as_deepspeed(), record)
    apart = None
    if membership is not None:
        place = membership.place
        apart = membership.replica(engine.weights, config.training.seed, engine.held())
    outer = build_outer(config, engine.weights, transport, place, apart)
    if membership is not None and apart is not None:
        optimizer, seed = config.optimizer.type, config.training.seed
        membership.keeper = ReplicaState(engine, outer, apart.movement, optimizer, seed, monitor.say)
        membership.say = monitor.say
    engine.pipeline.between_microbatches = outer.progress
    if torch.cuda.is_available() and membership is None:  # else a round ends in one call
        engine.pipeline.between_microbatches = partial(outer.progress, _PROGRESS_SECONDS)
    checkpointer = Checkpointer(
        checkpoint_settings(config, topology, tokenizer=prepared.tokenizer), engine, outer, plan
    )
    chosen_later = choices(config, outer, start.counters)
    if start.saved is not None:
        restore(start.saved, engine, outer, checkpointer.settings)

    slot = topology.slot if topology.separate_jobs else None
    order = prepared.datasets.order(config.training.seed, slot)
    source = MicrobatchSource(prepared.datasets.train, order, plan)
    reader = Reader.at(topology, at, stage.separate_documents)
    losses, means = None, None
    if membership is None and transport is not None:
        own_losses, mean_losses, weights = (
            Exchange(transport, place, channel, config.noloco.deadline_seconds)
            for channel in (Channel.LOSSES, Channel.MEAN_LOSSES, Channel.MEAN_MODEL)
        )
        losses = own_losses, mean_losses
        means = partial(mean_model, outer, weights) if config.evaluation.mean_model else None
    evaluator = Evaluator(engine, routing, prepared.validation, losses, means)
    evaluator.stops_before = joined.stopping.before_part
    return Run(
        schedule=_schedule(config),
        start_step=start.step,
        engine=engine,
        outer=outer,
        loader=StepLoader(source, routing, config.noloco.local_steps, reader, record),
        evaluator=evaluator,
        checkpointer=checkpointer,
        monitor=monitor,
        stopping=joined.stopping,
        health=Health(engine.weights, partial(vote, group=groups.replica)),
        final_average=build_final_average(config, outer, membership),
        choices=chosen_later,
        membership=membership,
        takes_over=config.checkpoint.load == "auto",
    )


def _model(prepared: Prepared) -> tuple[Groups, Stage]:
    config, architecture = prepared.config, prepared.architecture
    cpu.prepare()
    # A neighbour may be waiting for its partner.
    patience = PATIENCE + timedelta(seconds=config.noloco.deadline_seconds)
    routed = config.routing(prepared.topology).active
    groups = build_groups(prepared.topology, routed, architecture.tied_embeddings, patience)
    pretrained = config.training.pretrained
    with PretrainedWeights(Path(pretrained), architecture) if pretrained else nullcontext() as read:
        return groups, build_stage(architecture, config.compute, groups, config.training.seed, read)


def _schedule(config: RunConfig) -> Schedule:
    return Schedule(
        steps=config.training.train_iters,
        log_interval=config.training.log_interval,
        save_interval=0 if config.checkpoint.save_interval == "auto" else config.checkpoint.save_interval,
        evaluation_interval=config.evaluation.interval,
        evaluates=config.evaluation.iters > 0,
    )
