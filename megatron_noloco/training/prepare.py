"""Checks and reads what one process can alone, before it joins the others."""

import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron_noloco.checkpoint.catalog import (
    advice_on_set_aside,
    continued_from,
    latest,
    read_manifests,
    step_of,
    steps,
)
from megatron_noloco.checkpoint.resume import Start
from megatron_noloco.checkpoint.run_settings import CheckpointSettings, tokenizer_folder
from megatron_noloco.config import RunConfig
from megatron_noloco.config.blocks import EvaluationConfig
from megatron_noloco.config.optimizer_block import AdamOptimizer, Optimizer
from megatron_noloco.data.auto_tokenizer import build_tokenizer, find_tokenizer
from megatron_noloco.data.corpus import corpus_of
from megatron_noloco.data.microbatches import ValidationSource
from megatron_noloco.data.opening import Data, check_source, open_data
from megatron_noloco.data.sources import IndexedSource, Needs
from megatron_noloco.data.tokenizer import Tokenizer
from megatron_noloco.errors import UserError, prefix_errors_with
from megatron_noloco.federation.compatibility import RunIdentity
from megatron_noloco.federation.keys import Keys
from megatron_noloco.federation.membership import Membership, network_of
from megatron_noloco.federation.network import Network
from megatron_noloco.files import check_writable
from megatron_noloco.huggingface.folder import ModelFolder
from megatron_noloco.job.launcher import World, read_world
from megatron_noloco.job.start_up import before_engines, find_gpus_without_cuda
from megatron_noloco.model.architecture import Architecture
from megatron_noloco.plans.topology import Topology
from megatron_noloco.settings import MOST_SLOTS
from megatron_noloco.training.identity import first_weights, identity_of, with_first_weights
from megatron_noloco.transport.interface import Transport


@dataclass(frozen=True)
class Prepared:
    """Everything about a run that one process can know alone."""

    config: RunConfig
    tokenizer: Tokenizer
    world: World
    topology: Topology
    architecture: Architecture
    alike: RunIdentity  # what the jobs of a federation must have alike besides the settings of the method
    pretrained: ModelFolder | None  # with the weights to begin with

    @property
    def who(self) -> str:
        """This rank, as errors name it."""
        at = self.topology.position(self.world.rank)
        place = f"replica {at.replica}, stage {at.stage}, dp {at.dp}, tp {at.tp}"
        return f"rank {self.world.rank} on {socket.gethostname()} ({place})"


class Joined(NamedTuple):
    """What the ranks have found out together.

    Attributes:
        by_recipe: the settings that the file leaves to its recipe, see `Resolved`.
        link: to the other replicas: messages inside one job, or the other jobs of a federation.
        start: where the training begins or continues.
        data: the data of the run.
        validation: microbatches of each dataset of the blend.
        settings: of the checkpoints, with the checksums of the data.
    """

    by_recipe: dict[str, Any]
    link: Transport | Membership
    start: Start
    data: Data
    validation: list[ValidationSource]
    settings: CheckpointSettings


def prepare(config: RunConfig, environ: Mapping[str, str], replica: int | None = None) -> Prepared:
    """Check the config against the launch; raises UserError, one line per problem.

    Args:
        replica: in a federation, the number of this job's replica.
    """
    find_gpus_without_cuda()
    before_engines()
    world = read_world(environ)
    slot = _slot(config, replica)
    topology = _topology(config, world, slot)
    folder = config.training.pretrained
    pretrained = None if folder is None else ModelFolder(Path(folder))
    tokenizer, architecture = check_start(config, slot, pretrained)
    identity = identity_of(config, tokenizer, architecture)
    return Prepared(config, tokenizer, world, topology, architecture, identity, pretrained)


def check_data(
    config: RunConfig, topology: Topology | None, tokenizer: Tokenizer, architecture: Architecture
) -> None:
    """Raise UserError for data that cannot be read, as far as that is known before they are tokenized.

    Of text and records the first rows are read; of indexed datasets samples are counted, unless the layout is not
    known.
    """
    if not isinstance(config.data.source, IndexedSource):
        corpus_of(config.data.source, tokenizer).check_first()
    elif topology is not None:
        read_data(config, topology, tokenizer, architecture)


def read_data(
    config: RunConfig, topology: Topology, tokenizer: Tokenizer, architecture: Architecture
) -> tuple[Data, list[ValidationSource]]:
    """Open the data of a run, which one process of each host makes; raises UserError if they are too few.

    Also returns the validation microbatches of each dataset of the blend.
    """
    evaluation = config.evaluation
    needs = Needs(
        vocab_size=architecture.vocab_size,
        seq_length=architecture.seq_length,
        global_batch=topology.replicas * config.replica_batch,
        seed=config.training.seed,
        evaluates=evaluation.iters > 0,
        steps=config.training.train_iters,
        end_of_document=tokenizer.end_of_document,
        reset_attention_mask=config.data.reset_attention_mask,
        eod_mask_loss=config.data.eod_mask_loss,
    )
    data = open_data(config.data.source, tokenizer, needs)
    validation = []
    if data.validation is not None:
        parts = zip(data.validation.parts, data.validation.weights, strict=True)
        validation = [
            ValidationSource(
                samples,
                config.micro_batch_size,
                _validation_count(evaluation, len(samples), config.micro_batch_size),
                weight,
                topology.microbatches_at_once,
            )
            for samples, weight in parts
        ]
    return data, validation


def _validation_count(evaluation: EvaluationConfig, samples: int, micro_batch_size: int) -> int | None:
    """Return how many microbatches of so many samples an evaluation takes; None: all.

    A number that the file gives must be there. The default takes what a short text has.
    """
    if evaluation.full:
        return None
    if "iters" in evaluation.model_fields_set:
        return evaluation.iters
    return min(evaluation.iters, max(1, -(-samples // micro_batch_size)))


def _topology(config: RunConfig, world: World, slot: int) -> Topology:
    try:
        return config.topology(world.world_size, slot)
    except UserError as error:
        if world.launcher != "single":
            raise
        reason = "no launcher has started this process: use launch/mpirun.sh, torchrun (docs/launchers.md)"
        raise UserError(f"{error}; {reason}") from None


def _slot(config: RunConfig, replica: int | None) -> int:
    """Return the slot of this job, 0 without a federation. Raises UserError when `--replica` does not fit.

    Without `--replica` it is the slot of the member file, if the machine has joined by an invitation.
    """
    if not config.federation.exists:
        if replica is not None:
            raise UserError(
                "--replica: the config has no federation.rendezvous; without, all replicas are one job"
            )
        return 0
    if replica is None and config.federation.key_file is not None:
        replica = Keys.read(Path(config.federation.key_file)).slot
    if replica is None or not 0 <= replica < MOST_SLOTS:
        wrong = "is missing" if replica is None else f"{replica} is out of range"
        raise UserError(
            f"--replica {wrong}: each job of a federation has a number of its own, from 0 to {MOST_SLOTS - 1}"
        )
    return replica


def network_for(config: RunConfig) -> Network:
    """Return how a job of this config reaches the others, for a program that is none. Raises as `prepare` does."""
    before_engines()
    tokenizer, architecture = check_start(config)
    first = first_weights(config, architecture)
    identity = with_first_weights(identity_of(config, tokenizer, architecture), first)
    return network_of(config.federation, config.noloco, identity)


def folder_of_job(config: RunConfig, slot: int) -> Path:
    """Return the folder with what a job keeps; of a federation's job that of its replica."""
    training = config.training
    return training.folder_of(slot) if config.federation.exists else Path(training.output_dir)


def check_start(
    config: RunConfig, slot: int | None = None, pretrained: ModelFolder | None = None
) -> tuple[Tokenizer, Architecture]:
    """Return tokenizer and model of a run that this machine could start; `config --check` calls it, too.

    Writes at most a tokenizer, to the cache, and reads of the data at most an index.

    Args:
        slot: of the job; None: not known, and it may be any whose folder is there.
        pretrained: the folder in training.pretrained, if it is open.

    Raises UserError, one line per problem.
    """
    _check_machine(config)
    output_dir = Path(config.training.output_dir)
    jobs = [folder_of_job(config, slot or 0)]
    if slot is None and config.federation.exists:
        jobs = sorted(output_dir.glob("replica_*"))
    for place in (output_dir, output_dir / "checkpoints"):
        check_writable(place, "training.output_dir")
    if config.federation.exists:
        network_of(config.federation, config.noloco, RunIdentity({}))
    tokenizer = _tokenizer(config, jobs)
    architecture = config.architecture(tokenizer.vocab_size)
    if config.training.pretrained is not None and not _continues(config.checkpoint.load, jobs):
        pretrained = pretrained or ModelFolder(Path(config.training.pretrained))
        pretrained.check_fits(architecture, tokenizer, config.data.cache)
    check_source(config.data.source, tokenizer, output_dir)
    _check_load(config.checkpoint.load, jobs)
    return tokenizer, architecture


def _continues(load: str, jobs: Iterable[Path]) -> bool:
    """Return whether a job has a checkpoint to continue from, whose weights count, sound or not."""
    return load != "none" and (load != "auto" or any(latest(job / "checkpoints")[0] for job in jobs))


def _tokenizer(config: RunConfig, jobs: Iterable[Path]) -> Tokenizer:
    """Build the tokenizer; where its files are gone, from the copy that a run with checkpoints keeps of it."""
    place = config.data.tokenizer_model
    if place is None or Path(place).exists() or config.checkpoint.load == "none":
        return build_tokenizer(config.data.tokenizer)
    return find_tokenizer(config.data.tokenizer, filter(Path.is_dir, map(tokenizer_folder, jobs)))


def _check_machine(config: RunConfig) -> None:
    """Raise UserError for what this machine's hardware and packages cannot do."""
    cuda = torch.cuda.is_available()
    if config.precision == "fp16" and not cuda and not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        raise UserError(
            "fp16.enabled: this machine has no GPU, and its CPU no fp16 arithmetic; use bf16 or fp32"
        )
    config.compute.uses_transformer_engine()  # raises where it is not installed
    _check_kernel(config.optimizer)
    wandb = find_spec("wandb")
    if config.wandb.enabled and (wandb is None or wandb.origin is None):  # a folder `wandb` has no origin
        raise UserError(
            "wandb.enabled: the package wandb is not installed; pip install wandb, or set wandb.enabled to false"
        )


def _check_kernel(optimizer: Optimizer) -> None:
    """Raise UserError where a kernel of DeepSpeed that the file asks for cannot be had."""
    if not isinstance(optimizer, AdamOptimizer) or optimizer.params.torch_adam is not False:
        return
    before_engines()
    from megatron_noloco.engine.initialize import load_kernel  # DeepSpeed, which takes seconds to import

    try:
        load_kernel("FusedAdamBuilder")
    except UserError as error:
        raise UserError(
            f"optimizer.params.torch_adam false: {error}; or use AdamW with torch's kernel"
        ) from None


def _check_load(load: str, jobs: Iterable[Path]) -> None:
    """Raise UserError for a checkpoint that lacks manifests; its files are verified once all ranks are there.

    One from which a run has started before may have been removed since: see `resume.find_start`.
    """
    if load in ("auto", "none"):
        return
    if any(any(continued_from(job / "checkpoints", load)) for job in jobs):
        return
    with prefix_errors_with("checkpoint.load"):
        if (wrong := _not_a_step(Path(load))) is not None:
            raise UserError(f"{load}: {wrong}")
        read_manifests(Path(load))


def _not_a_step(folder: Path) -> str | None:
    """Return what is wrong with a folder that is there but has no step folder's name, and what would be right."""
    if step_of(folder) is not None or not folder.exists():
        return None
    if (aside := advice_on_set_aside(folder)) is not None:
        return aside
    inside = [*steps(folder / "checkpoints"), *steps(folder)]
    example = inside[0] if inside else "OUTPUT_DIR/checkpoints/step_00001000"
    return f'not a step folder; name one, such as {example}, or give "auto" for the newest in training.output_dir'
