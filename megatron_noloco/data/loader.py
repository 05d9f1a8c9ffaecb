"""What one rank reads in each local step, read while the step before it computes."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from torch import Tensor

from megatron_noloco.data.microbatches import MicrobatchSource
from megatron_noloco.metrics import SLOWEST, Record, unrecorded
from megatron_noloco.plans.routing import Routes, Routing
from megatron_noloco.plans.topology import Position, Topology

Microbatch = tuple[Tensor, Tensor]  # tokens and labels, both int64 [micro_batch_size, seq_length]
Address = tuple[int, int]  # replica, microbatch


class StepInput(NamedTuple):
    """What a local step needs: its microbatches, and the routes that they take."""

    read: Callable[[int, int], Microbatch]  # (replica, microbatch) of this step
    routes: Routes


@dataclass(frozen=True)
class Reader:
    """A rank as far as reading is concerned: only the two ends of a pipeline read."""

    replica: int
    dp: int
    reads_tokens: bool  # holds the model's first chunk
    reads_labels: bool  # holds its last chunk
    last_chunk: int  # the number of the last chunk; with virtual stages a rank holds several

    @classmethod
    def at(cls, topology: Topology, position: Position) -> "Reader":
        first, last = position.stage == 0, position.stage == topology.pp - 1
        return cls(position.replica, position.dp, first, last, topology.pp * topology.vpp - 1)

    def addresses(self, routes: Routes, microbatches: int) -> set[Address]:
        """All that this rank reads: tokens of its own replica, and labels of what is routed to it."""
        addresses: set[Address] = set()
        for microbatch in range(microbatches):
            if self.reads_tokens:
                addresses.add((self.replica, microbatch))
            if self.reads_labels:
                addresses.add((routes.origin(self.last_chunk, self.replica, microbatch), microbatch))
        return addresses


class StepLoader:
    """Microbatches and routes, step by step; a thread reads one step ahead.

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
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="data")
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
            (replica, microbatch): self._thread.submit(
                self._source.microbatch, step, replica, self._reader.dp, microbatch
            )
            for replica, microbatch in addresses
        }

    def _read(self, step: int, replica: int, microbatch: int) -> Microbatch:
        started = time.perf_counter()
        held = self._steps[step][replica, microbatch].result()
        self._record("data/wait_seconds", time.perf_counter() - started, SLOWEST)
        return held
