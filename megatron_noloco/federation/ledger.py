"""Which rounds with one other replica count.

A round counts where both partners are prepared: each has accepted the mean, and has told the other so, over the
stream of the round or over the link. A side that is not prepared may skip the round, since the other side cannot
count it. A side that is prepared and has not heard that the other is, too, is in doubt, and asks.
"""

import asyncio
from dataclasses import dataclass, field

_REMEMBERED = 32  # rounds, for which a partner may still ask


@dataclass
class _Round:
    ours: bool = False  # whether this side is prepared
    theirs: bool = False
    verdict: "asyncio.Future[bool]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Ledger:
    """What is known of the rounds with one other replica, by their numbers. Used by one event loop."""

    def __init__(self) -> None:
        self._rounds: dict[int, _Round] = {}

    def begin(self, number: int) -> None:
        """Note that a round begins. Of rounds that were never begun nothing is known."""
        self._rounds[number] = _Round()
        while len(self._rounds) > _REMEMBERED:
            self._rounds.pop(next(iter(self._rounds)))

    def prepare(self, number: int) -> None:
        """Note that this side is prepared. From now on it cannot skip the round by itself."""
        self._rounds[number].ours = True
        self._decide(number)

    def is_prepared(self, number: int) -> bool:
        """Return whether this side is prepared."""
        return number in self._rounds and self._rounds[number].ours

    def hear(self, number: int) -> None:
        """Note that the partner is prepared."""
        if number in self._rounds:
            self._rounds[number].theirs = True
            self._decide(number)

    def close(self, number: int, counts: bool) -> bool:
        """Note the verdict on a round that was begun, unless there is one; return the verdict that stands."""
        verdict = self._rounds[number].verdict
        if not verdict.done():
            verdict.set_result(counts)
        return verdict.result()

    def verdict(self, number: int) -> bool | None:
        """Return whether a round counts here; None: that is not known."""
        found = self._rounds.get(number)
        return found.verdict.result() if found is not None and found.verdict.done() else None

    def _decide(self, number: int) -> None:
        if self._rounds[number].ours and self._rounds[number].theirs:
            self.close(number, True)
