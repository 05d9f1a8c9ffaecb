"""A round between separate jobs, which counts for both partners or for neither.

Inside one job a lost partner ends the run. Separate jobs go on without it, so both must know whether a round took
place: if one partner used the mean and the other did not, the mean over the replicas would no longer follow
DiLoCo's recursion (docs/method.md). The ranks of one replica must not differ either: some of them hold copies of
the same weights.

    decides (the lower member)                      follows
    offers and fetches buckets                      offers and fetches buckets
    fetches "done"                                  has the mean: offers "done"
    decides, and offers the verdict for good        fetches the verdict

Only the side that decides ever says that a round counts, and only when both have the mean. The other side cannot
count without that word. Where the word does not come, the round is *in doubt* there: the replica goes on with its
own vector, keeps how far the mean is from it, and goes on asking. If the round counts after all, the difference is
added to the vector of its next round, or to its weights before it leaves. A replica that is to stop hears the
verdict before.

| ends without a word | the other side |
|---|---|
| either, before it has all buckets | skips the round |
| who follows, before its "done" has come | skips the round; the verdict says so |
| who follows, after that | counts the round; what it gave to the other is lost with the other's weights |
| who decides, before its verdict | is in doubt, and skips the round once a later process of the slot is there |
| who decides, after a verdict that has not arrived | the same; the weights that have the mean are lost |

    leader:      chooses the partner: the planned one, or another replica without a partner (`pairing`)
    all ranks:   learn the partner, and begin to gather and to hand out (`gather`)
    leader:      a thread runs the round (`_Round.run`), beside the training
    all ranks:   learn at `finish` whether the round counts, and use the mean, or their own vector
"""

import math
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_noloco.federation.codes import Coding, Phases
from megatron_noloco.federation.gather import Gather, Leader, Transfer
from megatron_noloco.federation.members import NO_PART, STOPPED, WORD_SECONDS
from megatron_noloco.federation.mesh import (
    BULK_BYTES,
    Blob,
    Fetch,
    LostError,
    Member,
    Mesh,
    Patience,
    RefusedError,
)
from megatron_noloco.federation.movement import Movement
from megatron_noloco.federation.pairing import Pairing
from megatron_noloco.federation.partners import Partners
from megatron_noloco.files import outside
from megatron_noloco.job.agreement import computed_by_rank_0
from megatron_noloco.outer.finite_mean import ExchangeReport, MeanPiece
from megatron_noloco.outer.payload import UnequalError
from megatron_noloco.outer.round import Fragment
from megatron_noloco.outer.vectors import HOST, NOTHING, Buffers, Ranges
from megatron_noloco.plans.grouping import Group
from megatron_noloco.plans.topology import Place

_YES = b"+"
_NOT_ACCEPTED, _GAVE_UP = "does not accept the mean", "gave the round up"
_UNDER_WAY_BYTES = 2**24  # fill a fast link of a long way
_LEAST_AHEAD = 4  # buckets
_SKETCHES_AHEAD = 4  # times as many buckets: a small piece that is lost on a full link holds nothing up
_MOST_WORD_BYTES = 1000
_WHY_SECONDS = 1.0  # for the word on why a partner has withdrawn its buckets
_REMEMBERED = 64  # words on rounds with a replica, besides those of rounds that may be under way
_DOUBT_SECONDS = 3600.0  # for a partner that is away to come again
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
    squared_distance = 2 * report.squared_deviation
    if not is_plausible(squared_distance, norm**2):
        times = math.sqrt(squared_distance) / norm if norm else math.inf
        raise ImplausibleError(f"sent absurd numbers, {times:.2g} times this replica's norm from its own")


def is_plausible(squared_distance: float, squared_norm: float) -> bool:
    """Return whether a vector is so near to this replica's that their mean may be used."""
    most = _FARTHEST**2 * squared_norm if squared_norm else math.inf  # zeros allow no comparison
    return math.isfinite(squared_distance) and squared_distance <= most


class _Outcome(NamedTuple):
    """How a round has ended. Why it does not count continues "replica K"; "" where it counts.

    Attributes:
        wait_seconds: until the partner had begun, since this replica began to wait.
        seconds: of the exchange.
    """

    counts: bool
    why: str = ""
    in_doubt: bool = False
    wait_seconds: float = 0.0
    seconds: float = 0.0


class _Doubt:
    """A round whose verdict has not come, on the leader. Its partner is asked for it until it answers."""

    def __init__(self, mesh: Mesh, number: int, partner: Member) -> None:
        self.number, self.partner = number, partner
        self._mesh, self._since = mesh, mesh.clock()
        self._word = mesh.begin(partner, f"round/{number}/verdict")

    def counts(self) -> bool | None:
        """Return whether the round counts; None: that is not known yet."""
        outcome = self._word.outcome
        if isinstance(outcome, Blob):
            return bytes(outcome) == _YES
        if isinstance(outcome, RefusedError):  # the partner has forgotten
            return False
        if self._mesh.is_followed(self.partner) or self._mesh.clock() >= self._since + _DOUBT_SECONDS:
            return False
        return None

    def end(self) -> None:
        self._mesh.cancel(self._word)


@dataclass
class _Ledger:
    """What is open or remembered of earlier rounds; one for each rank of a replica.

    Attributes:
        doubts: on the leader.
        changes: from the own vector to the mean, of each round in doubt; what this rank has of it.
        late: of rounds that count after all, by fragment: to be added to the next vector.
        words: names of "done" and verdicts, offered for partners that may be in doubt, by slot, oldest first.
    """

    doubts: list[_Doubt] = field(default_factory=list)
    changes: dict[int, Tensor] = field(default_factory=dict)
    late: dict[int, Tensor] = field(default_factory=dict)
    words: defaultdict[int, deque[str]] = field(default_factory=lambda: defaultdict(deque))

    def settle(self, settled: Mapping[int, bool], fragments: int) -> None:
        """Note what rounds have changed that count after all."""
        for number, counts in settled.items():
            change = self.changes.pop(number)
            if counts:
                fragment = number % fragments
                self.late[fragment] = change + self.late.pop(fragment, 0)

    def clear(self) -> None:
        """Forget what is open: this replica goes on from the state of another."""
        while self.doubts:
            self.doubts.pop().end()
        self.changes.clear()
        self.late.clear()


@dataclass(frozen=True)
class Replica:
    """This replica, as its rounds see it; the same object for all of one rank.

    Attributes:
        gather: moves its vectors between its ranks.
        place: of the replica among the others.
        pairing: says who exchanges with whom; used by the leader.
        partners: on the leader; None on followers.
    """

    gather: Gather
    place: Place
    pairing: Pairing
    partners: Partners | None
    ledger: _Ledger = field(default_factory=_Ledger)

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


class PairExchange:
    """An exchange that yields its mean only where the round counts, and lets no failure of a partner out.

    A failed round is skipped. The exchanges of one rank begin and finish in the same order on all ranks of its
    replica. See `outer.exchange.AnyExchange`.
    """

    done = False  # as far as is known before `finish`, which asks the leader

    def __init__(self, replica: Replica) -> None:
        self.report = ExchangeReport(())
        self._replica = replica
        self._buffers = Buffers()
        self._vector = self._mean = NOTHING
        self._number = 0
        self._partner: int | None = None
        self._transfer: Transfer
        self._round: _Round
        self._outcome: Future[_Outcome]

    def begin(
        self,
        vector: Tensor,
        group: Group,
        number: int,
        what: str,
        exact: Ranges = (),
        rounding: Tensor | None = None,
    ) -> None:
        """Begin as `Exchange.begin` does, with the planned or another partner. A collective of the replica.

        Args:
            vector: a copy, which the weights do not share; late changes are added to it.
            rounding: None, since pairs keep nothing.
        """
        replica, partners = self._replica, self._replica.partners
        self._vector, self._number = vector, number
        settled, self._partner, missed = computed_by_rank_0(lambda: self._choice(number))
        replica.ledger.settle(settled, len(replica.movement.intervals))
        if (late := replica.ledger.late.pop(self._fragment(number), None)) is not None:
            vector += late.to(vector.device)
        if self._partner is None:
            self.report = ExchangeReport((replica.place.replica,), missed=missed)
            if partners is not None:
                partners.members.begin_round(number, None)
            return
        self.report = ExchangeReport(tuple(sorted((replica.place.replica, self._partner))))
        self._mean = self._buffers.get("mean", vector.dtype, len(vector))
        self._transfer = replica.gather.fragment(self._fragment(number), vector, self._mean)
        if partners is not None:
            assert isinstance(self._transfer, Leader)
            self._round = _Round(replica, partners, self._partner, number, self._transfer, self.report)
            self._outcome = partners.members.mesh.spawn(self._round.run, "noloco-round")

    def progress(self, until: float = math.inf) -> Iterator[MeanPiece]:
        """Yield nothing: the leader's thread moves everything, and `finish` yields the mean."""
        return iter(())

    def finish(self) -> Iterator[MeanPiece]:
        """Yield the whole mean; the own vector where the round is skipped. A collective of the replica."""
        outcome = _Outcome(counts=False)
        if self._partner is not None:
            outcome = computed_by_rank_0(self._wait)
            self._transfer.wait()
            self.report.seconds = outcome.seconds  # also on followers, which choose settings by it
            if outcome.in_doubt:
                self._replica.ledger.changes[self._number] = self._mean - self._vector.to(self._mean.device)
            if not outcome.counts:
                self.report.skip(self._replica.place.replica, f"replica {self._partner}{outcome.why}")
                self.report.in_doubt = outcome.in_doubt
        yield MeanPiece(0, len(self._vector), self._mean if outcome.counts else self._vector)

    def _fragment(self, number: int) -> int:
        return number % len(self._replica.movement.intervals)

    def _choice(self, number: int) -> tuple[dict[int, bool], int | None, str]:
        """Return earlier rounds that were settled, the partner, and why the planned one is none."""
        replica, partners = self._replica, self._replica.partners
        assert partners is not None
        partners.members.check()
        settled = dict(_verdicts(replica.ledger))
        at = divmod(number, len(replica.movement.intervals))
        doubtful = {doubt.partner.slot for doubt in replica.ledger.doubts}
        candidates, why_not = partners.candidates(number, doubtful)
        partner = replica.pairing.choose(replica.place.replica, at, candidates)
        if partner is not None:
            return settled, partner, ""
        planned = replica.pairing.planned(at, candidates).get(replica.place.replica)
        why = "" if planned is None else f"replica {planned} {why_not[planned] or 'has another partner'}"
        return settled, None, why

    def _wait(self) -> _Outcome:
        """Wait for the end of the round; from now on the partner has until the deadline."""
        partners, partner = self._replica.partners, self._partner
        assert partners is not None
        assert partner is not None
        started, mesh = time.monotonic(), partners.members.mesh
        self.report.deadline_seconds = partners.seconds(partner)
        self._round.set_deadline(self.report.deadline_seconds)

        def is_over() -> bool:
            partners.members.check()
            return self._outcome.done()

        mesh.wait(is_over)
        outcome = self._outcome.result()
        self.report.wait_seconds += time.monotonic() - started
        partners.record(partner, outcome.wait_seconds)
        return outcome


class _Round:
    """A round on the leader, in a thread of its own."""

    def __init__(
        self,
        replica: Replica,
        partners: Partners,
        partner: int,
        number: int,
        transfer: Leader,
        report: ExchangeReport,
    ) -> None:
        self._replica, self._number, self._transfer, self.report = replica, number, transfer, report
        self._members, self._partners = partners.members, partners
        self._mesh = self._members.mesh
        signed = self._mesh.statuses.of(partner)
        assert signed is not None
        self._partner = signed.member
        self._waits_since = self._begin_by = self._end_by = math.inf
        self._coding = Coding(replica.pairing.noloco.payload_bits, number, transfer.movement.exact)
        self._members.begin_round(number, partner)

    def set_deadline(self, seconds: float) -> None:
        """Give the partner so many seconds to begin, and the round `noloco.deadline_seconds` to end."""
        limit = self._members.seconds_to_leave
        now = self._waits_since = self._mesh.clock()
        self._begin_by = now + min(seconds, limit)
        self._end_by = now + min(self._partners.longest_seconds, limit)
        self._mesh.wake()

    def run(self) -> _Outcome:
        """Run the round to its end."""
        mesh, name = self._mesh, f"round/{self._number}/"
        decides, has_mean, failure, error = mesh.me < self._partner, False, "", None
        word = mesh.begin(self._partner, name + ("done" if decides else "verdict"), is_sent=True)

        def why_not() -> str:
            if text := _why_no(word):
                return text
            return NO_PART if patience.began == math.inf and self._is_past() else self._members.why_stopped()

        patience = Patience(
            mesh, self._partner, lambda: self._begin_by, lambda: self._end_by, why_not=why_not
        )
        try:
            squared_norm = self._swap(name, patience)
            check_plausible(math.sqrt(squared_norm), self.report)
            has_mean = True
        except (LostError, UnequalError, ImplausibleError) as caught:
            error, failure = caught.with_traceback(None), getattr(caught, "why", str(caught))
            if isinstance(caught, RefusedError):  # the partner's word says why, and may be on its way
                mesh.wait(lambda: word.outcome is not None or why_not(), mesh.clock() + _WHY_SECONDS)
                failure = why_not() or _GAVE_UP
        is_yes: bool | None = None  # the partner's word, which it says once it has the mean as well
        if not decides:
            self._say(name + "done", has_mean, error)
        if has_mean:
            is_yes, failure = self._hear(word, 0.0 if decides else WORD_SECONDS)
        if decides:
            self._say(name + "verdict", bool(is_yes), error)
        in_doubt = has_mean and is_yes is None and not decides
        mesh.cancel(word)
        mesh.offers.withdraw(name + "b/")
        if in_doubt:
            self._replica.ledger.doubts.append(_Doubt(mesh, self._number, self._partner))
        self._members.end_round(self._number)
        seconds = time.perf_counter() - self.report.started
        waited = min(patience.began, mesh.clock()) - self._waits_since
        wait_seconds = max(0.0, waited) if math.isfinite(waited) else 0.0
        if is_yes:
            return _Outcome(True, wait_seconds=wait_seconds, seconds=seconds)
        self._avoid(error, patience)
        why = f"{':' * (failure == STOPPED)} {failure or 'skipped the round'}"
        return _Outcome(False, why, in_doubt, wait_seconds, seconds)

    def _hear(self, word: Fetch, seconds: float) -> tuple[bool | None, str]:
        """Wait for the partner's word; return whether it is yes, and why not. None: it has not come.

        Args:
            seconds: for which a replica that is to stop waits for it all the same.
        """
        mesh, members = self._mesh, self._members
        until = mesh.clock() + seconds
        patience = Patience(
            mesh,
            self._partner,
            end_by=lambda: self._end_by,
            why_not=lambda: members.why_stopped() if mesh.clock() >= until else "",
        )
        try:
            mesh.result(word, patience)
        except LostError as lost:
            return None, str(lost)
        return not _why_no(word), _why_no(word)

    def _swap(self, name: str, patience: Patience) -> float:
        """Hand out the mean, bucket by bucket; return the squared norm of the own vector.

        Both sides use what comes in one order: phase 0 of bucket t, phase 1 of bucket t - ahead, and so on. What a
        phase needs of the partner was sent `ahead` buckets before, sketches `lead`, so a slow link is full after
        one round trip. Whatever a side waits for comes earlier in this order, so no two sides wait for each
        other. The pieces of a phase are equally long; empty ones are not sent.

        Raises LostError, UnequalError.
        """
        mesh, transfer, buckets = self._mesh, self._transfer, self._transfer.buckets
        ahead = min(
            len(buckets), max(_LEAST_AHEAD, _UNDER_WAY_BYTES // (4 * max(map(len, buckets), default=1)))
        )
        running: dict[int, tuple[Phases, Tensor, ExchangeReport]] = {}
        fetches: dict[tuple[int, int], Fetch] = {}
        large_phase, squared_norm = self._coding.large_phase, 0.0
        lead = ahead * _SKETCHES_AHEAD if large_phase else ahead

        def offer(at: int, phase: int, content: Blob) -> None:
            if not len(content):
                return
            self.report.bytes_sent += len(content)
            mesh.offer(f"{name}b/{at}/{phase}", content, self._partner)
            for expected in range(phase, max(phase, large_phase) + 1):
                if (at, expected) not in fetches:
                    is_large = expected == large_phase and 4 * len(buckets[at]) > BULK_BYTES
                    fetches[at, expected] = mesh.begin(
                        self._partner, f"{name}b/{at}/{expected}", True, is_large
                    )

        def start(at: int) -> None:
            nonlocal squared_norm
            if at < len(buckets):
                own, mean = transfer.content(at), transfer.result(at)
                squared_norm += float(own.dot(own))
                report = ExchangeReport(self.report.group)
                phases = self._coding.exchange(buckets[at], own, mean, report)
                running[at] = phases, mean, report
                offer(at, 0, next(phases))

        try:
            for at in range(lead):
                start(at)
            for at, phase in _order(len(buckets), self._coding.phases, ahead):
                piece: Blob = b""
                if (fetch := fetches.pop((at, phase), None)) is not None:
                    piece = mesh.result(fetch, patience)
                phases, mean, report = running[at]
                try:
                    offer(at, phase + 1, phases.send(piece))
                except StopIteration:
                    del running[at]
                    self.report.add(report)
                    transfer.hand_out(at, mean)
                if phase == 0:
                    start(at + lead)
                if phase == large_phase and fetch is not None:
                    for sent in range(self._coding.phases):  # the partner had it when it sent this piece
                        mesh.offers.release(f"{name}b/{at - 1 - (1 - large_phase + sent) * ahead}/{sent}")
        finally:
            for left in fetches.values():
                mesh.cancel(left)
        return squared_norm

    def _say(self, name: str, is_yes: bool, error: Exception | None) -> None:
        """Offer a word for good, so that a partner in doubt can ask later."""
        words = self._replica.ledger.words[self._partner.slot]
        why = _NOT_ACCEPTED if isinstance(error, ImplausibleError) else _GAVE_UP
        word = _YES if is_yes else getattr(error, "why", why).encode()
        self._mesh.offer(name, word, self._partner)
        words.append(name)
        while len(words) > _REMEMBERED + len(self._replica.movement.intervals):
            self._mesh.offers.withdraw(words.popleft())

    def _is_past(self) -> bool:
        """Return whether the partner will not begin this round any more."""
        signed = self._mesh.statuses.of(self._partner.slot)
        return signed is not None and signed.status.is_without(self._members.slot, self._number)

    def _avoid(self, error: Exception | None, patience: Patience) -> None:
        if isinstance(error, ImplausibleError) and not error.is_ours:
            self._partners.avoid(self._partner.slot, _AVOIDED_ROUNDS, str(error))
        elif patience.began == math.inf and self._mesh.clock() >= self._begin_by:
            self._partners.avoid(self._partner.slot, 1, "missed its last deadline")


def _why_no(word: Fetch) -> str:
    """Return what a partner's word says; "" where it is yes, or has not come."""
    if not isinstance(word.outcome, Blob) or bytes(word.outcome) == _YES:
        return ""
    return outside(bytes(word.outcome[:_MOST_WORD_BYTES]).decode(errors="replace")) or _GAVE_UP


def late_change(replica: Replica, length: int) -> Tensor | None:
    """Return what rounds in doubt have changed that count after all, at the end of a run; None: nothing.

    Waits some seconds for the last words. A collective of the replica.

    Args:
        length: of the vector that is returned: the weights of this rank.
    """
    ledger, fragments, partners = replica.ledger, replica.fragments(), replica.partners

    def settled() -> dict[int, bool]:
        if partners is None or not ledger.doubts:
            return {}
        mesh = partners.members.mesh
        mesh.wait(
            lambda: all(doubt.counts() is not None for doubt in ledger.doubts), mesh.clock() + WORD_SECONDS
        )
        return dict(_verdicts(ledger))

    ledger.settle(computed_by_rank_0(settled), len(fragments))
    if not ledger.late:
        return None
    vector = torch.zeros(length, dtype=torch.float32, device=HOST)
    for number, change in ledger.late.items():
        for ours, place in fragments[number].within(0, fragments[number].length):
            vector[place] += change[ours]
    ledger.late.clear()
    return vector


def _verdicts(ledger: _Ledger) -> Iterator[tuple[int, bool]]:
    """Yield the rounds in doubt that are settled, and whether each counts."""
    finished = [doubt for doubt in ledger.doubts if doubt.number in ledger.changes]  # on all ranks
    for doubt in finished:
        if (counts := doubt.counts()) is not None:
            doubt.end()
            ledger.doubts.remove(doubt)
            yield doubt.number, counts


def _order(buckets: int, phases: int, ahead: int) -> Iterator[tuple[int, int]]:
    for turn in range(buckets + (phases - 1) * ahead):
        for phase in range(phases):
            if 0 <= (bucket := turn - phase * ahead) < buckets:
                yield bucket, phase
