"""From a config file to a finished run: puts the rooms together."""

import os
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_noloco.checkpoint.resume import Start, find_start
from megatron_noloco.config import RunConfig, describe
from megatron_noloco.data.datasets import Datasets, Needs, build_datasets
from megatron_noloco.data.loader import Reader, StepLoader
from megatron_noloco.data.microbatches import MicrobatchSource, ValidationSource
from megatron_noloco.data.tokenizer import Tokenizer
from megatron_noloco.huggingface.folder import PretrainedWeights
from megatron_noloco.job.join import choose_transport, join, ranks_on_this_host
from megatron_noloco.job.launcher import World, local_device, read_world
from megatron_noloco.metrics import Metrics
from megatron_noloco.metrics.writers import ReplicaFiles, Writer
from megatron_noloco.model.families import table_of
from megatron_noloco.outer import (
    Channel,
    Exchange,
    MeanModel,
    NoRounds,
    OuterOptimizer,
    OuterSettings,
    PartnerTimeoutError,
    Rounds,
    Weights,
)
from megatron_noloco.plans.grouping import Grouping
from megatron_noloco.plans.samples import BatchPlan
from megatron_noloco.plans.topology import Place, Position, Topology
from megatron_noloco.quiet import quieten
from megatron_noloco.spec.architecture import Architecture
from megatron_noloco.training.console import Console, RunFacts
from megatron_noloco.training.preflight import check_start
from megatron_noloco.transport.protocol import Transport

__all__ = ["PartnerTimeoutError", "Prepared", "join_job", "prepare", "train"]


@dataclass(frozen=True)
class Prepared:
    """Everything about a run that can be checked before any process talks to another."""

    config: RunConfig
    world: World
    topology: Topology
    tokenizer: Tokenizer
    architecture: Architecture
    datasets: Datasets
    plan: BatchPlan
    validation: list[ValidationSource]  # one per dataset of the blend


def prepare(config: RunConfig, environ: Mapping[str, str]) -> Prepared:
    """Check the config against the launch and the data; raises ValueError with one clear line."""
    quieten()
    world = read_world(environ)
    topology = config.topology(world.world_size)
    tokenizer, architecture = check_start(config)
    plan = BatchPlan(topology.replicas, topology.dp, config.microbatches, config.micro_batch_size)
    evaluation = config.evaluation
    needs = Needs(
        vocab_size=architecture.vocab_size,
        seq_length=architecture.seq_length,
        global_batch=plan.global_batch,
        seed=config.training.seed,
        evaluates=evaluation.iters > 0,
    )
    datasets = build_datasets(config.source, tokenizer, needs)
    count = None if evaluation.full else evaluation.iters
    at_once = topology.pp if topology.vpp > 1 else 1  # what that schedule takes
    validation = [
        ValidationSource(part.dataset, config.micro_batch_size, count, part.weight, at_once)
        for part in datasets.validation
    ]
    return Prepared(config, world, topology, tokenizer, architecture, datasets, plan, validation)


def join_job(prepared: Prepared) -> tuple[Transport, Start]:
    """Join the job, open the transport, find where to start.

    Raises ValueError when the others or the transport cannot be had, or the checkpoint to continue from does not
    fit, OSError when it cannot be read. Other ranks may then be waiting for this one: `job.leaving.abandon_job`.
    """
    world, cuda = prepared.world, torch.cuda.is_available()
    if cuda:
        world = replace(world, local_rank=local_device(world, torch.cuda.device_count()))
        torch.cuda.set_device(world.local_rank)
    join(world, "cpu:gloo,cuda:nccl" if cuda else "gloo")
    if not cuda and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks_on_this_host()))
    transport = choose_transport(prepared.config.noloco.transport, world)
    return transport, find_start(prepared.config, prepared.topology)


def train(prepared: Prepared, transport: Transport, start: Start, progress: str = "auto") -> bool:
    """Build this rank's part of the run and train to the end, or until asked to stop.

    False when the run stopped early and this rank's state could not be saved.
    """
    # These rooms import Megatron-core and DeepSpeed, which takes seconds: only for a run known to be sound.
    from megatron_noloco.checkpoint.checkpointer import Checkpointer
    from megatron_noloco.engine.replica import ReplicaEngine
    from megatron_noloco.job.stopping import Stopping
    from megatron_noloco.model.stage import build_stage
    from megatron_noloco.pipeline import cpu
    from megatron_noloco.pipeline.groups import PATIENCE, build_groups
    from megatron_noloco.training.evaluate import Evaluator
    from megatron_noloco.training.monitor import Monitor
    from megatron_noloco.training.trainer import Trainer

    config, topology = prepared.config, prepared.topology
    settings, training = config.noloco, config.training
    cpu.prepare()
    stopping = Stopping(training.exit_duration_minutes)
    routing = config.routing(topology)
    # A neighbour may be waiting for its partner.
    patience = PATIENCE + timedelta(seconds=settings.deadline_seconds)
    architecture, pretrained = prepared.architecture, training.pretrained
    groups = build_groups(topology, routing.active, architecture.tied_embeddings, patience)
    with PretrainedWeights(Path(pretrained), architecture) if pretrained else nullcontext() as read:
        stage = build_stage(architecture, config.compute, groups, training.seed, read)
    console = _console(prepared, transport, start, progress) if dist.get_rank() == 0 else None
    at = groups.position
    writers = _writers(prepared, at, start.step, console)
    metrics = Metrics(at.replica, groups.replica, writers, start.counters)
    engine = ReplicaEngine(config, groups, stage, metrics.record)
    place = topology.place(transport.rank)
    outer = _outer(config, engine.weights, transport, place)
    plan = replace(prepared.plan, start_step=start.step, start_sample=start.sample)
    order = prepared.datasets.order(training.seed)
    source = MicrobatchSource(prepared.datasets.train, order, plan)
    loader = StepLoader(source, routing, settings.local_steps, Reader.at(topology, at))
    losses, means = (
        Exchange(transport, place, channel, settings.deadline_seconds)
        for channel in (Channel.LOSSES, Channel.MEAN_MODEL)
    )
    mean_model = MeanModel(outer, means) if config.evaluation.mean_model else None
    evaluator = Evaluator(engine, routing, prepared.validation, losses, mean_model)
    checkpointer = Checkpointer(config, engine, outer, plan)
    if start.folder is not None and start.manifest is not None:
        checkpointer.restore(start.folder, start.manifest)
    monitor = Monitor(metrics, plan, plan.replica_batch * config.model.seq_length, console)
    trainer = Trainer(config, engine, outer, loader, start.step, evaluator, checkpointer, stopping, monitor)
    try:
        done = trainer.train()
    finally:
        loader.close()
        failed_save = checkpointer.close()
        monitor.close()
    if failed_save is not None:
        sys.stderr.write(f"rank {dist.get_rank()}: the last checkpoint failed: {failed_save}\n")
    stopping.close(done)
    stopped_early = done < training.train_iters
    if console is not None:
        console.summary(done, stopping.reason if stopped_early else None)
    return not (stopped_early and checkpointer.last_save_failed)


def _outer(config: RunConfig, weights: Weights, transport: Transport, place: Place) -> Rounds:
    """The outer optimizer of this rank; for a method without rounds, what stands in for it."""
    noloco = config.noloco
    if noloco.active_method == "none":
        return NoRounds(weights)
    group_size, per_stage = noloco.group_size_among(place.replicas), noloco.grouping == "stage"
    grouping = Grouping(place.replicas, group_size, config.training.seed, per_stage)
    numbers = {field.name: getattr(noloco, field.name) for field in fields(OuterSettings)}
    return OuterOptimizer(weights, transport, place, grouping, OuterSettings(**numbers))


def _writers(prepared: Prepared, at: Position, start_step: int, console: Console | None) -> list[Writer]:
    """Of the numbers of a replica; one rank of its last stage writes the files."""
    training = prepared.config.training
    writers: list[Writer] = [] if console is None else [console]
    if at == Position(at.replica, prepared.topology.pp - 1, 0, 0):
        folder = Path(training.output_dir) / f"replica_{at.replica:02d}"
        writers.append(ReplicaFiles(folder, prepared.config.tensorboard.enabled, start_step))
    return writers


def _console(prepared: Prepared, transport: Transport, start: Start, progress: str) -> Console:
    training = prepared.config.training
    facts = RunFacts(
        unigram_entropy=prepared.datasets.unigram_entropy,
        synchronous_bytes_per_step=_synchronous_bytes_per_step(prepared),
        output_dir=str(Path(training.output_dir).resolve()),
        how_to_continue="the same command"
        + ("" if prepared.config.checkpoint.load == "auto" else ' with checkpoint.load "auto"'),
        next_command=f"{os.path.relpath(sys.executable)} -m tensorboard.main --logdir {training.output_dir}",
    )
    console = Console(progress, training.train_iters, start.step, facts)
    console.say(*_banner(prepared, transport), *start.notes)
    return console


def _banner(prepared: Prepared, transport: Transport) -> list[str]:
    return [
        *describe(prepared.config, prepared.topology, prepared.architecture),
        f"data: {prepared.datasets.about}",
        f"started by {prepared.world.launcher}; exchanges over {transport.name}",
    ]


def _synchronous_bytes_per_step(prepared: Prepared) -> float:
    """What one replica sends when a step's gradients go through a ring all-reduce over the replicas."""
    replicas = prepared.topology.replicas
    parameters = table_of(prepared.architecture).parameter_count
    return 2 * (replicas - 1) / replicas * parameters * (4 if prepared.config.precision == "fp32" else 2)
