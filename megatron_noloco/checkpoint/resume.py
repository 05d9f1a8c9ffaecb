"""Decide where a run starts: from the beginning, or from the newest intact checkpoint, of any layout.

Before the first step all ranks agree on that checkpoint, with collectives over torch.distributed's default group.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

import torch.distributed as dist

from megatron_noloco.checkpoint import catalog
from megatron_noloco.checkpoint.catalog import DamagedCheckpointError, IncompleteError
from megatron_noloco.checkpoint.ensemble import Ensemble
from megatron_noloco.checkpoint.run_settings import CheckpointSettings
from megatron_noloco.errors import UserError
from megatron_noloco.job.agreement import broadcast_from_rank_0, gather_from_all_ranks, wait_for_all
from megatron_noloco.plans.topology import Position, Topology


@dataclass(frozen=True)
class Start:
    """Where this rank starts, and notes about it for the user."""

    saved: Ensemble | None  # the step to restore; None: from the beginning
    notes: list[str]
    counters: dict[str, float] = field(default_factory=dict)  # of this rank
    own: bool = True  # whether the step is one of this run's own checkpoints
    refused: str = ""  # why no checkpoint can be continued, though one was complete

    @property
    def step(self) -> int:
        """Local steps done before the start."""
        return self.saved.manifests[0].step if self.saved else 0

    @property
    def sample(self) -> int:
        """Samples consumed by all replicas before the start."""
        return self.saved.manifests[0].consumed_samples if self.saved else 0


def find_start(checkpoints: Path, load: str, topology: Topology) -> Start:
    """Find the step to start from; every rank calls it and gets the same step. Changes nothing.

    Args:
        checkpoints: the folder of the run's own step folders.
        load: see `CheckpointSettings`.

    A run that has started from a step folder, and has saved since, continues from what it saved: a scheduler that
    starts the same command again must not lead it back.
    Raises UserError when `checkpoint.load` names a damaged checkpoint, and nothing newer is there.
    """
    if load == "none":
        return Start(None, [])
    explicit = None if load == "auto" else Path(load)
    found = catalog.steps(checkpoints)
    if explicit is not None:
        found = [*catalog.continued_from(checkpoints, load), explicit]
    refused = ""
    # Rank 0 decides: other ranks may see an older state of a shared file system.
    folders, (complete, note) = broadcast_from_rank_0((found, catalog.latest(checkpoints)))
    notes = [note] if note and explicit is None else []
    for folder in folders:
        if folder == explicit and refused:
            break  # starting there again would leave out what the run has done since
        saved, problem = _examine(folder, topology)
        problems = [error for error in gather_from_all_ranks(problem) if error]
        if not problems:
            if explicit not in (None, folder):
                notes.append(
                    f"checkpoint.load: this run has saved since it started from {explicit}, and goes on; without "
                    f"{', '.join(path.name for path in folders[:-1])} it would start from there again"
                )
            return Start(saved, notes)
        if folder == explicit:
            raise UserError(f"checkpoint.load: {problems[0]}")
        notes.append(f"not used: {problems[0]}")
        if folder.name == complete or not isinstance(problems[0], IncompleteError):
            refused = refused or str(problems[0])
    return Start(None, notes, refused=refused)


def check_found(settings: CheckpointSettings, found: Start) -> Start:
    """Return what was found, with a note for each setting that differs from those of the checkpoint.

    Changes nothing on disk, so it comes before a job meets others.

    Raises UserError when the config does not fit the checkpoint, or no checkpoint can be continued.
    """
    if found.refused:
        again = "move that folder away to start anew, in a federation with the state of another job"
        if settings.load != "auto":
            again = f"delete its step folders to start from {settings.load} again"
        raise UserError(
            f"{settings.folder}: no checkpoint there can be continued ({found.refused}); put it right, or {again}"
        )
    if found.saved is None:
        return found
    saved, own = found.saved.manifests[0], found.saved.folder.parent.resolve() == settings.folder.resolve()
    changes = settings.changes(saved.config, saved.counters, own, saved.tokenizer)
    return replace(found, notes=[*found.notes, *(f"changed: {line}" for line in changes)], own=own)


def settle_start(settings: CheckpointSettings, topology: Topology, found: Start) -> Start:
    """Set aside the steps that the run will write again; return what was found with more notes and the counters.

    Every rank calls it, with what `check_found` returns.
    """
    if found.saved is None:
        return replace(found, notes=found.notes + _set_aside(catalog.steps(settings.folder)))
    folder, saved = found.saved.folder, found.saved.manifests[0]
    lines = [
        f"continuing from {folder}: step {saved.step}, {saved.consumed_samples} samples consumed",
        *found.notes,
        *describe_replicas(saved.topology, topology),
    ]
    obsolete = catalog.steps(settings.folder)
    if found.own:
        obsolete = [path for path in obsolete if (catalog.step_of(path) or 0) > saved.step]
    lines += _set_aside(obsolete)
    counters = counters_at(found.saved, topology, topology.position(dist.get_rank()))
    return replace(found, notes=lines, counters=counters)


def _examine(folder: Path, topology: Topology) -> tuple[Ensemble | None, DamagedCheckpointError | None]:
    """Return what a step folder has, or what is wrong with this rank's share of its files.

    The files that the run will read are divided over its ranks, so that each is verified once.
    """
    try:
        saved = Ensemble.read([folder])
        sources = {source_replica(replica, saved.topology) for replica in topology.numbers}
        needed = [manifest for manifest in saved.manifests if manifest.position.replica in sources]
        for manifest in needed[dist.get_rank() :: dist.get_world_size()]:
            saved.verify(manifest)
        return saved, None
    except DamagedCheckpointError as error:
        return None, error


def _set_aside(folders: list[Path]) -> list[str]:
    """Let rank 0 rename the steps that this run will write again, and wait until it has."""
    lines = []
    if dist.get_rank() == 0:
        lines = [f"set aside: {folder} is now {catalog.set_aside(folder).name}" for folder in folders]
        if folders:
            catalog.write_latest(folders[0].parent)
    wait_for_all()
    return lines


# Resuming with other ranks


def same_sizes(one: Topology, other: Topology) -> bool:
    """Return whether the sizes of a replica are the same; the numbers of replicas may differ."""
    return (one.pp, one.dp, one.tp, one.ep) == (other.pp, other.dp, other.tp, other.ep)


def source_replica(replica: int, saved: Topology) -> int:
    """Return the saved replica that `replica` continues: itself, or if it is new a saved one in turn."""
    return saved.slot + (replica - saved.slot) % saved.replicas


def describe_replicas(saved: Topology, now: Topology) -> list[str]:
    """Return a line for each replica that is cloned or dropped."""
    cloned = [
        f"replica {replica} begins as a clone of replica {source_replica(replica, saved)}, with data of its own"
        for replica in now.numbers
        if replica not in saved.numbers
    ]
    dropped = range(0) if now.separate_jobs else range(now.replicas, saved.replicas)
    return cloned + [f"replica {replica} is dropped" for replica in dropped]


def counters_at(saved: Ensemble, topology: Topology, at: Position) -> dict[str, float]:
    """Return the counters of a rank since the start of the run.

    From another layout a rank takes an equal part of the replica's bytes, and the maximum of any other counter.
    """
    source = source_replica(at.replica, saved.topology)
    if same_sizes(saved.topology, topology):
        return saved.manifest(replace(at, replica=source)).counters
    counted: dict[str, list[float]] = {}
    for manifest in saved.manifests:
        if manifest.position.replica == source:
            for name, value in manifest.counters.items():
                counted.setdefault(name, []).append(value)
    return {
        name: sum(values) / topology.replica_size if name.endswith("_bytes") else max(values)
        for name, values in counted.items()
    }
