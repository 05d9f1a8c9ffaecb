"""Microbatches, each a pure function of its address, and the thread that reads them ahead."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_noloco.data.blend import SampleDataset
from megatron_noloco.data.samples import IGNORED, in_samples
from megatron_noloco.errors import UserError
from megatron_noloco.monitor.metrics import Record, timed, unrecorded
from megatron_noloco.plans.routing import Routes, Routing
from megatron_noloco.plans.sample_order import BatchPlan, Order
from megatron_noloco.plans.topology import Position, Topology

_VALIDATION_SEED = 0  # not the run's seed: all runs are evaluated on the same samples


class Microbatch(NamedTuple):
    """Samples side by side; each int64, shape [micro_batch_size, seq_length]."""

    tokens: Tensor
    labels: Tensor  # IGNORED where there is no loss
    documents: Tensor | None  # the number of each token's document in its sample; None: not separated

    def pinned(self) -> "Microbatch":
        """Return a copy in pinned memory, from which a GPU copies asynchronously."""
        documents = None if self.documents is None else self.documents.pin_memory()
        return Microbatch(self.tokens.pin_memory(), self.labels.pin_memory(), documents)


def training_microbatch(
    dataset: SampleDataset, order: Order, plan: BatchPlan, dp: int, step: int, replica: int, microbatch: int
) -> Microbatch:
    """Return a training microbatch of any replica, on any rank.

    It depends on its address alone: a resume needs the step only, and a stage can read the labels and document
    borders of a microbatch that was routed to it from another replica.
    """
    return gather(dataset, order.ids(plan.first(step, replica, dp, microbatch), plan.micro_batch_size))


class ValidationSource:
    """The `count` validation microbatches, the same for every replica, evaluation and run.

    They are the first of a fixed shuffle: the beginning of the split itself may be a few long files. What is left
    of the last one, and of the pipeline, is filled with samples whose labels have no loss.

    Attributes:
        available: how many hold all samples of the split.
    """

    def __init__(
        self,
        dataset: SampleDataset,
        micro_batch_size: int,
        count: int | None,
        weight: float = 1.0,
        multiple_of: int = 1,
    ) -> None:
        """Raise UserError when the split has too few samples.

        Args:
            count: number of microbatches, rounded up to a multiple of `multiple_of`; None: those that hold all.
            weight: share of the dataset in its blend.
            multiple_of: number of microbatches that the pipeline takes at once.
        """
        self.available = -(-len(dataset) // micro_batch_size)
        count = count or self.available
        if count > self.available:
            needed = in_samples(count * micro_batch_size, dataset.seq_length)
            raise UserError(
                f"corpus too small: microbatches x samples in each = {count} x {micro_batch_size} need {needed}, "
                f"{dataset.name} has {len(dataset)}; lower evaluation.iters"
            )
        self.dataset, self.micro_batch_size = dataset, micro_batch_size
        self.count, self.weight = -(-count // multiple_of) * multiple_of, weight
        self.order = Order.of(len(dataset), _VALIDATION_SEED)

    def __len__(self) -> int:
        return self.count

    def microbatch(self, index: int) -> Microbatch:
        assert 0 <= index < self.count, index
        first = index * self.micro_batch_size
        found = gather(self.dataset, self.order.ids(first, self.micro_batch_size))
        found.labels[max(0, len(self.dataset) - first) :] = IGNORED
        return found


def gather(dataset: SampleDataset, ids: np.ndarray) -> Microbatch:
    """Return the samples of these ids as one microbatch."""
    tokens, labels, documents = zip(*(dataset[index] for index in ids.tolist()), strict=True)
    return Microbatch(
        torch.from_numpy(np.stack(tokens)),
        torch.from_numpy(np.stack(labels)),
        None if documents[0] is None else torch.from_numpy(np.stack(documents)),
    )


Address = tuple[int, int]  # replica, microbatch


class StepInput(NamedTuple):
    """The microbatches of a local step, and their routes."""

    read: Callable[[int, int], Microbatch]  # called with (replica, microbatch) of this step
    routes: Routes


def addresses_of(
    topology: Topology, position: Position, separate_documents: bool, microbatches: int, routes: Routes
) -> set[Address]:
    """Return the microbatches that a rank reads: those routed to its chunks of the model.

    The first and the last chunk of the model read tokens and labels; the first one those of its own replica. The
    chunks between read the borders of documents, and only if `separate_documents`.
    """
    own = range(position.stage, topology.pp * topology.vpp, topology.pp)
    ends = (0, topology.pp * topology.vpp - 1)
    return {
        (routes.origin(chunk, position.replica, microbatch), microbatch)
        for chunk in own
        if separate_documents or chunk in ends
        for microbatch in range(microbatches)
    }


class Loader:
    """Microbatches and routes, step by step; a thread reads one step ahead.

    On a machine with a GPU, microbatches are in pinned memory, so that the copy to the device is asynchronous.

    Args:
        read: returns the training microbatch of (step, replica, microbatch).
        addresses: returns what this rank reads on these routes.
        local_steps: k, the local steps of a round.
        record: receives "data/wait_seconds", for which the training loop waits for data.
    """

    def __init__(
        self,
        read: Callable[[int, int, int], Microbatch],
        addresses: Callable[[Routes], set[Address]],
        routing: Routing,
        local_steps: int,
        record: Record = unrecorded,
    ) -> None:
        self._read, self._addresses, self._record = read, addresses, record
        self._routing, self._local_steps = routing, local_steps
        self._gpu = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="data", initializer=self._set_device)
        self._steps: dict[int, dict[Address, Future[Microbatch]]] = {}  # of this step and the next

    def step(self, step: int) -> StepInput:
        """Return the input of local step `step` (from 0), begin to read the next one's, and drop earlier ones."""
        self._steps = {number: self._steps.get(number) or self._submit(number) for number in (step, step + 1)}
        return StepInput(partial(self._wait_for, step), self._routes(step))

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _routes(self, step: int) -> Routes:
        return self._routing.routes(step, step // self._local_steps)

    def _submit(self, step: int) -> dict[Address, Future[Microbatch]]:
        addresses = sorted(self._addresses(self._routes(step)))
        return {address: self._thread.submit(self._load, step, *address) for address in addresses}

    def _set_device(self) -> None:
        if self._gpu is not None:
            torch.cuda.set_device(self._gpu)  # a new thread begins on GPU 0

    def _load(self, step: int, replica: int, microbatch: int) -> Microbatch:
        read = self._read(step, replica, microbatch)
        return read if self._gpu is None else read.pinned()

    def _wait_for(self, step: int, replica: int, microbatch: int) -> Microbatch:
        with timed(self._record, "data/wait_seconds"):
            return self._steps[step][replica, microbatch].result()
