"""Checkpoints as files, without an engine, and ways to damage them."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megatron_noloco.checkpoint import catalog
from megatron_noloco.checkpoint.catalog import FileRecord, Manifest
from megatron_noloco.config import RunConfig
from megatron_noloco.engine.layout import FlatPart
from megatron_noloco.files import write_whole
from megatron_noloco.plans.topology import Topology
from megatron_noloco.training.start import checkpoint_settings
from tests.kit.configs import SMALLEST

CONFIG: dict[str, Any] = SMALLEST | {
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
    "noloco": {"recipe": "paper", "local_steps": 5},
    "parallel": {"replicas": 3, "pipeline_model_parallel_size": 2},
    "training": {"train_iters": 20},
}
TOPOLOGY = Topology(replicas=3, pp=2)
SIZES = (40, 24)  # parameters of the two stages


def write_checkpoint(checkpoints: Path, step: int, topology: Topology = TOPOLOGY) -> Path:
    """What the ranks of a run leave at `step`, with random numbers for weights, and no inner optimizer."""
    folder = catalog.step_folder(checkpoints, step)
    for rank in range(topology.world_size):
        write_rank(folder, rank, topology)
        catalog.publish(checkpoints, folder, topology.world_size, keep_last=100)
    return folder


def write_rank(step_folder: Path, rank: int, topology: Topology = TOPOLOGY) -> None:
    step = catalog.step_of(step_folder)
    assert step is not None
    position = topology.position(rank)
    folder = catalog.replica_folder(step_folder, position.replica)
    folder.mkdir(parents=True, exist_ok=True)
    size = SIZES[position.stage]
    generator = torch.Generator().manual_seed(1000 * step + rank)
    files = {}
    for name in ("slow_weights", "outer_momentum"):
        path = catalog.file_of(step_folder, position, name)
        write_whole(path, partial(save_file, {f"{name}.0": torch.randn(size, generator=generator)}))
        files[path.name] = FileRecord.of(path)
    config = RunConfig(**CONFIG)
    layout = [FlatPart(size, [("decoder.final_layernorm.weight", [size])])]
    Manifest(
        step, 12 * step, topology, position, config.to_dict(), files, config.architecture(257), layout
    ).write(folder)


TENSORS, MANIFEST = (f"replica_01/stage_01_dp_00_tp_00.{suffix}" for suffix in ("safetensors", "json"))


def edit(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def flip_a_bit(path: Path) -> None:
    edit(path, lambda content: content[:-5] + bytes([content[-5] ^ 0x10]) + content[-4:])


def edit_manifest(folder: Path, changes: dict[str, Any]) -> None:
    edit(folder / MANIFEST, lambda content: json.dumps(json.loads(content) | changes).encode())


def edit_configs(folder: Path, block: str, **fields: Any) -> None:
    """Change the run's config in each manifest of a checkpoint."""
    for path in folder.rglob("*.json"):
        manifest = json.loads(path.read_text())
        manifest["config"][block] |= fields
        path.write_text(json.dumps(manifest))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated file": lambda folder: edit(folder / TENSORS, lambda content: content[:-7]),
    "flipped bit": lambda folder: flip_a_bit(folder / TENSORS),
    "missing file": lambda folder: (folder / TENSORS).unlink(),
    "missing replica folder": lambda folder: shutil.rmtree(folder / "replica_01"),
    "missing manifest": lambda folder: (folder / MANIFEST).unlink(),
    "half-written step": lambda folder: [path.unlink() for path in folder.rglob("*.json")],
    "manifest cut short": lambda folder: edit(folder / MANIFEST, lambda content: content[:20]),
    "manifest that is no text": lambda folder: edit(folder / MANIFEST, lambda _: b"\xff\x00"),
    "manifest without its numbers": lambda folder: edit_manifest(folder, {"counters": None}),
    "manifest of another rank": lambda folder: shutil.copy(
        folder / MANIFEST.replace("stage_01", "stage_00"), folder / MANIFEST
    ),
    "manifest of another step": lambda folder: edit_manifest(folder, {"step": 9}),
    "manifest of a later format": lambda folder: edit_manifest(folder, {"format": 99}),
    "manifest of version 0.3": lambda folder: edit_manifest(folder, {"topology": {"slots": [0, 1, 2]}}),
    "folder in place of a manifest": lambda folder: [
        (folder / MANIFEST).unlink(),
        (folder / MANIFEST).mkdir(),
    ],
}


def changes(edits: dict[str, dict[str, Any]]) -> list[str]:
    """Of a run that continues a checkpoint of CONFIG, with these edits."""
    now = {block: {**CONFIG.get(block, {}), **values} for block, values in edits.items()}
    run = RunConfig(**{**CONFIG, **now})
    return checkpoint_settings(run, Topology()).changes(RunConfig(**CONFIG).to_dict())
