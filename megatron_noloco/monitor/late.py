"""Which partner made this replica wait."""

import statistics

from megatron_noloco.outer import ExchangeReport

_COMPARED = 16  # partners
_FEWEST = 2  # of them, to have a median
_NOTABLE = 0.1  # of the time from one exchange to the next


class LatePartners:
    """Compares the wait for a partner with those for the partners met lately, on one rank.

    It knows what this rank has measured anyway, so no message is needed. A partner can be late because it is slow,
    because it waited for its own partner before, or because the network between the two is slow.

    Args:
        replica: of this rank.
    """

    def __init__(self, replica: int) -> None:
        self._replica = replica
        self._waits: dict[int, float] = {}  # seconds, by partner, the one met last at the end
        self._last_started: float | None = None

    def notice(self, exchange: ExchangeReport) -> tuple[int, float] | None:
        """After each exchange: its partner, and the wait beyond the median of the waits for the others met lately.

        None where that is less than a tenth of the time since the last exchange began. None as well for a group
        that is no pair, since a wait for several does not say for whom; before two others have been met; and for
        the exchange of another replica, which one that began as its clone merges.
        """
        started, last_started = exchange.started, self._last_started
        self._last_started = started
        if len(exchange.group) != 2 or self._replica not in exchange.group:
            return None
        (partner,) = (other for other in exchange.group if other != self._replica)
        self._waits.pop(partner, None)
        others = list(self._waits.values())
        self._waits[partner] = exchange.wait_seconds
        if len(self._waits) > _COMPARED:
            del self._waits[next(iter(self._waits))]
        if last_started is None or len(others) < _FEWEST:
            return None
        late = exchange.wait_seconds - statistics.median(others)
        return (partner, late) if late > _NOTABLE * (started - last_started) else None
