"""The questions for states that speakers ask each other: which replica is asked, and what it answers."""

import secrets
from collections.abc import Collection, Mapping
from itertools import count
from typing import NamedTuple

from megatron_noloco.federation.control import Offer
from megatron_noloco.federation.network import FederationTransport
from megatron_noloco.federation.session import HANDOVER_TAG
from megatron_noloco.job.activity import line_of
from megatron_noloco.settings import MOST_SLOTS
from megatron_noloco.transport.interface import ExchangeTimeoutError, RankLostError

_BACK_SECONDS = 10.0  # for a replica that was lost to come back
_MOST_TAGS = 2**61


class NotTaken(NamedTuple):
    """Why the state of a slot was not taken, and whether it may be when it is asked again."""

    slot: int
    why: str
    may_pass: bool = False


class Asks:
    """Asks other replicas for their states; on the speaker."""

    def __init__(self, transport: FederationTransport) -> None:
        self._transport = transport
        self._tags = count(HANDOVER_TAG + secrets.randbelow(_MOST_TAGS))  # an earlier process had others

    def choose(
        self, least: int, seconds: float, given_up: Collection[int]
    ) -> tuple[tuple[int, Offer] | None, NotTaken | None]:
        """Ask the replica that is furthest for its state; return slot and offer, or why there is none.

        Neither is there where no replica has such a state, or this job is to stop.
        """
        place = self._transport.place
        steps = {slot: seen.state.step for slot, seen in self._transport.seen().items() if seen.present}
        slot = furthest(steps, place.replica, MOST_SLOTS, least, given_up)
        if slot is None or self._transport.partners.stopped():
            return None, None
        try:
            offer = self.ask(slot, seconds)
        except (OSError, ValueError) as error:
            return None, NotTaken(slot, line_of(error), isinstance(error, ConnectionError))
        if offer.step < least:
            why = f"it is at local step {offer.step} by now, as it was started anew"
            return None, NotTaken(slot, why)
        return (slot, offer), None

    def ask(self, slot: int, seconds: float) -> Offer:
        """Ask a replica for its state, and return its offer; the state follows under the tag of the offer.

        Raises RankLostError when it is lost or this job is to stop, ExchangeTimeoutError after so many seconds,
        ValueError where it has none to give.
        """
        transport, tag = self._transport, next(self._tags)
        transport.ask(slot, tag)
        transport.wait(lambda: transport.offered(slot, tag) or slot not in transport.present(), seconds)
        if (offer := transport.offered(slot, tag)) is None:
            if transport.partners.stopped():
                raise RankLostError(slot, "is not waited for: this job was asked to stop")
            if slot not in transport.present():
                raise RankLostError(slot, "has gone")
            raise ExchangeTimeoutError(slot, tag, seconds)
        if not offer.step:
            raise ValueError("it has no state to give")
        return offer

    def wait_for(self, slot: int) -> None:
        """Wait until a replica is connected, ten seconds at most, or this job is to stop."""
        self._transport.wait(lambda: slot in self._transport.present(), _BACK_SECONDS)


def furthest(
    steps: Mapping[int, int], own: int, slots: int, least: int, given_up: Collection[int] = ()
) -> int | None:
    """Return the slot that can give the latest step; of several, the next one after this job's. None: no slot.

    Args:
        steps: that each slot can give.
        own: slot of this job.
        least: the first step that is worth taking, above 0.
        given_up: slots not to be asked again.
    """
    found = [slot for slot, step in steps.items() if step >= least and slot not in given_up]
    return min(found, key=lambda slot: (-steps[slot], (slot - own) % slots), default=None)
