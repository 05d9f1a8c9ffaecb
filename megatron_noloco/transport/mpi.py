"""Messages over MPI. mpi4py is imported inside functions only: the import starts MPI."""

import atexit
import ctypes
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from megatron_noloco.transport.chunks import DEFAULT_CHUNK_BYTES, Chunk, check_messages, cut
from megatron_noloco.transport.protocol import Arrival, ExchangeTimeoutError, Message

_COUNT_LIMIT = 2**31  # MPI counts are C ints
_ALERT_SECONDS = 1e-3  # yield instead of napping: a chunk from this very host lands within it
_SHORTEST_NAP_SECONDS = 50e-6
_LONGEST_NAP_SECONDS = 1e-3
# Library, the variable that turns its thread on, and what then moves messages. Open MPI's serves TCP only.
_PROGRESS_THREADS = (
    ("Open MPI", "OMPI_MCA_btl_tcp_progress_thread", "between hosts a thread of Open MPI"),
    ("Intel(R) MPI", "I_MPI_ASYNC_PROGRESS", "a thread of Intel MPI"),
    ("MPICH", "MPIR_CVAR_ASYNC_PROGRESS", "a thread of MPICH"),
)


class _Pending:
    """The requests of one direction of a flight still to complete; their chunks keep the memory alive."""

    def __init__(self, chunks: list[Chunk], requests: list[Any]) -> None:
        from mpi4py import MPI

        self.chunks = chunks
        self._requests = requests
        self._testsome = MPI.Request.Testsome

    def landed(self) -> list[Chunk]:
        """Those completed since the last call; never blocks."""
        if not self.chunks:
            return []
        done = set(self._testsome(self._requests) or ())
        if not done:
            return []
        landed = [chunk for index, chunk in enumerate(self.chunks) if index in done]
        self.chunks = [chunk for index, chunk in enumerate(self.chunks) if index not in done]
        self._requests = [request for index, request in enumerate(self._requests) if index not in done]
        return landed


class MpiFlight:
    """Requests in the air."""

    def __init__(self, receives: _Pending, sends: _Pending, tag: int) -> None:
        self.abandoned = False
        self.wait_seconds = 0.0
        self._receives = receives
        self._sends = sends
        self._tag = tag
        self._posted = time.monotonic()

    def arrivals(self, deadline_seconds: float) -> Iterator[Arrival]:
        while self._receives.chunks:
            for chunk in self._next(self._receives, deadline_seconds):
                yield chunk.arrival

    def finish(self, deadline_seconds: float) -> None:
        while self._sends.chunks:
            self._next(self._sends, deadline_seconds)

    def landed(self) -> list[Arrival]:
        return [chunk.arrival for chunk in self._receives.landed()]

    def done(self) -> bool:
        self._sends.landed()
        return not (self._receives.chunks or self._sends.chunks)

    def in_air(self) -> bool:
        """Whether MPI may still touch our memory. An abandoned flight has no owner left to poll it: we do."""
        if self.abandoned:
            self._receives.landed()
            self._sends.landed()
        return bool(self._receives.chunks or self._sends.chunks)

    def _next(self, pending: _Pending, deadline_seconds: float) -> list[Chunk]:
        """Wait for at least one chunk: alert at first, then napping, since ranks may share a core."""
        started = time.monotonic()
        nap_seconds = _SHORTEST_NAP_SECONDS
        try:
            while not (landed := pending.landed()):
                now = time.monotonic()
                waited_seconds = now - self._posted
                if waited_seconds >= deadline_seconds:
                    self.abandoned = True
                    raise ExchangeTimeoutError(pending.chunks[0].rank, self._tag, waited_seconds)
                if now - started < _ALERT_SECONDS:
                    os.sched_yield()  # a sleep of any length, even 0, takes 50 us and more
                    continue
                time.sleep(min(nap_seconds, deadline_seconds - waited_seconds))
                nap_seconds = min(2 * nap_seconds, _LONGEST_NAP_SECONDS)
            return landed
        finally:
            self.wait_seconds += time.monotonic() - started


class MpiTransport:
    """Point-to-point messages on a private duplicate of COMM_WORLD, without copies.

    Every rank must construct its transport at the same place of the programme. A request
    that missed its deadline is never cancelled (MPI promises little about what then arrives): the flight
    stays on a list, with its buffers, until the partner answers after all. Give every exchange a tag of its
    own, so that a late message finds the old buffer and not the next one.

    Raises ValueError for `chunk_bytes` out of range, and when MPI was started for processes of one thread only.
    """

    name = "mpi"
    connects_lazily = True  # Open MPI and MPICH; a message that was not needed costs no time

    def __init__(self, chunk_bytes: int = DEFAULT_CHUNK_BYTES) -> None:
        if not 1 <= chunk_bytes < _COUNT_LIMIT:
            raise ValueError(f"chunk_bytes {chunk_bytes} must lie between 1 and {_COUNT_LIMIT - 1}")
        from mpi4py import MPI

        if MPI.Query_thread() < MPI.THREAD_FUNNELED:
            raise ValueError(
                "MPI was started with THREAD_SINGLE, but gloo and the writer of checkpoints are threads; "
                'leave mpi4py.rc.thread_level at "multiple", or set it to "funneled"'
            )
        self._comm = MPI.COMM_WORLD.Dup()
        self._chunk_bytes = chunk_bytes
        self.progress = progress_of(MPI.Get_library_version(), os.environ)
        self.device_buffers = torch.cuda.is_available() and gpu_buffers_supported()
        self._tags = (self._comm.Get_attr(MPI.TAG_UB) or 32767) + 1
        self._flights: list[MpiFlight] = []
        atexit.register(finalize, self._flights)
        self.rank: int = self._comm.Get_rank()
        self.world_size: int = self._comm.Get_size()

    def post(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> MpiFlight:
        from mpi4py import MPI

        check_messages([*sends, *receives], self.rank, self.world_size, self.device_buffers)
        if any(message.buffer.is_cuda for message in [*sends, *receives]):
            torch.cuda.current_stream().synchronize()  # MPI does not order with CUDA streams
        self._flights[:] = [flight for flight in self._flights if flight.in_air()]
        tag %= self._tags
        incoming, outgoing = cut(receives, self._chunk_bytes), cut(sends, self._chunk_bytes)
        receiving = [self._comm.Irecv([_memory(c), MPI.BYTE], source=c.rank, tag=tag) for c in incoming]
        sending = [self._comm.Isend([_memory(c), MPI.BYTE], dest=c.rank, tag=tag) for c in outgoing]
        flight = MpiFlight(_Pending(incoming, receiving), _Pending(outgoing, sending), tag)
        self._flights.append(flight)
        return flight


def _memory(chunk: Chunk) -> Any:
    """The chunk's bytes as mpi4py takes them without a copy: a numpy view, or the CUDA tensor itself."""
    return chunk.data if chunk.data.is_cuda else chunk.data.numpy()


def finalize(flights: list[MpiFlight]) -> None:
    """End MPI while `flights`, and with them their buffers, still exist.

    mpi4py would do it after the interpreter has freed everything, and a late message for an abandoned
    buffer then crashed in MPI_Finalize; or, where a process leaves without freeing, not at all.
    """
    from mpi4py import MPI

    if not MPI.Is_finalized():
        MPI.Finalize()
    flights.clear()


def library() -> str:
    """Name and version of the MPI library that mpi4py runs on; starts MPI."""
    from mpi4py import MPI

    return library_name(MPI.Get_library_version())


def library_name(version: str) -> str:
    """Name and version of a library, from its description of itself, which has several lines or clauses."""
    return " ".join(version.splitlines()[0].split(",")[0].replace("Version:", "").split())


def progress_of(library: str, environ: Mapping[str, str]) -> str:
    """What moves messages while the ranks compute, in words: between calls of MPI, most libraries do nothing.

    Args:
        library: MPI's description of itself.
        environ: where `mpirun --mca` and the users of MPICH and Intel MPI leave their settings.
    """
    for name, variable, what in _PROGRESS_THREADS:
        if name in library and environ.get(variable, "0").lower() in ("1", "true", "yes", "on", "enable"):
            return f"{what} ({variable})"
    return "calls of MPI at every microbatch"


def gpu_buffers_supported() -> bool:
    """Whether the MPI library says that it can send from CUDA memory; starts MPI.

    Asks `MPIX_Query_cuda_support`, an extension that not every MPI has. Not yet tried on a GPU.
    """
    from mpi4py import MPI

    library = ctypes.CDLL(MPI.__file__)  # resolves symbols of the MPI library it is linked to as well
    try:
        query = library.MPIX_Query_cuda_support
    except AttributeError:
        return False
    return bool(query())
