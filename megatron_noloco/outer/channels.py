"""The messages of exchanges: their tags and errors, and connections opened ahead of a round."""

from enum import IntEnum

from megatron_noloco.outer.vectors import NOTHING
from megatron_noloco.plans.grouping import Group
from megatron_noloco.plans.topology import Place
from megatron_noloco.transport.interface import EXCHANGE_TAGS, Flight, Message, Transport

CHANNELS = 64
WINDOW = EXCHANGE_TAGS // CHANNELS  # buckets of an exchange that are under way at a time


class Channel(IntEnum):
    """Numbers the channels in use; the others, up to CHANNELS - 1, are free."""

    ROUNDS = 0
    LOSSES = 2
    CONTACTS = 3
    FINAL = 4
    MEAN_MODEL = 6
    MEAN_LOSSES = 7


def tag_of(number: int, channel: int) -> int:
    """Return the first tag of exchange `number` (of the round or evaluation) on a channel.

    The messages of bucket b have the tag (number * CHANNELS + channel) * WINDOW + b % WINDOW. So buckets that are
    under way together, and exchanges of different channels or numbers, never take each other's messages.
    """
    return (number * CHANNELS + channel) * WINDOW


class PartnerLostError(RuntimeError):
    """Raised where the connection to a partner is gone; names the partner and the exchange."""


class PartnerTimeoutError(PartnerLostError):
    """Raised where a partner missed the deadline; names the partner, the exchange and the seconds."""


class Contacts:
    """Opens connections to the group of the next round during the local phase before it.

    Many transports connect two ranks at the first message between them, which takes several round trips of the
    network. The groups are known k steps ahead, so their ranks send each other an empty message. Each connection
    is opened once; a round does not depend on it.

    Args:
        transport: that of the exchanges; nothing is done where there is none, or it does not `connects_lazily`.
        place: of this rank.
    """

    def __init__(self, transport: Transport | None, place: Place) -> None:
        self._transport = transport
        self._place = place
        self._opened: set[int] = set()
        self._flights: list[Flight] = []

    def open(self, group: Group, number: int) -> None:
        """Greet the members without a connection yet. All members call it, at any time before the round.

        Of two ranks the lower one sends: if both opened a connection, one of the two would be refused.
        """
        if self._transport is None or not self._transport.connects_lazily:
            return
        me = self._place.rank
        new = {self._place.rank_of(member) for member in group} - {me} - self._opened
        if new:
            self._opened |= new
            sends = [Message(rank, NOTHING) for rank in sorted(new) if rank > me]
            receives = [Message(rank, NOTHING) for rank in sorted(new) if rank < me]
            self._flights.append(self._transport.post(sends, receives, tag_of(number, Channel.CONTACTS)))

    def progress(self) -> None:
        """Move the greetings under way, without waiting: many libraries connect only when they are called."""
        self._flights = [flight for flight in self._flights if not flight.done()]
