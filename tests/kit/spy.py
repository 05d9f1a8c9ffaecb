"""Listens to every message of a process, from outside: below torch.distributed's functions, and in mpi4py.

`torch.distributed`'s collectives and sends, by whatever name they were imported, end in methods of the class
`ProcessGroup`; MPI's in methods of a communicator. Both are replaced by ones that write down the call first.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_noloco.engine.replica import ReplicaEngine

COLLECTIVES = (
    "_allgather_base", "_reduce_scatter_base", "all_gather_single", "all_gather_single_coalesced",
    "all_to_all_single", "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce",
    "allreduce_coalesced", "alltoall", "alltoall_base", "barrier", "broadcast", "gather", "monitored_barrier",
    "reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced", "scatter",
)  # fmt: skip
NO_MESSAGE = ("Get_rank", "Get_size", "Get_attr", "Get_name", "rank", "size")


@dataclass
class Call:
    """One call on one rank. `ranks` (global) are those of the group it was made on."""

    library: str  # "torch" or "mpi"
    name: str
    ranks: list[int]
    step: int  # local steps begun before it; 0 while engines are built, -1 while ranks find each other
    peer: int | None = None  # global rank; None for a collective
    group: str = ""


@dataclass
class Spy:
    calls: list[Call] = field(default_factory=list)
    step: int = -1

    def report(self) -> list[dict[str, Any]]:
        return [asdict(call) for call in self.calls]

    def listen_to_torch(self) -> None:
        """From here on, to the end of this process."""
        for name in COLLECTIVES:
            if hasattr(ProcessGroup, name):  # torch versions differ in the newer ones
                self._wrap_collective(name)
        assert hasattr(ProcessGroup, "allreduce")
        self._wrap_message("send")
        self._wrap_message("recv")
        ProcessGroup.recv_anysource = _refused  # type: ignore[method-assign]
        self._count_steps()

    def _wrap_collective(self, name: str) -> None:
        original = getattr(ProcessGroup, name)

        def spied(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            self.calls.append(
                Call("torch", name, dist.get_process_group_ranks(group), self.step, group=group.group_name)
            )
            return original(group, *args, **kwargs)

        setattr(ProcessGroup, name, spied)

    def _wrap_message(self, name: str) -> None:
        original = getattr(ProcessGroup, name)

        def spied(group: ProcessGroup, tensors: Any, peer: int, tag: int) -> Any:
            ranks = dist.get_process_group_ranks(group)
            self.calls.append(Call("torch", name, ranks, self.step, ranks[peer], group.group_name))
            return original(group, tensors, peer, tag)

        setattr(ProcessGroup, name, spied)

    def _count_steps(self) -> None:
        build, original = ReplicaEngine.__init__, ReplicaEngine.train_batch

        def spied_build(engine: ReplicaEngine, *args: Any, **kwargs: Any) -> None:
            self.step = 0
            build(engine, *args, **kwargs)

        def spied(engine: ReplicaEngine, *args: Any, **kwargs: Any) -> Any:
            self.step += 1
            return original(engine, *args, **kwargs)

        ReplicaEngine.__init__ = spied_build  # type: ignore[method-assign]
        ReplicaEngine.train_batch = spied  # type: ignore[method-assign]

    def listen_to_mpi(self) -> None:
        """Before anything of the project touches MPI: all its communicators descend from COMM_WORLD."""
        from mpi4py import MPI

        MPI.COMM_WORLD = _SpiedComm(MPI.COMM_WORLD, self)


class _SpiedComm:
    """Passes everything on to a communicator; whatever is not known to be silent is written down."""

    def __init__(self, comm: Any, spy: Spy) -> None:
        self._comm, self._spy = comm, spy

    def __getattr__(self, name: str) -> Any:
        original = getattr(self._comm, name)
        if name in NO_MESSAGE:
            return original

        def spied(*args: Any, **kwargs: Any) -> Any:
            ranks = list(range(self._comm.Get_size()))  # a duplicate of COMM_WORLD
            peer = kwargs.get("dest", kwargs.get("source"))
            self._spy.calls.append(Call("mpi", name, ranks, self._spy.step, peer))
            made = original(*args, **kwargs)
            return _SpiedComm(made, self._spy) if name == "Dup" else made

        return spied


def _refused(*_: Any) -> None:
    raise AssertionError("a receive from anybody cannot be checked")
