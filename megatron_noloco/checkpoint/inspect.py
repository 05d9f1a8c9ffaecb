"""`python -m megatron_noloco inspect CHECKPOINT`: what a checkpoint holds, and whether it is complete.

Reads manifests and safetensors only, a piece of the replicas' vectors at a time.
"""

import math
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from megatron_noloco.checkpoint import catalog
from megatron_noloco.checkpoint.catalog import WEIGHTS, Manifest
from megatron_noloco.checkpoint.files import DamagedCheckpointError, verify
from megatron_noloco.checkpoint.vector import FlatVector
from megatron_noloco.plans.topology import Position
from megatron_noloco.spec.method import active_method

_BLOCK = 1 << 24  # elements in memory at a time, of all replicas together


def inspect(path: str) -> list[str]:
    """Lines about the checkpoint at `path`; raises DamagedCheckpointError when there is no complete one."""
    folder = find_step_folder(Path(path))
    manifests = catalog.read_manifests(folder)
    for manifest in manifests:
        verify(catalog.replica_folder(folder, manifest.position.replica), manifest.files)
    return report(folder, manifests)


def find_step_folder(path: Path) -> Path:
    """The step folder meant by a path: itself, or the one that `latest` names in it.

    Raises DamagedCheckpointError when there is none.
    """
    if catalog.step_of(path) is not None:
        return path
    for checkpoints in (path, path / "checkpoints"):
        latest = checkpoints / "latest"
        if latest.is_file():
            return checkpoints / latest.read_text().strip()
    raise DamagedCheckpointError(f"{path}: no checkpoint here; give a step folder or a run's output_dir")


def report(folder: Path, manifests: list[Manifest]) -> list[str]:
    first = manifests[0]
    noloco = first.config["noloco"]
    topology = first.topology
    seq_length = first.config["model"]["seq_length"]
    size = sum(record.bytes for manifest in manifests for record in manifest.files.values())
    parameters = sum(
        math.prod(shape)
        for manifest in manifests
        if manifest.position.replica == topology.slot and manifest.position.dp == 0
        for part in manifest.layout
        for _, shape in part.parameters
    )
    lines = [
        f"checkpoint: {folder}",
        f"step: {first.step} of {first.config['training']['train_iters']}",
        f"consumed by all replicas: {first.consumed_samples} samples, "
        f"{first.consumed_samples * seq_length} tokens",
        f"parallel: {topology.replicas} replicas x pipeline {topology.pp} x data {topology.dp} x "
        f"tensor {topology.tp} = {topology.world_size} ranks",
        f"method: {active_method(noloco['enabled'], noloco['method'])}",
        f"parameters: {parameters} per replica",
        f"size: {size / 1e6:.1f} MB, {size / (parameters * topology.replicas):.1f} bytes per parameter",
        f"integrity: {sum(len(manifest.files) for manifest in manifests)} files, all checksums match",
    ]
    for replica in topology.numbers:
        counters = manifests[topology.rank(Position(replica, topology.pp - 1, 0, 0))].counters
        if "validation_loss" in counters:
            lines.append(f"replica {replica}: validation loss {counters['validation_loss']:.4f}")
    if topology.replicas > 1:
        for stage, spread in enumerate(stage_spreads(folder, manifests)):
            lines.append(f"stage {stage}: spread {spread:.3E}")
    return lines


def stage_spreads(folder: Path, manifests: list[Manifest]) -> list[float]:
    """The spread of each stage."""
    return [_stage_spread(folder, manifests, stage) for stage in range(manifests[0].topology.pp)]


def _stage_spread(folder: Path, manifests: list[Manifest], stage: int) -> float:
    """Standard deviation of the slow weights over the replicas, root mean square over the stage's weights."""
    topology = manifests[0].topology
    squares, count = 0.0, 0
    for dp, tp in product(range(topology.dp), range(topology.tp)):
        places = [Position(replica, stage, dp, tp) for replica in topology.numbers]
        for group in range(len(manifests[topology.rank(places[0])].layout)):
            name = f"{WEIGHTS}.{group}"
            vectors = [FlatVector(catalog.file_of(folder, at, name), name) for at in places]
            length, block = vectors[0].length, max(_BLOCK // topology.replicas, 1 << 20)
            for start in range(0, length, block):
                squares += _variance([v.read(start, min(start + block, length)) for v in vectors])
            count += length
    return math.sqrt(squares / count)


def _variance(replicas: list[Tensor]) -> float:
    """Summed over the elements, of their values over the replicas."""
    return float(torch.stack(replicas).double().var(dim=0).sum())
