"""Save the state of one rank."""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_noloco.checkpoint import catalog
from megatron_noloco.checkpoint.catalog import FileRecord, Manifest
from megatron_noloco.checkpoint.run_settings import CheckpointSettings
from megatron_noloco.engine.layout import FlatPart
from megatron_noloco.engine.replica import ReplicaEngine
from megatron_noloco.files import write_tensors, write_whole
from megatron_noloco.job.activity import line_of
from megatron_noloco.job.run_folder import OccupiedFolder
from megatron_noloco.model.dropout import random_state
from megatron_noloco.outer import VECTORS, Rounds
from megatron_noloco.outer.vectors import Buffers
from megatron_noloco.plans.sample_order import BatchPlan


@dataclass(frozen=True)
class SaveReport:
    """The outcome of a save on this rank; `error` is None while the files are being written, too."""

    step: int
    pause_seconds: float  # for which the save stopped the training
    error: str | None


class Checkpointer:
    """Writes this rank's files; never waits for another rank.

    Training continues after an error of the system (disk full): the last complete checkpoint is still there. Any
    other error of a save is raised, such as FolderLostError.

    Attributes:
        place: the run's folder.
        saved_step: the step of the last save; before it, the step at which the run started.
        last_save_failed: whether the last finished save failed.
    """

    def __init__(
        self, settings: CheckpointSettings, engine: ReplicaEngine, outer: Rounds, plan: BatchPlan
    ) -> None:
        self.settings = settings
        self.engine = engine
        self.outer = outer
        self.plan = plan
        self.position = engine.groups.position
        self.place = OccupiedFolder(settings.folder.parent)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self._copies = Buffers()
        self.saved_step = plan.start_step
        self.last_save_failed = False

    def save(self, step: int, counters: dict[str, float]) -> SaveReport:
        """Write the state after `step` local steps; with `async_save` a copy of it, in the background."""
        started = time.perf_counter()
        step_before, error_before = self.saved_step, self.wait()  # so that at most one copy is in memory
        self.saved_step = step
        # In the background only copies are written, since training changes the tensors.
        copy = self.settings.async_save
        tensors = {name: self._on_host(name, tensor, copy) for name, tensor in self._tensors().items()}
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        numbers = self.engine.numbers()
        self._writing = self._writer.submit(self._write, step, tensors, numbers, counters)
        error = None if copy else self.wait()
        pause_seconds = time.perf_counter() - started
        if error_before is not None:
            return SaveReport(step_before, pause_seconds, error_before)
        return SaveReport(step, pause_seconds, error)

    def _on_host(self, name: str, tensor: Tensor, copy: bool) -> Tensor:
        """Return a tensor in host memory; from a GPU it is there once the current stream has come here.

        The memory of such copies is kept for the next save: pinned, since copies to other memory are several times
        slower, and to pin it takes seconds.
        """
        if tensor.device.type == "cpu":
            return tensor.to("cpu", copy=copy)
        return self._copies.get(name, tensor.dtype, *tensor.shape).copy_(tensor, non_blocking=True)

    def newest_step(self) -> int | None:
        """Return the newest step of which all ranks have written their files."""
        return catalog.step_of(self.settings.folder / catalog.latest(self.settings.folder)[0])

    def wait(self) -> str | None:
        """Wait until the last save has finished; return why it failed, None if it did not."""
        writing, self._writing = self._writing, None
        if writing is None:
            return None
        try:
            writing.result()
        except OSError as error:
            self.last_save_failed = True
            return line_of(error)
        self.last_save_failed = False
        return None

    def close(self) -> str | None:
        """Wait like `wait`, then end the thread that writes."""
        error = self.wait()
        self._writer.shutdown()
        return error

    def _tensors(self) -> dict[str, Tensor]:
        """Return all tensors of this rank's state by name; they are not copied."""
        outer = _split_by_group(self.outer.state(), self.engine.parameter_layout())
        return self.engine.tensors() | outer | random_state()

    def _write(
        self, step: int, tensors: dict[str, Tensor], numbers: dict[str, Any], counters: dict[str, float]
    ) -> None:
        self.place.check()
        step_folder = catalog.step_folder(self.settings.folder, step)
        folder = catalog.replica_folder(step_folder, self.position.replica)
        folder.mkdir(parents=True, exist_ok=True)
        files: dict[Path, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            files.setdefault(catalog.file_of(step_folder, self.position, name), {})[name] = tensor
        for path, content in files.items():
            write_whole(path, partial(write_tensors, tensors=content))
        topology = self.engine.groups.topology
        manifest = Manifest(
            step=step,
            consumed_samples=self.plan.consumed(step),
            topology=topology,
            position=self.position,
            config=self.settings.run,
            files={path.name: FileRecord.of(path) for path in files},
            architecture=self.engine.stage.architecture,
            layout=self.engine.parameter_layout(),
            engine=numbers,
            counters=counters,
            tokenizer=self.settings.tokenizer,
            first_weights=self.settings.first_weights,
        )
        manifest.write(folder)
        catalog.publish(self.settings.folder, step_folder, topology.world_size, self.settings.keep_last)


def _split_by_group(state: Mapping[str, Tensor], layout: Sequence[FlatPart]) -> dict[str, Tensor]:
    """Cut each vector NAME of the outer optimizer into NAME.0, NAME.1, ..., by group of the inner optimizer."""
    lengths = [part.length for part in layout]
    pieces = {
        f"{name}.{group}": piece
        for name in VECTORS
        if name in state
        for group, piece in enumerate(state[name].split(lengths))
    }
    return pieces | {name: tensor for name, tensor in state.items() if name not in VECTORS}
