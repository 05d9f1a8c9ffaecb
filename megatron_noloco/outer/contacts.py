"""Connections to the next round's group, opened while local steps go on.

Many transports connect two ranks when the first message passes between them. On a slow network that takes several
round trips, for which a round with a new partner would wait. The groups of a round are known k steps ahead, so
their ranks send each other an empty message during the local phase.
"""

import torch

from megatron_noloco.outer.tags import Channel, tag_of
from megatron_noloco.plans.grouping import Group
from megatron_noloco.plans.topology import Place
from megatron_noloco.transport.protocol import Flight, Message, Transport


class Contacts:
    """Opens each connection once, and waits for none: what is not open by the round is opened by the round.

    Args:
        transport: that of the exchanges. Where it `connects_lazily` is false, nothing is done.
        place: of this rank.
    """

    def __init__(self, transport: Transport, place: Place) -> None:
        self._transport = transport
        self._place = place
        self._opened: set[int] = set()
        self._flights: list[Flight] = []
        self._empty = torch.empty(0)

    def open(self, group: Group, number: int) -> None:
        """Greet the members without a connection yet. All members call it, at any time before the round.

        Of two ranks the lower one sends: were both to open a connection, one of the two would be refused.
        """
        if not self._transport.connects_lazily:
            return
        me = self._place.rank
        new = {self._place.rank_of(member) for member in group} - {me} - self._opened
        if new:
            self._opened |= new
            sends = [Message(rank, self._empty) for rank in sorted(new) if rank > me]
            receives = [Message(rank, self._empty) for rank in sorted(new) if rank < me]
            tag = tag_of(number, Channel.CONTACTS)
            self._flights.append(self._transport.post(sends, receives, tag))

    def progress(self) -> None:
        """Move what is not open yet, without waiting: many a library connects only when it is called."""
        for flight in self._flights:
            flight.arrived()
        self._flights = [flight for flight in self._flights if not flight.done()]
