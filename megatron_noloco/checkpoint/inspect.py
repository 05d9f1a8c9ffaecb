"""`python -m megatron_noloco inspect CHECKPOINT...`: verify a checkpoint and print what it holds.

It reads manifests and safetensors only, and vectors in pieces that bound its memory.
"""

import math
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import torch

from megatron_noloco.checkpoint import catalog
from megatron_noloco.checkpoint.catalog import WEIGHTS, verify
from megatron_noloco.checkpoint.ensemble import Ensemble, find_ensemble
from megatron_noloco.checkpoint.reader import read_into
from megatron_noloco.model.families import table_of
from megatron_noloco.plans.topology import Position

_BLOCK = 1 << 24  # elements in memory at once, all replicas together


def inspect(paths: Sequence[Path]) -> list[str]:
    """Verify the checkpoint that `paths` name, and return lines about it.

    Raises like `find_ensemble`, and DamagedCheckpointError when a file is damaged.
    """
    saved = find_ensemble(paths)
    for manifest in saved.manifests:
        replica = manifest.position.replica
        verify(catalog.replica_folder(saved.folders[replica], replica), manifest.files)
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
    """Return the spread of each stage: the root mean square, over its slow weights, of their std over replicas."""
    return [_stage_spread(saved, stage) for stage in range(saved.topology.pp)]


def _stage_spread(saved: Ensemble, stage: int) -> float:
    topology = saved.topology
    squares, count = 0.0, 0
    for dp, tp in product(range(topology.dp), range(topology.tp)):
        places = [Position(replica, stage, dp, tp) for replica in saved.replicas]
        for group, part in enumerate(saved.manifest(places[0]).layout):
            name, block = f"{WEIGHTS}.{group}", max(_BLOCK // len(places), 1 << 20)
            for start in range(0, part.length, block):
                vectors = torch.empty(len(places), min(block, part.length - start))
                for vector, at in zip(vectors, places, strict=True):
                    read_into(vector, saved.file(at, name), name, start)
                squares += float(vectors.double().var(dim=0).sum())
            count += part.length
    return math.sqrt(squares / count)
