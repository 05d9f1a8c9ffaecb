"""What speakers send each other of a vector that is passed in one direction: the `Work` of a pass."""

import time
from collections.abc import Mapping

from torch import Tensor

from megatron_noloco.federation.passes import is_over
from megatron_noloco.transport.interface import ExchangeTimeoutError, Flight, Message, Transport


class Sends:
    """Sends slabs to the speakers of other replicas; the `Work` of a pass.

    Attributes:
        slots: that are sent to. A slot that is lost is taken out, and the others go on.
        bytes: sent to each of them.
    """

    def __init__(self, transport: Transport, slots: Mapping[int, int]) -> None:
        self.slots, self.bytes = dict(slots), 0
        self._transport = transport

    def __call__(self, place: range, content: Tensor, result: Tensor) -> "_Sent":
        self.bytes += content.nbytes
        post = self._transport.post
        tags = dict(self.slots)  # another thread may empty it
        return _Sent(self, {slot: post([Message(slot, content)], [], tag) for slot, tag in tags.items()})


class _Sent:
    def __init__(self, sends: Sends, flights: dict[int, Flight]) -> None:
        self._sends, self._flights = sends, flights

    @property
    def done(self) -> bool:
        return not self._flights

    def poll(self) -> bool:
        before = len(self._flights)
        for slot, flight in list(self._flights.items()):
            try:
                over = slot not in self._sends.slots or is_over(flight)
            except ConnectionError:
                self._sends.slots.pop(slot, None)
                over = True
            if over:
                del self._flights[slot]
        return len(self._flights) < before


class Receives:
    """Receives slabs from the speaker of another replica; the `Work` of a pass.

    Raises ExchangeTimeoutError where nothing has come for `seconds`.
    """

    def __init__(self, transport: Transport, slot: int, tag: int, seconds: float) -> None:
        self._transport, self._slot, self._tag, self._seconds = transport, slot, tag, seconds
        self._came = time.monotonic()

    def __call__(self, place: range, content: Tensor, result: Tensor) -> "_Received":
        return _Received(self, self._transport.post([], [Message(self._slot, result)], self._tag))

    def came(self, anything: bool) -> None:
        """Note whether something has just come."""
        now = time.monotonic()
        if anything:
            self._came = now
        elif now - self._came > self._seconds:
            raise ExchangeTimeoutError(self._slot, self._tag, self._seconds)


class _Received:
    def __init__(self, receives: Receives, flight: Flight) -> None:
        self._receives, self._flight = receives, flight

    @property
    def done(self) -> bool:
        return self._flight.done()

    def poll(self) -> bool:
        arrived = bool(self._flight.arrived())
        self._receives.came(arrived)
        return arrived
