"""Lets the ranks of a job agree on small values, by one of two mechanisms.

- Collectives: for what all ranks do at the same place of the program. `gather_from_all_ranks` and
  `broadcast_from_rank_0`, at the start and between local phases, carry any value that can be pickled, and fail at
  once when a process has ended. `computed_by_rank_0` does if rank 0 first waits for others. `vote` carries a few
  integers, for what ranks agree on in each round; `wait_for_all` carries no value. All use a gloo group of their
  own: the default group may be NCCL's, which makes the host wait for the GPU, and ends the job if a rank waits for
  ten minutes.
- The job's key-value store: for what ranks do at different times, or from a thread while the main thread is
  inside a library. `announce` and `announced` carry a number of each rank (stopping, the delay of an overlapped
  exchange), `claim` and `claimed` the text of the first rank that has one (a failure, a request to stop).
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import TypeVar, cast

import torch
import torch.distributed as dist

Value = TypeVar("Value")
_POLL_SECONDS = 0.1
_HEARTBEAT_SECONDS = 5.0
PATIENCE_SECONDS = 600.0  # a rank that has not answered by then hangs


def gather_from_all_ranks(value: Value) -> list[Value]:
    """Return the values of all ranks, in rank order; `[value]` without torch.distributed. A collective."""
    values = [value]
    if dist.is_initialized():
        values *= dist.get_world_size()
        dist.all_gather_object(values, value, _control())
    return values


def broadcast_from_rank_0(value: Value) -> Value:
    """Return rank 0's value on every rank; `value` itself without torch.distributed. A collective."""
    return value if _is_alone() else _broadcast(value)


def computed_by_rank_0(find: Callable[[], Value], *errors: type[Exception]) -> Value:
    """Return on every rank what `find` returns on rank 0, which may wait for as long as it likes. A collective.

    The other ranks hear from rank 0 every few seconds, so that their waits never come to the group's time-out.

    Args:
        errors: are raised on every rank where `find` raises them on rank 0. Any other one ends rank 0.
    """
    if _is_alone():
        return find()
    found: tuple[Value | None, Exception | None] | None = None
    if dist.get_rank() == 0:
        with _heartbeat():
            try:
                found = find(), None
            except errors as error:
                found = None, error
    while (told := _broadcast(found)) is None:
        pass
    value, raised = told
    if raised is not None:
        raise raised
    return cast(Value, value)


@contextmanager
def _heartbeat() -> Iterator[None]:
    """Broadcast None now and then, until what is done inside is over."""
    over = threading.Event()

    def beat() -> None:
        with suppress(RuntimeError):  # a rank has ended: what is broadcast next fails as well
            while not over.wait(_HEARTBEAT_SECONDS):
                _broadcast(None)

    thread = threading.Thread(target=beat, name="noloco-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def vote(numbers: Sequence[int], group: dist.ProcessGroup | None = None) -> list[int]:
    """Return the smallest number of the ranks of a group, place by place. A collective of these ranks.

    Args:
        group: with a backend for the CPU; None: all ranks of the job.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return list(numbers)
    smallest = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    dist.all_reduce(smallest, dist.ReduceOp.MIN, group or _control())
    return smallest.tolist()


def wait_for_all() -> None:
    """Wait until all ranks are at this place of the program; nobody without torch.distributed. A collective."""
    if dist.is_initialized():
        dist.barrier(_control())


def _is_alone() -> bool:
    return not dist.is_initialized() or dist.get_world_size() == 1


def _broadcast(value: Value) -> Value:
    """Return rank 0's value on every rank."""
    holder = [value]
    dist.broadcast_object_list(holder, src=0, group=_control())
    return holder[0]


def _control() -> dist.ProcessGroup:
    """Return the group of these collectives, which the first of them makes."""
    return _control_beside(dist.group.WORLD)


@lru_cache(maxsize=1)
def _control_beside(world: dist.ProcessGroup) -> dist.ProcessGroup:
    return dist.new_group(backend="gloo")


def announce(subject: str, number: int) -> None:
    """Write this rank's number into the store, for the other ranks; returns at once."""
    _store().set(f"{subject}/{dist.get_rank()}", str(number))


def announced(subject: str, patience_seconds: float = PATIENCE_SECONDS) -> list[int]:
    """Wait until all ranks have announced their number; return the numbers in rank order.

    Raises RuntimeError when a rank has announced none within `patience_seconds`, or the store is lost.
    """
    names = [f"{subject}/{rank}" for rank in range(dist.get_world_size())]
    deadline = time.monotonic() + patience_seconds
    shared = _store()
    # A blocking `wait` would keep the other threads of this process from the store.
    while not shared.check(names):
        if time.monotonic() > deadline:
            raise RuntimeError(f"a rank has not answered for {patience_seconds:.0f} s")
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
