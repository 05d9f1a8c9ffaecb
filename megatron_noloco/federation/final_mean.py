"""The mean over the replicas of a federation that come to their end, over a tree of replicas with links.

    child                                   parent
    opens a stream, of the kind "mean"
    sends its sum, and who is in it         adds the sums of its children to its own vector
    receives the mean, and who is in it     is a child itself, or divides the sum as the root
    says that it has everything             sends it again to a child that does not say so and comes again

So all get the same bits. A stream that is lost is opened again: the parent keeps the first sum of each child.
Where a child does not come its sum is left out. A replica that has lost its parent becomes the root of a tree of
its own.

The parent of a slot is the slot without the lowest of its binary digits that are 1; where that slot is not there,
the parent's parent, and so on. So where all are linked no replica exchanges with more than log2(slots) others. A
slot without a link to that parent hangs below the neighbour that is nearest to the root.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Set
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Annotated, Any, TypeVar, cast

import torch
from pydantic import Field, TypeAdapter
from torch import Tensor

from megatron_noloco.federation.catch_up import AtEnd
from megatron_noloco.federation.delivery import (
    EVERYTHING,
    Taker,
    part_with,
    pass_on,
    receive_vector,
    send_vector,
)
from megatron_noloco.federation.gather import Gather, Leader
from megatron_noloco.federation.links import Link
from megatron_noloco.federation.messages import Slot, receive_json, send_json
from megatron_noloco.federation.node_thread import NodeThread
from megatron_noloco.federation.rounds import ImplausibleError, Replica, check_plausible
from megatron_noloco.federation.streams import Stream
from megatron_noloco.job.activity import now
from megatron_noloco.job.agreement import of_all_ranks
from megatron_noloco.outer.finite_mean import ExchangeReport, MeanPiece
from megatron_noloco.outer.vectors import HOST, NOTHING, Ranges
from megatron_noloco.plans.grouping import Group
from megatron_noloco.settings import MOST_SLOTS

Value = TypeVar("Value")
MEAN = "mean"  # the kind of conversation
FINAL = 2**52  # the number of the exchange at the end
_PASSES = 1 << 21  # the first tag inside the replica, beyond those of rounds and states
_AGAIN_SECONDS = 0.5  # before a stream that was lost is opened again
_LONGEST = 2**16  # bytes of a list
_LISTED = TypeAdapter(Annotated[list[Slot], Field(max_length=MOST_SLOTS)])


def parents(members: Set[int], links: Mapping[int, Set[int]]) -> dict[int, int | None]:
    """Return the parent of each member in the tree; None for a root. All members compute the same.

    Args:
        links: who has links to whom; a link counts where either side names it.
    """
    near = {slot: {other for other in members if _linked(slot, other, links)} for slot in members}
    found: dict[int, int | None] = {}
    for root in sorted(members):
        if root in found:
            continue
        found[root] = None  # the lowest slot of those that can reach each other
        depth, order = {root: 0}, deque([root])
        while order:
            slot = order.popleft()
            for other in sorted(near[slot] - depth.keys()):
                depth[other] = depth[slot] + 1
                order.append(other)
        for slot in depth.keys() - {root}:
            planned = _planned(slot, depth.keys(), root)
            # Towards the root, so that there is no circle: by depth, then by number.
            is_above = planned in near[slot] and (depth[planned], planned) < (depth[slot], slot)
            nearest = min(near[slot] & depth.keys(), key=lambda other: (depth[other], other))
            found[slot] = planned if is_above else nearest
    return found


def _linked(one: int, other: int, links: Mapping[int, Set[int]]) -> bool:
    return one != other and (other in links.get(one, ()) or one in links.get(other, ()))


def _planned(slot: int, there: Set[int], root: int) -> int:
    above = slot
    while above:
        above &= above - 1
        if above in there:
            return above
    return root


class FinalMean:
    """An exchange that yields the mean over the members of a group, in fp32. Holds three vectors.

    A collective of the replica: its leader sends and receives, each rank adds what it has. See
    `outer.exchange.AnyExchange`.

    Args:
        end: on the leader.
        seconds: for a child; for the parent as many times more as the tree has levels.

    Attributes:
        report: `group` has the replicas in the mean, `missed` names others, and why they are not. The deviation is
            that of this rank's part from the mean.
        stopped: whether there is no mean, since this job is to stop.
    """

    rounding = None
    done = False  # before `finish`

    def __init__(self, replica: Replica, end: AtEnd | None, seconds: float) -> None:
        self._replica, leading = replica, replica.leading
        self._gather = Gather(replica.movement, _PASSES)
        self._tree = None
        if leading is not None and end is not None:
            self._tree = _Tree(leading.thread, end, seconds, replica.movement.length)
        self._vector, self.stopped = NOTHING, False
        self.report = ExchangeReport(())

    def begin(self, vector: Tensor, group: Group, number: int, what: str, exact: Ranges = ()) -> None:
        """Note what to average; `finish` does it. The arguments are those of `Exchange.begin`."""
        self._vector, self.report = vector.to(HOST), ExchangeReport(group)

    def progress(self) -> Iterator[MeanPiece]:
        """Yield nothing: `finish` yields the mean."""
        return iter(())

    def finish(self) -> Iterator[MeanPiece]:
        """Yield the mean, in one piece. Where nothing else has come it is the vector itself."""
        own, tell, tree = self._replica.place.replica, self._replica.tell, self._tree
        children, parent, left_out = tell(lambda: tree and (tree.children, tree.parent, tree.left_out))
        total, included = self._vector.clone(), {own} - left_out.keys()
        if not included:
            total.zero_()
        memory = torch.zeros_like(total)
        for child in children:
            came = self._sum_of(child, memory)
            if came and self._is_sound(memory / len(came)):
                total += memory
                included |= came
        came = None if parent is None else self._mean_of_parent(total, included, memory)
        if came and self._is_sound(memory):
            total, included = memory, came
        elif included:
            came, total = None, total / len(included)
        self.stopped = tell(lambda: tree and tree.is_stopped) and not came
        if self.stopped or not included:  # a part of the sums may be missing; or this replica is alone
            total, included = self._vector.clone(), {own}
        if not self.stopped:
            self._pass_down(total, included)
        for start, stop in self._replica.movement.padding:
            total[start:stop] = self._vector[start:stop]
        self._complete(total, included, left_out)
        yield MeanPiece(0, len(total), total)

    def _sum_of(self, child: int, memory: Tensor) -> set[int] | None:
        """Fill a vector with the sum of a child; return who is in it, or None where the child does not come."""
        tell, tree = self._replica.tell, self._tree
        while True:
            now.part(f"waiting for replica {child} in the final mean")
            listed = tell(lambda: tree and tree.call(tree.wait_for_sum(child)))
            if listed is None:
                return None
            if self._moved(None, memory, lambda leader: tree and tree.receive_sum(child, leader)):
                return set(listed)

    def _mean_of_parent(self, total: Tensor, included: Set[int], memory: Tensor) -> set[int] | None:
        """Send the sum to the parent, and fill a vector with its mean; return who is in it, or None."""
        tell, tree = self._replica.tell, self._tree
        while True:
            now.part("waiting for the parent in the final mean")
            if not tell(lambda: tree and tree.call(tree.open(sorted(included)))):
                return None
            if self._moved(total, None, lambda leader: tree and tree.send_sum(leader)):
                listed = tell(lambda: tree and tree.call(tree.answer()))
                if listed is not None and self._moved(
                    None, memory, lambda leader: tree and tree.receive_mean(leader)
                ):
                    return set(listed)

    def _pass_down(self, mean: Tensor, included: Set[int]) -> None:
        """Send the mean to all children that wait for it, or may come for it again."""
        tell, tree = self._replica.tell, self._tree
        while tell(lambda: tree and tree.call(tree.wait_for_children())):
            self._moved(mean, None, lambda leader: tree and tree.send_mean(sorted(included), leader))

    def _moved(self, gives: Tensor | None, gets: Tensor | None, lead: Callable[[Leader], Any]) -> bool:
        """Move a vector inside the replica; return whether the leader could send or receive all of it."""
        transfer, failure = self._gather.whole(gives, gets), None
        if self._tree is not None:
            try:
                self._tree.call(lead(cast(Leader, transfer)))
            except (ConnectionError, TimeoutError) as error:
                failure = error
        transfer.wait()
        if self._tree is not None and gives is not None and failure is None:
            self.report.bytes_sent += 4 * self._replica.movement.length
        return bool(self._replica.tell(lambda: failure is None))

    def _complete(self, mean: Tensor, included: Set[int], left_out: Mapping[int, str]) -> None:
        """Complete the report."""
        report = self.report
        why = {**dict.fromkeys(report.group, "was lost, or is not finite"), **left_out}
        report.missed = "; ".join(
            f"without replica {slot}, which {text}"
            for slot, text in sorted(why.items())
            if slot not in included
        )
        report.group = tuple(sorted(included))
        report.seconds = time.perf_counter() - report.started
        report.compared_elements = len(mean)
        report.squared_deviation = float((mean - self._vector).square().sum())

    def _is_sound(self, mean: Tensor) -> bool:
        """Return whether a mean is as near to this replica's weights as that of a round must be.

        A collective of the replica.
        """
        own = float((mean - self._vector).square().sum()), float(self._vector.square().sum())
        squared_distance, squared_norm = (sum(parts) for parts in zip(*of_all_ranks(own), strict=True))
        try:
            report = ExchangeReport((), squared_deviation=squared_distance / 2)
            check_plausible(math.sqrt(squared_norm), report)
        except ImplausibleError:
            return False
        return math.isfinite(squared_distance)


class _Child(Taker):
    """A child that has opened a stream, and the replicas in its sum."""

    def __init__(self, stream: Stream, slots: list[int]) -> None:
        super().__init__(stream)
        self.slots = slots


class _Tree:
    """The conversations of the leader with its neighbours in the tree. Its coroutines run in the leader's thread.

    Attributes:
        children, parent: slots; the parent is None for the root.
        left_out: why slots are not in the mean, by slot. Members among them get the mean, and add nothing to it.
    """

    def __init__(self, thread: NodeThread, end: AtEnd, seconds: float, length: int) -> None:
        self._thread, self._node, self._seconds = thread, thread.node, seconds
        self.left_out = end.left_out
        tree = parents({*end.group}, end.links)
        self.parent = tree[self._node.slot]
        self.children = [slot for slot in end.group if tree[slot] == self._node.slot]
        self._levels = 1 + max(_depth(slot, tree) for slot in end.group)
        self._length = length
        self._deadlines: dict[int | None, float] = {}  # on the loop's clock, by slot; None: of the mean
        self._came: dict[int, _Child] = {}  # their sum is still to be received
        self._waiting: dict[int, _Child] = {}  # their sum has come
        self._summed, self._served = set[int](), set[int]()
        self._changed = asyncio.Event()
        self._stream: Stream  # to the parent, and what ends it
        self._opened = AsyncExitStack()
        self._pause = 0.0  # before a stream to the parent is opened: it may not be at its mean yet
        self._node.serves[MEAN] = self._serve

    @property
    def is_stopped(self) -> bool:
        """Whether this job is to stop."""
        return self._node.is_leaving

    def call(self, work: Coroutine[Any, Any, Value]) -> Value:
        """Run a coroutine in the leader's thread."""
        return self._thread.call(work).result()

    async def wait_for_sum(self, child: int) -> list[int] | None:
        """Wait for the stream of a child; return who is in its sum, or None where it does not come."""
        await self._wait(child, lambda: child in self._came or not self._may_come(child))
        return self._came[child].slots if child in self._came else None

    async def receive_sum(self, child: int, transfer: Leader) -> None:
        """Hand out the sum of a child."""
        taker = self._came.pop(child)
        try:
            await receive_vector(taker.stream, transfer)
        except BaseException:
            taker.refuse("was lost")
            raise
        self._summed.add(child)
        self._waiting[child] = taker

    async def open(self, included: list[int]) -> bool:
        """Open a stream to the parent; return False where it does not come."""
        assert self.parent is not None
        until = self._until(self.parent)
        while (
            asyncio.get_running_loop().time() < until and not self.is_stopped and self._may_come(self.parent)
        ):
            await asyncio.sleep(self._pause)
            self._pause = _AGAIN_SECONDS
            with suppress(ConnectionError, TimeoutError):
                link = self._node.links[self.parent]
                async with asyncio.timeout_at(until):
                    self._stream = await self._opened.enter_async_context(link.open(MEAN))
                await send_json(self._stream, _LISTED, included)
                return True
        return False

    async def send_sum(self, transfer: Leader) -> None:
        """Send this side's sum to the parent."""
        async with self._lost_where_failed():
            await send_vector(self._stream, transfer)

    async def answer(self) -> list[int] | None:
        """Return who is in the parent's mean; None where the stream is lost."""
        try:
            async with self._lost_where_failed(), asyncio.timeout_at(self._until(self.parent)):
                return await receive_json(self._stream, _LISTED, _LONGEST)
        except (ConnectionError, TimeoutError):
            return None

    async def receive_mean(self, transfer: Leader) -> None:
        """Hand out the parent's mean."""
        async with self._lost_where_failed():
            await receive_vector(self._stream, transfer)
        with suppress(ConnectionError):  # the mean has come
            await self._stream.send(EVERYTHING)
        await self._opened.aclose()

    async def wait_for_children(self) -> bool:
        """Wait until children wait for the mean; return False where no child comes for it any more."""

        def is_over() -> bool:
            left = {slot for slot in self._summed - self._served if self._may_come(slot)}
            return bool(self._waiting) or not left

        await self._wait(None, is_over)
        return bool(self._waiting)

    async def send_mean(self, included: list[int], transfer: Leader) -> None:
        """Send the mean to the children that wait for it."""
        takers, self._waiting = self._waiting, {}
        for taker in takers.values():
            with suppress(ConnectionError):
                await send_json(taker.stream, _LISTED, included)
        await pass_on([*takers.values()], transfer)
        have = await part_with([*takers.values()])
        self._served |= {slot for slot, taker in takers.items() if taker in have}

    @asynccontextmanager
    async def _lost_where_failed(self) -> AsyncIterator[None]:
        try:
            yield
        except BaseException:
            self._stream.abort("was lost")
            await self._opened.aclose()
            raise

    async def _serve(self, link: Link, stream: Stream) -> None:
        """Run the stream of a child, to its end."""
        child = _Child(stream, await receive_json(stream, _LISTED, _LONGEST))
        if link.peer in self._summed:  # the first sum counts
            await stream.skip(4 * self._length)
            self._waiting[link.peer] = child
        else:
            self._came[link.peer] = child
        self._changed.set()
        await child.over.wait()

    async def _wait(self, slot: int | None, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds, the deadline for a slot has come, or this job is to stop."""
        until = self._until(slot)
        while not condition() and asyncio.get_running_loop().time() < until and not self.is_stopped:
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(_AGAIN_SECONDS):
                    await self._changed.wait()

    def _until(self, slot: int | None) -> float:
        """Return the deadline for a slot, which begins with the first call."""
        levels = self._levels if slot == self.parent else 1
        at = asyncio.get_running_loop().time()
        return self._deadlines.setdefault(slot, at + levels * self._seconds)

    def _may_come(self, slot: int) -> bool:
        """Whether a replica averages at its end, or will as soon as it has a link again."""
        link = self._node.links.get(slot)
        return link is not None and link.seen.status.phase == "ended"


def _depth(slot: int, tree: Mapping[int, int | None]) -> int:
    parent = tree[slot]
    return 0 if parent is None else 1 + _depth(parent, tree)
