"""Rows about the rounds of an attached job, for `watch` where another job of its federation is the trainer's."""

import time
from collections.abc import Sequence

from megatron_noloco.federation.network import FederationTransport
from megatron_noloco.outer import RoundReport


class RoundRows:
    """Sends a row to all jobs after each round, with the names that the trainer's metrics have."""

    def __init__(self, transport: FederationTransport, done: int) -> None:
        self._transport = transport
        self._since, self._done = time.monotonic(), done
        self._sent_bytes = self._missed = 0

    def tell(self, done: int, reports: Sequence[RoundReport]) -> None:
        """Send what is known after `done` local steps; nothing where no round has ended."""
        for report in reports:
            self._sent_bytes += report.exchange.bytes_sent
            self._missed += bool(report.exchange.missed)
        if not reports or done <= self._done:
            return
        slot, last, at = self._transport.rank, reports[-1], time.monotonic()
        row = {
            "kind": "step",
            "step": done,
            "replica": slot,
            "speed/seconds_per_step": (at - self._since) / (done - self._done),
            "round/index": last.round_index,
            "round/partners": [other for other in last.exchange.group if other != slot],
            "round/pause_seconds": last.pause_seconds,
            "round/spread": last.spread,
            "round/deadline_seconds": self._transport.partners.deadline_seconds,
            "total/sent_bytes": self._sent_bytes,
            "total/missed_rounds": self._missed,
        }
        if last.exchange.missed:
            row["round/missed"] = last.exchange.missed
        self._since, self._done = at, done
        self._transport.tell_row(row)
