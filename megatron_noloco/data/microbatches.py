"""Microbatches as pure functions of their address: every rank that knows the address can read it."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_noloco.data.dataset import SampleDataset
from megatron_noloco.plans.samples import BatchPlan, BlendedOrder, SampleOrder

VALIDATION_SEED = 0  # not the run's seed: runs with different seeds measure on the same samples


class Microbatch(NamedTuple):
    """Samples side by side; each int64, shape [micro_batch_size, seq_length]."""

    tokens: Tensor
    labels: Tensor  # IGNORED where there is no loss
    documents: Tensor | None  # the number of each token's document in its sample; None: not told apart

    def pinned(self) -> "Microbatch":
        """In memory from which a GPU copies without the host."""
        tokens, labels, documents = self
        pinned = documents if documents is None else documents.pin_memory()
        return Microbatch(tokens.pin_memory(), labels.pin_memory(), pinned)


class MicrobatchSource:
    """Training microbatches, of every replica, on every rank.

    No state moves, so a resume needs only the step, and every stage can read the labels and the borders of
    documents of a microbatch that was routed to it from another replica.
    """

    def __init__(self, dataset: SampleDataset, order: SampleOrder | BlendedOrder, plan: BatchPlan) -> None:
        assert order.samples == len(dataset), f"an order of {order.samples} for {len(dataset)} samples"
        self.dataset = dataset
        self.order = order
        self.plan = plan

    def microbatch(self, step: int, replica: int, dp: int, microbatch: int) -> Microbatch:
        first = self.plan.first(step, replica, dp, microbatch)
        return gather(self.dataset, self.order.ids(first, self.plan.micro_batch_size))


class ValidationSource:
    """The same `count` validation microbatches for every replica, every evaluation and every run.

    They are the first of one fixed shuffle of the split: its beginning alone would be a few long files.
    """

    def __init__(
        self,
        dataset: SampleDataset,
        micro_batch_size: int,
        count: int | None,
        weight: float = 1.0,
        multiple_of: int = 1,
    ) -> None:
        """`count` None: all of the split, but for a rest that does not fill `multiple_of` microbatches.

        Args:
            weight: in its blend.
            multiple_of: how many microbatches a pipeline takes at once; another `count` is rounded up to it.
        """
        if count is None:
            count = max(1, len(dataset) // micro_batch_size // multiple_of) * multiple_of
        else:
            count = -(-count // multiple_of) * multiple_of
        needed = count * micro_batch_size
        if needed > len(dataset):
            raise ValueError(
                f"corpus too small: {dataset.name} has {len(dataset)} samples of {dataset.seq_length}, "
                f"{count} microbatches of {micro_batch_size} need {needed}"
            )
        self.dataset = dataset
        self.micro_batch_size = micro_batch_size
        self.count = count
        self.weight = weight
        self.order = SampleOrder(len(dataset), VALIDATION_SEED)

    def __len__(self) -> int:
        return self.count

    def microbatch(self, index: int) -> Microbatch:
        if not 0 <= index < self.count:
            raise IndexError(f"validation microbatch {index} is outside 0..{self.count - 1}")
        return gather(self.dataset, self.order.ids(index * self.micro_batch_size, self.micro_batch_size))


def gather(dataset: SampleDataset, ids: np.ndarray) -> Microbatch:
    """The samples of these ids as one microbatch."""
    tokens, labels, documents = zip(*(dataset[index] for index in ids.tolist()), strict=True)
    return Microbatch(
        torch.from_numpy(np.stack(tokens)),
        torch.from_numpy(np.stack(labels)),
        None if documents[0] is None else torch.from_numpy(np.stack(documents)),
    )
