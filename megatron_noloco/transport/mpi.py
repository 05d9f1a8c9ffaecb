"""Messages over MPI. mpi4py is imported inside functions only: the import starts MPI."""

import atexit
import os
import time
from collections.abc import Sequence
from typing import Any

from megatron_noloco.errors import UserError
from megatron_noloco.transport.chunks import DEFAULT_CHUNK_BYTES, check_messages, cut
from megatron_noloco.transport.interface import Arrival, Chunk, Flight, Message, Transfers

_COUNT_LIMIT = 2**31  # MPI counts are C ints
_YIELD_SECONDS = 1e-3  # a wait begins with yields, not sleeps: chunks from the same host arrive within it
_SHORTEST_SLEEP_SECONDS = 50e-6
_LONGEST_SLEEP_SECONDS = 1e-3


class _Requests(Transfers):
    """Chunks with their MPI requests; keeps their buffers alive."""

    def __init__(self, chunks: list[Chunk], tag: int, requests: list[Any]) -> None:
        from mpi4py import MPI

        super().__init__(chunks, tag)
        self._requests = requests
        self._testsome = MPI.Request.Testsome

    def completed(self) -> list[Arrival]:
        done = set(self._testsome(self._requests) or ()) if self._requests else ()
        if not done:
            return []
        completed = [arrival for index, arrival in enumerate(self.chunks) if index in done]
        self._requests = [request for index, request in enumerate(self._requests) if index not in done]
        for arrival in completed:
            del self.chunks[arrival]
        return completed

    def _wait(self, waited_seconds: float, left_seconds: float) -> None:
        """Yield at first, then sleep, longer each time: ranks may share a core."""
        if waited_seconds < _YIELD_SECONDS:
            os.sched_yield()  # a sleep of any length, even 0, takes 50 us and more
        else:
            sleep_seconds = max(_SHORTEST_SLEEP_SECONDS, waited_seconds - _YIELD_SECONDS)
            time.sleep(min(sleep_seconds, _LONGEST_SLEEP_SECONDS, left_seconds))


class _MpiFlight(Flight):
    def under_way(self) -> bool:
        """Return whether MPI may still access the buffers.

        After a time-out this call also moves the messages: no other call does.
        """
        if self._received.timed_out or self._sent.timed_out:
            self.arrived()
        return not self.done()


class MpiTransport:
    """Sends messages between two ranks on a private duplicate of COMM_WORLD, without copies.

    Every rank must construct its transport at the same place of the program. A request that missed its
    deadline is never cancelled (MPI promises little about what then arrives): the transport keeps it and its
    buffers until the partner answers. Every exchange needs tags of its own, so that a late message arrives in
    the old buffer and not in the next one.

    Args:
        chunk_bytes: of the pieces into which messages are cut, below 2^31.

    Raises UserError for `chunk_bytes` out of range, and when MPI was started with THREAD_SINGLE.
    """

    name = "mpi"
    connects_lazily = True  # Open MPI and MPICH do; with other libraries an early first message costs no time

    def __init__(self, chunk_bytes: int = DEFAULT_CHUNK_BYTES) -> None:
        if not 1 <= chunk_bytes < _COUNT_LIMIT:
            raise UserError(f"chunk_bytes {chunk_bytes} must lie between 1 and {_COUNT_LIMIT - 1}")
        from mpi4py import MPI

        if MPI.Query_thread() < MPI.THREAD_FUNNELED:
            raise UserError(
                "MPI was started with THREAD_SINGLE, but gloo and the writer of checkpoints are threads; "
                'leave mpi4py.rc.thread_level at "multiple", or set it to "funneled"'
            )
        self._comm = MPI.COMM_WORLD.Dup()
        self._chunk_bytes = chunk_bytes
        self._tags = (self._comm.Get_attr(MPI.TAG_UB) or 32767) + 1
        self._flights: list[_MpiFlight] = []  # under way
        atexit.register(finalize, self._flights)
        self.rank: int = self._comm.Get_rank()
        self.world_size: int = self._comm.Get_size()

    def post(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Flight:
        from mpi4py import MPI

        check_messages([*sends, *receives], self.rank, self.world_size)
        tag %= self._tags
        incoming, outgoing = cut(receives, self._chunk_bytes), cut(sends, self._chunk_bytes)
        receiving = [self._comm.Irecv([c.data.numpy(), MPI.BYTE], source=c.rank, tag=tag) for c in incoming]
        sending = [self._comm.Isend([c.data.numpy(), MPI.BYTE], dest=c.rank, tag=tag) for c in outgoing]
        flight = _MpiFlight(_Requests(incoming, tag, receiving), _Requests(outgoing, tag, sending))
        self._flights[:] = [*(old for old in self._flights if old.under_way()), flight]
        return flight


def finalize(flights: list[_MpiFlight]) -> None:
    """End MPI while `flights` and their buffers still exist.

    mpi4py would do so after the interpreter has freed the buffers: a late message for one of them then crashed in
    MPI_Finalize. In a process that ends by `os._exit`, mpi4py would not end MPI at all.
    """
    from mpi4py import MPI

    if not MPI.Is_finalized():
        MPI.Finalize()
    flights.clear()


def library() -> str:
    """Return name and version of the MPI library that mpi4py runs on; starts MPI."""
    from mpi4py import MPI

    return library_name(MPI.Get_library_version())


def library_name(version: str) -> str:
    """Return name and version of an MPI library, from the lines or clauses by which it describes itself."""
    return " ".join(version.splitlines()[0].split(",")[0].replace("Version:", "").split())
