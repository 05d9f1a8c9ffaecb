"""The questions for states that speakers ask each other: which step can be given, and the state itself."""

import json
import secrets
import threading
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

from pydantic import ConfigDict, TypeAdapter, ValidationError

from megatron_noloco.federation.network import FederationTransport
from megatron_noloco.federation.service import ServiceFailedError
from megatron_noloco.federation.session import HANDOVER_TAG
from megatron_noloco.job.activity import line_of
from megatron_noloco.transport.interface import ExchangeTimeoutError, RankLostError

_LOOK_SECONDS = 0.02
_ANSWER_SECONDS = 10.0  # for the step that a replica can give, and for one that was lost to come back
_MOST_TAGS = 2**61
_MOST_VECTORS, _MOST_REST = 64, 1 << 30  # of a state, and bytes


@dataclass(frozen=True)
class Offer:
    """What a giver says about the state that follows."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")

    step: int
    facts: dict[str, Any]
    vectors: list[str]
    rest: int  # bytes


_OFFERS = TypeAdapter(Offer)


class NotTaken(NamedTuple):
    """Why the state of a slot was not taken, and whether it may be when it is asked again."""

    slot: int
    why: str
    may_pass: bool = False


class Asks:
    """The questions for states, of this replica and to it; on the speaker.

    Attributes:
        done: local steps of this replica; 0: it has no state to give.
        wanted: tags of the replicas that wait for the present state, by slot.
    """

    def __init__(self, transport: FederationTransport) -> None:
        self.done = 0
        self.wanted: dict[int, int] = {}
        self._transport = transport
        self._tags = count(HANDOVER_TAG + secrets.randbelow(_MOST_TAGS))  # an earlier process had others
        self._lock = threading.Lock()  # for `wanted` and `_closed`
        self._closed = False
        transport.when_asked = self._asked

    def take_wanted(self) -> dict[int, int]:
        """Return which replicas wait, and note that they wait no more."""
        with self._lock:
            wanted, self.wanted = self.wanted, {}
        return wanted

    def close(self) -> None:
        """Tell those that wait, and all that ask from now on, that there is nothing."""
        with self._lock:
            self._closed = True
        for slot, tag in self.take_wanted().items():
            with suppress(ServiceFailedError):  # then the connection is lost, which answers as well
                self._transport.offer(slot, tag, b"")

    def _asked(self, slot: int, tag: int, chosen: bool) -> None:
        """Have an ASK answered; called by a thread of the transport."""
        with self._lock:
            waits = chosen and self.done > 0 and not self._closed
            if waits:
                self.wanted[slot] = tag
        if not waits:
            nothing = self._closed or chosen
            self._transport.offer(slot, tag, b"" if nothing else json.dumps({"step": self.done}).encode())

    def choose(
        self, least: int, seconds: float, given_up: Collection[int]
    ) -> tuple[tuple[int, int, Offer] | None, NotTaken | None]:
        """Ask the replica that is furthest for its state; return slot, tag and offer, or why there is none."""
        slot = furthest(
            self.steps(), self._transport.place.replica, self._transport.place.replicas, least, given_up
        )
        if slot is None:
            return None, None
        try:
            tag, offer = self.ask(slot, seconds)
        except (OSError, ValueError) as error:
            return None, NotTaken(slot, line_of(error), isinstance(error, ConnectionError))
        if offer.step < least:
            why = f"it is at local step {offer.step} by now, as it was started anew"
            return None, NotTaken(slot, why)
        return (slot, tag, offer), None

    def steps(self, seconds: float = _ANSWER_SECONDS) -> dict[int, int]:
        """Ask all replicas that are connected which step they can give; return it by slot, if it is above 0.

        A replica that does not answer in time counts as one that has nothing; so do all where this job is to stop.
        """
        transport, tag, deadline = self._transport, next(self._tags), time.monotonic() + seconds
        asked: set[int] = set()
        while time.monotonic() < deadline:
            present = set(transport.present())
            for slot in present - asked:
                transport.ask(slot, tag)
            asked |= present
            if all(self._offered(slot, tag) is not None for slot in present):
                break
            if transport.partners.stopped():
                return {}
            time.sleep(_LOOK_SECONDS)
        steps = {slot: _step_in(self._offered(slot, tag) or b"") for slot in asked}
        return {slot: step for slot, step in steps.items() if step > 0}

    def ask(self, slot: int, seconds: float) -> tuple[int, Offer]:
        """Ask a replica for its state; return the tag of what follows, and the offer.

        Raises RankLostError when it is lost, ExchangeTimeoutError after so many seconds, and ValueError for
        anything but an offer.
        """
        transport, tag, deadline = self._transport, next(self._tags), time.monotonic() + seconds
        transport.ask(slot, tag, chosen=True)
        while (description := self._offered(slot, tag)) is None:
            if slot not in transport.present():
                raise RankLostError(slot, "has gone")
            check_not_stopped(transport)
            if time.monotonic() > deadline:
                raise ExchangeTimeoutError(slot, tag, seconds)
            time.sleep(_LOOK_SECONDS)
        if not description:
            raise ValueError("it has no state to give")
        try:
            offer = _OFFERS.validate_json(description)
        except (ValidationError, RecursionError):
            raise ValueError("its description is not that of a state") from None
        if not (0 < len(offer.vectors) <= _MOST_VECTORS and 0 <= offer.rest <= _MOST_REST):
            raise ValueError(f"its state has {len(offer.vectors)} vectors and {offer.rest} further bytes")
        return tag, offer

    def wait_for(self, slot: int) -> None:
        """Wait until a replica is connected, ten seconds at most, or this job is to stop."""
        deadline, transport = time.monotonic() + _ANSWER_SECONDS, self._transport
        while slot not in transport.present() and time.monotonic() < deadline:
            if transport.partners.stopped():
                return
            time.sleep(_LOOK_SECONDS)

    def _offered(self, slot: int, tag: int) -> bytes | None:
        """Return the description that a replica has sent under this tag; None: no answer yet."""
        offered = self._transport.offered(slot)
        return offered[1] if offered is not None and offered[0] == tag else None


def furthest(
    steps: Mapping[int, int], own: int, slots: int, least: int, given_up: Collection[int] = ()
) -> int | None:
    """Return the slot that can give the latest step; of several, the next one after this job's. None: no slot.

    Args:
        steps: that each slot can give.
        own: slot of this job.
        least: the first step that is worth taking.
        given_up: slots not to be asked again.
    """
    found = [slot for slot, step in steps.items() if step >= least and slot not in given_up]
    return min(found, key=lambda slot: (-steps[slot], (slot - own) % slots), default=None)


def check_not_stopped(transport: FederationTransport) -> None:
    """Raise RankLostError where this job was asked to stop."""
    if transport.partners.stopped():
        raise RankLostError(transport.rank, "waits no more: this job was asked to stop")


def _step_in(description: bytes) -> int:
    try:
        step = json.loads(description)["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return 0
    return step if type(step) is int else 0
