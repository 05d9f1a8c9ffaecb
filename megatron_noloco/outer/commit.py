"""An exchange between separate jobs, which counts for both partners or for neither.

In one job a partner that is lost ends the run. Separate jobs go on, so it must be certain whether a round took
place: if one of a pair used the mean and the other did not, the mean over the replicas would no longer follow
DiLoCo's recursion (docs/method.md). Nor may the ranks of a replica differ: some of them hold copies of the same
weights.

1. The ranks of a replica agree whom of the others they can meet, and so with whom: the plan's partner, or another
   replica left over (`plans.choices`). All others learn at once that they do not meet this replica, and one that
   waits for it has a bye. A replica that finds nobody has a bye at once.
2. The vectors are exchanged. The mean is kept aside. One that is not finite, or absurd (`guard`), is refused.
3. A rank that has a sound one, and whose vector has arrived, sends its counterpart a token: *prepared*. With
   overlap this happens in the air, so neither partner waits for the other to merge.
4. The ranks of a replica agree whether each of them has a sound mean and the counterpart's token. If so, the mean
   is used. If not, the round is a bye, and the partner is told that its messages are void.

Where a rank has sent no token, its replica has a bye, and so has the partner, of which one rank receives none. A
replica whose ranks all sent theirs, and of which one waits in vain, cannot know whether its own tokens arrived; no
number of further messages would change that. It takes the bye, and reports the round as in doubt. If its partner
did use the mean, the mean of c over the R replicas is off, once, by the pair's difference over 2 R.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import torch
from torch import Tensor

from megatron_noloco.outer.exchange import Exchange
from megatron_noloco.outer.guard import Guard, PoisonedError
from megatron_noloco.outer.mean import ExchangeReport, MeanPiece
from megatron_noloco.outer.memory import Kept
from megatron_noloco.outer.patience import PartnerTimeoutError
from megatron_noloco.outer.spans import Ranges
from megatron_noloco.outer.tags import Channel, tag_of
from megatron_noloco.plans.choices import Others
from megatron_noloco.plans.grouping import Group
from megatron_noloco.transport.protocol import (
    ExchangeTimeoutError,
    Flight,
    Message,
    Partners,
    Standing,
    WithdrawnError,
)

Choose = Callable[[int, Others], int | None]
"""choose(number, others): the partner in an exchange, see `plans.choices.choose`."""

_AVOIDED_EXCHANGES = 10  # with a partner whose vector was refused
_LATE = (PartnerTimeoutError, ExchangeTimeoutError)
_FAILURES = (*_LATE, ConnectionError)


class CommittedExchange:
    """As `Exchange`, but nothing of the mean is given before it is certain, and no failure leaves it.

    The exchanges of one rank must begin and finish in the same order on all ranks of its replica. Holds the mean:
    4 bytes per element more.

    Args:
        exchange: of a pair; on the channel `Channel.ROUNDS`.
        partners: of its transport.
        choose: the same on all ranks.
        guard: that of all exchanges of this rank.
    """

    def __init__(self, exchange: Exchange, partners: Partners, choose: Choose, guard: Guard) -> None:
        self._exchange = exchange
        self._partners = partners
        self._choose = choose
        self._guard = guard
        self._replica = exchange.place.replica
        self._kept = Kept()
        self._vector = torch.empty(0)
        self._mean: Tensor | None = None  # None: a bye
        self._failure: Exception | None = None
        self._partner = self._rank = self._number = -1
        self._begun_at = 0.0
        self._token: Flight | None = None  # the counterpart's
        self._prepared: Flight | None = None  # ours
        self._ratio = math.nan  # see `Guard.check`

    @property
    def report(self) -> ExchangeReport:
        return self._exchange.report

    @property
    def sends_from_device(self) -> bool:
        return self._exchange.sends_from_device

    def begin(self, vector: Tensor, group: Group, number: int, what: str, exact: Ranges = ()) -> None:
        """As in `Exchange`; `group` is the plan's. The ranks of a replica agree first: all call it together."""
        assert len(group) <= 2, f"a group of {len(group)} cannot commit"
        self._vector, self._mean, self._failure, self._number = vector, None, None, number
        self._prepared = None
        place = self._exchange.place
        others = [replica for replica in range(place.replicas) if replica != self._replica]
        seen = [self._partners.standing(number, place.rank_of(other)) for other in others]
        standings = dict(zip(others, self._partners.agree([standing for standing, _ in seen]), strict=True))
        partner = self._choose(
            number,
            Others(
                *(
                    {other for other in others if standings[other] >= least}
                    for least in (Standing.BUSY, Standing.FREE, Standing.WAITING)
                )
            ),
        )
        if partner is None:
            self._partners.begin(number, None)
            self._exchange.report = ExchangeReport((self._replica,))
            for planned in set(group) & set(others):
                self._miss(planned, seen[others.index(planned)][1] or "is not there for another rank")
            return
        self._partner, self._rank = partner, place.rank_of(partner)
        self._partners.begin(number, self._rank)
        self._mean = self._kept.take("mean", torch.float32, len(vector))
        self._exchange.patience.deadline_seconds = self._partners.deadline_seconds
        self._begun_at = time.monotonic()
        self._token = self._post_token([], [Message(self._rank, torch.zeros(1, dtype=torch.uint8))])
        pair = min(self._replica, partner), max(self._replica, partner)
        self._exchange.begin(vector, pair, number, what, exact)

    def progress(self) -> Iterator[MeanPiece]:
        """Move what is under way; gives nothing before `finish`."""
        if self._collecting():
            self._collect(self._exchange.progress())
            if self._exchange.complete:
                self._prepare()
        return iter(())

    def finish(self) -> Iterator[MeanPiece]:
        """Yield the whole mean; after a bye, the own vector. All ranks of a replica call it together."""
        if self._mean is not None:
            started = time.monotonic()
            if self._collecting():
                self._prepare()
            seconds = time.monotonic() - started
            if self._commit():
                self._partners.record(seconds)
                self._guard.accept(self._ratio)
            else:
                self._mean = None
                if isinstance(self._failure, _LATE):
                    self._partners.avoid(self._rank, 1, "missed its last deadline")
                elif isinstance(self._failure, PoisonedError) and self._failure.by_partner:
                    self._partners.avoid(self._rank, _AVOIDED_EXCHANGES, str(self._failure))
        self._partners.end(self._number)
        mean = self._vector if self._mean is None else self._mean
        yield MeanPiece(0, len(mean), mean)

    def _collecting(self) -> bool:
        return self._mean is not None and self._failure is None and self._prepared is None

    def _collect(self, pieces: Iterator[MeanPiece]) -> None:
        assert self._mean is not None
        try:
            for piece in pieces:
                self._mean[piece.start : piece.stop] = piece.mean
        except _FAILURES as failure:
            self._failure = failure

    def _prepare(self) -> None:
        """End the exchange; tell the counterpart that a sound mean is here, if it is."""
        self._collect(self._exchange.finish())
        try:
            if self._failure is None:
                self._ratio = self._guard.check(self._vector, self.report)
                self._prepared = self._post_token([Message(self._rank, torch.ones(1, dtype=torch.uint8))], [])
        except PoisonedError as failure:
            self._failure = failure

    def _commit(self) -> bool:
        """Whether the mean counts, the same on all ranks of the replica; else the report is that of a bye."""
        if self._prepared is not None:
            self._wait_for_token()
        withdrawn = isinstance(self._failure, WithdrawnError)
        votes = [self._prepared is not None, self._failure is None, not withdrawn]
        all_prepared, all_certain, none_withdrawn = self._partners.agree(votes)
        if not all_certain:
            what = "did not answer" if all_prepared else "failed, or was refused by,"
            self._miss(self._partner, _short(self._failure) or f"{what} another rank")
            self.report.in_doubt = bool(all_prepared and none_withdrawn)
            return False
        # The token must not be void before it is there. Where it does not arrive, the partner is in doubt, not we.
        assert self._prepared is not None
        with suppress(*_FAILURES):
            self._prepared.finish(self._exchange.patience.deadline_seconds)
        return True

    def _wait_for_token(self) -> None:
        assert self._token is not None
        elapsed_seconds = time.monotonic() - self._begun_at  # since the receive was posted
        try:
            for _ in self._token.arrivals(elapsed_seconds + self._exchange.patience.deadline_seconds):
                pass
        except _FAILURES as failure:
            self._failure = failure
        self.report.wait_seconds += self._token.wait_seconds

    def _post_token(self, sends: list[Message], receives: list[Message]) -> Flight:
        tag = tag_of(self._number, Channel.COMMITS)
        return self._exchange.transport.post(sends, receives, tag)

    def _miss(self, partner: int, why: str) -> None:
        self.report.become_bye(self._replica, f"replica {partner} {why}")


def _short(failure: Exception | None) -> str:
    """As the log names it."""
    if isinstance(failure, _LATE):
        return "missed the deadline"
    if isinstance(failure, PoisonedError):
        return str(failure)
    return "" if failure is None else str(failure).partition(" ")[2].partition(" ")[2]
