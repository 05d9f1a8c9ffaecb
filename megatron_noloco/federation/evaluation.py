"""The mean model of an evaluation in a federation: of the replicas that come to it at about the same time.

1. A replica that comes tells all others, with its next HELLO.
2. One of those that are there, another one each time, leads. It waits until all that may come have come, but no
   longer than for the partner in a round. Then it tells all who is in.
3. Those average, over a tree (`mean`).

A replica that continues voids its messages, so none waits for it.
"""

import time
from collections.abc import Callable, Iterator, Set

import torch
from torch import Tensor

from megatron_noloco.federation.mean import LOOK_SECONDS, TreeMean
from megatron_noloco.federation.transport import FederationTransport
from megatron_noloco.job.activity import now
from megatron_noloco.outer import Channel, MeanPiece
from megatron_noloco.outer.messages import tag_of
from megatron_noloco.outer.vectors import Ranges
from megatron_noloco.plans.draws import Stream, draw_words
from megatron_noloco.plans.grouping import Group
from megatron_noloco.settings import MOST_SLOTS
from megatron_noloco.transport.protocol import Message


class MeanOfThoseThere(TreeMean):
    """The exchange of a `MeanModel` in a federation.

    Slow weights change in rounds only. So a mean is formed in the first evaluation after a round; in others the
    group is this replica alone.

    Args:
        exchange_before: returns the number of the last exchange, from the local steps done.
        deadline_seconds: for one that stays connected and does not go on.
    """

    def __init__(
        self,
        transport: FederationTransport,
        exchange_before: Callable[[int], int],
        deadline_seconds: float,
    ) -> None:
        super().__init__(transport, Channel.MEAN_MODEL, deadline_seconds, self._may_take_part)
        self._exchange_before = exchange_before
        self._number = -1

    def begin(self, vector: Tensor, group: Group, number: int, what: str, exact: Ranges = ()) -> None:
        """Find out who takes part. `number` has the local steps done, `group` all slots. A collective."""
        last, self._number = self._number, self._exchange_before(number)
        alone = (self._place.replica,)
        super().begin(vector, alone, self._number, what)
        if self._number > last:
            self.report.group = self._meet()

    def finish(self) -> Iterator[MeanPiece]:
        yield from super().finish()
        self._transport.partners.end_evaluation(self._number)

    def _meet(self) -> Group:
        """Return the slots that take part, this one included. A collective of the replica."""
        partners, place, slots = self._transport.partners, self._place, range(self._place.replicas)
        partners.begin_evaluation(self._number)
        now.part("waiting for the other replicas in an evaluation")
        there = partners.at_evaluation(self._number)
        ranks = [place.rank_of(slot) for slot in slots]
        votes = partners.agree([*(rank in there for rank in ranks), *map(partners.reachable, ranks)])
        near = {place.replica, *(slot for slot in slots if votes[slot])}
        lead = lead_of(near, {slot for slot in slots if not votes[len(slots) + slot]}, self._number)
        members = self._lead() if lead == place.replica else self._follow(lead)
        votes = partners.agree(members[: len(slots)].tolist())
        return tuple(slot for slot in slots if votes[slot]) if votes[place.replica] else (place.replica,)

    def _lead(self) -> Tensor:
        """Decide who is in, and tell the others."""
        partners, place, slots = self._transport.partners, self._place, range(self._place.replicas)
        until = time.monotonic() + partners.deadline_seconds
        while not all((there := partners.at_evaluation(self._number)).values()) and time.monotonic() < until:
            if partners.stopped():
                break
            time.sleep(LOOK_SECONDS)
        came = [slot == place.replica or there.get(place.rank_of(slot), False) for slot in slots]
        members = torch.zeros(MOST_SLOTS, dtype=torch.uint8)
        members[: len(slots)] = torch.tensor(partners.agree(came), dtype=torch.uint8)
        tag = tag_of(self._number, Channel.MEAN_MODEL) + 1
        self._transport.post([Message(rank, members) for rank in there], [], tag)
        return members

    def _follow(self, lead: int) -> Tensor:
        """Return who is in, as the lead says; nobody where it does not come, or goes on."""
        members = torch.zeros(MOST_SLOTS, dtype=torch.uint8)
        seconds = 2 * self._transport.partners.deadline_seconds  # it may come late, and wait for others then
        return members if self._move(lead, (), (members,), seconds, phase=1) else torch.zeros_like(members)

    def _may_take_part(self, rank: int) -> bool:
        return rank in self._transport.partners.at_evaluation(self._number)


def lead_of(near: Set[int], hidden: Set[int], number: int) -> int:
    """Return the slot that leads the evaluation after an exchange, the same on all replicas that see the same.

    Args:
        near: slots that may take part.
        hidden: slots that no other can connect to.
    """
    return min(near - hidden or near, key=lambda slot: draw_words(1, 0, Stream.LEADS, number, slot)[0])
