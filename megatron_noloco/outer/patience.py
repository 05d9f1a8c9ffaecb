"""Collecting the chunks of a flight: while there is something else to do, and when all that is left is to wait."""

import time
from collections.abc import Iterator

from megatron_noloco.job.activity import now
from megatron_noloco.transport.protocol import Arrival, Flight


class PartnerLostError(RuntimeError):
    """A partner in one job is gone; says who and in which exchange."""


class PartnerTimeoutError(PartnerLostError):
    """A partner did not answer within the deadline; says who, in which exchange, after how many seconds."""


class Patience:
    """Whether an exchange waits for its members, and for how long.

    Args:
        deadline_seconds: how long to wait for a chunk, from when its flight was posted; where that was before
            `wait` was called, from then.
    """

    def __init__(self, deadline_seconds: float) -> None:
        self.deadline_seconds = deadline_seconds
        self._since: float | None = None
        self._awaited = ""

    def work(self) -> None:
        """From here on there is something else to do: nobody waits."""
        self._since = None

    def wait(self, awaited: str) -> None:
        """From here on there is nothing else to do; `awaited` says in words for whom this rank waits."""
        self._since, self._awaited = time.monotonic(), awaited

    def collect(self, flight: Flight) -> Iterator[Arrival | None]:
        """The chunks of a flight just posted, until all are received and sent.

        None where nothing more has landed and nobody waits. Raises ExchangeTimeoutError at the deadline.
        """
        return self._collect(flight, time.monotonic())

    def _collect(self, flight: Flight, posted: float) -> Iterator[Arrival | None]:
        while not flight.done():
            landed = flight.arrived()
            yield from landed
            if landed:
                continue
            if self._since is None:
                yield None
                continue
            deadline_seconds = self.deadline_seconds + max(0.0, self._since - posted)
            now.part(self._awaited)
            for arrival in flight.arrivals(deadline_seconds):
                yield arrival
                now.part(self._awaited)
            flight.finish(deadline_seconds)
            now.part("")
