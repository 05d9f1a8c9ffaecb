"""What a run shows and writes: its files, its first lines on the console, and the monitor of its loop."""

import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from megatron_noloco import __version__
from megatron_noloco.checkpoint.catalog import MEAN_OF_REPLICAS, TOKENS_PER_SAMPLE
from megatron_noloco.checkpoint.resume import Start
from megatron_noloco.checkpoint.run_settings import same_data
from megatron_noloco.config import Known, RunConfig, describe, facts_in_words
from megatron_noloco.data.opening import VALIDATION_DATA
from megatron_noloco.files import write_text
from megatron_noloco.job.launcher import same_command
from megatron_noloco.model.families import table_of, training_flops
from megatron_noloco.monitor.console import Console, RunFacts
from megatron_noloco.monitor.metrics import Metrics
from megatron_noloco.monitor.monitor import Monitor, Throughput
from megatron_noloco.monitor.writers import ReplicaFiles, WandbRun, Writer
from megatron_noloco.pipeline.groups import Groups
from megatron_noloco.plans.sample_order import BatchPlan
from megatron_noloco.preflight.accelerators import peak_tflops_here
from megatron_noloco.preflight.schemes import all_reduce_bytes
from megatron_noloco.training.prepare import Joined, Prepared


def build_monitor(
    prepared: Prepared, joined: Joined, groups: Groups, plan: BatchPlan, progress: str
) -> Monitor:
    """Return this rank's monitor. Rank 0 writes `run.json`, and says what the run is.

    Args:
        groups: of this rank; the last stage of each replica writes its metrics.
        progress: see `Console`.
    """
    config, at, start = prepared.config, groups.position, joined.start
    console, writers = None, list[Writer]()
    if dist.get_rank() == 0:
        console = _console(prepared, joined, progress)
        writers.append(console)
        _write_facts(prepared, joined)
    if groups.last_stage and at.dp == 0 and at.tp == 0:
        writers += _writers(config, at.replica, start)
    metrics = Metrics(at.replica, groups.replica, writers, start.counters)
    for name, checksum in joined.settings.training_data.items():
        metrics.count(name, checksum)
    tokens_per_sample = joined.data.training.tokens_per_sample
    metrics.count(TOKENS_PER_SAMPLE, tokens_per_sample)
    metrics.count(MEAN_OF_REPLICAS, None)  # of the steps so far, if any
    return Monitor(metrics, plan, _throughput(prepared, tokens_per_sample), console, config.noloco.fragments)


def _writers(config: RunConfig, replica: int, start: Start) -> Iterator[Writer]:
    """Yield the writers of one replica."""
    folder, wandb = config.training.folder_of(replica), config.wandb
    yield ReplicaFiles(folder, config.tensorboard.enabled, start.step, start.own)
    if wandb.enabled:
        yield WandbRun(
            folder,
            start.step,
            start.own,
            name=folder.name,
            group=wandb.group or folder.resolve().parent.name,
            project=wandb.project,
            entity=wandb.team,
            config=config.to_dict(),
        )


def _throughput(prepared: Prepared, tokens_per_sample: float) -> Throughput:
    config, topology, architecture = prepared.config, prepared.topology, prepared.architecture
    samples = config.replica_batch
    return Throughput(
        tokens=round(samples * tokens_per_sample),
        replicas=topology.total_replicas,
        # Padding takes time, and counts for nothing.
        flops_per_rank=samples
        * training_flops(architecture)
        * (tokens_per_sample / architecture.seq_length)
        / topology.replica_size,
        peak_tflops=config.training.peak_tflops or peak_tflops_here(config.precision),
    )


def _synchronous_bytes_per_step(prepared: Prepared) -> float:
    """Return what one replica would send to average a step's gradients over the replicas.

    In a federation their number is not known, and 2 stands for it: with more each would send more.
    """
    weights = table_of(prepared.architecture).parameter_count
    return all_reduce_bytes(prepared.config.precision, weights, prepared.topology.total_replicas or 2)


def _known(prepared: Prepared, joined: Joined) -> Known:
    return Known(
        prepared.config, prepared.topology, prepared.architecture, joined.by_recipe, joined.data.summary
    )


def _write_facts(prepared: Prepared, joined: Joined) -> None:
    """Write `run.json`: what `watch` and `report` need to know of a run beside its metrics.

    A start that trains nothing leaves the file as it is: its config may not be that of the run.
    """
    folder = Path(prepared.config.training.output_dir)
    path = folder / "run.json"
    if joined.start.step >= prepared.config.training.train_iters and path.exists():
        return
    facts = {
        "version": __version__,
        **facts_in_words(_known(prepared, joined)),
        "steps": prepared.config.training.train_iters,
        "parameters": table_of(prepared.architecture).parameter_count,
        "synchronous_bytes_per_step": _synchronous_bytes_per_step(prepared),
        "config": prepared.config.to_dict(),
    }
    if prepared.topology.total_replicas is not None:
        facts["replicas"] = prepared.topology.total_replicas
    folder.mkdir(parents=True, exist_ok=True)  # its replicas' folders are made by other ranks
    write_text(path, json.dumps(facts, indent=2))


def _console(prepared: Prepared, joined: Joined, progress: str) -> Console:
    """Return the console, after it has said what the run is."""
    config, start, training = prepared.config, joined.start, prepared.config.training
    validation, method = joined.validation, config.noloco
    program, run = _program(), shlex.quote(training.output_dir)
    prompt = '--prompt ""' if config.data.sft_data_path is None else '--chat --prompt "..."'
    facts = RunFacts(
        unigram_entropy=joined.data.unigram_entropy,
        validated_on=f"{sum(map(len, validation))} of {sum(source.available for source in validation)}",
        all_reduce="an fp32 all-reduce" if config.precision == "fp32" else f"a {config.precision} all-reduce",
        all_reduce_bytes=_synchronous_bytes_per_step(prepared) * method.local_steps / method.fragments,
        output_dir=str(Path(training.output_dir).resolve()),
        how_to_continue=same_command(os.environ)
        + (' with checkpoint.load "auto"' if config.checkpoint.load == "none" else ""),
        next_commands=(
            f"{program} report {run}",
            f"{program} generate {run} {prompt}",
            f"{program} export {run} --output trained-model",
        ),
    )
    console = Console(progress, training.train_iters, start.step, facts)
    console.say(*_first_lines(prepared, joined))
    return console


def _program() -> str:
    """Return how a shell starts this program: by its name, if that is the one beside this Python."""
    name = "megatron-noloco"
    beside = Path(sys.executable).with_name(name)
    return (
        name if shutil.which(name) == str(beside) else f"{os.path.relpath(sys.executable)} -m megatron_noloco"
    )


def _first_lines(prepared: Prepared, joined: Joined) -> Iterator[str]:
    yield from describe(_known(prepared, joined))
    yield f"started by {prepared.world.launcher}; exchanges over {joined.link.name}"
    yield from joined.start.notes
    checksums, saved = joined.settings.training_data, joined.start.counters
    of_validation = {name: held for name, held in checksums.items() if name == VALIDATION_DATA}
    if same_data(checksums, saved) is False:
        yield (
            "changed: the training data have other contents than those of the checkpoint, or another order; what "
            "was read for training may now be read for validation"
        )
    elif same_data(of_validation, saved) is False:
        yield (
            "changed: the validation data have other contents than those of the checkpoint, so validation losses "
            "do not compare with earlier ones"
        )
