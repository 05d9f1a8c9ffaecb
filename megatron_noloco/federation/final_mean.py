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
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence, Set
from contextlib import AsyncExitStack, suppress
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field, TypeAdapter
from torch import Tensor

from megatron_noloco.federation.catch_up import MeanGroup
from megatron_noloco.federation.delivery import (
    EVERYTHING,
    Taker,
    part_with,
    pass_on,
    receive_vector,
)
from megatron_noloco.federation.gather import Gather, Transfer
from megatron_noloco.federation.links import Link
from megatron_noloco.federation.messages import Slot, receive_json, send_json
from megatron_noloco.federation.node_thread import NodeThread
from megatron_noloco.federation.rounds import ImplausibleError, Replica, check_plausible
from megatron_noloco.federation.streams import Changes, Stream
from megatron_noloco.job.activity import now
from megatron_noloco.job.agreement import computed_by_rank_0, gather_from_all_ranks
from megatron_noloco.outer.finite_mean import ExchangeReport, MeanPiece
from megatron_noloco.outer.vectors import HOST, NOTHING, Ranges
from megatron_noloco.plans.grouping import Group
from megatron_noloco.settings import MOST_SLOTS

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


class _Step(NamedTuple):
    """What all ranks of this replica do next.

    Attributes:
        what: "receive": gets a vector; "add": this vector is the sum of a child, "take": it is the mean of the
            parent; "send": gives its sum to the parent, or its mean to children; "end": has its mean; "stop": has
            its own vector instead, since the job is to stop.
        slots: that are in the sum or the mean which was received.
    """

    what: Literal["receive", "add", "take", "send", "end", "stop"]
    slots: Sequence[int] = ()


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

    def __init__(self, replica: Replica, end: MeanGroup | None, seconds: float) -> None:
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

    def progress(self, until: float = math.inf) -> Iterator[MeanPiece]:
        """Yield nothing: `finish` yields the mean."""
        return iter(())

    def finish(self) -> Iterator[MeanPiece]:
        """Yield the mean, in one piece. Where nothing else has come it is the vector itself."""
        own, tree = self._replica.place.replica, self._tree
        left_out: dict[int, str] = computed_by_rank_0(lambda: tree.left_out if tree else {})
        included, is_mean = {own} - left_out.keys(), False
        total = self._vector.clone() if included else torch.zeros_like(self._vector)
        memory = torch.zeros_like(total)
        now.part("waiting for the other replicas in the final mean")
        step = self._next_step(None)
        while step is not None:
            gives, gets = total if step.what == "send" else None, memory if step.what == "receive" else None
            if step.what == "add" and self._is_sound(memory / len(step.slots)):
                total += memory
                included |= {*step.slots}
            elif step.what == "take" and self._is_sound(memory):
                total, included, is_mean = memory, {*step.slots}, True
            elif step.what == "stop" or (step.what == "end" and not included):
                # A part of the sums may be missing; or this replica is alone.
                self.stopped = step.what == "stop"
                total, included = self._vector.clone(), {own}
            elif step.what == "end" and not is_mean:
                total = total / len(included)
            if gives is None and gets is None:
                step = self._next_step(sorted(included))
            else:
                transfer = self._gather.whole(gives, gets)
                step = self._next_step(transfer)
                transfer.wait()
        for start, stop in self._replica.movement.padding:
            total[start:stop] = self._vector[start:stop]
        self._complete(total, included, left_out)
        yield MeanPiece(0, len(total), total)

    def _next_step(self, answer: Transfer | list[int] | None) -> _Step | None:
        """Go on with the answer to the last step; return the next on all ranks, or None at the end."""
        tree = self._tree
        return computed_by_rank_0(lambda: tree.next_step(answer) if tree else None)

    def _complete(self, mean: Tensor, included: Set[int], left_out: Mapping[int, str]) -> None:
        """Complete the report."""
        report = self.report
        if self._tree is not None:
            report.bytes_sent = 4 * self._replica.movement.length * self._tree.sent
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
        squared_distance, squared_norm = (
            sum(parts) for parts in zip(*gather_from_all_ranks(own), strict=True)
        )
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
    """The conversations of the leader with its neighbours in the tree.

    Attributes:
        left_out: why slots are not in the mean, by slot. Members among them get the mean, and add nothing to it.
        sent: vectors.
    """

    def __init__(self, thread: NodeThread, end: MeanGroup, seconds: float, length: int) -> None:
        self._thread, self._node, self._seconds = thread, thread.node, seconds
        self.left_out, self.sent = end.left_out, 0
        tree = parents({*end.group}, end.links)
        self._parent = tree[self._node.slot]
        self._children = [slot for slot in end.group if tree[slot] == self._node.slot]
        self._levels = 1 + max(_depth(slot, tree) for slot in end.group)
        self._length = length
        self._came: dict[int, _Child] = {}  # their sum is still to be received
        self._waiting: dict[int, _Child] = {}  # their sum has come
        self._summed, self._served = set[int](), set[int]()
        self._changes = Changes()
        self._script = self._run()
        self._node.serves[MEAN] = self._serve

    def next_step(self, answer: Transfer | list[int] | None) -> _Step | None:
        """Go on with the answer to the last step: its transfer, or the slots that are included so far."""

        async def go_on() -> _Step | None:
            try:
                return await self._script.asend(answer)
            except StopAsyncIteration:
                return None

        return self._thread.call(go_on()).result()

    async def _run(self) -> AsyncGenerator[_Step, Any]:
        included = sorted({self._node.slot} - self.left_out.keys())
        for child in self._children:
            until = self._deadline(1)
            while (taker := await self._child_that_comes(child, until)) is not None:
                try:
                    await receive_vector(taker.stream, (yield _Step("receive")))
                except (ConnectionError, TimeoutError):
                    taker.refuse("was lost")
                    continue
                self._summed.add(child)
                self._waiting[child] = taker
                included = yield _Step("add", taker.slots)
                break
        slots, until, pause = None, self._deadline(self._levels), 0.0
        while slots is None and (parent := await self._parent_that_comes(until, pause)) is not None:
            pause = _AGAIN_SECONDS  # it may not be at its mean yet
            with suppress(ConnectionError, TimeoutError):
                async with AsyncExitStack() as conversation:
                    async with asyncio.timeout_at(until):
                        stream = await conversation.enter_async_context(parent.open(MEAN))
                    await send_json(stream, _LISTED, included)
                    await pass_on([Taker(stream)], (yield _Step("send")))
                    async with asyncio.timeout_at(until):
                        listed = await receive_json(stream, _LISTED, _LONGEST)
                    self.sent += 1
                    await receive_vector(stream, (yield _Step("receive")))
                    slots = listed
                    await stream.send(EVERYTHING)
        if slots is None and self._node.is_leaving:
            yield _Step("stop")
            return
        if slots is not None:
            yield _Step("take", slots)
        included, until = (yield _Step("end")), self._deadline(1)
        while takers := await self._children_that_wait(until):
            for taker in takers.values():
                with suppress(ConnectionError):
                    await send_json(taker.stream, _LISTED, included)
            await pass_on([*takers.values()], (yield _Step("send")))
            self.sent += 1
            have = await part_with([*takers.values()])
            self._served |= {slot for slot, taker in takers.items() if taker in have}

    async def _child_that_comes(self, child: int, until: float) -> _Child | None:
        await self._wait(until, lambda: child in self._came or not self._may_come(child))
        return self._came.pop(child, None)

    async def _children_that_wait(self, until: float) -> dict[int, _Child]:
        def is_over() -> bool:
            return bool(self._waiting) or not any(map(self._may_come, self._summed - self._served))

        await self._wait(until, is_over)
        takers, self._waiting = self._waiting, {}
        return takers

    async def _parent_that_comes(self, until: float, pause: float) -> Link | None:
        await asyncio.sleep(pause)
        is_late = asyncio.get_running_loop().time() >= until or self._node.is_leaving
        if self._parent is None or is_late or not self._may_come(self._parent):
            return None
        return self._node.links[self._parent]

    async def _serve(self, link: Link, stream: Stream) -> None:
        """Run the stream of a child, to its end."""
        child = _Child(stream, await receive_json(stream, _LISTED, _LONGEST))
        if link.peer in self._summed:  # the first sum counts
            await stream.skip(4 * self._length)
            self._waiting[link.peer] = child
        else:
            self._came[link.peer] = child
        self._changes.note()
        await child.over.wait()

    async def _wait(self, until: float, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds, the deadline has come, or this job is to stop."""
        while not condition() and asyncio.get_running_loop().time() < until and not self._node.is_leaving:
            await self._changes.until(condition, _AGAIN_SECONDS)

    def _deadline(self, levels: int) -> float:
        return asyncio.get_running_loop().time() + levels * self._seconds

    def _may_come(self, slot: int) -> bool:
        """Whether a replica averages at its end, or will as soon as it has a link again."""
        link = self._node.links.get(slot)
        return link is not None and link.seen.status.phase == "ended"


def _depth(slot: int, tree: Mapping[int, int | None]) -> int:
    parent = tree[slot]
    return 0 if parent is None else 1 + _depth(parent, tree)
