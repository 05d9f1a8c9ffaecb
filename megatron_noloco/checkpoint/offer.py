"""Hand a checkpoint from one job of a federation to another: offer, check and receive a rank's files."""

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megatron_noloco.checkpoint import catalog
from megatron_noloco.checkpoint.catalog import (
    WEIGHTS,
    DamagedCheckpointError,
    Manifest,
    manifest_name,
    replica_folder,
    verify,
)
from megatron_noloco.checkpoint.run_settings import ChangedError, CheckpointSettings
from megatron_noloco.files import put_in_place
from megatron_noloco.model.architecture import Architecture
from megatron_noloco.model.families import table_of
from megatron_noloco.plans.topology import Position, Topology

_BYTES_PER_PARAMETER = 64  # of a file, at most: several fp32 vectors
_OTHER_BYTES = 1 << 24  # of random states, numbers and names, at most
_LOCAL_BLOCKS = ("data", "federation")  # blocks with the paths and addresses of a job


def newest_saved(checkpoints: Path, at: Position) -> tuple[Manifest, Path] | None:
    """Return the manifest of the newest step that the rank `at` has saved, and its file. Raises OSError.

    Other ranks of the replica may not have saved that step yet.
    """
    for folder in catalog.steps(checkpoints):
        path = replica_folder(folder, at.replica) / manifest_name(at)
        with suppress(FileNotFoundError, DamagedCheckpointError):
            return Manifest.parse(path.read_bytes(), str(path)), path
    return None


def check_offer(
    content: bytes,
    at: Position,
    topology: Topology,
    architecture: Architecture,
    settings: CheckpointSettings,
) -> Manifest:
    """Check the manifest that the rank `at` of another job offers; return it with this job's paths and addresses.

    The content comes from another machine, so its file names must be those of that rank, and their sizes possible.
    Raises DamagedCheckpointError for any other manifest, and when this job could not continue from it.
    """
    where = f"offered by replica {at.replica}"
    manifest = Manifest.parse(content, where)
    theirs = replace(topology, slot=at.replica, slots=manifest.topology.slots)  # of which it may have fewer
    if (manifest.position, manifest.architecture, manifest.topology) != (at, architecture, theirs):
        raise DamagedCheckpointError(f"{where}: its rank, layout or model is another")
    expected = {catalog.file_of(Path(), at, name).name for name in (WEIGHTS, "")}
    longest = _BYTES_PER_PARAMETER * table_of(architecture).parameter_count + _OTHER_BYTES
    sizes = [record.bytes for record in manifest.files.values()]
    if manifest.files.keys() != expected or not all(
        _is_count(size) and 0 < size <= longest for size in sizes
    ):
        raise DamagedCheckpointError(f"{where}: its files are not those of a checkpoint of this rank")
    if not (
        all(isinstance(block, dict) for block in (manifest.config, manifest.engine, manifest.counters))
        and all(map(_is_count, (manifest.step, manifest.consumed_samples)))
        and all(isinstance(value, int | float) for value in manifest.counters.values())
    ):
        raise DamagedCheckpointError(f"{where}: not a manifest")
    own = {block: settings.run[block] for block in _LOCAL_BLOCKS if block in settings.run}
    manifest = replace(manifest, config=manifest.config | own)
    try:
        settings.changes(manifest.config)
    except ChangedError as error:
        raise DamagedCheckpointError(f"{where}: {error.changes[0]}") from None
    return manifest


def receive(checkpoints: Path, manifest: Manifest, fill: Callable[[Sequence[Tensor]], None]) -> None:
    """Receive the files of a manifest, and write them and then the manifest as its rank would have done.

    Args:
        fill: receives the content of the files into these buffers, which are in the order of the files' names.

    Raises DamagedCheckpointError when a checksum does not match, OSError, and what `fill` raises. Before all
    checksums match no file is put in place.
    """
    folder = replica_folder(catalog.step_folder(checkpoints, manifest.step), manifest.position.replica)
    folder.mkdir(parents=True, exist_ok=True)
    partial = checkpoints / f".handover_{catalog.rank_name(manifest.position)}"
    shutil.rmtree(partial, ignore_errors=True)  # left by a process that was killed
    partial.mkdir()
    try:
        files = {name: partial / name for name in sorted(manifest.files)}
        fill([_buffer(path, manifest.files[name].bytes) for name, path in files.items()])
        verify(partial, manifest.files)
        for name, path in files.items():
            put_in_place(path, folder / name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    manifest.write(folder)


def _buffer(path: Path, size: int) -> Tensor:
    """Map a new file of this size into memory; raises OSError if the disk is full (a later write would crash)."""
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62
