"""The first rank of a job that fails says why; the others leave without a word, with its exit code.

It writes that it has failed into the job's key-value store, where every rank looks (`Watchdog`): also those that
would wait for it for ever, and under every launcher. A rank that is killed writes nothing. The first of those that
lose their connection to it then speaks.
"""

import os
import queue
import threading
import time
from contextlib import suppress
from typing import NamedTuple

import torch.distributed as dist

from megatron_noloco.job import agreement

LOOK_SECONDS = 1.0  # between two looks for a failure
_ANSWER_SECONDS = 10.0  # in which the store answers, if its host can
_KEY = "failure"
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")


class Failure(NamedTuple):
    """What the store knows."""

    rank: int
    exit_code: int


def announce(exit_code: int) -> Failure:
    """The job's first failure: that of this rank, unless another was before, or nobody can be asked."""
    if not dist.is_initialized():
        return Failure(0, exit_code)
    own, answer = Failure(dist.get_rank(), exit_code), queue.SimpleQueue[Failure]()

    def ask() -> None:
        with suppress(RuntimeError):  # the store is gone, and rank 0 with it
            answer.put(_read(agreement.store().compare_set(_KEY, "", f"{own.rank} {exit_code}")))

    asking = threading.Thread(target=ask, daemon=True)  # the host of rank 0 may no longer answer
    asking.start()
    asking.join(_ANSWER_SECONDS)
    return own if answer.empty() else answer.get()


def is_own(first: Failure) -> bool:
    """Whether it is this rank's."""
    return first.rank == (dist.get_rank() if dist.is_initialized() else 0)


def announced() -> Failure | None:
    """The job's first failure, if there is one. Raises RuntimeError when the store is gone."""
    store = agreement.store()
    return _read(store.get(_KEY)) if store.check([_KEY]) else None


def wait_for_another(seconds: float) -> Failure | None:
    """A failure that another rank announces within so many seconds."""
    if not dist.is_initialized():
        time.sleep(seconds)
        return None
    deadline = time.monotonic() + seconds
    try:
        while not (found := announced()) and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS / 5)
    except RuntimeError:
        return None
    return found


def lost_connection(error: BaseException | None) -> BaseException | None:
    """What tells that a connected process has gone: `error` itself, one of its causes, or nothing."""
    while error is not None:
        by_name = isinstance(error, RuntimeError) and any(text in str(error) for text in _LOST)
        if by_name or isinstance(error, ConnectionError | dist.DistNetworkError):
            return error
        error = error.__cause__
    return None


def serve_the_others() -> None:
    """Where this process holds the store, let the others read of the failure in it before it leaves."""
    serves = dist.is_initialized() and dist.get_rank() == 0 and dist.get_world_size() > 1
    if serves and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        time.sleep(1.5 * LOOK_SECONDS)


def _read(value: bytes) -> Failure:
    rank, exit_code = value.decode().split()
    return Failure(int(rank), int(exit_code))
