"""The start of a run: the way from a config to the first local step, on each rank."""

import math
import os
import socket
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_noloco.checkpoint.catalog import Manifest
from megatron_noloco.checkpoint.resume import check_found, find_start, settle_start
from megatron_noloco.checkpoint.run_settings import TEMPLATE, TOKENS, CheckpointSettings, tokenizer_folder
from megatron_noloco.config import RunConfig, resolve, saved_config
from megatron_noloco.config.agreed import divided
from megatron_noloco.config.blocks import AUTO_SAVE_SECONDS
from megatron_noloco.data.microbatches import ValidationSource
from megatron_noloco.data.opening import Data
from megatron_noloco.data.tokenizer import Tokenizer, write_copy
from megatron_noloco.errors import UserError
from megatron_noloco.federation.compatibility import differences, digests_of
from megatron_noloco.federation.membership import Membership
from megatron_noloco.job.activity import now
from megatron_noloco.job.agreement import announce, announced, computed_by_rank_0, gather_from_all_ranks, vote
from megatron_noloco.job.launcher import local_device
from megatron_noloco.job.leaving import leave_with_parent
from megatron_noloco.job.run_folder import occupy, stop_request
from megatron_noloco.job.start_up import importing
from megatron_noloco.job.stopping import Stopping
from megatron_noloco.job.world import (
    check_gpus,
    choose_transport,
    cores_on_this_host,
    join,
    record_collectives,
    threads_among,
)
from megatron_noloco.outer.health import Health
from megatron_noloco.plans.sample_order import BatchPlan
from megatron_noloco.plans.topology import Topology
from megatron_noloco.training.identity import first_weights
from megatron_noloco.training.prepare import (
    Joined,
    Prepared,
    folder_of_job,
    prepare,
    read_data,
)
from megatron_noloco.training.separate_jobs import meet
from megatron_noloco.transport.interface import Transport

if TYPE_CHECKING:
    from megatron_noloco.training.run import Run


def start(
    config: RunConfig, environ: Mapping[str, str], replica: int | None = None, progress: str = "auto"
) -> "Run":
    """Return this rank's part of a run; its first local step is next. A collective of the job.

    Args:
        replica: in a federation, the number of this job's replica.
        progress: see `Console`.

    Raises StoppedAtStartError, on all ranks, where a job of a federation was asked to stop while it waited, or
    comes when the run has ended.
    Raises UserError when the other ranks or the transport cannot be reached, or the checkpoint to continue from
    does not fit, OSError when it cannot be read. Other ranks may then wait for this one: see
    `job.leaving.abandon_job`.
    """
    prepared = prepare(config, environ, replica)  # what this process can know alone
    topology, now.who = prepared.topology, prepared.who
    if prepared.world.launcher == "torchrun":
        leave_with_parent()  # a torchrun that is killed leaves its ranks running
    with now.doing("joining the other ranks"):
        notes = _join_ranks(prepared)
    data, validation = _wait_for_data(prepared)
    with now.doing("comparing config and data with the other ranks"):
        check_ranks(prepared, data)
        hosts = gather_from_all_ranks(socket.gethostname())[:: topology.replica_size]
    with now.doing("looking for a checkpoint"):
        output_dir, job_folder = Path(config.training.output_dir), folder_of_job(config, topology.slot)
        old_stop_request = stop_request(output_dir)  # before the job can be asked to stop
        if taken := computed_by_rank_0(lambda: occupy(job_folder)):
            raise UserError(taken)
        found = find_start(job_folder / "checkpoints", config.checkpoint.load, topology)
        saved = None if found.saved is None else found.saved.manifests[0]
        method = None if saved is None else saved_config(saved.config).noloco
        config, by_recipe = resolve(config, topology.total_replicas, hosts, method)
        prepared = replace(prepared, config=config)
        settings = checkpoint_settings(config, topology, data.checksums, prepared.tokenizer)
        found = check_found(settings, found)
        notes += _tokenizer_notes(prepared, begins=saved is None)
    # From here on no signal ends this process at once: what follows must look.
    save_seconds = AUTO_SAVE_SECONDS if config.checkpoint.save_interval == "auto" else None
    stopping = Stopping(config.training.exit_duration_minutes, output_dir, old_stop_request, save_seconds)
    link: Transport | Membership
    if topology.separate_jobs:
        with now.doing("joining the other jobs"):
            settings = replace(settings, first_weights=_first_weights(prepared, saved))
            link, said = meet(prepared, settings, found, stopping)
            notes += said
    else:
        with now.doing("choosing a transport"):
            link = choose_transport(config.noloco.transport, prepared.world)
    with now.doing("setting aside what the run will write again"):
        begin = settle_start(settings, topology, found)
        if dist.get_rank() == 0:
            write_copy(prepared.tokenizer.kept, tokenizer_folder(job_folder))
    begin = replace(begin, notes=notes + begin.notes)
    joined = Joined(by_recipe, link, begin, data, validation, settings)

    with now.doing("importing Megatron-core and DeepSpeed"), importing():  # seconds: only for a sound run
        from megatron_noloco.checkpoint.checkpointer import Checkpointer
        from megatron_noloco.checkpoint.restore import restore
        from megatron_noloco.training import build
        from megatron_noloco.training.choices import choices
        from megatron_noloco.training.outputs import build_monitor
        from megatron_noloco.training.run import Run

    with now.doing("building its part of the model"):
        groups = build.groups(prepared)
        batch = config.microbatches, config.micro_batch_size
        plan = BatchPlan(topology.replicas, topology.dp, *batch, begin.step, begin.sample, topology.slot)
        monitor = build_monitor(prepared, joined, groups, plan, progress)
        record = monitor.metrics.record
        engine = build.engine(prepared, groups, record, begins=begin.saved is None)
        health = Health(engine.weights, partial(vote, group=groups.replica))
        peers = build.peers(prepared, link, engine, health, monitor)
        run = Run(
            schedule=build.schedule(config),
            start_step=begin.step,
            engine=engine,
            peers=peers,
            loader=build.loader(prepared, data, engine, plan, record),
            evaluator=build.evaluator(prepared, joined, engine, peers.outer, stopping),
            checkpointer=Checkpointer(settings, engine, peers.outer, plan),
            monitor=monitor,
            stopping=stopping,
            health=health,
            choices=choices(config, peers.outer, begin.counters),
            takes_over=config.checkpoint.load == "auto",
        )
    if begin.saved is not None:
        with now.doing("reading its checkpoint"):
            restore(begin.saved, engine, peers.outer, settings)
    return run


def check_ranks(prepared: Prepared, data: Data) -> None:
    """Raise UserError on all ranks of the job unless they have read the same config, tokenizer and data.

    Ranks divide the samples of a step by their numbers alone, and a last stage reads the labels of tokens that
    another rank has read. Of fields that may hold places, which differ from host to host, only numbers count.
    """
    config = prepared.config.to_dict()
    read = [*data.checksums.values()]
    compared = (_numbers(config), divided(config)[0], {"noloco": config["noloco"], "data": read})
    own = {name: digest for part in compared for name, digest in digests_of(part).items()}
    told = gather_from_all_ranks(own | prepared.alike.digests)
    for rank, digests in enumerate(told):
        if names := differences(told[0], digests):
            raise UserError(
                f"rank {rank} differs from rank 0 in {names}: all ranks of a job need the same config and files"
            )


def _numbers(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings without texts and lists, which may have places."""
    inner = {name: _numbers(value) if isinstance(value, dict) else value for name, value in settings.items()}
    return {name: value for name, value in inner.items() if not isinstance(value, str | list)}


def _wait_for_data(prepared: Prepared) -> tuple[Data, list[ValidationSource]]:
    """Return the data, once all ranks of the job have them: a host that has no dataset makes it first."""
    with now.doing("preparing the data"):
        read = read_data(prepared.config, prepared.topology, prepared.tokenizer, prepared.architecture)
        now.part("waiting for other hosts, which prepare theirs")
        announce("data", 1)
        announced("data", math.inf)
    return read


def _join_ranks(prepared: Prepared) -> list[str]:
    """Join the ranks of this job, and give each its device and threads. Return notes for the user."""
    world, topology, cuda = prepared.world, prepared.topology, torch.cuda.is_available()
    if cuda:  # before anything is allocated
        if topology.tp > 1:  # Megatron-core queues messages before the products that are to hide them
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        routing = prepared.config.routing(topology)
        if routing.active:  # each rank then has hops to and from those of all replicas
            os.environ.setdefault("NCCL_MAX_P2P_NCHANNELS", "4")
            os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")  # activations and gradients at once
        alone = topology.replica_size == 1
        device = local_device(world, torch.cuda.device_count(), shared=alone)
        try:
            torch.cuda.set_device(device)  # initializes CUDA
        except RuntimeError as error:  # the driver's
            raise UserError(
                f"{socket.gethostname()}: GPU {device} cannot be used: {str(error).splitlines()[0]}; "
                "`megatron-noloco doctor` says more, CUDA_VISIBLE_DEVICES= trains on the CPU"
            ) from None
    record_collectives(Path(prepared.config.training.output_dir) if cuda else None)
    join(world, "cpu:gloo,cuda:nccl" if cuda else "gloo")
    neighbours = cores_on_this_host()  # a collective: on every rank, whether the variable below is set or not
    if cuda:
        check_gpus(topology.replica_size)
    own = os.sched_getaffinity(0)
    share = threads_among(own, neighbours)
    if "OMP_NUM_THREADS" not in os.environ:  # beside GPUs as well: exchanges compute on the host
        torch.set_num_threads(max(1, int(share)))
    crowded = f"this host has more ranks ({len(neighbours)}) than cores ({len(own)}): they compute in turn"
    return [crowded] * (not cuda and share < 1)


def _tokenizer_notes(prepared: Prepared, begins: bool) -> list[str]:
    """Return notes about the tokenizer for the user; a collective."""
    data, notes = prepared.config.data, list[str]()
    if (pretrained := prepared.pretrained) is not None and begins:
        notes += filter(None, [computed_by_rank_0(lambda: pretrained.missing_bos(data))])
    place = data.tokenizer_model
    if place is not None and not Path(place).exists():
        copy = tokenizer_folder(folder_of_job(prepared.config, prepared.topology.slot))
        notes.append(f"data.tokenizer_model: {place} is not there; using the copy, {copy}")
    return notes


def _first_weights(prepared: Prepared, saved: Manifest | None) -> str | None:
    """Return the digest of the weights with which the run began: the checkpoint's, else of their files."""
    if saved is not None and saved.first_weights is not None:
        return saved.first_weights
    return computed_by_rank_0(lambda: first_weights(prepared.config, prepared.architecture))


def checkpoint_settings(
    config: RunConfig,
    topology: Topology,
    training_data: Mapping[str, int] | None = None,
    tokenizer: Tokenizer | None = None,
) -> CheckpointSettings:
    """Return what the run wants of its checkpoints."""
    checkpoint = config.checkpoint
    return CheckpointSettings(
        folder=folder_of_job(config, topology.slot) / "checkpoints",
        run=config.to_dict(),
        meant=lambda run: saved_config(run).meant(tokenizer.vocab_size if tokenizer else 0),
        keep_last=checkpoint.keep_last,
        async_save=checkpoint.async_save,
        load=checkpoint.load,
        training_data=training_data or {},
        tokenizer={TOKENS: tokenizer.digest, TEMPLATE: tokenizer.chat_template.digest} if tokenizer else {},
    )
