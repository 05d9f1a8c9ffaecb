"""The start of a run: what one process checks and reads alone, and how it then joins the others."""

import os
import socket
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_noloco.checkpoint.catalog import read_manifests
from megatron_noloco.checkpoint.resume import Start, find_start
from megatron_noloco.checkpoint.settings import CheckpointSettings
from megatron_noloco.config import ConfigError, RunConfig
from megatron_noloco.data.corpus import check_text
from megatron_noloco.data.datasets import Datasets, Needs, build_datasets
from megatron_noloco.data.indexed import IndexedTokens
from megatron_noloco.data.microbatches import ValidationSource
from megatron_noloco.data.records import record_files
from megatron_noloco.data.sources import RecordSource, Source, TextSource
from megatron_noloco.data.tokenizer import Tokenizer, build_tokenizer
from megatron_noloco.federation.handover import Takeover
from megatron_noloco.federation.join import Membership, join_federation, network_of
from megatron_noloco.huggingface.pretrained import check_fits
from megatron_noloco.job.agreement import of_rank_0
from megatron_noloco.job.join import (
    check_gpus,
    choose_transport,
    join,
    ranks_on_this_host,
    record_collectives,
)
from megatron_noloco.job.launcher import World, local_device, read_world
from megatron_noloco.job.run_folder import occupy, wait_file
from megatron_noloco.job.start_up import before_engines
from megatron_noloco.model.architecture import Architecture
from megatron_noloco.plans.samples import BatchPlan
from megatron_noloco.plans.topology import Topology
from megatron_noloco.preflight.fit import shortage
from megatron_noloco.transport.protocol import Transport

_FIRST_SECONDS = 5.0  # for another job of the federation, which may have a state to offer


@dataclass(frozen=True)
class Prepared:
    """Everything about a run that one process can know."""

    config: RunConfig
    world: World
    topology: Topology
    architecture: Architecture
    datasets: Datasets
    plan: BatchPlan
    validation: list[ValidationSource]  # one per dataset of the blend

    @property
    def who(self) -> str:
        """This rank, as errors name it."""
        at = self.topology.position(self.world.rank)
        place = f"replica {at.replica}, stage {at.stage}, dp {at.dp}, tp {at.tp}"
        return f"rank {self.world.rank} on {socket.gethostname()} ({place})"

    @property
    def wait_file(self) -> Path:
        """Where this rank says that it stands still."""
        replica = self.topology.position(self.world.rank).replica
        return wait_file(self.config.training.folder_of(replica), self.world.rank)


def prepare(config: RunConfig, environ: Mapping[str, str], replica: int | None = None) -> Prepared:
    """Check the config against the launch and the data; raises ValueError with one clear line.

    Args:
        replica: in a federation, the number of this job's replica.
    """
    before_engines()
    world = read_world(environ)
    topology = _topology(config, world, _slot(config, replica))
    tokenizer, architecture = check_start(config)
    plan = BatchPlan(topology.ensemble, topology.dp, config.microbatches, config.micro_batch_size)
    evaluation = config.evaluation
    needs = Needs(
        vocab_size=architecture.vocab_size,
        seq_length=architecture.seq_length,
        global_batch=plan.global_batch,
        seed=config.training.seed,
        evaluates=evaluation.iters > 0,
        documents=config.documents(tokenizer.end_of_document),
    )
    datasets = build_datasets(config.source, tokenizer, needs)
    count = None if evaluation.full else evaluation.iters
    at_once = topology.pp if topology.vpp > 1 else 1  # what that schedule takes
    validation = [
        ValidationSource(part.dataset, config.micro_batch_size, count, part.weight, at_once)
        for part in datasets.validation
    ]
    return Prepared(config, world, topology, architecture, datasets, plan, validation)


def _topology(config: RunConfig, world: World, slot: int) -> Topology:
    try:
        return config.topology(world.world_size, slot)
    except ConfigError as error:
        if world.launcher != "single":
            raise
        reason = "no launcher has started this process: use launch/mpirun.sh, torchrun (docs/launchers.md)"
        raise ValueError(f"{error}; {reason}") from None


def _slot(config: RunConfig, replica: int | None) -> int:
    """Return the slot of this job, 0 without a federation. Raises ValueError when `--replica` does not fit."""
    slots = config.federation.slots
    if slots is None:
        if replica is not None:
            raise ValueError(
                "--replica: the config has no federation.slots; without, all replicas are one job"
            )
        return 0
    if replica is None or not 0 <= replica < slots:
        wrong = "is missing" if replica is None else f"{replica} is out of range"
        raise ValueError(
            f"--replica {wrong}: federation.slots {slots} are 0 to {slots - 1}, one for each job"
        )
    return replica


def _alike(config: RunConfig) -> dict[str, Any]:
    """Return what the jobs of a federation must have alike besides the settings of the method."""
    parallel = config.parallel.model_dump(exclude={"replicas"})
    return {"seed": config.training.seed, "model": config.model.model_dump(), "parallel": parallel}


def check_start(config: RunConfig) -> tuple[Tokenizer, Architecture]:
    """The tokenizer and the model of a run that this machine could start; `config --check` calls it, too.

    Changes nothing on disk. Of data only the beginning is read. Raises ValueError, one line per problem.
    """
    _check_arithmetic(config)
    config.compute.uses_transformer_engine()  # for its error
    _check_optimizer(config.deepspeed["optimizer"])
    _check_writable(Path(config.training.output_dir))
    _check_wandb(config.wandb.enabled)
    if config.federation.slots is not None:
        network_of(config.federation, config.noloco, _alike(config))
    tokenizer = build_tokenizer(config.tokenizer)
    architecture = config.architecture(tokenizer.vocab_size)
    if config.training.pretrained is not None:
        check_fits(Path(config.training.pretrained), architecture)
    _check_source(config.source)
    _check_load(config.checkpoint.load)
    return tokenizer, architecture


class Joined(NamedTuple):
    """What a rank has when its job stands.

    Attributes:
        transport: for exchanges between replicas.
        start: where the training begins or continues.
        membership: in a federation.
    """

    transport: Transport
    start: Start
    membership: Membership | None


def join_job(prepared: Prepared) -> Joined:
    """Join the job, open the transport, find where to start.

    Raises ValueError when the others or the transport cannot be had, or the checkpoint to continue from does not
    fit, OSError when it cannot be read. Other ranks may then be waiting for this one: `job.leaving.abandon_job`.
    """
    world, topology, cuda = prepared.world, prepared.topology, torch.cuda.is_available()
    if cuda:  # before anything is allocated
        if topology.tp > 1:  # Megatron-core queues messages before the products that are to hide them
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        alone = topology.replica_size == 1
        torch.cuda.set_device(local_device(world, torch.cuda.device_count(), shared=alone))
    record_collectives(Path(prepared.config.training.output_dir) if cuda else None)
    join(world, "cpu:gloo,cuda:nccl" if cuda else "gloo")
    neighbours = ranks_on_this_host()  # asked by every rank: the variable may be set on some hosts only
    _warn_of_shortage(prepared, neighbours, check_gpus(topology.replica_size) if cuda else 1)
    cores = os.cpu_count() or 1
    if "OMP_NUM_THREADS" not in os.environ:  # beside GPUs as well: exchanges compute on the host
        torch.set_num_threads(max(1, cores // neighbours))
    config = prepared.config
    settings, notes, membership = checkpoint_settings(config, topology), list[str](), None
    if taken := of_rank_0(occupy(settings.folder.parent) if dist.get_rank() == 0 else ""):
        raise ValueError(taken)
    if not cuda and neighbours > cores:
        notes.append(f"this host has more ranks ({neighbours}) than cores ({cores}): they compute in turn")
    if topology.slots:
        steps, place = config.training.train_iters, topology.place(dist.get_rank())
        membership = join_federation(config.federation, config.noloco, place, _alike(config), steps)
        transport: Transport = (federated := membership.transport)
        federated.wait_for(1, _FIRST_SECONDS)
        if not membership.wait_for_start():
            notes.append("fewer replicas than federation.start_with are there; starting without")
        margin = config.federation.rounds_behind * config.noloco.local_steps
        notes += Takeover(federated, settings, topology, prepared.architecture, margin)()
    else:
        transport = choose_transport(config.noloco.transport, world)
    start = find_start(settings, topology)
    return Joined(transport, replace(start, notes=notes + start.notes), membership)


def _warn_of_shortage(prepared: Prepared, ranks: int, sharing: int) -> None:
    """Once for each host: the system ends a process without a word."""
    if prepared.world.local_rank == 0:
        short = shortage(
            prepared.config, prepared.architecture, prepared.topology, ranks, sharing, started=True
        )
        if short is not None:
            sys.stderr.write(f"{socket.gethostname()}: {short}\n")


def checkpoint_settings(config: RunConfig, topology: Topology) -> CheckpointSettings:
    """What the run wants of its checkpoints; each job of a federation has its own, in its replica's folder."""
    checkpoint, training = config.checkpoint, config.training
    of_job = training.folder_of(topology.slot) if topology.slots else Path(training.output_dir)
    return CheckpointSettings(
        folder=of_job / "checkpoints",
        run=config.to_dict(),
        completed=_completed,
        keep_last=checkpoint.keep_last,
        async_save=checkpoint.async_save,
        load=checkpoint.load,
        fold=checkpoint.fewer_replicas == "fold",
    )


def _completed(saved: dict[str, Any]) -> dict[str, Any]:
    try:
        return RunConfig.from_dict(saved).to_dict()
    except ConfigError:  # written by a version that had other fields
        return saved


def _check_arithmetic(config: RunConfig) -> None:
    if config.precision != "fp16" or torch.cuda.is_available():
        return
    if not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        raise ValueError(
            "fp16.enabled: this machine has no GPU, and its CPU no fp16 arithmetic; use bf16 or fp32"
        )


def _check_optimizer(optimizer: Mapping[str, Any]) -> None:
    if optimizer["type"].lower() == "lion" and not torch.cuda.is_available():
        raise ValueError("optimizer.type: DeepSpeed's Lion needs a GPU; use AdamW")


def _check_writable(output_dir: Path) -> None:
    """Now, not at the first log line or checkpoint; in the folder itself, or in that which will hold it."""
    folder = output_dir.absolute()
    try:
        there = next(path for path in (folder, *folder.parents) if path.exists())
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise ValueError(f"training.output_dir: cannot write in {output_dir}: {error.strerror}") from None


def _check_wandb(enabled: bool) -> None:
    found = find_spec("wandb")
    if enabled and (found is None or found.origin is None):  # a folder of that name is found, too
        raise ValueError(
            "wandb.enabled: the package wandb is not installed; pip install wandb, or set wandb.enabled to false"
        )


def _check_load(load: str) -> None:
    """That the checkpoint has all its manifests; its files are verified once all ranks are there."""
    if load not in ("auto", "none"):
        try:
            read_manifests(Path(load))
        except ValueError as error:
            raise ValueError(f"checkpoint.load: {error}") from None


def _check_source(source: Source) -> None:
    if isinstance(source, TextSource):
        check_text(source.text)
        return
    if isinstance(source, RecordSource):
        record_files(source.path)
        return
    for blend in filter(None, (source.train, source.validation)):
        for prefix, _ in blend.parts:
            IndexedTokens(prefix)
