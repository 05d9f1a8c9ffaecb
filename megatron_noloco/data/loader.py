"""What one rank reads in each local step, read while the step before it computes."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from megatron_noloco.data.microbatches import Microbatch, MicrobatchSource
from megatron_noloco.monitor import SLOWEST, Record, timed, unrecorded
from megatron_noloco.plans.routing import Routes, Routing
from megatron_noloco.plans.topology import Position, Topology

Address = tuple[int, int]  # replica, microbatch


class StepInput(NamedTuple):
    """What a local step needs: its microbatches, and the routes that they take."""

    read: Callable[[int, int], Microbatch]  # (replica, microbatch) of this step
    routes: Routes


@dataclass(frozen=True)
class Reader:
    """A rank as far as reading is concerned."""

    replica: int
    dp: int
    chunks: tuple[int, ...]  # the numbers, in the model, of those of its chunks that read

    @classmethod
    def at(cls, topology: Topology, position: Position, separate_documents: bool) -> "Reader":
        """The two ends of a pipeline read tokens and labels, all others the borders of documents, if anything."""
        own = range(position.stage, topology.pp * topology.vpp, topology.pp)
        ends = (0, topology.pp * topology.vpp - 1)
        chunks = tuple(chunk for chunk in own if separate_documents or chunk in ends)
        return cls(position.replica, position.dp, chunks)

    def addresses(self, routes: Routes, microbatches: int) -> set[Address]:
        """All that this rank reads: what is routed to its chunks, which to the first is its own replica's."""
        return {
            (routes.origin(chunk, self.replica, microbatch), microbatch)
            for chunk in self.chunks
            for microbatch in range(microbatches)
        }


class StepLoader:
    """Microbatches and routes, step by step; a thread reads one step ahead.

    Where there is a GPU, microbatches are in pinned memory: copying them to the device waits for nothing.

    Args:
        local_steps: k, from round to round.
        record: takes what the training loop waits for data, as "data/wait_seconds".
    """

    def __init__(
        self,
        source: MicrobatchSource,
        routing: Routing,
        local_steps: int,
        reader: Reader,
        record: Record = unrecorded,
    ) -> None:
        self._record = record
        self._source = source
        self._routing = routing
        self._local_steps = local_steps
        self._reader = reader
        self._gpu = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="data", initializer=self._begin_thread)
        self._steps: dict[int, dict[Address, Future[Microbatch]]] = {}  # this step's and the next one's

    def step(self, step: int) -> StepInput:
        """The input of local step `step` (from 0); begins to read the next one's and forgets those before."""
        self._steps = {number: self._steps.get(number) or self._begin(number) for number in (step, step + 1)}
        return StepInput(partial(self._read, step), self._routes(step))

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _routes(self, step: int) -> Routes:
        return self._routing.routes(step, step // self._local_steps)

    def _begin(self, step: int) -> dict[Address, Future[Microbatch]]:
        addresses = sorted(self._reader.addresses(self._routes(step), self._source.plan.microbatches))
        return {
            (replica, microbatch): self._thread.submit(self._load, step, replica, microbatch)
            for replica, microbatch in addresses
        }

    def _begin_thread(self) -> None:
        if self._gpu is not None:
            torch.cuda.set_device(self._gpu)  # a new thread begins on GPU 0

    def _load(self, step: int, replica: int, microbatch: int) -> Microbatch:
        read = self._source.microbatch(step, replica, self._reader.dp, microbatch)
        return read if self._gpu is None else read.pinned()

    def _read(self, step: int, replica: int, microbatch: int) -> Microbatch:
        with timed(self._record, "data/wait_seconds", SLOWEST):
            return self._steps[step][replica, microbatch].result()
