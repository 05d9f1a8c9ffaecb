"""From a prepared config to a run: puts the parts together. Imports Megatron-core and DeepSpeed."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from megatron_noloco import __version__
from megatron_noloco.checkpoint.checkpointer import Checkpointer
from megatron_noloco.checkpoint.restore import restore
from megatron_noloco.checkpoint.resume import Start
from megatron_noloco.config import RunConfig, describe
from megatron_noloco.data.microbatches import MicrobatchSource, Reader, StepLoader
from megatron_noloco.engine.replica import ReplicaEngine
from megatron_noloco.federation.keeping_up import Health
from megatron_noloco.files import write_text
from megatron_noloco.huggingface.pretrained import PretrainedWeights
from megatron_noloco.job.stopping import Stopping
from megatron_noloco.model.families import table_of, training_flops
from megatron_noloco.model.stage import Stage, build_stage
from megatron_noloco.monitor.console import Console, RunFacts
from megatron_noloco.monitor.metrics import Metrics
from megatron_noloco.monitor.monitor import DELAY_STEPS, Monitor, Throughput
from megatron_noloco.monitor.writers import ReplicaFiles, WandbRun, Writer
from megatron_noloco.outer import (
    Channel,
    Exchange,
    MeanModel,
    NoRounds,
    Rounds,
)
from megatron_noloco.pipeline import cpu
from megatron_noloco.pipeline.groups import PATIENCE, Groups, build_groups
from megatron_noloco.preflight.accelerators import peak_tflops_here
from megatron_noloco.training.evaluate import Evaluator
from megatron_noloco.training.prepare import Joined, Prepared, checkpoint_settings
from megatron_noloco.training.rounds import DelayChoice, build_final_average, build_outer
from megatron_noloco.training.run import Run, Schedule
from megatron_noloco.transport.protocol import Transport

_SAMPLES = "training_samples"  # the counter by which a run that continues sees that its data has changed


def build(prepared: Prepared, joined: Joined, progress: str = "auto") -> Run:
    """Return this rank's part of the run, in the state that `joined.start` names."""
    config, topology = prepared.config, prepared.topology
    transport, start, membership = joined
    stopping = Stopping(config.training.exit_duration_minutes, Path(config.training.output_dir))
    groups, stage = _model(prepared)
    at, place, routing = groups.position, topology.place(dist.get_rank()), config.routing(topology)
    plan = replace(prepared.plan, start_step=start.step, start_sample=start.sample)

    console, writers = None, list[Writer]()
    if dist.get_rank() == 0:
        console = _console(prepared, transport, start, progress)
        writers.append(console)
        _write_facts(prepared)
    if groups.last_stage and at.dp == 0 and at.tp == 0:
        writers += _writers(config, at.replica, start.step)
    metrics = Metrics(at.replica, groups.replica, writers, start.counters)
    metrics.count(_SAMPLES, len(prepared.datasets.train))

    engine = ReplicaEngine(stage, groups, config.deepspeed, metrics.record)
    commit = membership.commit(config.training.seed) if membership else None
    outer = build_outer(config, engine.weights, transport, place, commit)
    engine.pipeline.between_microbatches = outer.progress
    order = prepared.datasets.order(config.training.seed)
    source = MicrobatchSource(prepared.datasets.train, order, plan)
    reader = Reader.at(topology, at, stage.separate_documents)
    checkpointer = Checkpointer(checkpoint_settings(config, topology), engine, outer, plan)
    if start.folder is not None:
        restore(start.folder, start.manifests, engine, outer, checkpointer.settings)
    delay = _delay(config, outer, start)

    deadline_seconds = config.noloco.deadline_seconds
    losses, means = (
        Exchange(transport, place, channel, deadline_seconds)
        for channel in (Channel.LOSSES, Channel.MEAN_MODEL)
    )
    mean_model = MeanModel(outer, means) if config.evaluation.mean_model else None
    health = None
    if membership is not None:
        agree = membership.transport.partners.agree
        health = Health(engine.weights, config.noloco.local_steps, agree)
    return Run(
        schedule=_schedule(config),
        start_step=start.step,
        engine=engine,
        outer=outer,
        loader=StepLoader(source, routing, config.noloco.local_steps, reader, metrics.record),
        evaluator=Evaluator(engine, routing, prepared.validation, losses, mean_model),
        checkpointer=checkpointer,
        monitor=Monitor(metrics, plan, _throughput(prepared), console, config.noloco.fragments),
        stopping=stopping,
        final_average=build_final_average(config, outer, transport, place),
        delay=delay,
        keeping_up=membership.keeping_up if membership else None,
        health=health,
    )


def _writers(config: RunConfig, replica: int, start_step: int) -> Iterator[Writer]:
    """Of one replica."""
    folder, wandb = config.training.folder_of(replica), config.wandb
    yield ReplicaFiles(folder, config.tensorboard.enabled, start_step)
    if wandb.enabled:
        yield WandbRun(
            folder,
            start_step,
            name=folder.name,
            group=wandb.group or folder.resolve().parent.name,
            project=wandb.project,
            entity=wandb.team,
            config=config.to_dict(),
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


def _delay(config: RunConfig, outer: Rounds, start: Start) -> DelayChoice | None:
    """None where there is nothing to choose: the config says it, or the checkpoint that is continued."""
    if not config.noloco.chooses_delay or isinstance(outer, NoRounds):
        return None
    local_steps = config.noloco.local_steps
    if DELAY_STEPS not in start.counters:
        return DelayChoice(outer)
    outer.delay_steps = min(int(start.counters[DELAY_STEPS]), local_steps)
    return None


def _throughput(prepared: Prepared) -> Throughput:
    config, topology, architecture = prepared.config, prepared.topology, prepared.architecture
    samples = config.replica_batch
    return Throughput(
        tokens=samples * architecture.seq_length,
        replicas=topology.ensemble,
        flops_per_rank=samples * training_flops(architecture) / topology.replica_size,
        peak_tflops=config.training.peak_tflops or peak_tflops_here(config.precision),
    )


def _schedule(config: RunConfig) -> Schedule:
    return Schedule(
        steps=config.training.train_iters,
        log_interval=config.training.log_interval,
        save_interval=config.checkpoint.save_interval,
        evaluation_interval=config.evaluation.interval,
        evaluates=config.evaluation.iters > 0,
    )


def _synchronous_bytes_per_step(prepared: Prepared) -> float:
    """What one replica sends when a step's gradients go through a ring all-reduce over the replicas."""
    replicas = prepared.topology.ensemble
    bytes_per_weight = 4 if prepared.config.precision == "fp32" else 2
    return 2 * (replicas - 1) / replicas * bytes_per_weight * table_of(prepared.architecture).parameter_count


def _write_facts(prepared: Prepared) -> None:
    """`run.json`: what `watch` and `report` say about a run beside its metrics, and a person looks for later."""
    facts = {
        "version": __version__,
        "steps": prepared.config.training.train_iters,
        "replicas": prepared.topology.ensemble,
        "parameters": table_of(prepared.architecture).parameter_count,
        "synchronous_bytes_per_step": _synchronous_bytes_per_step(prepared),
        "config": prepared.config.to_dict(),
    }
    folder = Path(prepared.config.training.output_dir)
    folder.mkdir(parents=True, exist_ok=True)  # its replicas' folders are made by other ranks
    write_text(folder / "run.json", json.dumps(facts, indent=2))


def _console(prepared: Prepared, transport: Transport, start: Start, progress: str) -> Console:
    config, topology = prepared.config, prepared.topology
    training, samples = config.training, len(prepared.datasets.train)
    before = int(start.counters.get(_SAMPLES, samples))
    shows = "tensorboard.main --logdir" if config.tensorboard.enabled else "megatron_noloco report"
    facts = RunFacts(
        unigram_entropy=prepared.datasets.unigram_entropy,
        synchronous_bytes_per_step=_synchronous_bytes_per_step(prepared),
        output_dir=str(Path(training.output_dir).resolve()),
        how_to_continue="the same command"
        + ("" if config.checkpoint.load == "auto" else ' with checkpoint.load "auto"'),
        next_command=f"{os.path.relpath(sys.executable)} -m {shows} {training.output_dir}",
    )
    console = Console(progress, training.train_iters, start.step, facts)
    console.say(
        *describe(config, topology, prepared.architecture),
        f"data: {prepared.datasets.about}",
        f"started by {prepared.world.launcher}; exchanges over {transport.name}"
        f"; while ranks compute, messages are moved by {transport.progress}",
        *start.notes,
        *(
            [f"changed: {before:,} training samples in the checkpoint, {samples:,} now, in another order"]
            if before != samples
            else []
        ),
    )
    return console
