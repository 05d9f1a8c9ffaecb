"""Saving one rank's part of a run."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from megatron_noloco.checkpoint import catalog
from megatron_noloco.checkpoint.catalog import Manifest
from megatron_noloco.checkpoint.files import FileRecord
from megatron_noloco.checkpoint.settings import CheckpointSettings, SaveReport
from megatron_noloco.checkpoint.vector import cut
from megatron_noloco.engine.replica import ReplicaEngine
from megatron_noloco.files import write_whole
from megatron_noloco.model.dropout import random_state
from megatron_noloco.outer import Rounds
from megatron_noloco.plans.samples import BatchPlan


class Checkpointer:
    """Writes this rank's files; never waits for another rank.

    A save that fails (disk full, folder gone) is reported and training continues: the last complete checkpoint
    is still there.
    """

    def __init__(
        self,
        settings: CheckpointSettings,
        engine: ReplicaEngine,
        outer: Rounds,
        plan: BatchPlan,
    ) -> None:
        self.settings = settings
        self.engine = engine
        self.outer = outer
        self.plan = plan
        self.position = engine.groups.position
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self.saved_step = plan.start_step  # resumed from there, or nothing to save yet
        self.last_save_failed = False

    def save(self, step: int, counters: dict[str, float]) -> SaveReport:
        """Write the state after `step` local steps; with `async_save`, a copy of it, in the background."""
        started = time.perf_counter()
        step_before, error_before = self.saved_step, self.wait()  # at most one copy is in memory
        self.saved_step = step
        copy = self.settings.async_save  # training must not touch what is being written
        tensors = {name: tensor.to("cpu", copy=copy) for name, tensor in self._tensors().items()}
        numbers = self.engine.numbers()
        self._writing = self._writer.submit(self._write, step, tensors, numbers, counters)
        error = None if self.settings.async_save else self.wait()
        pause_seconds = time.perf_counter() - started
        if error_before is not None:
            return SaveReport(step_before, pause_seconds, error_before)
        return SaveReport(step, pause_seconds, error)

    def wait(self) -> str | None:
        """Until nothing is being written; returns why the last save failed, if it did."""
        writing, self._writing = self._writing, None
        if writing is None:
            return None
        try:
            writing.result()
        except (OSError, RuntimeError, SafetensorError) as error:  # the latter two wrap system errors
            self.last_save_failed = True
            return " ".join(str(error).split())
        self.last_save_failed = False
        return None

    def _write(
        self, step: int, tensors: dict[str, Tensor], numbers: dict[str, Any], counters: dict[str, float]
    ) -> None:
        step_folder = catalog.step_folder(self.settings.folder, step)
        folder = catalog.replica_folder(step_folder, self.position.replica)
        folder.mkdir(parents=True, exist_ok=True)
        files: dict[Path, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            files.setdefault(catalog.file_of(step_folder, self.position, name), {})[name] = tensor
        records: dict[str, FileRecord] = {}
        for path, content in files.items():
            write_whole(path, partial(save_file, content))
            records[path.name] = FileRecord.of(path)
        topology = self.engine.groups.topology
        Manifest(
            step=step,
            consumed_samples=self.plan.consumed(step),
            topology=topology,
            position=self.position,
            config=self.settings.run,
            files=records,
            architecture=self.engine.stage.architecture,
            layout=self.engine.parameter_layout(),
            engine=numbers,
            counters=counters,
        ).write(folder)
        catalog.publish(self.settings.folder, step_folder, topology.world_size, self.settings.keep_last)

    def _tensors(self) -> dict[str, Tensor]:
        """All of this rank's state but for the engine's numbers, by name; live."""
        outer = cut(self.outer.state(), self.engine.parameter_layout())
        return self.engine.tensors() | outer | random_state()

    def close(self) -> str | None:
        error = self.wait()
        self._writer.shutdown()
        return error
