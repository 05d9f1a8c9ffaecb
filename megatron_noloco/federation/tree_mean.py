"""The mean over the replicas of a federation that come to their end, over a tree of pairs of replicas.

The parent of a slot is the slot without the lowest of its binary digits that are 1; where that one is not there,
the parent's parent, and so on. Sums go up the tree, and the mean of the root comes down. So all get the same bits,
a slot that is missing changes the way of its own children only, and where all slots are taken no replica exchanges
with more than log2(slots) others. Where a child is lost its sum is left out. A slot that has lost its parent
becomes the root of a tree of its own. With each sum and the mean goes a list of the replicas in it.

Slots that are not connected to all others are leaves, so those that no other can connect to are. Where every slot
lacks a connection the lowest one is the root, and each other slot hangs on it, or on a neighbour that does.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_noloco.federation.commit import Guard, PoisonedError, Replica
from megatron_noloco.federation.network import FederationTransport
from megatron_noloco.federation.passes import FAILURES, is_over, run, whole
from megatron_noloco.federation.speakers import Receives, Sends
from megatron_noloco.job.activity import now
from megatron_noloco.job.agreement import of_all_ranks
from megatron_noloco.outer.finite_mean import ExchangeReport, MeanPiece
from megatron_noloco.outer.messages import Channel, tag_of
from megatron_noloco.outer.vectors import HOST, NOTHING, Ranges
from megatron_noloco.plans.grouping import Group
from megatron_noloco.settings import MOST_SLOTS
from megatron_noloco.transport.interface import Flight, Message

_LOOK_SECONDS = 0.02
_PASSES = 1 << 21  # the tag inside the replica, beyond those of exchanges and states


def parent_of(slot: int, inner: Set[int]) -> int | None:
    """Return the parent of a slot in the tree; None for the root.

    Args:
        inner: the slots that are no leaves.
    """
    if slot not in inner:
        return sorted(inner)[slot % len(inner)]
    above = slot
    while above:
        above &= above - 1
        if above in inner:
            return above
    root = min(inner)
    return None if slot == root else root


@dataclass(frozen=True)
class Tree:
    """The part of the speaker in a mean.

    Attributes:
        deadline_seconds: for a child; for the parent as many times more as the tree may have levels.
        may_come: whether a slot that is waited for may still do its part; one that has lost its connection is
            waited for, too, as long as this is so.
        left_out: why slots are not in the mean, by slot. Members among them get the mean, and add nothing to it.
        links: to whom members are connected; a member that is missing: to all.
    """

    transport: FederationTransport
    deadline_seconds: float
    may_come: Callable[[int], bool]
    left_out: Mapping[int, str] = field(default_factory=dict)
    links: Mapping[int, Set[int]] = field(default_factory=dict)

    def around(self, members: Group) -> tuple[list[int], int | None]:
        """Return the children of this slot, and its parent."""
        own, links = self.transport.place.replica, self.links
        there = set[int]().union(*links.values())
        # A leaf knows what those know that are connected to all.
        full = {slot for slot in members if there <= links.get(slot, there) | {slot}}
        inner = full - self.transport.partners.hidden() or full
        if inner:
            parents = {slot: parent_of(slot, inner) for slot in members}
        else:
            parents = {slot: _parent_towards(min(there), slot, links) for slot in members}
        return [slot for slot in members if parents[slot] == own], parents[own]


def _parent_towards(root: int, slot: int, links: Mapping[int, Set[int]]) -> int | None:
    """Return the parent of a slot in a tree of two levels, whose edges are `links`."""
    near = links.get(root, set()) | {other for other, to in links.items() if root in to}
    if slot == root:
        return None
    return root if slot in near else min(links.get(slot, set()) & near, default=None)


class TreeMean:
    """An exchange that yields the mean over the members of a group, in fp32. Holds two vectors.

    A collective of the replica: its speaker sends and receives (`movement`), each rank adds what it has.

    Args:
        replica: this one.
        tree: of the speaker; None on the other ranks.

    Attributes:
        report: `group` has the replicas in the mean, `missed` names others, and why they are not. The deviation is
            that of this rank's part from the mean.
        stopped: whether there is no mean, since this job is to stop.
    """

    rounding = None
    done = False  # before `finish`

    def __init__(self, replica: Replica, tree: Tree | None) -> None:
        self._replica, self._tree = replica, tree
        self._vector, self._what, self._tag, self.stopped = NOTHING, "", 0, False
        self.report = ExchangeReport(())

    def begin(self, vector: Tensor, group: Group, number: int, what: str, exact: Ranges = ()) -> None:
        """Note what to average; `finish` does it. The arguments are those of `Exchange.begin`."""
        self._vector, self.report = vector.to(HOST), ExchangeReport(group)
        self._what, self._tag = what, tag_of(number, Channel.FINAL)

    def progress(self) -> Iterator[MeanPiece]:
        return iter(())

    def finish(self) -> Iterator[MeanPiece]:
        """Yield the mean, in one piece. Where nothing else has come it is the vector itself."""
        own, tree = self._replica.place.replica, self._tree
        children, parent, seconds, left_out = self._replica.tell(
            lambda: tree and (*tree.around(self.report.group), tree.deadline_seconds, dict(tree.left_out))
        )
        total, included = self._vector.clone(), {own} - left_out.keys()
        if not included:
            total.zero_()
        memory = torch.zeros_like(total)
        for child in children:
            came = self._pass(child, None, memory, seconds)
            if came is None:
                memory = torch.zeros_like(total)
            elif not came or self._is_sound(memory / len(came)):
                total += memory
                included |= came
        came = None
        if parent is not None:
            levels = 1 + math.log2(MOST_SLOTS)  # each may wait for its own children
            came = self._pass(parent, total, memory, levels * seconds, included)
        if came and self._is_sound(memory):
            total, included = memory, came
        elif included:
            came, total = None, total / len(included)  # in new memory: the parent may still ask for the sum
        stopped = tree is not None and came is None and tree.transport.partners.stopped()
        self.stopped = self._replica.tell(lambda: stopped)
        if self.stopped or not included:  # a part of the sums may be missing; or this replica is alone
            total, included = self._vector.clone(), {own}
        if not self.stopped:
            for child in children:
                self._pass(child, total, None, seconds, included)
        for start, stop in self._replica.movement.padding:
            total[start:stop] = self._vector[start:stop]
        self._end(total, included, left_out)
        yield MeanPiece(0, len(total), total)

    def _end(self, mean: Tensor, included: Set[int], left_out: Mapping[int, str]) -> None:
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
        """Return whether another's mean is as near to this replica's weights as those of a first exchange must be.

        A collective of the replica.
        """
        own = float((mean - self._vector).square().sum()), float(self._vector.square().sum())
        squared_distance, squared_norm = (sum(parts) for parts in zip(*of_all_ranks(own), strict=True))
        try:
            report = ExchangeReport((), squared_deviation=squared_distance / 2)
            Guard().check(math.sqrt(squared_norm), report)
        except PoisonedError:
            return False
        return math.isfinite(squared_distance)

    def _pass(
        self,
        slot: int,
        gives: Tensor | None,
        gets: Tensor | None,
        seconds: float,
        included: Set[int] = frozenset(),
    ) -> set[int] | None:
        """Send a vector to a slot, or receive one, or first send and then receive; all ranks do the same.

        A list of the replicas in a vector goes before it. A lost connection begins it all anew. A slot that has
        sent its vector takes the answer, whether or not it has seen that its own arrived.

        Returns the replicas in the vector that came, or in the one sent; None where not all came, and `gets` must
        not be used again: late messages may arrive there.
        """
        link = None if self._tree is None else _Link(self._tree, slot, self._tag, seconds)

        def wait() -> tuple[bool, list[int]] | None:
            assert link is not None
            return link.wait(included if gives is not None else None, gets is not None)

        while True:
            now.part(f"waiting for replica {slot} in {self._what}")
            found = self._replica.tell(wait)
            if found is None:
                return None
            takes, listed = found
            if takes and self._moved(link, gives, None) and gets is None:
                return set(included)
            if not takes and self._moved(link, None, gets):
                return set(listed)

    def _moved(self, link: "_Link | None", gives: Tensor | None, gets: Tensor | None) -> bool:
        """Pass a vector; return whether all of it has come, or arrived."""
        work = None if link is None else link.work(gives is not None)
        moving = whole(self._replica.movement, _PASSES, gives, gets, work)
        run(moving)
        came = link is not None and moving.failure is None
        if isinstance(work, Sends):
            self.report.bytes_sent += work.bytes
            came = came and bool(work.slots)
        if link is not None:
            link.passed(came, gives is not None)
        return bool(self._replica.tell(lambda: came))


class _Link:
    """What the speaker does with one other slot."""

    def __init__(self, tree: Tree, slot: int, tag: int, seconds: float) -> None:
        self._tree, self._slot, self._tag = tree, slot, tag
        self._until = time.monotonic() + seconds
        self._has_ours = False  # the vector, as we know, over a connection that has not been lost since
        self._sent: Flight | None = None
        self._came: Flight | None = None
        self._list = NOTHING

    def wait(self, ours: Set[int] | None, receives: bool) -> tuple[bool, list[int]] | None:
        """Wait until the other slot takes a list of replicas, or its own has come; None: neither happens any more.

        Args:
            ours: the list that is sent, unless the other slot has our vector; None: there is none.
            receives: whether a list of the other slot is awaited.

        Returns whether it takes ours, and else its list.
        """
        while True:
            # Before the look: a slot that has sent everything goes on at once.
            may_come = self._may_come()
            try:
                if may_come:
                    self._post(ours, receives)
                if self._came is not None and is_over(self._came):
                    self._came = None
                    return False, self._list.nonzero().flatten().tolist()
                if self._sent is not None and is_over(self._sent):
                    self._sent = None
                    return True, []
            except FAILURES:
                self._begin_anew()
            if not may_come:
                return None
            time.sleep(_LOOK_SECONDS)

    def work(self, sends: bool) -> Sends | Receives:
        """Return what deals with the slabs of a vector."""
        if sends:
            return Sends(self._tree.transport, {self._slot: self._tag})
        seconds = max(1.0, self._until - time.monotonic())
        return Receives(self._tree.transport, self._slot, self._tag, seconds)

    def passed(self, whole: bool, sent: bool) -> None:
        """Note whether a vector has passed."""
        if not whole:
            self._begin_anew()
        elif sent:
            self._has_ours = True

    def _may_come(self) -> bool:
        stopped = self._tree.transport.partners.stopped()
        return time.monotonic() < self._until and not stopped and self._tree.may_come(self._slot)

    def _begin_anew(self) -> None:
        self._sent = self._came = None
        self._has_ours = False

    def _post(self, ours: Set[int] | None, receives: bool) -> None:
        """Post what is not under way."""
        post = self._tree.transport.post
        if ours is not None and not self._has_ours and self._sent is None:
            listed = _no_slots()
            listed[list(ours)] = 1
            self._sent = post([Message(self._slot, listed)], [], self._tag)
        if receives and self._came is None:
            self._list = _no_slots()  # a late one goes where the last one was
            self._came = post([], [Message(self._slot, self._list)], self._tag)


def _no_slots() -> Tensor:
    return torch.zeros(MOST_SLOTS, dtype=torch.uint8, device=HOST)
