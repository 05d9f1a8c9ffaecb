"""Messages over MPI. mpi4py is imported inside functions only: the import starts MPI."""

import atexit
import os
import time
from collections.abc import Sequence
from typing import Any

import torch

from megatron_noloco.errors import UserError
from megatron_noloco.transport.interface import Flight, Message, check_messages

_YIELD_SECONDS = 1e-3  # a wait begins with yields, not sleeps: messages from the same host arrive within it
_SHORTEST_SLEEP_SECONDS = 50e-6
_LONGEST_SLEEP_SECONDS = 1e-3


class _MpiFlight(Flight):
    """Messages with their MPI requests; keeps their buffers alive."""

    def __init__(
        self, receives: Sequence[Message], sends: Sequence[Message], tag: int, requests: list[Any]
    ) -> None:
        from mpi4py import MPI

        super().__init__(receives, sends, tag)
        self._requests = requests  # of the messages under way, in their order
        self._testsome = MPI.Request.Testsome

    def _move(self) -> None:
        done = set(self._testsome(self._requests) or ()) if self._requests else set[int]()
        if done:
            numbers, requests = [*self.under_way], self._requests
            self._requests = [request for index, request in enumerate(requests) if index not in done]
            for index in done:
                del self.under_way[numbers[index]]

    def _block(self, waited_seconds: float, left_seconds: float) -> None:
        """Yield at first, then sleep, longer each time: ranks may share a core."""
        if waited_seconds < _YIELD_SECONDS:
            os.sched_yield()  # a sleep of any length, even 0, takes 50 us and more
        else:
            sleep_seconds = max(_SHORTEST_SLEEP_SECONDS, waited_seconds - _YIELD_SECONDS)
            time.sleep(min(sleep_seconds, _LONGEST_SLEEP_SECONDS, left_seconds))


class MpiTransport:
    """Sends messages between two ranks on a private duplicate of COMM_WORLD, without copies.

    Every rank must construct its transport at the same place of the program. A request that missed its
    deadline is never cancelled (MPI promises little about what then arrives): the transport keeps it and its
    buffers until the partner answers. Every exchange needs tags of its own, so that a late message arrives in
    the old buffer and not in the next one.

    Raises UserError when MPI was started with THREAD_SINGLE.
    """

    name = "mpi"
    connects_lazily = True  # Open MPI and MPICH do; with other libraries an early first message costs no time

    def __init__(self) -> None:
        from mpi4py import MPI

        if MPI.Query_thread() < MPI.THREAD_FUNNELED:
            raise UserError(
                "MPI was started with THREAD_SINGLE, but gloo and the writer of checkpoints are threads; "
                'leave mpi4py.rc.thread_level at "multiple", or set it to "funneled"'
            )
        self._comm = MPI.COMM_WORLD.Dup()
        self._tags = (self._comm.Get_attr(MPI.TAG_UB) or 32767) + 1
        self._flights: list[_MpiFlight] = []  # under way
        atexit.register(finalize, self._flights)
        self.rank: int = self._comm.Get_rank()
        self.world_size: int = self._comm.Get_size()

    def post(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Flight:
        check_messages([*sends, *receives], self.rank, self.world_size)
        tag %= self._tags
        requests = [self._comm.Irecv(_bytes_of(one), source=one.rank, tag=tag) for one in receives]
        requests += [self._comm.Isend(_bytes_of(one), dest=one.rank, tag=tag) for one in sends]
        flight = _MpiFlight(receives, sends, tag, requests)
        self._flights[:] = [*(old for old in self._flights if not old.done()), flight]
        return flight


def _bytes_of(message: Message) -> list[Any]:
    from mpi4py import MPI

    return [message.buffer.view(torch.uint8).numpy(), MPI.BYTE]


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
