"""Which rounds with one other replica count.

A round counts where both partners are prepared: each has accepted the mean, and has told the other so, over the
stream of the round or over the link. A side that is not prepared may skip the round, since the other side cannot
count it. A side that is prepared and has not heard that the other is, too, is in doubt, and asks.
"""

from dataclasses import dataclass

_REMEMBERED = 32  # rounds, for which a partner may still ask


@dataclass
class _Round:
    ours: bool = False  # whether this side is prepared
    theirs: bool = False
    verdict: bool | None = None


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
        known = self._rounds[number]
        if known.verdict is None:
            known.verdict = counts
        return known.verdict

    def verdict(self, number: int) -> bool | None:
        """Return whether a round counts here; None: that is not known."""
        return self._rounds[number].verdict if number in self._rounds else None

    def _decide(self, number: int) -> None:
        if self._rounds[number].ours and self._rounds[number].theirs:
            self.close(number, True)
