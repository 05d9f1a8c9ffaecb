"""The parts of a run that need Megatron-core and DeepSpeed; `start` puts them together."""

from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_noloco.config import RunConfig
from megatron_noloco.data.microbatches import Loader, addresses_of, training_microbatch
from megatron_noloco.data.opening import Data
from megatron_noloco.engine.replica import ReplicaEngine
from megatron_noloco.federation.federation_peers import FederationPeers
from megatron_noloco.federation.membership import Membership
from megatron_noloco.huggingface.weight_files import PretrainedWeights
from megatron_noloco.job.stopping import Stopping
from megatron_noloco.model.stage import build_stage
from megatron_noloco.monitor.metrics import Record
from megatron_noloco.monitor.monitor import Monitor
from megatron_noloco.outer import Channel, Exchange, NoRounds, OuterOptimizer, Rounds, mean_model
from megatron_noloco.outer.health import Health
from megatron_noloco.outer.peers import JobPeers, Peers
from megatron_noloco.pipeline import cpu
from megatron_noloco.pipeline.groups import PATIENCE, Groups, build_groups
from megatron_noloco.plans.sample_order import BatchPlan
from megatron_noloco.training.evaluator import Evaluator
from megatron_noloco.training.prepare import Joined, Prepared
from megatron_noloco.training.replica_state import ReplicaState
from megatron_noloco.training.run import Schedule
from megatron_noloco.training.separate_jobs import OtherJobs
from megatron_noloco.transport.interface import Transport

# Of a call between microbatches: a GPU has more queued than that, or is asked again behind the backward pass.
_PROGRESS_SECONDS = 0.005


def groups(prepared: Prepared) -> Groups:
    """Return the groups of this rank; a collective."""
    config = prepared.config
    cpu.prepare()
    # A neighbour may be waiting for its partner.
    patience = PATIENCE + timedelta(seconds=config.noloco.deadline_seconds)
    routed = config.routing(prepared.topology).active
    return build_groups(prepared.topology, routed, prepared.architecture.tied_embeddings, patience)


def engine(prepared: Prepared, groups: Groups, record: Record, begins: bool) -> ReplicaEngine:
    """Return the engine of this rank's stage: with the weights of the seed, or of `training.pretrained`.

    Args:
        begins: whether the run starts with these weights; else a checkpoint has others.
    """
    config, architecture = prepared.config, prepared.architecture
    pretrained = config.training.pretrained if begins else None
    with PretrainedWeights(Path(pretrained), architecture) if pretrained else nullcontext() as folder:
        stage = build_stage(architecture, config.compute, groups, config.training.seed, folder)
        made = ReplicaEngine(stage, groups, config.as_deepspeed(), record)
        if folder is not None and config.compute.precision != "fp32":
            made.fill(folder)
    return made


def peers(
    prepared: Prepared, link: Transport | Membership, engine: ReplicaEngine, health: Health, monitor: Monitor
) -> Peers:
    """Return the other replicas as the loop meets them; exchanges move between the engine's microbatches."""
    config, weights = prepared.config, engine.weights
    found: Peers
    if isinstance(link, Membership):
        found = _other_jobs(config, link, engine, health, monitor)
    elif not config.noloco.enabled:
        found = JobPeers(NoRounds(weights))
    else:
        place = prepared.topology.place(dist.get_rank())
        found = JobPeers(OuterOptimizer(weights, link, place, config.noloco, config.training.seed))
    engine.pipeline.between_microbatches = found.outer.progress
    if torch.cuda.is_available():
        engine.pipeline.between_microbatches = partial(found.outer.progress, _PROGRESS_SECONDS)
    return found


def _other_jobs(
    config: RunConfig, membership: Membership, engine: ReplicaEngine, health: Health, monitor: Monitor
) -> FederationPeers:
    """Return the other jobs of a federation as the loop meets them."""
    weights, seed, place = engine.weights, config.training.seed, membership.place
    replica = membership.replica(weights, seed, engine.held())
    outer = OuterOptimizer(weights, None, place, config.noloco, seed, replica)
    optimizer = config.optimizer.type
    keeper = ReplicaState(engine, outer, optimizer, seed, monitor.say)
    membership.say = monitor.say
    if membership.members is not None:
        folder, key_file = config.training.folder_of(place.replica), config.federation.key_file
        assert key_file is not None
        others = OtherJobs(membership.members, folder, monitor.plan.start_step, Path(key_file))
        monitor.metrics.writers.append(others)
    return FederationPeers(membership, replica, outer, keeper, health)


def loader(prepared: Prepared, data: Data, engine: ReplicaEngine, plan: BatchPlan, record: Record) -> Loader:
    """Return what reads this rank's microbatches ahead of the steps."""
    config, topology, at = prepared.config, prepared.topology, engine.groups.position
    slot = topology.slot if topology.separate_jobs else None
    order = data.training.order(config.training.seed, slot)
    read = partial(training_microbatch, data.training, order, plan, at.dp)
    addresses = partial(addresses_of, topology, at, engine.stage.separate_documents, plan.microbatches)
    return Loader(read, addresses, config.routing(topology), config.noloco.local_steps, record)


def evaluator(
    prepared: Prepared, joined: Joined, engine: ReplicaEngine, outer: Rounds, stopping: Stopping
) -> Evaluator:
    """Return what measures the replicas of this job, and their mean."""
    config, topology, losses, means = prepared.config, prepared.topology, None, None
    if not isinstance(joined.link, Membership):
        place, seconds = topology.place(dist.get_rank()), config.noloco.deadline_seconds
        own_losses, mean_losses, weights = (
            Exchange(joined.link, place, channel, seconds)
            for channel in (Channel.LOSSES, Channel.MEAN_LOSSES, Channel.MEAN_MODEL)
        )
        losses = own_losses, mean_losses
        means = partial(mean_model, outer, weights) if config.evaluation.mean_model else None
    made = Evaluator(engine, config.routing(topology), joined.validation, losses, means)
    made.stops_before = stopping.before_part
    return made


def schedule(config: RunConfig) -> Schedule:
    """Return after which local steps the run logs, evaluates and saves."""
    return Schedule(
        steps=config.training.train_iters,
        log_interval=config.training.log_interval,
        save_interval=0 if config.checkpoint.save_interval == "auto" else config.checkpoint.save_interval,
        evaluation_interval=config.evaluation.interval,
        evaluates=config.evaluation.iters > 0,
        averages=config.noloco.final_average and config.noloco.enabled,
    )
