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
from megatron_noloco.data.microbatches import Loader, addresses_of, training_microbatch
from megatron_noloco.engine.replica import ReplicaEngine
from megatron_noloco.federation.membership import Membership
from megatron_noloco.huggingface.weight_files import PretrainedWeights
from megatron_noloco.job.agreement import vote
from megatron_noloco.model.stage import build_stage
from megatron_noloco.monitor.monitor import Monitor
from megatron_noloco.outer import Channel, Exchange, NoRounds, OuterOptimizer, Rounds, mean_model
from megatron_noloco.outer.health import Health
from megatron_noloco.outer.peers import JobPeers, Peers
from megatron_noloco.pipeline import cpu
from megatron_noloco.pipeline.groups import PATIENCE, Groups, build_groups
from megatron_noloco.training.choices import choices
from megatron_noloco.training.evaluator import Evaluator
from megatron_noloco.training.joined import Joined
from megatron_noloco.training.outputs import build_monitor
from megatron_noloco.training.prepare import Prepared
from megatron_noloco.training.run import Run, Schedule
from megatron_noloco.training.separate_jobs import build_peers

# Of a call between microbatches: a GPU has more queued than that, or is asked again behind the backward pass.
_PROGRESS_SECONDS = 0.005


def build(prepared: Prepared, joined: Joined, progress: str = "auto") -> Run:
    """Return this rank's part of the run, in the state that `joined.start` names."""
    prepared = replace(prepared, config=joined.config)
    config, topology = prepared.config, prepared.topology
    start, groups = joined.start, _groups(prepared)
    plan = replace(prepared.plan, start_step=start.step, start_sample=start.sample)
    monitor = build_monitor(prepared, joined, groups, plan, progress)
    record = monitor.metrics.record

    pretrained = config.training.pretrained
    with (
        PretrainedWeights(Path(pretrained), prepared.architecture) if pretrained else nullcontext() as folder
    ):
        stage = build_stage(prepared.architecture, config.compute, groups, config.training.seed, folder)
        engine = ReplicaEngine(stage, groups, config.as_deepspeed(), record)
        if folder is not None and config.compute.precision != "fp32":
            engine.fill(folder)
    health = Health(engine.weights, partial(vote, group=groups.replica))
    peers = _peers(prepared, joined, engine, health, monitor)
    outer, routing = peers.outer, config.routing(topology)
    engine.pipeline.between_microbatches = outer.progress
    if torch.cuda.is_available():
        engine.pipeline.between_microbatches = partial(outer.progress, _PROGRESS_SECONDS)
    checkpointer = Checkpointer(joined.settings, engine, outer, plan)
    chosen_later = choices(config, outer, start.counters)
    if start.saved is not None:
        restore(start.saved, engine, outer, joined.settings)

    slot = topology.slot if topology.separate_jobs else None
    training = joined.data.training
    order, at = training.order(config.training.seed, slot), groups.position
    read = partial(training_microbatch, training, order, plan, at.dp)
    addresses = partial(addresses_of, topology, at, stage.separate_documents, plan.microbatches)
    return Run(
        schedule=_schedule(config),
        start_step=start.step,
        engine=engine,
        peers=peers,
        loader=Loader(read, addresses, routing, config.noloco.local_steps, record),
        evaluator=_evaluator(prepared, joined, engine, outer),
        checkpointer=checkpointer,
        monitor=monitor,
        stopping=joined.stopping,
        health=health,
        choices=chosen_later,
        takes_over=config.checkpoint.load == "auto",
    )


def _peers(
    prepared: Prepared, joined: Joined, engine: ReplicaEngine, health: Health, monitor: Monitor
) -> Peers:
    config, weights = prepared.config, engine.weights
    if isinstance(joined.link, Membership):
        return build_peers(config, joined.link, engine, health, monitor)
    if not config.noloco.enabled:
        return JobPeers(NoRounds(weights))
    place = prepared.topology.place(dist.get_rank())
    return JobPeers(OuterOptimizer(weights, joined.link, place, config.noloco, config.training.seed))


def _evaluator(prepared: Prepared, joined: Joined, engine: ReplicaEngine, outer: Rounds) -> Evaluator:
    config, topology, losses, means = prepared.config, prepared.topology, None, None
    if not isinstance(joined.link, Membership):
        place, seconds = topology.place(dist.get_rank()), config.noloco.deadline_seconds
        own_losses, mean_losses, weights = (
            Exchange(joined.link, place, channel, seconds)
            for channel in (Channel.LOSSES, Channel.MEAN_LOSSES, Channel.MEAN_MODEL)
        )
        losses = own_losses, mean_losses
        means = partial(mean_model, outer, weights) if config.evaluation.mean_model else None
    evaluator = Evaluator(engine, config.routing(topology), joined.validation, losses, means)
    evaluator.stops_before = joined.stopping.before_part
    return evaluator


def _groups(prepared: Prepared) -> Groups:
    config = prepared.config
    cpu.prepare()
    # A neighbour may be waiting for its partner.
    patience = PATIENCE + timedelta(seconds=config.noloco.deadline_seconds)
    routed = config.routing(prepared.topology).active
    return build_groups(prepared.topology, routed, prepared.architecture.tied_embeddings, patience)


def _schedule(config: RunConfig) -> Schedule:
    return Schedule(
        steps=config.training.train_iters,
        log_interval=config.training.log_interval,
        save_interval=0 if config.checkpoint.save_interval == "auto" else config.checkpoint.save_interval,
        evaluation_interval=config.evaluation.interval,
        evaluates=config.evaluation.iters > 0,
        averages=config.noloco.final_average and config.noloco.enabled,
    )
