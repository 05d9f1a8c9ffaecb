"""An exchange between separate jobs that counts for both partners or for neither.

Inside one job a lost partner ends the run. Separate jobs go on without it, so both must know whether a round took
place: if one partner used the mean and the other did not, the mean over the replicas would no longer follow
DiLoCo's recursion (docs/method.md). The ranks of one replica must not differ either: some of them hold copies of
the same weights.

1. The speaker of a replica, its first rank, sees which other replicas are available, and so the partner: the
   planned one, or another replica without a partner (`pairing`). The other replicas learn at once that this one is
   taken; a replica that waits for it skips the round. Without any available partner the round is skipped at once.
2. The partners exchange their vectors (`movement`), and each rank keeps its part of the mean aside. A mean that is
   not finite, or implausible (`Guard`), is refused.
3. A speaker with an accepted mean, whose own vector has arrived, sends the other a one-byte token: *prepared*.
   With overlap this happens during the local steps, so neither partner waits for the other to merge.
4. A speaker that has an accepted mean and the other's token tells the ranks of its replica to use the mean. Else
   the replica skips the round, and its speaker tells the partner that its messages are void.

If a speaker sent no token, its replica skips the round, and so does the partner, which misses that token. A
speaker that sent its token, but misses the other's, cannot know whether its own arrived; no number of further
messages would change that. It skips the round and reports it as in doubt. If its partner did use the mean, the
mean of c over the R replicas is off, once, by the pair's difference over 2 R.
"""

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any, cast

import torch
from torch import Tensor

from megatron_noloco.federation.exchanges import WithdrawnError
from megatron_noloco.federation.moved_exchange import MovedExchange
from megatron_noloco.federation.movement import Movement
from megatron_noloco.federation.pairing import Others, Pairing
from megatron_noloco.federation.partners import FederationPartners
from megatron_noloco.federation.passes import DEPTH, FAILURES
from megatron_noloco.job.agreement import found_by_rank_0
from megatron_noloco.outer.exchange import Exchange
from megatron_noloco.outer.finite_mean import ExchangeReport, MeanPiece
from megatron_noloco.outer.messages import Channel, tag_of
from megatron_noloco.outer.payload import UnequalError
from megatron_noloco.outer.round import Fragment
from megatron_noloco.outer.vectors import HOST, NOTHING, Ranges
from megatron_noloco.plans.grouping import Group
from megatron_noloco.plans.topology import Place
from megatron_noloco.settings import NolocoSettings
from megatron_noloco.transport.interface import ExchangeTimeoutError, Flight, Message, RankLostError

Choose = Callable[[int, Others], tuple[int | None, int | None]]
"""choose(number, others): the partner in an exchange, and the planned one, see `Pairing`."""

_AVOIDED_EXCHANGES = 10  # with a partner whose vector was refused
_Failure = ExchangeTimeoutError | RankLostError | UnequalError


class PoisonedError(Exception):
    """Raised for an exchanged vector that must not be used.

    Attributes:
        why: continues "replica ...".
        by_partner: whether the partner sent bad numbers; False where this replica's own are not finite.
    """

    def __init__(self, why: str, by_partner: bool = True) -> None:
        super().__init__(why)
        self.why = why
        self.by_partner = by_partner


class Guard:
    """Decides whether a partner's vector is plausible; one for all exchanges of a fragment.

    The exchange of a pair measures the distance of the two vectors, |c_i - c_j| (`ExchangeReport`). Divided by the
    norm of the own vector it is small, because partners have trained for a short time since their weights were
    averaged. A vector is refused where this ratio is above 1 and above ten times the median of past exchanges; in
    the first exchange the limit is 10, since weights may have moved by more than their initial norm. So weights
    that doubled are refused, and weights of another initialisation; those of a replica that was away for long are
    accepted.
    """

    _REMEMBERED = 32  # exchanges
    _FAR = 10.0  # times the median

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=self._REMEMBERED)

    def check(self, norm: float, report: ExchangeReport) -> float:
        """Return the ratio of the exchange that `report` describes, of a vector with this norm.

        Raises PoisonedError for an implausible vector, or where one of the two is not finite.
        """
        if not math.isfinite(norm):
            raise PoisonedError("was sent numbers that are not finite", by_partner=False)
        if report.poisoned_elements:
            raise PoisonedError("sent numbers that are not finite")
        distance = math.sqrt(2 * report.squared_deviation)
        ratio = distance / norm if norm else 0.0  # a vector of zeros allows no comparison
        limit = max(1.0, self._FAR * (statistics.median(self._ratios) if self._ratios else 1.0))
        if ratio > limit:
            raise PoisonedError(f"sent absurd numbers, {ratio:.2g} times this replica's norm from its own")
        return ratio

    def accept(self, ratio: float) -> None:
        """Remember the ratio of an exchange that counts."""
        self._ratios.append(ratio)


@dataclass(frozen=True)
class Replica:
    """This replica, as its exchanges with others see it; the same object for all of one rank.

    Attributes:
        movement: of its vectors.
        place: of the replica among the others.
        partners: the other replicas; of the speaker, None on the other ranks.
        choose: the partners; used by the speaker.
        guards: of each fragment; used by the speaker.
        tell: returns on all ranks of the replica what a function returns on the speaker; a collective.
    """

    movement: Movement
    place: Place
    partners: FederationPartners | None
    choose: Choose
    guards: Sequence[Guard]
    tell: Callable[[Callable[[], Any]], Any]
    _tags: Iterator[int] = field(default_factory=count)

    def fragments(self) -> list[Fragment]:
        """Return the fragments of this rank's weights: what it has of each interval of the canonical vector.

        The last one ends with the padding.
        """
        intervals = self.movement.intervals
        held = [self.movement.own.between(interval.start, interval.stop) for interval in intervals]
        ranges = [[(block.own, block.own + block.size) for block in blocks] for blocks in held]
        ranges[-1] += self.movement.padding
        names = [f", fragment {index}" * (len(intervals) > 1) for index in range(len(intervals))]
        return [Fragment(*one) for one in zip(ranges, range(len(ranges)), names, strict=True)]

    def exchange(self, make: Callable[[int, int], Exchange]) -> "CommittedExchange":
        """Return an exchange; all ranks of the replica make theirs in the same order."""

        def of_slabs() -> list[Exchange]:
            return [make(Channel.SLABS + index, self.movement.slab) for index in range(DEPTH)]

        return CommittedExchange(MovedExchange(self.movement, of_slabs, next(self._tags)), self)


class CommittedExchange:
    """An exchange that yields its mean only once the round is certain, and lets no failure of a partner out.

    A failed round is skipped. The exchanges of one rank must begin and finish in the same order on all ranks of
    its replica.
    """

    rounding = None  # of pairs nothing is kept
    done = False  # as far as is known before `finish`, which asks the other ranks

    def __init__(self, exchange: MovedExchange, replica: Replica) -> None:
        self._exchange = exchange
        self._replica = replica
        self._partners = replica.partners  # None: this rank does not speak
        self._vector = NOTHING
        self._collecting = False  # whether the mean is still to come
        self._failure: _Failure | PoisonedError | None = None  # why there is none, or it is refused
        self._partner = self._number = -1  # no partner: the round is skipped
        self._deadline_seconds = 600.0
        self._token: Flight | None = None  # the other speaker's
        self._prepared: Flight | None = None  # ours: the mean is accepted
        self._ratio = math.nan  # see `Guard.check`

    @property
    def report(self) -> ExchangeReport:
        return self._exchange.report

    @property
    def _guard(self) -> Guard:
        return self._replica.guards[self._number % len(self._replica.guards)]

    def begin(self, vector: Tensor, group: Group, number: int, what: str, exact: Ranges = ()) -> None:
        """Begin as `Exchange.begin` does, with the planned or another partner. A collective of the replica."""
        assert len(group) <= 2, f"a group of {len(group)} cannot commit"
        self._vector, self._failure, self._prepared, self._number = vector, None, None, number
        place = self._replica.place
        partner, missed = self._replica.tell(lambda: self._choice(number))
        if self._partners is not None:
            self._partners.begin(number, partner)
        self._partner, self._collecting = -1 if partner is None else partner, partner is not None
        if partner is None:
            self._exchange.report = ExchangeReport((place.replica,), missed=missed)
            return
        if self._partners is not None:
            self._deadline_seconds = self._partners.deadline_seconds
            self._token = self._post_token([], [Message(partner, _token())])
        pair = min(place.replica, partner), max(place.replica, partner)
        self._exchange.begin(vector, pair, number, what)

    def progress(self) -> Iterator[MeanPiece]:
        """Move the messages under way; yields nothing before `finish`."""
        if self._collecting:
            self._exchange.poll()
            if self._exchange.done:
                self._prepare()
        return iter(())

    def finish(self) -> Iterator[MeanPiece]:
        """Yield the whole mean; the own vector where the round is skipped. A collective of the replica."""
        started = time.monotonic()
        if self._collecting:
            self._prepare()
        seconds, counts = time.monotonic() - started, False
        if self._partner >= 0:
            counts, missed, in_doubt = self._replica.tell(self._verdict)
            if not counts:
                self.report.skip(self._replica.place.replica, missed)
                self.report.in_doubt = in_doubt
        if self._partners is not None:
            self._note(self._partners, counts, seconds)
        yield MeanPiece(0, len(self._vector), self._exchange.mean if counts else self._vector)

    def _note(self, partners: FederationPartners, counts: bool, seconds: float) -> None:
        """End the exchange for the partner, and remember how it went."""
        if counts:
            partners.record(seconds, self._partner)
            self._guard.accept(self._ratio)
        elif isinstance(self._failure, ExchangeTimeoutError):
            partners.missed(self._partner)
        elif isinstance(self._failure, PoisonedError) and self._failure.by_partner:
            partners.avoid(self._partner, _AVOIDED_EXCHANGES, self._failure.why)
        partners.end(self._number, counts)

    def _choice(self, number: int) -> tuple[int | None, str]:
        """Return the partner, or None and why the planned one is none, as far as there is one."""
        assert self._partners is not None
        others, why_not = self._partners.others(number)
        partner, planned = self._replica.choose(number, others)
        missed = "" if planned is None else f"replica {planned} {why_not[planned] or 'has another partner'}"
        return partner, missed if partner is None else ""

    def _prepare(self) -> None:
        """End the exchange. The speaker sends the token if the mean is accepted."""
        self._collecting = False
        self._failure = cast(_Failure | None, self._exchange.wait(self._deadline_seconds))
        if self._partners is None or self._failure is not None:
            return
        try:
            self._ratio = self._guard.check(math.sqrt(self._exchange.squared_norm), self.report)
        except PoisonedError as failure:
            self._failure = failure
            return
        self._prepared = self._post_token([Message(self._partner, _token())], [])

    def _verdict(self) -> tuple[bool, str, bool]:
        """Return whether the mean counts; else why not, and whether the partner may use it all the same."""
        if self._prepared is not None:
            self._wait_for_token()
        if self._failure is not None:
            in_doubt = self._prepared is not None and not isinstance(self._failure, WithdrawnError)
            return False, f"replica {self._partner} {self._failure.why}", in_doubt
        # `end` must not void our token before it arrives. If it is lost, the partner is in doubt.
        assert self._prepared is not None
        with suppress(*FAILURES):
            self._prepared.finish(self._deadline_seconds)
        return True, "", False

    def _wait_for_token(self) -> None:
        assert self._token is not None
        started = time.monotonic()
        try:
            self._token.finish(started - self._token.posted + self._deadline_seconds)
        except FAILURES as failure:
            self._failure = cast(_Failure, failure)
        self.report.wait_seconds += time.monotonic() - started

    def _post_token(self, sends: list[Message], receives: list[Message]) -> Flight:
        tag = tag_of(self._number, Channel.COMMITS)
        return self._exchange.exchanges[0].transport.post(sends, receives, tag)


def _token() -> Tensor:
    return torch.ones(1, dtype=torch.uint8, device=HOST)


def committing(
    movement: Movement,
    partners: FederationPartners | None,
    place: Place,
    settings: NolocoSettings,
    seed: int = 0,
) -> Replica:
    """Return what makes the exchanges of an `OuterOptimizer` count for both partners or for neither.

    Args:
        partners: see `Replica`.
        place, settings, seed: those of the `OuterOptimizer`.
    """
    guards = [Guard() for _ in range(settings.fragments)]
    pairing = Pairing(settings, seed)

    def choose_partner(number: int, others: Others) -> tuple[int | None, int | None]:
        at = divmod(number, settings.fragments)
        return pairing.choose(place.replica, at, others), pairing.planned(at, others).get(place.replica)

    return Replica(movement, place, partners, choose_partner, guards, found_by_rank_0)
