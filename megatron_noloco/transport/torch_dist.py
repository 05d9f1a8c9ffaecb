"""Messages over torch.distributed (gloo, host memory): the transport that needs no MPI.

gloo's `work.wait(timeout)` closes all connections of the group when the time is over, so one slow partner would
cost all the others; and its `work.is_completed()` never becomes true. So threads wait without a time-out and
report each completed message, and the caller's thread keeps the deadline.
"""

import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist

from megatron_noloco.transport.interface import (
    Flight,
    Message,
    RankLostError,
    ReportedFlight,
    check_messages,
)

_NEVER = timedelta(days=365)  # the group's time-out, which must not come before the caller's deadline

_Started = dist.Work | RankLostError  # an operation under way, or the error with which gloo refused it

_Begun = tuple[int, Message, _Started]  # with the number of the message

_Work = SimpleQueue[Callable[[], None] | None]  # None ends a thread


class TorchTransport:
    """Sends messages between two ranks over a gloo group of its own.

    The constructor makes the group over all ranks, so every rank must construct its transport at the same
    place of the program, after `torch.distributed.init_process_group`.
    """

    name = "torch"
    connects_lazily = False  # gloo connects all ranks of a group when it is made

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=_NEVER)
        self._threads = _Threads()
        self.rank = dist.get_rank(self._group)
        self.world_size = dist.get_world_size(self._group)

    def post(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Flight:
        check_messages([*sends, *receives], self.rank, self.world_size)
        tag %= 2**31
        flight = ReportedFlight(receives, sends, tag)
        common: dict[str, Any] = {"group": self._group, "tag": tag}
        begun = [_start(dist.irecv, one, group_src=one.rank, **common) for one in receives]
        begun += [_start(dist.isend, one, group_dst=one.rank, **common) for one in sends]
        by_rank: defaultdict[int, list[_Begun]] = defaultdict(list)
        for number, message in flight.under_way.items():
            by_rank[message.rank].append((number, message, begun[number]))
        # A thread per partner, so that a lost one is found behind a late one. After a time-out the thread of one
        # that does not answer goes on, and keeps its operations and their buffers for a late message.
        for of_partner in by_rank.values():
            self._threads.run(partial(_report, of_partner, flight))
        return flight


class _Threads:
    """Threads that are used again, and one more where all are busy. They do not keep the process from ending."""

    def __init__(self) -> None:
        self._work: _Work = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._all: list[threading.Thread] = []
        weakref.finalize(self, _end, self._work, self._all)

    def run(self, work: Callable[[], None]) -> None:
        self._work.put(work)
        if not self._idle.acquire(blocking=False):
            served = (self._work, self._idle)
            self._all.append(threading.Thread(target=_serve, args=served, name="noloco-flight", daemon=True))
            self._all[-1].start()


def _serve(queue: _Work, idle: threading.Semaphore) -> None:
    while (work := queue.get()) is not None:
        work()
        del work  # with torch's operations
        idle.release()


def _end(queue: _Work, threads: list[threading.Thread]) -> None:
    """End the threads, and wait a second for those that are not stuck.

    A thread that frees torch's objects while Python ends aborts the process.
    """
    for _ in threads:
        queue.put(None)
    until = time.monotonic() + 1.0
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(0.0, until - time.monotonic()))


def _start(operation: Callable[..., dist.Work | None], message: Message, **arguments: Any) -> _Started:
    """Start an operation; return a RankLostError where gloo refuses it, as it does for an ended rank."""
    try:
        work = operation(message.buffer, **arguments)
    except RuntimeError as error:
        return _lost(message.rank, error)
    assert work is not None  # None is for ranks outside the group
    return work


def _lost(rank: int, error: RuntimeError) -> RankLostError:
    return RankLostError(rank, f"has gone: the connection was lost ({str(error).partition(chr(10))[0]})")


def _report(begun: list[_Begun], flight: ReportedFlight) -> None:
    """Wait for the messages of one partner and report each, until a failure: then no more can arrive."""
    for number, message, started in begun:
        if isinstance(started, RankLostError):
            flight.report(started)
            return
        try:
            started.wait()
        except RuntimeError as error:
            flight.report(_lost(message.rank, error))
            return
        flight.report(number)
