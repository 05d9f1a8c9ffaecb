"""Messages over torch.distributed (gloo, host memory): the transport that needs no MPI.

Two facts about gloo shape this file. `work.wait(timeout)` closes every connection of the group when it
runs out, so a partner that is merely slow would cost us all the others; and `work.is_completed()` never
turns true. So threads wait without a timeout and report what landed, and the caller's thread
keeps the deadline.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_noloco.transport.chunks import (
    DEFAULT_CHUNK_BYTES,
    Chunk,
    Landing,
    LandingFlight,
    check_messages,
    cut,
)
from megatron_noloco.transport.protocol import Message

_NEVER = timedelta(days=365)  # gloo's own time-out: out of the way

_Started = dist.Work | ConnectionError  # an operation under way, or refused


class TorchTransport:
    """Point-to-point messages over a gloo group of its own.

    The constructor makes it over all ranks, so every rank must construct its transport at the same place of the
    programme.
    """

    name = "torch"
    device_buffers = False
    connects_lazily = False  # gloo connects all ranks of a group when it is made
    progress = "threads of gloo"

    def __init__(self, chunk_bytes: int = DEFAULT_CHUNK_BYTES) -> None:
        self._group = dist.new_group(backend="gloo", timeout=_NEVER)
        self._chunk_bytes = chunk_bytes
        self.rank = dist.get_rank(self._group)
        self.world_size = dist.get_world_size(self._group)

    def post(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> LandingFlight:
        check_messages([*sends, *receives], self.rank, self.world_size)
        tag %= 2**31
        receiving = [
            (chunk, _start(dist.irecv, chunk, group=self._group, tag=tag, group_src=chunk.rank))
            for chunk in cut(receives, self._chunk_bytes)
        ]
        sending = [
            (chunk, _start(dist.isend, chunk, group=self._group, tag=tag, group_dst=chunk.rank))
            for chunk in cut(sends, self._chunk_bytes)
        ]
        return LandingFlight(_watch(receiving, tag), _watch(sending, tag))


def _start(operation: Callable[..., dist.Work | None], chunk: Chunk, **arguments: Any) -> _Started:
    """Gloo refuses at once to send to a rank it knows is dead; the flight reports that, as any lost connection."""
    try:
        work = operation(chunk.data, **arguments)
    except RuntimeError as error:
        return _lost(chunk.rank, error)
    assert work is not None  # None is for ranks outside the group
    return work


def _lost(rank: int, error: RuntimeError) -> ConnectionError:
    return ConnectionError(f"the connection to rank {rank} was lost: {str(error).partition(chr(10))[0]}")


def _watch(flying: list[tuple[Chunk, _Started]], tag: int) -> Landing:
    """Start a daemon thread per partner, so that one that is late does not hide the chunks of another.

    A thread whose partner never answers stays behind after a time-out, holding its works, and these hold
    their buffers: what lands late lands in memory that still exists. It ends with the partner or the process.
    """
    landing = Landing([chunk for chunk, _ in flying], tag)
    by_rank: defaultdict[int, list[tuple[Chunk, _Started]]] = defaultdict(list)
    for chunk, started in flying:
        by_rank[chunk.rank].append((chunk, started))
    for from_one in by_rank.values():
        threading.Thread(target=_report, args=(from_one, landing), name="noloco-flight", daemon=True).start()
    return landing


def _report(flying: list[tuple[Chunk, _Started]], landing: Landing) -> None:
    """Report chunk after chunk of one partner, until a failure: after that nothing more can come from it."""
    for chunk, started in flying:
        if isinstance(started, ConnectionError):
            landing.report(started)
            return
        try:
            started.wait()
        except RuntimeError as error:
            landing.report(_lost(chunk.rank, error))
            return
        landing.report(chunk.arrival)
