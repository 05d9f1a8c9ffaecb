"""The rank at the same place in another replica: what is known of it, and what is under way with it."""

import time
from collections import defaultdict, deque
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

from megatron_noloco.federation.frames import Frame, Send
from megatron_noloco.federation.outbox import Outbox
from megatron_noloco.federation.rendezvous import Address
from megatron_noloco.transport.interface import RankLostError

FINAL = 2**52  # the number of the exchange at the end, after those of all rounds
AT_ITS_END = 2**51  # a replica that waits at its end says that it has begun this plus 1 and its last exchange
LEFT = FINAL + 1  # what a replica that has left says that it has begun
_SILENCE_SECONDS = 10.0  # after which a rank counts as absent
_LONGEST_SILENCE = 60  # ticks of half a second


class WithdrawnError(RankLostError):
    """The counterpart takes no part in this exchange, or has skipped it."""


class Standing(IntEnum):
    """How available a counterpart is for an exchange; the ranks of a replica agree on the smallest value."""

    AWAY = 0  # not connected, avoided, or too far behind
    BUSY = 1  # exchanges with another rank, or is past this exchange
    FREE = 2
    WAITING = 3  # has begun this exchange with this rank


class Seen(NamedTuple):
    """Holds what this rank knows of a counterpart. A change replaces it, so other threads read one moment of it.

    Attributes:
        epoch: of its process; 0: it was never heard of.
        begun: the exchange that it began last; -1: none.
        open_from: the first exchange that it may have with this rank.
        heard: the time of its last frame, on the monotonic clock; -inf: never.
        connected: whether our frames can reach it.
        takes_over: whether it has asked for our state, and has begun no exchange since.
    """

    epoch: int = 0
    begun: int = -1
    open_from: int = 0
    heard: float = float("-inf")
    connected: bool = False
    takes_over: bool = False

    @property
    def present(self) -> bool:
        """Whether it is connected, and has said something in the last ten seconds."""
        return self.connected and time.monotonic() - self.heard <= _SILENCE_SECONDS


def is_at_end(exchange: int) -> bool:
    """Whether the exchange that a replica began last says that it waits at its end."""
    return AT_ITS_END <= exchange < FINAL


def is_far_behind(exchange: int, number: int, behind: int) -> bool:
    """Whether a replica is more than `behind` exchanges behind; one at its end is behind no other.

    Args:
        exchange: the one that it began last.
        number: that of the others.
    """
    return number - exchange > behind and not is_at_end(exchange)


@dataclass
class Counterpart:
    """A counterpart, as this rank sees it.

    Attributes:
        seen: for other threads as well; the rest is used by the thread of the service only.
        outbox: sends to it, over the link that is used.
        address: its latest; None: not known.
        apart_since: when its address became known or its connection was lost, on the monotonic clock.
        directory_version: of our directory that it was sent last; -1: none.
        offer: its last answer to an ASK, tag and description; None: none yet.
        posted: our messages that it has not asked for, oldest first, by tag.
        wants: what it has asked for and we have not posted, likewise.
        unconfirmed: our messages that it has asked for and not confirmed, by its ticket.
        connections, its_connections: how many this rank has used to it, one after the other, and it to this rank.
        counted: the latest exchange with it that counts here; -1: none.
        silent_ticks: for how many ticks of the protocol it has said nothing.
        longest_silence: of those that ended, in ticks.
    """

    rank: int
    seen: Seen = Seen()
    outbox: Outbox = field(default_factory=Outbox)
    address: Address | None = None
    apart_since: float = float("-inf")
    directory_version: int = -1
    offer: tuple[int, bytes] | None = None
    posted: defaultdict[int, deque[Send]] = field(default_factory=lambda: defaultdict(deque))
    wants: defaultdict[int, deque[Frame]] = field(default_factory=lambda: defaultdict(deque))
    unconfirmed: dict[int, Send] = field(default_factory=dict)
    connections: int = 0
    its_connections: int = 0
    counted: int = -1
    silent_ticks: int = 0
    longest_silence: int = 0

    def note_sign_of_life(self) -> None:
        """Note that a frame of it has come."""
        self.longest_silence = min(_LONGEST_SILENCE, max(self.longest_silence, self.silent_ticks))
        self.silent_ticks = 0

    def update(self, **changes: Any) -> None:
        """Replace some of `seen`."""
        self.seen = self.seen._replace(**changes)

    @property
    def linked(self) -> bool:
        """Whether there is a link to it over which messages can pass."""
        return self.outbox.link is not None and self.outbox.link.up

    @property
    def connections_of_both(self) -> int:
        """How many connections the two ranks have used to each other; what belongs to fewer is void."""
        return self.connections + self.its_connections

    def wants_waiting(self) -> int:
        return sum(map(len, self.wants.values()))
