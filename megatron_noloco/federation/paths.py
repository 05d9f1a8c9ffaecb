"""How frames reach a counterpart: directly, over another rank that relays them, or not at all."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from megatron_noloco.federation.counterpart import Counterpart
from megatron_noloco.federation.frames import Frame
from megatron_noloco.federation.keys import Sealing
from megatron_noloco.federation.links import Link
from megatron_noloco.federation.rendezvous import Directory

CONNECTION_LOST = "has gone: the connection was lost"
_RELAY_SECONDS = 10.0  # after which a rank that should be reachable, and is not, is tried over a relay


class Paths:
    """Chooses the path to each counterpart. Used by the thread of the protocol.

    Args:
        rank: this one.
        counterparts: by rank.
        directory: the addresses of all ranks.
        relays: whether this rank passes frames on between counterparts.
        sealing: encrypts what is relayed; None: nothing is encrypted.
        lost: called with a counterpart and the reason when its path ends.
        greet: called with a rank when there is a new path to it.
    """

    def __init__(
        self,
        rank: int,
        counterparts: Mapping[int, Counterpart],
        directory: Directory,
        relays: bool,
        sealing: Sealing | None,
        lost: Callable[[Counterpart, str], None],
        greet: Callable[[int], None],
    ) -> None:
        self._rank, self._counterparts, self._directory = rank, counterparts, directory
        self._relays, self._sealing = relays, sealing
        self._lost, self._greet = lost, greet

    def linked(self, counterpart: Counterpart, link: Link) -> None:
        """Use a connection to a counterpart, unless there is one already."""
        if counterpart.direct is None or not counterpart.direct.up:
            counterpart.direct = link
            self.check(counterpart)

    def check_all(self) -> None:
        """Find another path to each counterpart whose link is down, and a path to those that have none."""
        for counterpart in self._counterparts.values():
            self.check(counterpart)

    def check(self, counterpart: Counterpart) -> None:
        """Send to a counterpart directly, else over a relay, else not at all; see `check_all`."""
        direct = counterpart.direct if counterpart.direct and counterpart.direct.up else None
        outbox = counterpart.outbox
        silent = counterpart.silent
        counterpart.silences += silent
        link = direct or self._relay_to(counterpart, None if silent else outbox.link)
        if link is not outbox.link or silent:
            self._take(counterpart, link, direct)

    def came(self, counterpart: Counterpart, link: Link, relayed: bool) -> None:
        """Use the link over which a frame of the counterpart came, if it is direct and there was none.

        If it leads to a relay, it is used if the counterpart has the lower number: that one chooses for both.
        """
        if not relayed:
            self.linked(counterpart, link)
        elif counterpart.outbox.relayed and counterpart.outbox.link is not link:
            links_to_relays = (other.direct for other in self._counterparts.values())
            if counterpart.rank < self._rank and any(link is one for one in links_to_relays):
                self._take(counterpart, link, None)

    def pass_on(self, frame: Frame, header: bytes, parts: Sequence[Any]) -> str:
        """Pass a frame on between two counterparts that cannot reach each other; returns why not, or ""."""
        to = self._counterparts.get(frame.receiver)
        if not self._relays or frame.sender not in self._counterparts or not frame.relayed:
            return "for another rank"
        if to is None or to.direct is None or not to.direct.send(header, *parts):
            return "no way on"
        return ""

    def open(self, rank: int, data: np.ndarray) -> np.ndarray | None:
        """Decrypt what a counterpart has sent over a relay; None where that fails."""
        if self._sealing is None:
            return data
        address = self._directory.addresses.get(rank)
        return self._sealing.open(data, address.key) if address else None

    def _sealed(self, rank: int, data: np.ndarray) -> np.ndarray:
        if self._sealing is None:
            return data
        return self._sealing.seal(data, self._directory.addresses[rank].key)

    def _take(self, counterpart: Counterpart, link: Link | None, direct: Link | None) -> None:
        if counterpart.outbox.link is not None:
            self._lost(counterpart, CONNECTION_LOST)
        if link is not None:
            counterpart.paths += 1
            counterpart.outbox.take_path(link, direct is None, partial(self._sealed, counterpart.rank))
            counterpart.update(connected=direct is not None)
            self._greet(counterpart.rank)

    def _relay_to(self, counterpart: Counterpart, used: Link | None) -> Link | None:
        """Return the link to a rank that can pass frames on to a counterpart which cannot be reached.

        That is the one `used`, if it still can; after each silence another one.
        """
        own = self._directory.addresses.get(self._rank)
        if counterpart.address is None or own is None:
            return None
        others = (other for other in self._counterparts.values() if other is not counterpart)
        direct = (other.direct for other in others if other.address is not None and other.address.relay)
        links = [link for link in direct if link is not None and link.up]
        if counterpart.outbox.relayed and used in links:
            return used
        reachable = counterpart.address.endpoint or own.endpoint
        if reachable and time.monotonic() - counterpart.apart < _RELAY_SECONDS:
            return None
        return links[counterpart.silences % len(links)] if links else None
