"""Messages over torch.distributed (gloo, host memory): the transport that needs no MPI.

gloo's `work.wait(timeout)` closes all connections of the group when the time is over, so one slow partner would
cost all the others; and its `work.is_completed()` never becomes true. So threads wait without a time-out and
report each completed chunk, and the caller's thread keeps the deadline.
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

from megatron_noloco.transport.chunks import DEFAULT_CHUNK_BYTES, ReportedTransfers, check_messages, cut
from megatron_noloco.transport.interface import Chunk, Flight, Message, RankLostError

_NEVER = timedelta(days=365)  # the group's time-out, which must not come before the caller's deadline

_Started = dist.Work | RankLostError  # an operation under way, or the error with which gloo refused it

_Work = SimpleQueue[Callable[[], None] | None]  # None ends a thread


class TorchTransport:
    """Sends messages between two ranks over a gloo group of its own.

    The constructor makes the group over all ranks, so every rank must construct its transport at the same
    place of the program, after `torch.distributed.init_process_group`.

    Args:
        chunk_bytes: of the pieces into which messages are cut.
    """

    name = "torch"
    connects_lazily = False  # gloo connects all ranks of a group when it is made

    def __init__(self, chunk_bytes: int = DEFAULT_CHUNK_BYTES) -> None:
        self._group = dist.new_group(backend="gloo", timeout=_NEVER)
        self._chunk_bytes = chunk_bytes
        self._threads = _Threads()
        self.rank = dist.get_rank(self._group)
        self.world_size = dist.get_world_size(self._group)

    def post(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Flight:
        check_messages([*sends, *receives], self.rank, self.world_size)
        tag %= 2**31
        incoming, outgoing = cut(receives, self._chunk_bytes), cut(sends, self._chunk_bytes)
        common: dict[str, Any] = {"group": self._group, "tag": tag}
        receiving = [(c, _start(dist.irecv, c, group_src=c.rank, **common)) for c in incoming]
        sending = [(c, _start(dist.isend, c, group_dst=c.rank, **common)) for c in outgoing]
        return Flight(self._watch(receiving, tag), self._watch(sending, tag))

    def _watch(self, begun: list[tuple[Chunk, _Started]], tag: int) -> ReportedTransfers:
        """Let a thread per partner report its chunks, so that a late partner delays no other.

        After a time-out the thread of a partner that does not answer goes on, and keeps its operations and their
        buffers, so that a late chunk arrives in memory that still exists.
        """
        transfers = ReportedTransfers([chunk for chunk, _ in begun], tag)
        by_rank: defaultdict[int, list[tuple[Chunk, _Started]]] = defaultdict(list)
        for chunk, started in begun:
            by_rank[chunk.rank].append((chunk, started))
        for of_partner in by_rank.values():
            self._threads.run(partial(_report, of_partner, transfers))
        return transfers


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


def _start(operation: Callable[..., dist.Work | None], chunk: Chunk, **arguments: Any) -> _Started:
    """Start an operation; return a RankLostError where gloo refuses it, as it does for an ended rank."""
    try:
        work = operation(chunk.data, **arguments)
    except RuntimeError as error:
        return _lost(chunk.rank, error)
    assert work is not None  # None is for ranks outside the group
    return work


def _lost(rank: int, error: RuntimeError) -> RankLostError:
    return RankLostError(rank, f"has gone: the connection was lost ({str(error).partition(chr(10))[0]})")


def _report(begun: list[tuple[Chunk, _Started]], transfers: ReportedTransfers) -> None:
    """Wait for the chunks of one partner and report each, until a failure: then no more can arrive."""
    for chunk, started in begun:
        if isinstance(started, RankLostError):
            transfers.report(started)
            return
        try:
            started.wait()
        except RuntimeError as error:
            transfers.report(_lost(chunk.rank, error))
            return
        transfers.report(chunk.arrival)
