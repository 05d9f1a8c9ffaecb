"""One model at the end: the mean of all replicas that have come to their end, over a tree of pairs of ranks.

The parent of a slot is the slot without the lowest of its binary digits that are 1; where that one is not there,
the parent's parent, and so on. Sums go up the tree, and the mean of the root comes down. So all get the same bits,
a slot that is missing changes the way of its own children only, and where all slots are taken no rank exchanges
with more than log2(slots) others. Where a child is lost its sum is left out. A slot that has lost its parent
becomes the root of a tree of its own, and reports it.

Slots that no other can connect to are leaves: they are not connected to each other.
"""

import math
import time
from collections.abc import Iterator, Set

import torch
from torch import Tensor

from megatron_noloco.federation.commit import Guard, PoisonedError
from megatron_noloco.federation.keeping_up import FINAL, KeepingUp
from megatron_noloco.federation.transport import FederationTransport
from megatron_noloco.outer.mean import ExchangeReport, MeanPiece
from megatron_noloco.outer.messages import Channel, tag_of
from megatron_noloco.outer.vectors import Ranges
from megatron_noloco.plans.grouping import Group
from megatron_noloco.transport.protocol import ExchangeTimeoutError, Message

_FAILURES = (ExchangeTimeoutError, ConnectionError)


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


class FinalMean:
    """The exchange of `OuterOptimizer.settle` in a federation: the mean over the members, in fp32.

    All ranks of a replica leave out the same sums. Holds two vectors.

    Attributes:
        report: its deviation is that of this replica from the mean; `missed` where the mean lacks a member.
    """

    sends_from_device = False

    def __init__(
        self, transport: FederationTransport, keeping_up: KeepingUp, deadline_seconds: float
    ) -> None:
        self._transport = transport
        self._place = transport.place
        self._keeping_up = keeping_up
        self._deadline_seconds = deadline_seconds
        self._hidden: Set[int] = frozenset()
        self._vector = torch.empty(0)
        self.report = ExchangeReport(())

    def members(self) -> Group:
        """Wait until the others have come to their end, too; return their slots and this one's. A collective."""
        there, partners = self._keeping_up.wait_at_end(), self._transport.partners
        ranks = [self._place.rank_of(slot) for slot in range(self._place.replicas)]
        votes = partners.agree([*(rank in there for rank in ranks), *map(partners.reachable, ranks)])
        ended, reachable = votes[: len(ranks)], votes[len(ranks) :]
        self._hidden = {slot for slot, vote in enumerate(reachable) if not vote}
        return tuple(slot for slot, vote in enumerate(ended) if vote or slot == self._place.replica)

    def begin(self, vector: Tensor, group: Group, number: int, what: str, exact: Ranges = ()) -> None:
        """Note what to average; `finish` does it. The arguments are those of `Exchange.begin`."""
        self._vector, self.report = vector.to("cpu"), ExchangeReport(group)

    def progress(self) -> Iterator[MeanPiece]:
        return iter(())

    def finish(self) -> Iterator[MeanPiece]:
        """Yield the mean, whole. A collective of the replica. Raises nothing where others are lost."""
        members, own = set(self.report.group), self._place.replica
        total = self._vector.clone()
        received, count = torch.empty_like(total), torch.ones(1)
        parents = {slot: parent_of(slot, members, self._hidden) for slot in sorted(members)}
        children = [slot for slot, parent in parents.items() if parent == own]
        for child in children:
            of_child = torch.zeros(1)
            came = self._receive(child, [received, of_child]) and self._is_sound(received / of_child)
            if self._transport.partners.agree([came]) == [1]:
                total += received
                count += of_child
            else:
                self._missed(child)
                received = torch.empty_like(total)  # a late chunk still arrives where the last one was
        parent = parents[own]
        if parent is not None:
            levels = 1 + math.log2(self._place.replicas)  # each of which may wait for its own children
            came = self._send(parent, [total, count], levels) and self._receive(parent, [received], levels)
            came = came and self._is_sound(received)
            if self._transport.partners.agree([came]) == [1]:
                total, count = received, torch.ones(1)
            else:
                self._missed(parent)
                total = total.clone()  # the parent may still ask for the sum
        total /= count
        for child in children:
            self._send(child, [total])
        self.report.seconds = time.perf_counter() - self.report.started
        self.report.compared_elements = len(total)
        self.report.squared_deviation = float((total - self._vector).square().sum())
        yield MeanPiece(0, len(total), total)

    def _is_sound(self, mean: Tensor) -> bool:
        """Whether another's mean is as near to this replica's weights as those of a first exchange must be."""
        squared_distance = float((mean - self._vector).square().sum())
        try:
            Guard().check(self._vector, ExchangeReport((), squared_deviation=squared_distance / 2))
        except PoisonedError:
            return False
        return math.isfinite(squared_distance)

    def _send(self, slot: int, parts: list[Tensor], levels: float = 1) -> bool:
        flight = self._transport.post(self._messages(slot, parts), [], tag_of(FINAL, Channel.FINAL))
        try:
            flight.finish(self._deadline_seconds * levels)
        except _FAILURES:
            return False
        self.report.bytes_sent += sum(part.nbytes for part in parts)
        return True

    def _receive(self, slot: int, parts: list[Tensor], levels: float = 1) -> bool:
        flight = self._transport.post([], self._messages(slot, parts), tag_of(FINAL, Channel.FINAL))
        try:
            for _ in flight.arrivals(self._deadline_seconds * levels):
                pass
        except _FAILURES:
            return False
        return True

    def _messages(self, slot: int, parts: list[Tensor]) -> list[Message]:
        return [Message(self._place.rank_of(slot), part) for part in parts]

    def _missed(self, slot: int) -> None:
        self.report.missed = f"replica {slot} was lost, or its numbers are not finite"
