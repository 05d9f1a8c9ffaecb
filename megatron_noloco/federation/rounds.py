"""A round between separate jobs, which counts for both partners or for neither.

Inside one job a lost partner ends the run. Separate jobs go on without it, so both must know whether a round took
place: if one partner used the mean and the other did not, the mean over the replicas would no longer follow
DiLoCo's recursion (docs/method.md). The ranks of one replica must not differ either: some of them hold copies of
the same weights.

    leader:      chooses the partner: the planned one, or another replica without a partner (`pairing`)
    all ranks:   learn the partner, and begin to gather and to hand out (`gather`)
    leader:      one stream: buckets both ways (`swap`), then "prepared" both ways
    all ranks:   learn at `finish` whether the round counts, and use the mean, or their own vector

A leader says "prepared" when it has the whole mean, and the mean is plausible (`check_plausible`). `ledger` says
who may count the round, and who may skip it. A leader that is prepared, and does not hear it of the other, asks
over the link. Where no way is left the round stays in doubt: it is skipped here, and reported. If the partner did
use the mean, the mean of c over the R replicas is off, once, by the pair's difference over 2 R.
"""

import asyncio
import math
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from megatron_noloco.federation.gather import Gather, Leader, Transfer
from megatron_noloco.federation.ledger import Ledger
from megatron_noloco.federation.links import NO_PART
from megatron_noloco.federation.messages import Verdict
from megatron_noloco.federation.movement import Movement
from megatron_noloco.federation.node_thread import NodeThread
from megatron_noloco.federation.pairing import Pairing
from megatron_noloco.federation.partners import Partners
from megatron_noloco.federation.streams import StreamEndedError
from megatron_noloco.federation.swap import Swap
from megatron_noloco.job.agreement import computed_by_rank_0
from megatron_noloco.outer.finite_mean import ExchangeReport, MeanPiece
from megatron_noloco.outer.payload import UnequalError
from megatron_noloco.outer.round import Fragment
from megatron_noloco.outer.vectors import NOTHING, Buffers, Ranges
from megatron_noloco.plans.grouping import Group
from megatron_noloco.plans.topology import Place

_PREPARED = b"P"
_NOT_ACCEPTED = "does not accept the mean"
_DOUBT_SECONDS = 20.0
_AVOIDED_ROUNDS = 10  # with a partner whose vector was refused
_FARTHEST = 10.0  # norms of the own vector


class ImplausibleError(Exception):
    """Raised for an exchanged vector that must not be used; the message continues "replica ...".

    Attributes:
        is_ours: whether it is this replica's numbers that are not finite.
    """

    def __init__(self, why: str, is_ours: bool = False) -> None:
        super().__init__(why)
        self.is_ours = is_ours


def check_plausible(norm: float, report: ExchangeReport) -> None:
    """Raise ImplausibleError for an exchange whose vectors must not be averaged.

    Partners have trained for a short time since their weights were averaged, so |c_i - c_j| is small beside |c_i|.
    A vector is refused where it is ten times |c_i| away, or has a number that is not finite.

    Args:
        norm: of this replica's vector.
        report: of its exchange.
    """
    if not math.isfinite(norm):
        raise ImplausibleError("was sent numbers that are not finite", is_ours=True)
    if report.poisoned_elements:
        raise ImplausibleError("sent numbers that are not finite")
    distance = math.sqrt(2 * report.squared_deviation)
    if norm and distance > _FARTHEST * norm:  # a vector of zeros allows no comparison
        raise ImplausibleError(
            f"sent absurd numbers, {distance / norm:.2g} times this replica's norm from its own"
        )


class Leading(NamedTuple):
    """What the leader of a replica has beside the other ranks."""

    thread: NodeThread
    partners: Partners


@dataclass(frozen=True)
class Replica:
    """This replica, as its rounds see it; the same object for all of one rank.

    Attributes:
        gather: moves its vectors between its ranks.
        place: of the replica among the others.
        pairing: says who exchanges with whom; used by the leader.
        leading: None on followers.
    """

    gather: Gather
    place: Place
    pairing: Pairing
    leading: Leading | None

    @property
    def movement(self) -> Movement:
        return self.gather.movement

    def fragments(self) -> list[Fragment]:
        """Return the fragments of this rank's weights: what it has of each interval of the canonical vector.

        The last fragment ends with the padding.
        """
        intervals = self.movement.intervals
        held = [self.movement.own.between(interval.start, interval.stop) for interval in intervals]
        ranges = [[(block.own, block.own + block.size) for block in blocks] for blocks in held]
        ranges[-1] += self.movement.padding
        names = [f", fragment {index}" * (len(intervals) > 1) for index in range(len(intervals))]
        return [Fragment(*one) for one in zip(ranges, range(len(ranges)), names, strict=True)]

    def exchange(self) -> "PairExchange":
        """Return what exchanges a fragment."""
        return PairExchange(self)


class _Outcome(NamedTuple):
    """How a round has ended. Why it does not count continues "replica K"; "" where it counts.

    Attributes:
        ended: on the monotonic clock, without the time to ask whether it counts.
    """

    counts: bool
    why: str = ""
    in_doubt: bool = False
    ended: float = 0.0


class PairExchange:
    """An exchange that yields its mean only where the round counts, and lets no failure of a partner out.

    A failed round is skipped. The exchanges of one rank begin and finish in the same order on all ranks of its
    replica. See `outer.exchange.AnyExchange`.
    """

    rounding = None  # of pairs nothing is kept
    done = False  # as far as is known before `finish`, which asks the leader

    def __init__(self, replica: Replica) -> None:
        self.report = ExchangeReport(())
        self._replica = replica
        self._buffers = Buffers()
        self._vector = self._mean = NOTHING
        self._partner: int | None = None
        self._transfer: Transfer
        self._outcome: Future[_Outcome]
        self._timeout: asyncio.Timeout | None = None
        self._deadline: float | None = None  # on the clock of the leader's thread

    def begin(self, vector: Tensor, group: Group, number: int, what: str, exact: Ranges = ()) -> None:
        """Begin as `Exchange.begin` does, with the planned or another partner. A collective of the replica."""
        replica, leading = self._replica, self._replica.leading
        self._vector, self._deadline = vector, None
        self._partner, missed = computed_by_rank_0(lambda: self._choice(number))
        if self._partner is None:
            self.report = ExchangeReport((replica.place.replica,), missed=missed)
            if leading is not None:
                leading.thread.do(leading.thread.node.begin_round, number, None)
            return
        self.report = ExchangeReport(tuple(sorted((replica.place.replica, self._partner))))
        self._mean = self._buffers.get("mean", vector.dtype, len(vector))
        fragment = number % len(replica.movement.intervals)
        self._transfer = replica.gather.fragment(fragment, vector, self._mean)
        if leading is not None:
            assert isinstance(self._transfer, Leader)
            self._outcome = leading.thread.call(self._run(leading, self._transfer, number))

    def progress(self, until: float = math.inf) -> Iterator[MeanPiece]:
        """Yield nothing: the leader's thread moves everything, and `finish` yields the mean."""
        return iter(())

    def finish(self) -> Iterator[MeanPiece]:
        """Yield the whole mean; the own vector where the round is skipped. A collective of the replica."""
        outcome = _Outcome(counts=False)
        if self._partner is not None:
            outcome = computed_by_rank_0(self._wait)
            self._transfer.wait()
            if not outcome.counts:
                self.report.skip(self._replica.place.replica, f"replica {self._partner}{outcome.why}")
                self.report.in_doubt = outcome.in_doubt
        if self._replica.leading is not None:
            self.report.deadline_seconds = self._replica.leading.partners.deadline_seconds
        yield MeanPiece(0, len(self._vector), self._mean if outcome.counts else self._vector)

    def _choice(self, number: int) -> tuple[int | None, str]:
        """Return the partner, or None and why the planned one is none, as far as there is one."""
        replica, leading = self._replica, self._replica.leading
        assert leading is not None
        leading.thread.check()
        at = divmod(number, len(replica.movement.intervals))
        candidates, why_not = leading.partners.candidates(number)
        partner = replica.pairing.choose(replica.place.replica, at, candidates)
        if partner is not None:
            return partner, ""
        planned = replica.pairing.planned(at, candidates).get(replica.place.replica)
        why = "" if planned is None else f"replica {planned} {why_not[planned] or 'has another partner'}"
        return None, why

    def _wait(self) -> _Outcome:
        """Wait for the end of the round; from now on the partner has until the deadline."""
        assert self._replica.leading is not None
        thread, partners = self._replica.leading
        started = time.monotonic()
        seconds = thread.node.seconds_to_leave or partners.deadline_seconds
        thread.do(self._set_deadline, seconds)
        outcome = self._outcome.result()
        self.report.wait_seconds += time.monotonic() - started
        waited = max(0.0, outcome.ended - started)
        if outcome.counts or waited >= seconds:
            partners.record(waited)
        return outcome

    def _set_deadline(self, seconds: float) -> None:
        self._deadline = asyncio.get_running_loop().time() + seconds
        if self._timeout is not None:
            self._timeout.reschedule(self._deadline)

    async def _run(self, leading: Leading, transfer: Leader, number: int) -> _Outcome:
        """Run a round to its end, in the leader's thread."""
        node, partner = leading.thread.node, self._partner
        assert partner is not None
        link = node.links[partner]
        ledger, failure = link.ledger, None
        ledger.begin(number)
        node.begin_round(number, partner)
        try:
            async with asyncio.timeout_at(self._deadline) as self._timeout:
                try:
                    await self._exchange(leading, transfer, number, ledger)
                finally:
                    self._timeout = None
        except (ConnectionError, TimeoutError, UnequalError, ImplausibleError) as error:
            failure = error
        ended = time.monotonic()
        if ledger.verdict(number) is None and ledger.is_prepared(number):
            await link.settle(number, ledger, _DOUBT_SECONDS)
        in_doubt = ledger.verdict(number) is None and ledger.is_prepared(number)
        counts = ledger.close(number, False)
        if not counts:
            await link.say(Verdict(number, False))
        node.end_round(number)
        self.report.seconds = time.perf_counter() - self.report.started
        if counts:
            return _Outcome(True, ended=ended)
        self._avoid(leading.partners, partner, failure)
        return _Outcome(False, _why(failure), in_doubt, ended)

    async def _exchange(self, leading: Leading, transfer: Leader, number: int, ledger: Ledger) -> None:
        assert self._partner is not None
        bits = self._replica.pairing.noloco.payload_bits
        async with leading.thread.node.links[self._partner].meet(number) as stream:
            swap = Swap(stream, transfer, leading.thread.arithmetic, bits, number)
            squared_norm = await swap.run(self.report)
            try:
                check_plausible(math.sqrt(squared_norm), self.report)
            except ImplausibleError:
                stream.abort(_NOT_ACCEPTED)  # the error is a sentence about the partner
                raise
            ledger.prepare(number)
            await stream.send(_PREPARED)
            if await stream.receive(1) != _PREPARED:
                raise StreamEndedError(_NOT_ACCEPTED)
            ledger.hear(number)

    def _avoid(self, partners: Partners, partner: int, failure: Exception | None) -> None:
        if isinstance(failure, TimeoutError):
            partners.avoid(partner, 1, "missed its last deadline")
        elif isinstance(failure, ImplausibleError) and not failure.is_ours:
            partners.avoid(partner, _AVOIDED_ROUNDS, str(failure))


def _why(failure: Exception | None) -> str:
    """Return why a round does not count; continues "replica K"."""
    if isinstance(failure, TimeoutError):
        return " missed the deadline"
    if isinstance(failure, UnequalError):
        return f" {failure.why}"
    text = str(failure or "skipped the round")
    is_of_stream = isinstance(failure, ConnectionError) and text not in (NO_PART, _NOT_ACCEPTED)
    return f": {text}" if is_of_stream else f" {text}"
