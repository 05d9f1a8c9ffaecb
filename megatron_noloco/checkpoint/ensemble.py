"""The replicas of a checkpoint: all in one step folder, or in a federation each in its own."""

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from megatron_noloco.checkpoint import catalog
from megatron_noloco.checkpoint.catalog import (
    MEAN_OF_REPLICAS,
    TOKENS_PER_SAMPLE,
    DamagedCheckpointError,
    Manifest,
    verify,
)
from megatron_noloco.errors import UserError
from megatron_noloco.model.architecture import Architecture
from megatron_noloco.model.families import table_of
from megatron_noloco.plans.topology import Position, Topology


class Consumed(NamedTuple):
    """Training data that a model has seen, padding and local steps that a job left out not counted.

    Attributes:
        whose: the replicas that are counted, in words.
        missing: how many replicas of the mean are not counted, since their folders are elsewhere.
    """

    samples: int
    tokens: int
    whose: str
    missing: int = 0

    @property
    def note(self) -> str:
        """Say that not all is counted, where it is not."""
        if not self.missing:
            return ""
        other = "other replica whose" if self.missing == 1 else "other replicas whose"
        return f"; not known here: those of {self.missing} {other} mean the weights are"


@dataclass(frozen=True)
class Ensemble:
    """Saved replicas of one model; those of different jobs may have different layouts.

    Attributes:
        folders: the step folder of each replica, by its number.
        manifests: of all ranks, replica by replica, each in rank order.
    """

    folders: dict[int, Path]
    manifests: list[Manifest]

    @classmethod
    def read(cls, folders: Sequence[Path]) -> "Ensemble":
        """Read the replicas in several step folders as one ensemble.

        Raises DamagedCheckpointError when a step is not complete, UserError when the steps do not fit together.
        """
        places: dict[int, Path] = {}
        manifests: list[Manifest] = []
        for folder in folders:
            manifests += catalog.read_manifests(folder)
            for replica in manifests[-1].topology.numbers:
                if replica in places:
                    raise UserError(f"replica {replica} is in {places[replica]} and in {folder}")
                places[replica] = folder
            if _model(manifests[-1]) != _model(manifests[0]):
                raise UserError(f"{folders[0]} and {folder} are of different models")
        return cls(places, manifests)

    @property
    def folder(self) -> Path:
        """The step folder of the first replica, and of all where one job has saved them."""
        return self.folders[self.replicas[0]]

    @property
    def replicas(self) -> list[int]:
        """The numbers of the replicas."""
        return list(self.folders)

    @property
    def topology(self) -> Topology:
        """The topology of the job that saved the first replica."""
        return self.manifests[0].topology

    @cached_property
    def consumed(self) -> "Consumed":
        """What these replicas have consumed; of a mean at the end what all replicas have, if all are here."""
        first = self.manifests[0]
        if not first.topology.separate_jobs:
            return Consumed(first.consumed_samples, _tokens_of(first, first.consumed_samples), "all replicas")
        jobs = self._jobs_of_mean()
        samples = [_consumed_by_job(job) for job in jobs]
        whose, missing = "all replicas", max(self.mean_of, len(self.replicas)) - len(jobs)
        if missing or (len(jobs) == 1 and not self.mean_of):
            whose = "this replica" if len(jobs) == 1 else f"these {len(jobs)} replicas"
        return Consumed(sum(samples), sum(map(_tokens_of, jobs, samples)), whose, missing)

    def _jobs_of_mean(self) -> list[Manifest]:
        """Return a manifest of each separate job: of all whose mean the weights are, if they are in one folder."""
        found = [self]
        if self.mean_of > len(self.replicas):
            folders = sorted((self.folder / "../../..").glob(f"replica_*/checkpoints/{self.folder.name}"))
            beside = [Ensemble.read([folder]) for folder in folders if catalog.is_complete(folder)]
            beside = [other for other in beside if other.mean_of == self.mean_of]
            found = beside if len(beside) == self.mean_of else found
        return [other.last_stage(replica) for other in found for replica in other.replicas]

    @property
    def mean_of(self) -> int:
        """The number of separate jobs of whose replicas the weights are the mean; 0 before the end."""
        return int(self.manifests[0].counters.get(MEAN_OF_REPLICAS, 0))

    def topology_of(self, replica: int) -> Topology:
        """Return the topology of the job that saved a replica."""
        return self.manifest(Position(replica, 0, 0, 0)).topology

    @property
    def layout_in_words(self) -> str:
        """The layout of all replicas, or of each where they differ."""
        words = {replica: self.topology_of(replica).replica_in_words for replica in self.replicas}
        if len(set(words.values())) == 1:
            return self.topology.in_words(len(words))
        return ", ".join(f"replica {replica}: {layout}" for replica, layout in words.items())

    @property
    def weights_are_equal(self) -> bool:
        """Whether all replicas have the same slow weights in the same layout, by the checksums of their files."""
        found: dict[int, list[Any]] = {replica: [] for replica in self.replicas}
        for manifest in self.manifests:
            at = manifest.position
            name = self.file(at, catalog.WEIGHTS).name
            layout = replace(manifest.topology, replicas=1, slot=0), manifest.layout
            found[at.replica].append((layout, name, manifest.files[name].sha256))
        first, *others = found.values()
        return all(other == first for other in others)

    @property
    def losses(self) -> dict[int, dict[str, float]]:
        """The losses of the last evaluation before the checkpoint, of each replica that has been evaluated."""
        counters = {replica: self.last_stage(replica).counters for replica in self.replicas}
        return {replica: figures for replica, figures in counters.items() if "validation_loss" in figures}

    @property
    def losses_in_words(self) -> list[str]:
        """A line for each of these losses."""
        found = self.losses.items()
        return [
            f"replica {number}: validation loss {losses['validation_loss']:.4f} in the last evaluation"
            for number, losses in found
        ]

    def verify(self, manifest: Manifest, names: Collection[str] | None = None) -> None:
        """Raise DamagedCheckpointError unless a rank's files, or those with these names, are as it saved them."""
        folder = catalog.replica_folder(self.folders[manifest.position.replica], manifest.position.replica)
        verify(folder, {name: manifest.files[name] for name in names or manifest.files})

    def manifest(self, at: Position) -> Manifest:
        return self._by_position[at]

    def last_stage(self, replica: int) -> Manifest:
        """Return the manifest of the rank whose counters have the measurements of the whole replica."""
        return self.manifest(Position(replica, self.topology_of(replica).pp - 1, 0, 0))

    def file(self, at: Position, name: str) -> Path:
        """Return the file in which a rank saved the tensor `name`."""
        return catalog.file_of(self.folders[at.replica], at, name)

    def __str__(self) -> str:
        folders = list(dict.fromkeys(self.folders.values()))
        if len(folders) == 1:
            return str(folders[0])
        steps = {replica: catalog.step_of(folder) for replica, folder in self.folders.items()}
        if len(set(steps.values())) == 1:
            return f"replicas {', '.join(map(str, steps))} at step {steps[self.replicas[0]]}"
        return ", ".join(f"replica {replica} at step {step}" for replica, step in steps.items())

    @cached_property
    def _by_position(self) -> dict[Position, Manifest]:
        return {manifest.position: manifest for manifest in self.manifests}


def find_ensemble(paths: Sequence[Path]) -> Ensemble:
    """Find the replicas that a user's paths name.

    A path is a step folder, or a run's `output_dir`, which stands for its latest checkpoint. The `output_dir`
    of a federation, and several paths, stand for the newest step that all their replicas have. Weights of
    different steps are averaged only if all paths are step folders. A line on stderr says where `latest` is wrong.
    Raises DamagedCheckpointError when there is no complete checkpoint, ValueError when they do not fit together.
    """
    folders = [folder for path in paths for folder in _checkpoint_folders(path)]
    if all(catalog.step_of(folder) is not None for folder in folders):
        return Ensemble.read(folders)
    if len(folders) == 1:
        name, note = catalog.latest(folders[0])
        if note:
            sys.stderr.write(f"{note}\n")
        return Ensemble.read([folders[0] / name])
    return Ensemble.read(_newest_common_step(folders))


def inspect(paths: Sequence[Path]) -> list[str]:
    """Verify the checkpoint that `paths` name, without loading its tensors, and return lines about it.

    Raises like `find_ensemble`, and DamagedCheckpointError when a file is damaged.
    """
    saved = find_ensemble(paths)
    for manifest in saved.manifests:
        saved.verify(manifest)
    manifests, first, replicas, seen = saved.manifests, saved.manifests[0], saved.replicas, saved.consumed
    noloco = first.config["noloco"]
    size = sum(record.bytes for manifest in manifests for record in manifest.files.values())
    parameters = table_of(first.architecture).parameter_count
    are_equal = len(replicas) > 1 and saved.weights_are_equal
    steps = [f"{saved.last_stage(replica).step} (replica {replica})" for replica in replicas]
    if len({manifest.step for manifest in manifests}) == 1:
        steps = [str(first.step)]
    mean = [f"weights: the mean of {saved.mean_of} replicas, which each of them has"] if saved.mean_of else []
    return [
        *(f"checkpoint: {folder}" for folder in dict.fromkeys(saved.folders.values())),
        f"step: {', '.join(steps)} of {first.config['training']['train_iters']}",
        f"consumed by {seen.whose}: {seen.samples} samples, {seen.tokens} tokens{seen.note}",
        f"parallel: {saved.layout_in_words}",
        f"method: {noloco['method'] if noloco['enabled'] else 'none'}",
        f"parameters: {parameters} per replica{', the same in all, bit for bit' * are_equal}",
        f"size: {size / 1e6:.1f} MB, {size / (parameters * len(replicas)):.1f} bytes per parameter",
        f"integrity: {sum(len(manifest.files) for manifest in manifests)} files, all checksums match",
        *mean,
        *saved.losses_in_words,
    ]


def _checkpoint_folders(path: Path) -> list[Path]:
    """Return `path` if it is a step folder; otherwise the `checkpoints` folder of each job below it."""
    if catalog.step_of(path) is not None:
        return [path]
    if (aside := catalog.advice_on_set_aside(path)) is not None:
        raise DamagedCheckpointError(f"{path}: {aside}")
    for checkpoints in (path, path / "checkpoints"):
        if catalog.latest(checkpoints)[0]:
            return [checkpoints]
    jobs = sorted(path.glob("replica_*/checkpoints"))
    federation = [checkpoints for checkpoints in jobs if catalog.latest(checkpoints)[0]]
    if not federation:
        raise DamagedCheckpointError(f"{path}: {_describe(path)}; give a step folder or a run's output_dir")
    return federation


def _describe(path: Path) -> str:
    if not path.exists():
        return "there is no such folder"
    if note := catalog.latest(path)[1] or catalog.latest(path / "checkpoints")[1]:
        return note.removeprefix(f"{path}/")
    if (path / "run.json").exists():
        return "this run has saved no checkpoint yet (checkpoint.save_interval, or Ctrl-C)"
    return "a Hugging Face model, no checkpoint" if (path / "config.json").exists() else "no checkpoint here"


def _newest_common_step(folders: list[Path]) -> list[Path]:
    """Return the step folders of the newest step that all `folders` have complete."""
    steps = [[folder] if catalog.step_of(folder) is not None else catalog.steps(folder) for folder in folders]
    complete = [
        {catalog.step_of(folder) or 0: folder for folder in folders if catalog.is_complete(folder)}
        for folders in steps
    ]
    common = set[int].intersection(*map(set[int], complete))
    if not common:
        found = "; ".join(
            f"{job} has {', '.join(map(str, sorted(folders))) or 'none'}"
            for job, folders in zip(folders, complete, strict=True)
        )
        raise UserError(f"no step that all have: {found}; leave some out, or give a step folder of each")
    return [folders[max(common)] for folders in complete]


def _consumed_by_job(manifest: Manifest) -> int:
    """Return the samples that a separate job has read: without those of local steps that it left out."""
    left_out = manifest.counters.get("total/skipped_ahead", 0.0) / max(1, manifest.step)
    return round(manifest.consumed_samples * (1 - left_out))


def _tokens_of(manifest: Manifest, samples: int) -> int:
    return round(samples * manifest.counters.get(TOKENS_PER_SAMPLE, manifest.architecture.seq_length))


def _model(manifest: Manifest) -> Architecture:
    """Return what must be the same in all files whose weights are averaged: not the padding of the vocabulary."""
    return replace(manifest.architecture, padded_vocab_size=manifest.architecture.vocab_size)
