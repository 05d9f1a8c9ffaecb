"""Lets the ranks of a job agree on small values, by one of two mechanisms.

- Collectives: for what all ranks do at the same place of the program. `of_all_ranks` and `of_rank_0`, at the start
  and between local phases, carry any value that can be pickled, and fail at once when a process has ended.
  `voting` carries a few integers, for what ranks agree on in each round; `wait_for_all` carries none.
- The job's key-value store: for what ranks do at different times, or from a thread while the main thread is
  inside a library. `announce` and `announced` carry a number of each rank (stopping, the delay of an overlapped
  exchange), `claim` and `claimed` the text of the first rank that has one (a failure, a request to stop).
"""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

Value = TypeVar("Value")
Vote = Callable[[Sequence[int]], list[int]]
"""vote(numbers): the smallest number of all ranks, place by place. A collective."""

_POLL_SECONDS = 0.1
PATIENCE_SECONDS = 600.0  # a rank that has not answered by then hangs


def of_all_ranks(value: Value) -> list[Value]:
    """Return the values of all ranks, in rank order; `[value]` without torch.distributed. A collective."""
    values = [value]
    if dist.is_initialized():
        values *= dist.get_world_size()
        dist.all_gather_object(values, value)
    return values


def of_rank_0(value: Value) -> Value:
    """Return rank 0's value on every rank; `value` itself without torch.distributed. A collective."""
    holder = [value]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(holder, src=0)
    return holder[0]


def voting(group: dist.ProcessGroup | None = None) -> Vote:
    """Return how ranks vote, on the host.

    Args:
        group: the ranks, with a backend for the CPU; None: all ranks of the job, in a group of their own beside
            other collectives. To make that group is a collective.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return list
    group = group or dist.new_group(backend="gloo")

    def vote(numbers: Sequence[int]) -> list[int]:
        smallest = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        dist.all_reduce(smallest, dist.ReduceOp.MIN, group)
        return smallest.tolist()

    return vote


def wait_for_all() -> None:
    """Wait until all ranks are at this place of the program; nobody without torch.distributed. A collective."""
    if dist.is_initialized():
        dist.barrier()


def announce(subject: str, number: int) -> None:
    """Write this rank's number into the store, for the other ranks; returns at once."""
    _store().set(f"{subject}/{dist.get_rank()}", str(number))


def announced(subject: str) -> list[int]:
    """Wait until all ranks have announced their number; return the numbers in rank order.

    Raises RuntimeError when a rank has announced none within `PATIENCE_SECONDS`, or the store is lost.
    """
    names = [f"{subject}/{rank}" for rank in range(dist.get_world_size())]
    deadline = time.monotonic() + PATIENCE_SECONDS
    shared = _store()
    # A blocking `wait` would keep the other threads of this process from the store.
    while not shared.check(names):
        if time.monotonic() > deadline:
            raise RuntimeError(f"a rank has not answered for {PATIENCE_SECONDS:.0f} s")
        time.sleep(_POLL_SECONDS)
    return [int(shared.get(name)) for name in names]


def claim(subject: str, text: str) -> str:
    """Write a text into the store, unless a rank has written one before; return the first.

    Raises RuntimeError when the store is lost, as `claimed` does.
    """
    return _store().compare_set(subject, "", text).decode()


def claimed(subject: str) -> str:
    """Return the text that a rank was the first to write; "" where none has."""
    shared = _store()
    return shared.get(subject).decode() if shared.check([subject]) else ""


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()
