"""From a config file to a finished run: puts the rooms together."""

import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_noloco.checkpoint.resume import Start, find_start
from megatron_noloco.config import RunConfig, describe, parameter_count
from megatron_noloco.config.deepspeed_keys import TORCH_OPTIMIZERS
from megatron_noloco.data.datasets import Datasets, Needs, build_datasets
from megatron_noloco.data.loader import Reader, StepLoader
from megatron_noloco.data.microbatches import MicrobatchSource, ValidationSource
from megatron_noloco.data.tokenizer import Tokenizer, build_tokenizer
from megatron_noloco.huggingface import llama as huggingface
from megatron_noloco.job.world import (
    World,
    choose_transport,
    join,
    local_device,
    ranks_on_this_host,
    read_world,
)
from megatron_noloco.model import quieten
from megatron_noloco.outer.averaging import PartnerTimeoutError
from megatron_noloco.plans.grouping import Grouping
from megatron_noloco.plans.routing import Routing
from megatron_noloco.plans.samples import BatchPlan
from megatron_noloco.plans.topology import Topology
from megatron_noloco.training.console import Console, RunFacts
from megatron_noloco.transport import mpi
from megatron_noloco.transport.protocol import Transport

__all__ = ["PartnerTimeoutError", "Prepared", "abandon_job", "join_job", "prepare", "train"]


@dataclass(frozen=True)
class Prepared:
    """Everything about a run that can be checked before any process talks to another."""

    config: RunConfig
    world: World
    topology: Topology
    tokenizer: Tokenizer
    datasets: Datasets
    plan: BatchPlan
    validation: list[ValidationSource]  # one per dataset of the blend


def prepare(config: RunConfig, environ: Mapping[str, str]) -> Prepared:
    """Check the config against the launch and the data; raises ValueError with one clear line."""
    quieten()
    world = read_world(environ)
    topology = config.topology(world.world_size)
    if config.precision == "fp16" and not torch.cuda.is_available() and not _cpu_has_fp16():
        raise ValueError(
            "fp16.enabled: this machine has no GPU, and its CPU no fp16 arithmetic; use bf16 or fp32"
        )
    _check_optimizer(config.deepspeed["optimizer"])
    if config.training.pretrained is not None:
        huggingface.check_fits(Path(config.training.pretrained), config.model)
    _check_writable(Path(config.training.output_dir))
    tokenizer = build_tokenizer(config.tokenizer)
    vocab_size = config.model.vocab_size or tokenizer.vocab_size
    if vocab_size < tokenizer.vocab_size:
        raise ValueError(
            f"model.vocab_size {vocab_size} is smaller than the tokenizer's {tokenizer.vocab_size}; "
            f"set it to {tokenizer.vocab_size} or leave it out"
        )
    padded, tp_size = config.padded_vocab_size(vocab_size), topology.tp
    if padded % tp_size:
        raise ValueError(
            f"model.make_vocab_size_divisible_by: the padded vocabulary {padded} does not divide into "
            f"parallel.tensor_model_parallel_size {tp_size}; make it a multiple of {tp_size}"
        )
    plan = BatchPlan(topology.replicas, topology.dp, config.microbatches, config.micro_batch_size)
    needs = Needs(
        vocab_size=vocab_size,
        seq_length=config.model.seq_length,
        global_batch=plan.global_batch,
        seed=config.training.seed,
        evaluates=config.training.eval_iters > 0,
    )
    datasets = build_datasets(config.source, tokenizer, needs)
    count = None if config.training.eval_full else config.training.eval_iters
    at_once = (
        topology.pp if config.parallel.virtual_pipeline_model_parallel_size > 1 else 1
    )  # what that schedule takes
    validation = [
        ValidationSource(part.dataset, config.micro_batch_size, count, part.weight, at_once)
        for part in datasets.validation
    ]
    return Prepared(config, world, topology, tokenizer, datasets, plan, validation)


def _check_optimizer(optimizer: Mapping[str, Any]) -> None:
    """What only the optimizer itself knows, such as that SGD's Nesterov needs momentum."""
    name = optimizer["type"]
    if name.lower() == "lion" and not torch.cuda.is_available():
        raise ValueError("optimizer.type: DeepSpeed's Lion needs a GPU; use AdamW")
    if name in TORCH_OPTIMIZERS:
        try:
            getattr(torch.optim, name)([torch.zeros(1)], **optimizer.get("params", {}))
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"optimizer.params: torch's {name} does not take them: {error}") from None


def _check_writable(output_dir: Path) -> None:
    """Now, not at the first log line or checkpoint."""
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output_dir):
            pass
    except OSError as error:
        raise ValueError(f"training.output_dir: cannot write in {output_dir}: {error.strerror}") from None


def join_job(prepared: Prepared) -> tuple[Transport, Start]:
    """Join the job, open the transport, find where to start.

    Raises ValueError when the others or the transport cannot be had, or the checkpoint to continue from does not
    fit, OSError when it cannot be read. Other ranks may then be waiting for this one: `abandon_job`.
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


def abandon_job(exit_code: int) -> None:
    """End the other ranks too, which would wait for this one for ever; returns where the launcher does it."""
    mpi.abort(exit_code)


def train(prepared: Prepared, transport: Transport, start: Start, progress: str = "auto") -> bool:
    """Build this rank's part of the run and train to the end, or until asked to stop.

    False when the run stopped early and this rank's state could not be saved.
    """
    # These rooms import Megatron-core and DeepSpeed, which takes seconds: only for a run known to be sound.
    from megatron_noloco.checkpoint.checkpointer import Checkpointer
    from megatron_noloco.engine.replica import ReplicaEngine
    from megatron_noloco.job.stopping import Stopping
    from megatron_noloco.model.stage import build_stage
    from megatron_noloco.outer.averaging import GroupAveraging
    from megatron_noloco.outer.optimizer import OuterOptimizer
    from megatron_noloco.pipeline import cpu
    from megatron_noloco.pipeline.groups import PATIENCE, build_groups
    from megatron_noloco.training.evaluate import Evaluator
    from megatron_noloco.training.monitor import Monitor
    from megatron_noloco.training.trainer import Trainer

    config, topology = prepared.config, prepared.topology
    settings, training = config.noloco, config.training
    cpu.prepare()
    stopping = Stopping(training.exit_duration_minutes)
    routed = settings.routing.interval != "off" and topology.replicas > 1 and topology.pp > 1
    # A neighbour may be waiting for its partner.
    patience = PATIENCE + timedelta(seconds=settings.deadline_seconds)
    tied = not config.model.untie_embeddings_and_output_weights
    groups = build_groups(topology, routed, tied, patience)
    stage = build_stage(config, groups, prepared.tokenizer.vocab_size)
    engine = ReplicaEngine(config, groups, stage)
    averaging = GroupAveraging(transport, topology, settings.deadline_seconds)
    outer = None
    if settings.active_method != "none":
        group_size = settings.group_size_among(topology.replicas)
        per_stage = settings.grouping == "stage"
        grouping = Grouping(topology.replicas, group_size, training.seed, per_stage)
        outer = OuterOptimizer(engine.master_weights, averaging, grouping, settings)
    interval = settings.routing.interval if routed else "off"
    routing = Routing(topology.replicas, config.microbatches, training.seed, interval)
    plan = replace(prepared.plan, start_step=start.step, start_sample=start.sample)
    order = prepared.datasets.order(training.seed)
    source = MicrobatchSource(prepared.datasets.train, order, plan)
    reader = Reader.at(topology, groups.position, config.parallel.virtual_pipeline_model_parallel_size)
    loader = StepLoader(source, routing, settings.local_steps, reader)
    evaluator = Evaluator(
        engine, outer, averaging, routing, prepared.validation, config.training.eval_mean_model
    )
    checkpointer = Checkpointer(config, engine, outer, plan)
    if start.folder is not None and start.manifest is not None:
        checkpointer.restore(start.folder, start.manifest)
    console = _console(prepared, transport, start, progress) if dist.get_rank() == 0 else None
    monitor = Monitor(config, groups, plan, console, start.counters)
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


def _console(prepared: Prepared, transport: Transport, start: Start, progress: str) -> Console:
    training = prepared.config.training
    facts = RunFacts(
        unigram_entropy=prepared.datasets.unigram_entropy,
        synchronous_bytes_per_step=_synchronous_bytes_per_step(prepared),
        output_dir=str(Path(training.output_dir).resolve()),
        how_to_continue="the same command"
        + ("" if training.load == "auto" else ' with training.load "auto"'),
        next_command=f"{os.path.relpath(sys.executable)} -m tensorboard.main --logdir {training.output_dir}",
    )
    console = Console(progress, training.train_iters, start.step, facts)
    console.say(*_banner(prepared, transport), *start.notes)
    return console


def _banner(prepared: Prepared, transport: Transport) -> list[str]:
    return [
        *describe(prepared.config, prepared.topology, prepared.tokenizer.vocab_size),
        f"data: {prepared.datasets.about}",
        f"started by {prepared.world.launcher}; exchanges over {transport.name}",
    ]


def _cpu_has_fp16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def _synchronous_bytes_per_step(prepared: Prepared) -> float:
    """What one replica sends when a step's gradients go through a ring all-reduce over the replicas."""
    config, replicas = prepared.config, prepared.topology.replicas
    gradient_bytes = parameter_count(config.model, prepared.tokenizer.vocab_size) * (
        4 if config.precision == "fp32" else 2
    )
    return 2 * (replicas - 1) / replicas * gradient_bytes
