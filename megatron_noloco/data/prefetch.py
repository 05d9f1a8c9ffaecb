"""The next step's microbatches, read while this step computes."""

import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from megatron_noloco.data.microbatches import MicrobatchSource
from megatron_noloco.metrics import SLOWEST, Record, unrecorded

Microbatch = tuple[Tensor, Tensor]


class Prefetcher:
    """Microbatches of one data-parallel rank, read ahead by a thread; what was not announced is read at once.

    Keeps no more than one step beside the current one, and records how long the training loop waits for data.
    """

    def __init__(self, source: MicrobatchSource, dp: int, record: Record = unrecorded) -> None:
        self.plan = source.plan
        self.record = record
        self._source = source
        self._dp = dp
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="data")
        self._steps: dict[int, dict[tuple[int, int], Future[Microbatch]]] = {}

    def announce(self, step: int, addresses: Iterable[tuple[int, int]]) -> None:
        """Start reading (replica, microbatch) of `step`, and forget the steps before the one before it."""
        self._steps = {other: held for other, held in self._steps.items() if other == step - 1}
        self._steps[step] = {
            (replica, microbatch): self._thread.submit(
                self._source.microbatch, step, replica, self._dp, microbatch
            )
            for replica, microbatch in addresses
        }

    def microbatch(self, step: int, replica: int, microbatch: int) -> Microbatch:
        """Tokens and labels, int64, each of shape [micro_batch_size, seq_length]."""
        started = time.perf_counter()
        announced = self._steps.get(step, {}).get((replica, microbatch))
        if announced is None:
            held = self._source.microbatch(step, replica, self._dp, microbatch)
        else:
            held = announced.result()
        self.record("data/wait_seconds", time.perf_counter() - started, SLOWEST)
        return held

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
