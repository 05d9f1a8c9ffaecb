"""The order in which ranks ask NCCL for messages: recorded rank by rank, without messages, then played together.

`record` runs a function as one rank of a world, alone: with torch's "fake" process groups nothing is sent. `play`
runs the recorded programs of all ranks together by NCCL's rules, which are stricter than gloo's:

- A collective, or a batch of sends and receives, is one kernel of its communicator. It ends when each of its
  messages has met its counterpart in a kernel that runs at the other rank: nothing is buffered.
- The kernels of a communicator run one after the other, in the order of the calls. Those of two communicators may
  run at the same time.
- A kernel begins when all earlier ones that its rank has waited for (`Work.wait`) have ended. Played strictly, a
  rank posts no kernel before its last one has ended, as while NCCL connects two ranks for the first time.

What is asked of gloo is played as well, in communicators of its own.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed import fake_pg  # noqa: F401  # registers the backend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.simulated_gpu.memory import on_device

_POINT_TO_POINT = {"send": "send", "recv_": "recv"}
_SIZES_DIFFER = ("alltoall_base", "alltoall")  # between the members


class OrderError(RuntimeError):
    """The members of a group ask for different things, or wait for each other for ever."""


class Communicator(NamedTuple):
    """Names a communicator alike on all its ranks."""

    members: tuple[int, ...]
    number: int  # of the groups with the same members, in the order in which they were made
    library: str


class Op(NamedTuple):
    """A collective of this kind, or a message; what two ranks ask for must have the same content."""

    kind: str
    peer: int | None  # the rank at the other end; None for a collective
    content: tuple[Any, ...]  # dtype and shape


@dataclass
class Kernel:
    """What a rank asks for in one call.

    Attributes:
        beside: earlier kernels, by their number in the program, that may still run when this one begins.
    """

    communicator: Communicator
    ops: list[Op]
    beside: frozenset[int]


@dataclass
class Program:
    """What a rank asks for, in order.

    Attributes:
        started: the number of kernels that belong to the start (see `start_ends`).
    """

    rank: int
    kernels: list[Kernel] = field(default_factory=list)
    started: int = 0

    def start_ends(self) -> None:
        """Note that what follows does not belong to the start."""
        self.started = len(self.kernels)

    def connected_late(self) -> set[Communicator]:
        """Return the communicators of NCCL that were first used after the start."""
        early, late = self._used(0, self.started), self._used(self.started, len(self.kernels))
        return {one for one in late - early if len(one.members) > 1}

    def connected_alone(self) -> set[Communicator]:
        """Return the communicators of NCCL with this rank alone."""
        return {one for one in self._used(0, len(self.kernels)) if len(one.members) == 1}

    def _used(self, first: int, last: int) -> set[Communicator]:
        return {one.communicator for one in self.kernels[first:last] if one.communicator.library == "nccl"}


def record(rank: int, size: int, function: Callable[..., object], *args: Any) -> Program:
    """Return what `function(program, *args)` asks for as this rank of a world of `size` ranks.

    Messages on simulated device memory count as NCCL's. Numbers that would be received are zeros.
    """
    recorder = _Recorder(Program(rank))
    dist.init_process_group("fake", rank=rank, world_size=size, store=dist.HashStore())
    try:
        recorder.name_group(dist.group.WORLD)
        with recorder.in_place(), recorder:
            function(recorder.program, *args)
    finally:
        dist.destroy_process_group()
    return recorder.program


class _Recorder(TorchDispatchMode):
    """Sees the operators of torch.distributed, and the batches of messages."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self._groups: dict[str, tuple[tuple[int, ...], int]] = {}
        self._batch: list[tuple[Communicator, Op]] | None = None
        self._not_waited_for: set[int] = set()

    def name_group(self, group: Any) -> None:
        members = tuple(sorted(dist.get_process_group_ranks(group)))
        number = sum(others == members for others, _ in self._groups.values())
        self._groups[group.group_name] = members, number

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Record through the functions of torch.distributed that no operator shows."""
        make = dist.new_group

        def new_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
            made = make(ranks, *args, **kwargs)
            if made is not dist.GroupMember.NON_GROUP_MEMBER:
                self.name_group(made)
            return made

        with (
            mock.patch.object(dist, "new_group", new_group),
            mock.patch.object(dist, "batch_isend_irecv", self._exchange),
        ):
            yield

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            self._note(function, args)
        return function(*args, **(kwargs or {}))

    def _note(self, function: Any, args: Any) -> None:
        name = function._schema.name.removeprefix("c10d::")
        group = next((dist.ProcessGroup.unbox(one) for one in args if _is_group(one)), None)
        if group is None:
            return
        tensor = next((one for one in tree_leaves(args) if isinstance(one, Tensor)), None)
        peer = None
        if name in _POINT_TO_POINT:
            numbers = zip(function._schema.arguments, args, strict=False)
            in_group = next(value for argument, value in numbers if argument.name in ("src", "dst"))
            peer = dist.get_global_rank(group, in_group)
        kind = _POINT_TO_POINT.get(name, name.rstrip("_"))
        content = () if tensor is None or kind in _SIZES_DIFFER else (tensor.dtype, *tensor.shape)
        library = "nccl" if on_device(tensor) else "gloo"
        communicator = Communicator(*self._groups[group.group_name], library)
        op = Op(kind, peer, content)
        if self._batch is None:
            self._post(communicator, [op])  # and waits for it
        else:
            self._batch.append((communicator, op))

    def _post(self, communicator: Communicator, ops: list[Op]) -> int:
        self.program.kernels.append(Kernel(communicator, ops, frozenset(self._not_waited_for)))
        return len(self.program.kernels) - 1

    def _exchange(self, operations: Sequence[Any]) -> list["_Work"]:
        """Take the place of `batch_isend_irecv`."""
        self._batch = []
        for one in operations:
            to = {"group_dst" if one.op is dist.isend else "group_src": one.group_peer}
            one.op(one.tensor, group=one.group, **to)
            if one.op is dist.irecv:
                one.tensor.data.zero_()
        batch, self._batch = self._batch, None
        (communicator,) = {communicator for communicator, _ in batch}
        number = self._post(communicator, [op for _, op in batch])
        self._not_waited_for.add(number)
        return [_Work(lambda: self._not_waited_for.discard(number))] * len(operations)


class _Work(NamedTuple):
    wait: Callable[[], None]


def _is_group(value: object) -> bool:
    return isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type())


class _Player:
    """Plays the program of one rank.

    Attributes:
        posted: of each communicator the kernels that have not ended, by number, with their open ops; the first
            of them runs.
    """

    def __init__(self, program: Program, strict: bool) -> None:
        self.program, self.strict = program, strict
        self.posted: dict[Communicator, deque[tuple[int, list[Op]]]] = defaultdict(deque)
        self.next = 0
        self._running: set[int] = set()

    def post(self) -> bool:
        """Post what can be posted; return whether anything was."""
        before = self.next
        while self.next < len(self.program.kernels):
            kernel = self.program.kernels[self.next]
            if self._running - (frozenset() if self.strict else kernel.beside):
                break
            self.posted[kernel.communicator].append((self.next, list(kernel.ops)))
            self._running.add(self.next)
            self.next += 1
        return self.next > before

    def open_ops(self, communicator: Communicator) -> list[Op]:
        """Return the ops of the running kernel that have not met their counterparts."""
        posted = self.posted[communicator]
        return posted[0][1] if posted else []

    def end(self) -> int:
        """Take out the kernels that have ended; return how many."""
        ended = 0
        for posted in self.posted.values():
            if posted and not posted[0][1]:
                self._running.remove(posted.popleft()[0])
                ended += 1
        return ended


def play(programs: Sequence[Program], strict: bool = False) -> int:
    """Play the programs of all ranks, in rank order; return the number of kernels, of all ranks.

    Raises OrderError where they cannot end.
    """
    players = [_Player(program, strict) for program in programs]
    total = 0
    while any(player.next < len(player.program.kernels) or any(player.posted.values()) for player in players):
        moved = [player.post() for player in players]
        for player in players:
            for communicator in list(player.posted):
                for op in list(player.open_ops(communicator)):
                    _meet(players, player, communicator, op)
        ended = sum(player.end() for player in players)
        total += ended
        if not ended and not any(moved):
            raise OrderError(f"after {total} kernels all wait:\n" + "\n".join(map(_waiting, players)))
    return total


def _meet(players: Sequence[_Player], player: _Player, communicator: Communicator, op: Op) -> None:
    """Let an op end, with its counterparts, if these run."""
    rank = player.program.rank
    mine = player.open_ops(communicator)
    if op not in mine or op.kind == "recv":
        return
    if op.kind == "send":
        theirs = players[op.peer].open_ops(communicator) if op.peer is not None else []
        found = next((one for one in theirs if (one.kind, one.peer) == ("recv", rank)), None)
        if found is None:
            return
        if found.content != op.content:
            raise OrderError(f"rank {rank} sends {op.content}, rank {op.peer} receives {found.content}")
        mine.remove(op)
        theirs.remove(found)
        return
    all_ops = [players[member].open_ops(communicator) for member in communicator.members]
    if all(all_ops):
        if any(ops != [op] for ops in all_ops):
            raise OrderError(f"the members of {communicator} ask for {[ops[0] for ops in all_ops]}")
        for ops in all_ops:
            ops.clear()


def _waiting(player: _Player) -> str:
    heads = [
        f"{one.members} #{one.number}: {posted[0][1]}" for one, posted in player.posted.items() if posted
    ]
    return f"rank {player.program.rank}: {'; '.join(heads) or 'done'}"
