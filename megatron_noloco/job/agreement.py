"""The largest of the numbers that the ranks find, through the job's key-value store: without a collective."""

import time

import torch.distributed as dist

_LOOK_SECONDS = 0.1  # between two looks for the others' numbers
PATIENCE_SECONDS = 600.0  # for a rank whose process hangs


def announce(subject: str, number: int) -> None:
    """Let the others know this rank's number; returns at once."""
    store().set(f"{subject}/{dist.get_rank()}", str(number))


def largest_announced(subject: str) -> int:
    """The largest number, as soon as all ranks have announced theirs.

    Raises RuntimeError when a rank has not within `PATIENCE_SECONDS`, or when the store is gone.
    """
    names = [f"{subject}/{rank}" for rank in range(dist.get_world_size())]
    deadline = time.monotonic() + PATIENCE_SECONDS
    held = store()
    while not held.check(names):  # waiting in the store would keep this process's others from it
        if time.monotonic() > deadline:
            raise RuntimeError(f"a rank has not answered for {PATIENCE_SECONDS:.0f} s")
        time.sleep(_LOOK_SECONDS)
    return max(int(held.get(name)) for name in names)


def store() -> dist.Store:
    """The job's key-value store."""
    return dist.distributed_c10d._get_default_store()
