"""An exchange between separate jobs counts for both partners or for neither; the guard refuses absurd vectors.

A rank has a short deadline only where what it waits for never comes, so a busy machine changes no outcome.
"""

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import pytest
import torch
from megatron_noloco.federation.commit import CommittedExchange, Guard, PoisonedError, Replica
from megatron_noloco.federation.moved_exchange import MovedExchange
from megatron_noloco.federation.passes import DEPTH
from torch import Tensor

from megatron_noloco.federation.movement import Movement, alone
from megatron_noloco.federation.pairing import Others
from megatron_noloco.outer import Channel, CodedExchange, Coding, Exchange, ExchangeReport
from megatron_noloco.outer.finite_mean import finite_mean
from megatron_noloco.outer.messages import CHANNELS, PHASES
from megatron_noloco.plans.canonical import Block, Holding, Matrix
from megatron_noloco.plans.topology import Place
from megatron_noloco.transport.interface import Flight, Message
from tests.unit.fleet import SECONDS, noise
from tools.loopback import LoopbackTransport, loopback_world

LENGTH = 5000
SHORT_SECONDS = 0.1
Fault = Callable[[int, int, Tensor], Tensor | None]
"""fault(rank that sends, channel, what it sends): what arrives; None: nothing."""


class FaultyTransport:
    """A rank's transport that loses messages, and alters vectors."""

    def __init__(self, inner: LoopbackTransport, fault: Fault) -> None:
        self._inner, self._fault = inner, fault
        self.rank, self.world_size = inner.rank, inner.world_size

    def post(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Flight:
        channel = tag // PHASES % CHANNELS
        arriving = [(one.rank, self._fault(self.rank, channel, one.buffer)) for one in sends]
        sent = [Message(rank, buffer) for rank, buffer in arriving if buffer is not None]
        return self._inner.post(sent, receives, tag)


def no_fault(rank: int, channel: int, sent: Tensor) -> Tensor:
    return sent


def losing(sender: int, lost: Channel) -> Fault:
    """Lose what one rank sends on a channel."""
    return lambda rank, channel, sent: None if (rank, channel) == (sender, lost) else sent


class Voice:
    """What the speaker tells the other ranks of its replica, which are threads."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks, timeout=SECONDS)
        self._told: Any = None

    def tell(self, rank: int, find: Callable[[], Any]) -> Any:
        if rank == 0:
            self._told = find()
        self._barrier.wait()
        told = self._told
        self._barrier.wait()
        return told


class Partners:
    """Counterparts that are all free, or away; records what an exchange does with them."""

    def __init__(self, deadline_seconds: float, refused: str = "") -> None:
        self.deadline_seconds = deadline_seconds
        self.refused = refused
        self.begun: list[int | None] = []
        self.ended: list[int] = []
        self.succeeded = 0
        self.avoided: list[tuple[int, int, str]] = []
        self.late: list[int] = []

    def others(self, number: int) -> tuple[Others, dict[int, str]]:
        there = set() if self.refused else {0, 1}
        return Others(there, there, set()), dict.fromkeys((0, 1), self.refused)

    def begin(self, number: int, rank: int | None) -> None:
        self.begun.append(rank)

    def end(self, number: int, counts: bool = False) -> None:
        self.ended.append(number)

    def record(self, seconds: float, rank: int) -> None:
        self.succeeded += 1

    def missed(self, rank: int) -> None:
        self.late.append(rank)

    def avoid(self, rank: int, exchanges: int, why: str) -> None:
        self.avoided.append((rank, exchanges, why))


def the_other(rank: int, others: Others) -> int | None:
    return next(iter(others.free - {rank}), None)


@dataclass
class Outcome:
    mean: Tensor
    report: ExchangeReport
    partners: Partners


def vector(replica: int) -> Tensor:
    return noise(LENGTH, seed=replica)


def mean_of(*replicas: int) -> Tensor:
    return torch.stack([vector(replica) for replica in replicas]).mean(0)


def committed_of(
    transport: Any, partners: Any, bits: int | None = None, more: Mapping[str, Any] = MappingProxyType({})
) -> CommittedExchange:
    """Return the exchange of a replica, which nothing moves but its `progress` and `finish`.

    Args:
        more: `movement` of a rank, `tell`, `guards`; by default the replica has one rank.
    """
    movement = more.get("movement", alone(LENGTH))
    place = Place(0 if transport is None else transport.rank, 2)
    replica = Replica(
        movement,
        place,
        partners,
        lambda _, others: the_other(place.replica, others),
        more.get("guards") or [Guard()],
        more.get("tell", lambda find: find()),
    )

    def make() -> list[Exchange]:
        channels = [Channel.SLABS + index for index in range(DEPTH)]
        if bits is None:
            return [Exchange(transport, place, channel, SECONDS, movement.slab) for channel in channels]
        coding = Coding(bits, movement.slab)
        return [CodedExchange(transport, place, channel, SECONDS, coding) for channel in channels]

    return CommittedExchange(MovedExchange(movement, make, 0, background=False), replica)


def average(
    fault: Fault = no_fault,
    bits: int | None = None,
    in_vain: Mapping[int, Literal["vector", "token"]] | None = None,
    refused: str = "",
    guards: Sequence[Guard] | None = None,
) -> list[Outcome]:
    """Run a round of two replicas; returns outcomes by replica.

    Args:
        in_vain: what some replicas wait for that never comes; their deadline is short.
        refused: why replica 1 is away for replica 0, if it is.
        guards: of both; the round is number 7.
    """
    world = loopback_world(2, chunk_bytes=4096)

    def run(rank: int) -> Outcome:
        waits_for = (in_vain or {}).get(rank)
        seconds = SHORT_SECONDS if waits_for == "vector" else SECONDS
        partners = Partners(seconds, refused if rank == 0 else "")
        committed = committed_of(FaultyTransport(world[rank], fault), partners, bits, {"guards": guards})
        committed.begin(vector(rank), (0, 1), 7, "a test")
        assert list(committed.progress()) == []
        if waits_for == "token":
            while not committed._exchange.done:
                time.sleep(0.001)
                assert list(committed.progress()) == []
            committed._deadline_seconds = SHORT_SECONDS
        mean = torch.zeros(LENGTH)
        for start, stop, piece in committed.finish():
            mean[start:stop] = piece
        return Outcome(mean, committed.report, partners)

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(run, range(2)))


def of_two_ranks(fault: Fault = no_fault, second_waits: float = SECONDS) -> list[list[Outcome]]:
    """Run a round of two replicas of two ranks, each of which has one half of the vector; returns outcomes.

    Args:
        second_waits: seconds that replica 1 waits for the other.
    """
    speakers = loopback_world(2, chunk_bytes=4096)
    half = LENGTH // 2
    halves = [Matrix(start, 1, half) for start in (0, half)]
    holdings = [Holding([Block(0, one, 0, 0, 1, half)]) for one in halves]
    inside, voices = [loopback_world(2) for _ in range(2)], [Voice(2) for _ in range(2)]

    def run(replica: int, rank: int) -> Outcome:
        movement = Movement(holdings, [range(LENGTH)], inside[replica][rank], slab=1000)
        partners = Partners(second_waits if replica else SECONDS)
        more = {"movement": movement, "tell": partial(voices[replica].tell, movement.rank)}
        speaks = partners if rank == 0 else None
        committed = committed_of(FaultyTransport(speakers[replica], fault), speaks, None, more)
        committed.begin(vector(replica)[rank * half : (rank + 1) * half], (0, 1), 7, "a test")
        ((_, _, mean),) = committed.finish()
        return Outcome(mean, committed.report, partners)

    with ThreadPoolExecutor(4) as threads:
        found = [[threads.submit(run, replica, rank) for rank in range(2)] for replica in range(2)]
        return [[one.result() for one in ranks] for ranks in found]


def assert_skipped(outcome: Outcome, rank: int, missed: str) -> None:
    assert torch.equal(outcome.mean, vector(rank))
    assert outcome.report.group == (rank,)
    assert outcome.report.missed == f"replica {1 - rank} {missed}"
    assert outcome.report.compared_elements == 0
    assert outcome.partners.ended == [7]


def test_without_faults_the_mean_is_that_of_the_exchange() -> None:
    for outcome in average():
        assert torch.equal(outcome.mean, mean_of(0, 1))
        assert outcome.report.group == (0, 1)
        assert outcome.partners.succeeded == 1
        assert not outcome.partners.avoided
        assert outcome.partners.ended == [7]


def test_a_coded_mean_is_kept_whole() -> None:
    first, second = average(bits=8)
    for outcome in (first, second):
        torch.testing.assert_close(outcome.mean, mean_of(0, 1), atol=0.1, rtol=0)
    torch.testing.assert_close(first.mean + second.mean, vector(0) + vector(1))


def test_a_partner_that_is_not_available_costs_nothing() -> None:
    """Rank 0 posts nothing; rank 1, which did, gets no answer."""
    first, second = average(refused="is behind", in_vain={1: "vector"})
    assert_skipped(first, 0, "is behind")
    assert_skipped(second, 1, "missed the deadline")
    assert (first.partners.begun, first.partners.late) == ([None], [])
    assert (second.partners.begun, second.partners.late) == ([0], [0])
    assert not first.report.in_doubt


@pytest.mark.parametrize("bits", [None, 8])
def test_both_skip_the_round_when_a_vector_is_lost_one_way(bits: int | None) -> None:
    first, second = average(losing(1, Channel.SLABS), bits=bits, in_vain={0: "vector", 1: "vector"})
    assert_skipped(first, 0, "missed the deadline")
    assert_skipped(second, 1, "missed the deadline")
    assert not first.report.in_doubt, "it never said that it was prepared"


def test_a_lost_token_leaves_the_rank_that_misses_it_in_doubt() -> None:
    """This cannot be excluded: one uses the mean, the other skips the round; their mean is off by this."""
    first, second = average(losing(1, Channel.COMMITS), in_vain={0: "token"})
    assert_skipped(first, 0, "missed the deadline")
    assert first.report.in_doubt
    assert not second.report.in_doubt
    assert torch.equal(second.mean, mean_of(0, 1))
    off = (first.mean + second.mean - vector(0) - vector(1)) / 2
    torch.testing.assert_close(off, (vector(0) - vector(1)) / 4)


def test_all_ranks_of_both_replicas_use_the_mean() -> None:
    for ranks in of_two_ranks():
        assert torch.equal(torch.cat([outcome.mean for outcome in ranks]), mean_of(0, 1))
        assert all(outcome.report.group == (0, 1) for outcome in ranks)
        assert [outcome.partners.succeeded for outcome in ranks] == [1, 0], "the speaker's"
        assert [outcome.partners.ended for outcome in ranks] == [[7], []]


def poisoned_by(replica: int, factor: float) -> Fault:
    return lambda rank, _, sent: sent * factor if rank == replica and sent.dtype == torch.float32 else sent


def test_no_rank_of_either_replica_uses_a_mean_that_one_refuses() -> None:
    for replica, ranks in enumerate(of_two_ranks(poisoned_by(1, 1e6), second_waits=1.0)):
        assert torch.equal(torch.cat([outcome.mean for outcome in ranks]), vector(replica))
        assert all(outcome.report.group == (replica,) for outcome in ranks)
        assert len({outcome.report.missed for outcome in ranks}) == 1


@pytest.mark.parametrize(
    ("bits", "factor", "why"),
    [
        (None, math.nan, "numbers that are not finite"),
        (None, 1e6, "absurd numbers"),
        (8, 1e6, "absurd numbers"),
    ],
)
def test_poison_is_refused_by_both_replicas(bits: int | None, factor: float, why: str) -> None:
    first, second = average(poisoned_by(1, factor), bits=bits, in_vain={1: "token"})
    assert torch.equal(first.mean, vector(0))
    assert torch.equal(second.mean, vector(1))
    assert not first.report.in_doubt
    assert f"replica 1 sent {why}" in first.report.missed
    ((rank, exchanges, _),) = first.partners.avoided
    assert (rank, exchanges) == (1, 10)


def test_a_partner_with_another_number_of_weights_is_named() -> None:
    world = loopback_world(2)

    def run(rank: int) -> str:
        more = {"movement": alone(300 - rank)}
        committed = committed_of(world[rank], Partners(SECONDS), 8, more)
        committed.begin(vector(rank)[: 300 - rank], (0, 1), 7, "a test")
        list(committed.finish())
        return committed.report.missed

    with ThreadPoolExecutor(2) as threads:
        for rank, missed in enumerate(threads.map(run, range(2))):
            assert missed == f"replica {1 - rank} has a vector of another length"


def test_a_merge_does_not_wait_for_the_partner_to_merge() -> None:
    """With overlap replicas merge at different times; here one after the other, in one thread."""
    both = [committed_of(transport, Partners(SECONDS)) for transport in loopback_world(2, chunk_bytes=4096)]
    for rank, committed in enumerate(both):
        committed.begin(vector(rank), (0, 1), 7, "a test")
    for committed in both * 3:  # the vectors, then the tokens
        assert list(committed.progress()) == []
    for committed in both:
        ((_, _, mean),) = committed.finish()
        assert torch.equal(mean, mean_of(0, 1))
        assert committed.report.group == (0, 1)


def test_a_round_without_a_planned_partner_misses_no_partner() -> None:
    partners = Partners(SECONDS, "is not there")
    committed = committed_of(loopback_world(2)[0], partners)
    committed.begin(vector(0), (0,), 3, "a test")
    ((start, stop, mean),) = committed.finish()
    assert (start, stop) == (0, LENGTH)
    assert torch.equal(mean, vector(0))
    assert (committed.report.missed, partners.begun, partners.ended) == ("", [None], [3])


# The guard


def check(guard: Guard, mine: Tensor, theirs: Tensor) -> float:
    report = ExchangeReport((0, 1))
    finite_mean([mine, theirs], torch.empty(LENGTH), report)
    return guard.check(float(mine.norm()), report)


def seasoned(ratio: float) -> Guard:
    """Return a guard that has accepted ten vectors at this distance."""
    guard = Guard()
    for number in range(10):
        guard.accept(check(guard, vector(0), vector(0) + ratio * vector(number + 1)))
    return guard


def with_one(number: float) -> Tensor:
    return vector(0).index_fill(0, torch.tensor([7]), number)


def test_the_ratio_is_that_of_distance_and_norm() -> None:
    expected = float((vector(1) - vector(2)).norm() / vector(1).norm())
    assert check(Guard(), vector(1), vector(2)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("theirs", "why"),
    [
        (1e6 * vector(0), "absurd numbers, 1e\\+06 times this replica's norm"),
        (2.5 * vector(0), "absurd"),
        (-1.0 * vector(0), "absurd"),
        (vector(9), "absurd"),
        (1e30 * vector(0), "not finite"),
        (with_one(math.nan), "not finite"),
        (with_one(math.inf), "not finite"),
    ],
)
def test_the_guard_refuses_poison(theirs: Tensor, why: str) -> None:
    with pytest.raises(PoisonedError, match=why) as caught:
        check(seasoned(0.01), vector(0), theirs)
    assert caught.value.by_partner


def test_a_replica_that_was_away_is_accepted() -> None:
    """Its distance is fifty times that of other partners."""
    assert check(seasoned(0.01), vector(0), vector(0) + 0.5 * vector(9)) == pytest.approx(0.5, rel=0.1)


def test_the_first_exchange_may_be_of_weights_that_have_moved_far() -> None:
    assert check(Guard(), 0.2 * vector(1), vector(2)) < 10
    with pytest.raises(PoisonedError, match="absurd"):
        check(Guard(), 0.05 * vector(1), vector(2))


def test_the_limit_follows_partners_that_come_apart() -> None:
    guard = Guard()
    for number in range(100):
        guard.accept(check(guard, vector(0), vector(0) + 0.001 * 1.1**number * vector(number + 1)))
    with pytest.raises(PoisonedError):
        check(guard, vector(0), 1e6 * vector(0))


@pytest.mark.parametrize(("fragments", "fragment_of_7"), [(2, 1), (3, 1), (4, 3)])
def test_each_fragment_has_a_guard(fragments: int, fragment_of_7: int) -> None:
    """Fragments differ in size, and so in the distances that are usual for them."""
    guards = [seasoned(0.01) for _ in range(fragments)]
    assert "absurd" in average(guards=guards)[0].report.missed
    guards[fragment_of_7] = Guard()
    for rank, outcome in enumerate(average(guards=guards)):
        assert torch.equal(outcome.mean, mean_of(0, 1)), rank


def test_own_numbers_that_are_not_finite_do_not_blame_the_partner() -> None:
    with pytest.raises(PoisonedError, match="was sent numbers that are not finite") as caught:
        check(Guard(), with_one(math.nan), vector(0))
    assert not caught.value.by_partner


def test_zeros_are_compared_with_nothing() -> None:
    assert check(Guard(), torch.zeros(LENGTH), torch.zeros(LENGTH)) == 0
    assert check(Guard(), torch.zeros(LENGTH), vector(0)) == 0
