"""Where a run starts: from nothing, or from the newest sound checkpoint.

The one moment, before the first step, at which all ranks must agree about files; they do it over
torch.distributed's default group.
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from megatron_noloco.checkpoint import catalog, compare, elastic
from megatron_noloco.checkpoint.catalog import Manifest
from megatron_noloco.checkpoint.files import DamagedCheckpointError, verify
from megatron_noloco.checkpoint.settings import CheckpointSettings
from megatron_noloco.job.agreement import of_all_ranks, of_rank_0
from megatron_noloco.plans.topology import Topology


@dataclass(frozen=True)
class Start:
    """Where this rank starts, and what a person should know about it."""

    folder: Path | None  # the step folder to restore; None: from the beginning
    notes: list[str]
    manifests: list[Manifest] = field(default_factory=list)  # of all ranks that wrote it, in rank order
    counters: dict[str, float] = field(default_factory=dict)  # of this rank

    @property
    def step(self) -> int:
        return self.manifests[0].step if self.manifests else 0

    @property
    def sample(self) -> int:
        """Samples consumed before it, by all replicas."""
        return self.manifests[0].consumed_samples if self.manifests else 0


def find_start(settings: CheckpointSettings, topology: Topology) -> Start:
    """Every rank calls it, before the first step, and gets the same step.

    Raises ValueError when `checkpoint.load` names a checkpoint that is not complete, or when the config does not
    fit the one that would be continued.
    """
    load, checkpoints = settings.load, settings.folder
    if load == "none":
        return _start_over(checkpoints)
    explicit = load != "auto"
    candidates = of_rank_0(  # a file system may show the others an older state
        [str(Path(load))] if explicit else [str(path) for path in catalog.steps(checkpoints)]
    )
    notes: list[str] = []
    for folder in map(Path, candidates):
        manifests, problem = _examine(folder, topology, settings.fold)
        problems = [text for text in of_all_ranks(problem) if text]
        if not problems:
            return _continue(settings, topology, folder, manifests, notes)
        if explicit:
            raise ValueError(f"checkpoint.load: {problems[0]}")
        notes.append(f"not used: {problems[0]}")
    start = _start_over(checkpoints)
    return Start(None, notes + start.notes)


def _examine(folder: Path, topology: Topology, fold: bool) -> tuple[list[Manifest], str]:
    """All manifests, or what is wrong with this rank's share of the files that will be read.

    Which rank reads a file depends on both layouts; each file is verified once, by some rank.
    """
    try:
        manifests = catalog.read_manifests(folder)
        needed = elastic.needed(manifests, topology, fold)
        for manifest in needed[dist.get_rank() :: dist.get_world_size()]:
            verify(catalog.replica_folder(folder, manifest.position.replica), manifest.files)
        return manifests, ""
    except DamagedCheckpointError as error:
        return [], str(error)


def _continue(
    settings: CheckpointSettings,
    topology: Topology,
    folder: Path,
    manifests: list[Manifest],
    notes: list[str],
) -> Start:
    saved = manifests[0]
    changed = compare.changes(settings.completed(saved.config), settings.run)
    lines = [f"continuing from {folder}: step {saved.step}, {saved.consumed_samples} samples consumed"]
    lines += notes
    lines += [f"changed: {line}" for line in changed]
    lines += elastic.what_happened(saved.topology, topology, settings.fold)
    newer = catalog.steps(settings.folder)  # than the step continued from, where that lies in this folder
    if folder.parent.resolve() == settings.folder.resolve():
        newer = [path for path in newer if (catalog.step_of(path) or 0) > saved.step]
    lines += _set_aside(newer)
    counters = elastic.counters_of(manifests, topology, topology.position(dist.get_rank()))
    return Start(folder, lines, manifests, counters)


def _start_over(checkpoints: Path) -> Start:
    return Start(None, _set_aside(catalog.steps(checkpoints)))


def _set_aside(folders: list[Path]) -> list[str]:
    """Rank 0 moves steps out of the way that this run will write again; nobody starts before."""
    lines = []
    if dist.get_rank() == 0:
        lines = [f"set aside: {folder} is now {catalog.set_aside(folder).name}" for folder in folders]
        if folders:
            catalog.name_latest(folders[0].parent)
    dist.barrier()
    return lines
