"""The mean over the replicas of a federation that come to their end, over a tree of pairs of ranks.

The parent of a slot is the slot without the lowest of its binary digits that are 1; where that one is not there,
the parent's parent, and so on. Sums go up the tree, and the mean of the root comes down. So all get the same bits,
a slot that is missing changes the way of its own children only, and where all slots are taken no rank exchanges
with more than log2(slots) others. Where a child is lost its sum is left out. A slot that has lost its parent
becomes the root of a tree of its own. With each sum and the mean goes a list of the replicas in it.

Slots that no other can connect to are leaves: they are not connected to each other.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set

import torch
from torch import Tensor

from megatron_noloco.federation.commit import Guard, PoisonedError
from megatron_noloco.federation.network import FederationTransport
from megatron_noloco.job.activity import now
from megatron_noloco.outer.finite_mean import ExchangeReport, MeanPiece
from megatron_noloco.outer.messages import Channel, tag_of
from megatron_noloco.outer.vectors import Ranges
from megatron_noloco.plans.grouping import Group
from megatron_noloco.settings import MOST_SLOTS
from megatron_noloco.transport.interface import Message

_LOOK_SECONDS = 0.02


def parent_of(slot: int, members: Set[int], hidden: Set[int] = frozenset()) -> int | None:
    """Return the parent of a slot in the tree; None for the root.

    Args:
        members: all slots that average; of one that is hidden, those that it is connected to.
        hidden: slots that no other can connect to.
    """
    inner = members - hidden or members
    if slot not in inner:
        return sorted(inner)[slot % len(inner)]
    above = slot
    while above:
        above &= above - 1
        if above in inner:
            return above
    root = min(inner)
    return None if slot == root else root


class TreeMean:
    """An exchange that yields the mean over the members of a group, in fp32. Holds two vectors.

    All ranks of a replica leave out the same sums.

    Args:
        deadline_seconds: for a child; for the parent as many times more as the tree may have levels.
        may_come: whether a rank that is waited for may still do its part; one that has lost its connection is
            waited for, too, as long as this is so.
        left_out: why slots are not in the mean, by slot. Members among them get the mean, and add nothing to it.

    Attributes:
        report: `group` has the replicas in the mean, `missed` names others, and why they are not. The deviation is
            that of this replica from the mean.
        stopped: whether there is no mean, since this job is to stop.
    """

    rounding = None

    def __init__(
        self,
        transport: FederationTransport,
        deadline_seconds: float,
        may_come: Callable[[int], bool],
        left_out: Mapping[int, str] | None = None,
    ) -> None:
        self._transport, self._place = transport, transport.place
        self._deadline_seconds, self._may_come = deadline_seconds, may_come
        self._left_out = left_out or {}
        self._vector, self._what, self._tag, self.stopped = torch.empty(0), "", 0, False
        self.report = ExchangeReport(())

    def begin(self, vector: Tensor, group: Group, number: int, what: str, exact: Ranges = ()) -> None:
        """Note what to average; `finish` does it. The arguments are those of `Exchange.begin`."""
        self._vector, self.report = vector.to("cpu"), ExchangeReport(group)
        self._what, self._tag = what, tag_of(number, Channel.FINAL)

    def progress(self) -> Iterator[MeanPiece]:
        return iter(())

    def finish(self) -> Iterator[MeanPiece]:
        """Yield the mean, whole; the own vector where this job is to stop. A collective of the replica.

        Raises nothing where others are lost.
        """
        members, own, partners = self.report.group, self._place.replica, self._transport.partners
        reachable = partners.agree([partners.reachable(self._place.rank_of(slot)) for slot in members])
        hidden = {slot for slot, vote in zip(members, reachable, strict=True) if not vote}
        parents = {slot: parent_of(slot, {*members}, hidden) for slot in members}
        children, parent = [slot for slot in members if parents[slot] == own], parents[own]
        total, included = self._vector.clone(), torch.zeros(MOST_SLOTS, dtype=torch.uint8)
        if own in self._left_out:
            total.zero_()
        else:
            included[own] = 1
        memory = torch.empty_like(total), torch.empty_like(included)
        for child in children:
            came = self._move(child, (), memory, self._deadline_seconds)
            if self._agreed(came and (not memory[1].any() or self._is_sound(memory[0] / memory[1].sum()))):
                total += memory[0]
                included |= memory[1]
            else:  # a late chunk still arrives where the last one was
                memory = torch.empty_like(total), torch.empty_like(included)
        came = False
        if parent is not None:
            levels = 1 + math.log2(self._place.replicas)  # each of which may wait for its own children
            came = self._move(parent, (total, included), memory, levels * self._deadline_seconds)
            came = self._agreed(came and bool(memory[1].any()) and self._is_sound(memory[0]))
        if came:
            total, included = memory
        elif included.any():  # in new memory: the parent may still ask for the sum
            total = total / included.sum()
        self.stopped = not self._agreed(came or not partners.stopped())
        if self.stopped or not included.any():  # a part of the sums may be missing; or this replica is alone
            total, included = self._vector.clone(), torch.zeros_like(included)
            included[own] = 1
        if not self.stopped:
            for child in children:
                self._move(child, (total, included), (), self._deadline_seconds)
        self._end(total, included)
        yield MeanPiece(0, len(total), total)

    def _end(self, mean: Tensor, included: Tensor) -> None:
        """Complete the report."""
        report = self.report
        why = {**dict.fromkeys(report.group, "was lost, or is not finite"), **self._left_out}
        report.missed = "; ".join(
            f"without replica {slot}, which {text}"
            for slot, text in sorted(why.items())
            if not included[slot]
        )
        report.group = tuple(included.nonzero().flatten().tolist())
        report.seconds = time.perf_counter() - report.started
        report.compared_elements = len(mean)
        report.squared_deviation = float((mean - self._vector).square().sum())

    def _agreed(self, vote: bool) -> bool:
        return self._transport.partners.agree([vote]) == [1]

    def _is_sound(self, mean: Tensor) -> bool:
        """Whether another's mean is as near to this replica's weights as those of a first exchange must be."""
        squared_distance = float((mean - self._vector).square().sum())
        try:
            norm = float(self._vector.norm())
            Guard().check(norm, ExchangeReport((), squared_deviation=squared_distance / 2))
        except PoisonedError:
            return False
        return math.isfinite(squared_distance)

    def _move(self, slot: int, sends: Sequence[Tensor], receives: Sequence[Tensor], seconds: float) -> bool:
        """Send to a slot, and receive its answer; return whether all came. A lost connection begins it anew."""
        rank, until = self._place.rank_of(slot), time.monotonic() + seconds
        now.part(f"waiting for rank {rank} (replica {slot}) in {self._what}")
        messages = [[Message(rank, part) for part in parts] for parts in (sends, receives)]
        awaited = None
        while True:
            # Before the look: a rank that has sent everything goes on at once.
            goes_on = time.monotonic() < until and not self._transport.partners.stopped()
            may_come = goes_on and self._may_come(rank)
            try:
                if awaited is None and may_come:
                    awaited = self._transport.post(messages[0], [], self._tag)
                    if receives:  # whoever answers has what was sent
                        awaited = self._transport.post([], messages[1], self._tag)
                if awaited is not None:
                    awaited.arrived()
                    if awaited.done():
                        self.report.bytes_sent += sum(part.nbytes for part in sends)
                        return True
            except ConnectionError:
                awaited = None
            if not may_come:
                return False
            time.sleep(_LOOK_SECONDS)
