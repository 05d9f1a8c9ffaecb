"""`python -m megatron_noloco inspect CHECKPOINT...`: what a checkpoint holds, and whether it is complete.

Reads manifests and safetensors only, a piece of the replicas' vectors at a time.
"""

import math
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from megatron_noloco.checkpoint import catalog
from megatron_noloco.checkpoint.catalog import WEIGHTS
from megatron_noloco.checkpoint.ensemble import Ensemble, find_ensemble
from megatron_noloco.checkpoint.files import verify
from megatron_noloco.checkpoint.vector import FlatVector
from megatron_noloco.model.families import table_of
from megatron_noloco.plans.topology import Position

_BLOCK = 1 << 24  # elements in memory at a time, of all replicas together


def inspect(paths: Sequence[Path]) -> list[str]:
    """Lines about the checkpoint that `paths` mean; raises as `find_ensemble`, and when a file is damaged."""
    saved = find_ensemble(paths)
    for manifest in saved.manifests:
        replica = manifest.position.replica
        verify(catalog.replica_folder(saved.folders[replica], replica), manifest.files)
    return report(saved)


def report(saved: Ensemble) -> list[str]:
    manifests, first = saved.manifests, saved.manifests[0]
    replicas = len(saved.replicas)
    noloco = first.config["noloco"]
    topology = first.topology
    seq_length = first.config["model"]["seq_length"]
    size = sum(record.bytes for manifest in manifests for record in manifest.files.values())
    parameters = table_of(first.architecture).parameter_count
    lines = [
        *(f"checkpoint: {folder}" for folder in dict.fromkeys(saved.folders.values())),
        f"step: {_steps(saved)} of {first.config['training']['train_iters']}",
        f"consumed by all replicas: {first.consumed_samples} samples, "
        f"{first.consumed_samples * seq_length} tokens",
        f"parallel: {replicas} replicas x pipeline {topology.pp} x data {topology.dp} x "
        f"tensor {topology.tp} = {len(manifests)} ranks",
        f"method: {noloco['method'] if noloco['enabled'] else 'none'}",
        f"parameters: {parameters} per replica",
        f"size: {size / 1e6:.1f} MB, {size / (parameters * replicas):.1f} bytes per parameter",
        f"integrity: {sum(len(manifest.files) for manifest in manifests)} files, all checksums match",
    ]
    for replica in saved.replicas:
        counters = saved.last_stage(replica).counters
        if "validation_loss" in counters:
            lines.append(f"replica {replica}: validation loss {counters['validation_loss']:.4f}")
    if replicas > 1:
        for stage, spread in enumerate(stage_spreads(saved)):
            lines.append(f"stage {stage}: spread {spread:.3E}")
    return lines


def _steps(saved: Ensemble) -> str:
    steps = {replica: saved.last_stage(replica).step for replica in saved.replicas}
    if len(set(steps.values())) == 1:
        return str(steps[saved.replicas[0]])
    return ", ".join(f"{step} (replica {replica})" for replica, step in steps.items())


def stage_spreads(saved: Ensemble) -> list[float]:
    """The spread of each stage."""
    return [_stage_spread(saved, stage) for stage in range(saved.topology.pp)]


def _stage_spread(saved: Ensemble, stage: int) -> float:
    """Standard deviation of the slow weights over the replicas, root mean square over the stage's weights."""
    topology = saved.topology
    squares, count = 0.0, 0
    for dp, tp in product(range(topology.dp), range(topology.tp)):
        places = [Position(replica, stage, dp, tp) for replica in saved.replicas]
        for group in range(len(saved.manifest(places[0]).layout)):
            name = f"{WEIGHTS}.{group}"
            vectors = [FlatVector(saved.file(at, name), name) for at in places]
            length, block = vectors[0].length, max(_BLOCK // len(places), 1 << 20)
            for start in range(0, length, block):
                squares += _variance([v.read(start, min(start + block, length)) for v in vectors])
            count += length
    return math.sqrt(squares / count)


def _variance(replicas: list[Tensor]) -> float:
    """Summed over the elements, of their values over the replicas."""
    return float(torch.stack(replicas).double().var(dim=0).sum())
