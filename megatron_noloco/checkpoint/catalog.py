"""The folder of checkpoints: its file names, the manifest of every rank, and which steps are complete."""

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter

from megatron_noloco.engine.layout import FlatPart
from megatron_noloco.errors import UserError
from megatron_noloco.files import outside, write_text
from megatron_noloco.model.architecture import Architecture
from megatron_noloco.plans.topology import Position, Topology

FORMAT = 3
MEAN_OF_REPLICAS = (
    "mean_of_replicas"  # counter: of how many separate jobs the weights are the mean at the end
)
TOKENS_PER_SAMPLE = "tokens_per_sample"  # counter: mean tokens in a training sample, padding left out
WEIGHTS = "slow_weights"  # the vector that a model is made from
_STEP = re.compile(r"step_(\d{8,})$")
_SET_ASIDE = ".set_aside"  # after the name of a step
_READ_BYTES = 1 << 20


class DamagedCheckpointError(UserError):
    """A file is missing, cut short or altered; the message names it."""


class IncompleteError(DamagedCheckpointError):
    """A manifest is missing, as in a step whose save was interrupted."""


# Files


@dataclass(frozen=True)
class FileRecord:
    """Size and checksum of a file."""

    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> "FileRecord":
        """Return size and checksum of a file, which is read."""
        with path.open("rb", buffering=0) as file:
            digest = hashlib.file_digest(file, "sha256", _bufsize=_READ_BYTES)
        return cls(path.stat().st_size, digest.hexdigest())


def verify(folder: Path, files: dict[str, FileRecord]) -> None:
    """Raise DamagedCheckpointError unless every file in `folder` has its recorded size and checksum."""
    for name, expected in files.items():
        path = folder / name
        try:
            size = path.stat().st_size
            if size != expected.bytes:
                raise DamagedCheckpointError(f"{path}: {size} bytes instead of {expected.bytes}")
            if FileRecord.of(path) != expected:
                raise DamagedCheckpointError(f"{path}: checksum does not match its manifest")
        except OSError as error:
            raise DamagedCheckpointError(f"{path}: {error.strerror}") from None


def rank_name(position: Position) -> str:
    return f"stage_{position.stage:02d}_dp_{position.dp:02d}_tp_{position.tp:02d}"


def manifest_name(position: Position) -> str:
    return f"{rank_name(position)}.json"


def file_of(step_folder: Path, position: Position, name: str) -> Path:
    """Return the file in which a rank saves the tensor `name`; slow weights have a file of their own."""
    resume = "" if name.startswith(WEIGHTS) else "resume_"
    folder = replica_folder(step_folder, position.replica)
    return folder / f"{resume}{rank_name(position)}.safetensors"


def replica_folder(step_folder: Path, replica: int) -> Path:
    return step_folder / f"replica_{replica:02d}"


def step_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step_{step:08d}"


# Manifests


@dataclass(frozen=True)
class Manifest:
    """What one rank saved, and the state of the run at that step."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # of its fields' values, too

    step: int  # local steps done
    consumed_samples: int  # by all replicas of the job
    topology: Topology
    position: Position
    config: dict[str, Any]
    files: dict[str, FileRecord]
    architecture: Architecture  # of the model that is split over the ranks
    layout: list[FlatPart]  # of this rank's flat vectors
    engine: dict[str, Any] = field(default_factory=dict)  # see `ReplicaEngine.numbers`
    counters: dict[str, float] = field(default_factory=dict)
    tokenizer: dict[str, str] = field(default_factory=dict)  # see `CheckpointSettings`
    first_weights: str | None = None  # see `CheckpointSettings`

    def write(self, folder: Path) -> None:
        """Write the manifest, which commits the rank's files: files without one are ignored."""
        content = json.dumps({"format": FORMAT, **asdict(self)}, indent=1)
        write_text(folder / manifest_name(self.position), content)

    @classmethod
    def read(cls, path: Path) -> "Manifest":
        """Read a manifest.

        Raises IncompleteError when it is missing, DamagedCheckpointError when it is none, UserError when it is too
        old.
        """
        try:
            raw = json.loads(path.read_bytes())
            if raw.pop("format") != FORMAT:
                raise DamagedCheckpointError(f"{path}: written by another version of this program")
            if "slots" in raw["topology"]:
                raise UserError(
                    f"{path}: of megatron_noloco 0.3 or before; version 0.4 continues and exports it"
                )
            return _MANIFEST.validate_python(raw)
        except FileNotFoundError as error:
            raise IncompleteError(f"{path}: {error.strerror}") from None
        except OSError as error:
            raise DamagedCheckpointError(f"{path}: {error.strerror}") from None
        except UserError:  # a ValueError, too
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise DamagedCheckpointError(f"{path}: not a manifest") from None


_MANIFEST = TypeAdapter(Manifest)


def read_manifests(folder: Path) -> list[Manifest]:
    """Read the manifests of all ranks of a step, in rank order.

    Raises DamagedCheckpointError, naming the first one that is missing (IncompleteError) or unreadable.
    """
    try:
        replicas = [path for path in folder.iterdir() if path.name.startswith("replica_")]
        files = [file for replica in replicas for file in replica.iterdir()]
    except OSError as error:
        raise DamagedCheckpointError(f"{error.filename}: {error.strerror}") from None
    first = min((file for file in files if file.match("stage_*.json")), default=None)
    if first is None:
        raise IncompleteError(f"{folder}: no manifest; it was never completed")
    topology = Manifest.read(first).topology
    manifests = []
    for position in map(topology.position, range(topology.world_size)):
        manifest = Manifest.read(replica_folder(folder, position.replica) / manifest_name(position))
        if (manifest.topology, manifest.position, manifest.step) != (topology, position, step_of(folder)):
            raise DamagedCheckpointError(f"{folder}: its manifests do not belong together")
        manifests.append(manifest)
    return manifests


# Steps


def step_of(folder: Path) -> int | None:
    """Return the step in a folder's name; None for any other name."""
    match = _STEP.match(folder.name)
    return int(match[1]) if match else None


def steps(checkpoints: Path) -> list[Path]:
    """Return the step folders, complete or not, newest first."""
    if not checkpoints.is_dir():
        return []
    found = [folder for folder in checkpoints.iterdir() if step_of(folder) is not None]
    return sorted(found, key=lambda folder: step_of(folder) or 0, reverse=True)


def continued_from(checkpoints: Path, load: str) -> Iterator[Path]:
    """Yield the steps, also damaged ones, that the run has saved since it started from the step folder `load`.

    The newest comes first. None where the newest complete one was saved by a run with another `checkpoint.load`.
    """
    for folder in steps(checkpoints):
        if _saved_load(folder) == load:
            yield folder
        elif is_complete(folder):
            return


def _saved_load(step: Path) -> Any:
    """Return `checkpoint.load` of the run that saved a step, complete or not; None where no manifest says it."""
    for path in sorted(step.glob("replica_*/stage_*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            return json.loads(path.read_bytes())["config"]["checkpoint"]["load"]
    return None


def is_complete(folder: Path) -> bool:
    """Return whether all ranks of a step have written their manifests."""
    return _problem(folder) is None


def _problem(folder: Path) -> DamagedCheckpointError | None:
    """Return what is wrong with the manifests of a step; None where it is complete."""
    try:
        read_manifests(folder)
    except DamagedCheckpointError as error:
        return error
    return None


def publish(checkpoints: Path, folder: Path, world_size: int, keep_last: int) -> None:
    """Name a step in `latest` and remove the steps beyond `keep_last`, if this rank completes the step.

    Every rank calls it after writing its manifest. Of ranks that finish at the same time several may do the work,
    with the same result.
    """
    written = sum(1 for _ in folder.glob("replica_*/stage_*.json"))  # a cheap test; most ranks return here
    if written < world_size or not is_complete(folder):
        return
    complete = write_latest(checkpoints)
    for old in steps(checkpoints):
        if len(complete) > keep_last and (step_of(old) or 0) < (step_of(complete[keep_last - 1]) or 0):
            with contextlib.suppress(OSError):  # another rank may be removing it, too
                shutil.rmtree(old)


def write_latest(checkpoints: Path) -> list[Path]:
    """Write the newest complete step to `latest`, or remove the file; return all complete steps, newest first."""
    complete = [path for path in steps(checkpoints) if is_complete(path)]
    if complete:
        write_text(checkpoints / "latest", complete[0].name + "\n")
    else:
        (checkpoints / "latest").unlink(missing_ok=True)
    return complete


def latest(checkpoints: Path) -> tuple[str, str]:
    """Return the name of the newest complete step, "" if there is none, and a line if `latest` does not name it.

    The step that `latest` names was complete. It is also returned where its manifests are damaged since, or where
    they are missing and no other step is complete: otherwise the run would seem to have saved nothing.
    """
    path, named, folders = checkpoints / "latest", "", steps(checkpoints)
    with contextlib.suppress(OSError):
        named = path.read_text(errors="replace").strip()
    problem = next((_problem(step) for step in folders if step.name == named), None)
    is_there = any(step.name == named for step in folders)
    found = next(
        (
            step.name
            for step in folders
            if (not isinstance(problem, IncompleteError) if step.name == named else is_complete(step))
        ),
        named if is_there else "",
    )
    if found == named:  # or both are ""
        return found, ""
    says = "is empty" if path.exists() else "is missing"
    if named:
        state = ", which is not complete" if problem else "" if is_there else ", which is not there"
        says = f'names "{outside(named)[:40]}"{state}'
    return found, f"{path}: {says}" + (f"; the newest complete step is {found}" if found else "")


def set_aside(folder: Path) -> Path:
    """Rename a step folder that the resumed run will write again, so that old and new files never mix."""
    endings = chain([""], map("_{}".format, count(1)))
    paths = (folder.with_name(f"{folder.name}{_SET_ASIDE}{ending}") for ending in endings)
    return folder.rename(next(path for path in paths if not path.exists()))


def advice_on_set_aside(folder: Path) -> str | None:
    """Return what is to be done to use a folder that `set_aside` has renamed; None for any other."""
    step, aside, _ = folder.name.partition(_SET_ASIDE)
    if not aside or not folder.exists() or step_of(folder.with_name(step)) is None:
        return None
    if folder.with_name(step).exists():
        return (
            f"was set aside, and {step} is there anew; move it into another folder as {step}, and name that"
        )
    return f"was set aside; rename it to {step}, and name that"
