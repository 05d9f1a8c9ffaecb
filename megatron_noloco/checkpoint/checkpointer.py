"""Saving and resuming one rank's part of a run."""

import copy
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._pytree import tree_map

from megatron_noloco.checkpoint import catalog, elastic
from megatron_noloco.checkpoint.catalog import Manifest
from megatron_noloco.checkpoint.files import FileRecord
from megatron_noloco.checkpoint.settings import CheckpointSettings, SaveReport
from megatron_noloco.engine.replica import ReplicaEngine
from megatron_noloco.files import write_whole
from megatron_noloco.model.dropout import random_state, set_random_state
from megatron_noloco.outer import Rounds
from megatron_noloco.plans.samples import BatchPlan

Write = Callable[[Path], None]


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
        states = self.engine.collect_state()
        tensors = self._tensors()
        if self.settings.async_save:
            states, tensors = _snapshot(states), _snapshot(tensors)
        files: dict[str, Write] = {name: partial(torch.save, state) for name, state in states.items()}
        files[f"{catalog.rank_name(self.position)}.safetensors"] = partial(save_file, tensors)
        self._writing = self._writer.submit(self._write, step, files, counters)
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

    def _write(self, step: int, files: dict[str, Write], counters: dict[str, float]) -> None:
        step_folder = catalog.step_folder(self.settings.folder, step)
        folder = catalog.replica_folder(step_folder, self.position.replica)
        folder.mkdir(parents=True, exist_ok=True)
        records: dict[str, FileRecord] = {}
        for name, write in files.items():
            write_whole(folder / name, write)
            records[name] = FileRecord.of(folder / name)
        topology = self.engine.groups.topology
        Manifest(
            step=step,
            consumed_samples=self.plan.consumed(step),
            topology=topology,
            position=self.position,
            config=self.settings.run,
            files=records,
            layout=self.engine.parameter_layout(),
            counters=counters,
        ).write(folder)
        catalog.publish(self.settings.folder, step_folder, topology.world_size, self.settings.keep_last)

    def _tensors(self) -> dict[str, Tensor]:
        """What DeepSpeed's files do not hold."""
        return {name: tensor.cpu() for name, tensor in (self.outer.state() | random_state()).items()}

    def restore(self, folder: Path, saved: Manifest) -> None:
        """Continue from the state of this rank's source in `folder`, which was verified; see `resume`."""
        replicas = self.engine.groups.topology.replicas
        source = elastic.source_replica(self.position.replica, saved.topology.replicas)
        source_folder = catalog.replica_folder(folder, source)
        self.engine.restore_state(source_folder)
        tensors = load_file(source_folder / f"{catalog.rank_name(self.position)}.safetensors")
        if source == self.position.replica:
            set_random_state(tensors)  # a clone keeps the dropout of its own place
        if "outer_momentum" not in tensors:  # written without rounds: the outer optimizer starts here
            tensors["outer_momentum"] = torch.zeros_like(tensors["slow_weights"])
        if self.settings.fold and replicas < saved.topology.replicas:
            shift = elastic.shift_of_mean(folder, self.position, saved.topology.replicas, replicas)
            for name, value in shift.items():
                tensors[name] += value
            self.engine.weights.add(shift["slow_weights"])
        self.outer.restore(tensors)

    def close(self) -> str | None:
        error = self.wait()
        self._writer.shutdown()
        return error


def _snapshot(state: Any) -> Any:
    """A copy in host memory that training does not touch."""
    return tree_map(
        lambda leaf: leaf.detach().to("cpu", copy=True) if isinstance(leaf, Tensor) else copy.deepcopy(leaf),
        state,
        is_leaf=lambda node: isinstance(node, torch.Size),  # would come back as a plain tuple
    )
