"""An exchange between separate jobs counts for both partners or for neither."""

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from megatron_noloco.federation.commit import CommittedExchange, Guard, Standing
from megatron_noloco.federation.pairing import Others
from megatron_noloco.outer import Channel, CodedExchange, Coding, Exchange, ExchangeReport
from megatron_noloco.outer.messages import CHANNELS, PHASES
from megatron_noloco.plans.topology import Place
from megatron_noloco.transport.chunks import ChunkFlight
from megatron_noloco.transport.loopback import LoopbackTransport, loopback_world
from megatron_noloco.transport.protocol import Message

LENGTH = 5000
SHORT_SECONDS, LONG_SECONDS = 1.0, 20.0
Lost = Callable[[int, int], bool]  # (rank that sends, channel) -> whether its messages get lost
Altered = Callable[[int, Tensor], Tensor]  # (rank that sends, fp32 numbers) -> what it sends


class FaultyTransport:
    """A rank's transport that loses messages, and alters vectors."""

    device_buffers = False

    def __init__(self, inner: LoopbackTransport, lost: Lost, altered: Altered) -> None:
        self._inner, self._lost, self._altered = inner, lost, altered
        self.rank, self.world_size = inner.rank, inner.world_size

    def post(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> ChunkFlight:
        if self._lost(self.rank, tag // PHASES % CHANNELS):
            sends = []
        sends = [
            Message(message.rank, self._altered(self.rank, message.buffer))
            if message.buffer.dtype == torch.float32
            else message
            for message in sends
        ]
        return self._inner.post(sends, receives, tag)


@dataclass
class Votes:
    """Agreement among the ranks of a replica, which are threads."""

    ranks: int
    barrier: threading.Barrier = field(init=False)
    votes: list[Sequence[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.ranks, timeout=LONG_SECONDS)

    def agree(self, votes: Sequence[int]) -> list[int]:
        if self.barrier.wait() == 0:
            self.votes.clear()
        self.barrier.wait()
        self.votes.append(votes)
        self.barrier.wait()
        smallest = [min(place) for place in zip(*self.votes, strict=True)]
        self.barrier.wait()
        return smallest


class Partners:
    """Counterparts that are all free, or away; records what an exchange does with them."""

    def __init__(self, votes: Votes, deadline_seconds: float, refused: str = "") -> None:
        self.agree = votes.agree
        self.deadline_seconds = deadline_seconds
        self.refused = refused
        self.begun: list[int | None] = []
        self.ended: list[int] = []
        self.succeeded = 0
        self.avoided: list[tuple[int, int, str]] = []

    def standing(self, number: int, rank: int) -> tuple[Standing, str]:
        return (Standing.AWAY, self.refused) if self.refused else (Standing.FREE, "")

    def begin(self, number: int, rank: int | None) -> None:
        self.begun.append(rank)

    def end(self, number: int) -> None:
        self.ended.append(number)

    def record(self, seconds: float) -> None:
        self.succeeded += 1

    def avoid(self, rank: int, exchanges: int, why: str) -> None:
        self.avoided.append((rank, exchanges, why))


def late(rank: int) -> tuple[int, int, str]:
    return rank, 1, "missed its last deadline"


def the_other(number: int, others: Others) -> int | None:
    return next(iter(others.free), None)


@dataclass
class Outcome:
    mean: Tensor
    report: ExchangeReport
    partners: Partners


def vector(rank: int) -> Tensor:
    return torch.randn(LENGTH, generator=torch.Generator().manual_seed(rank))


def as_it_is(rank: int, vector: Tensor) -> Tensor:
    return vector


def average(
    lost: Lost,
    ranks: int = 1,
    bits: int | None = None,
    seconds: float = SHORT_SECONDS,
    refused: str = "",
    altered: Altered = as_it_is,
) -> list[Outcome]:
    """Run a round of two replicas; returns outcomes by rank. With `refused`, replica 1 is away for replica 0."""
    votes = [Votes(ranks), Votes(ranks)]
    world = loopback_world(2 * ranks, chunk_bytes=4096)

    def run(rank: int) -> Outcome:
        place = Place(rank // ranks, 2, rank=rank, ranks_per_replica=ranks)
        transport = FaultyTransport(world[rank], lost, altered)
        exchange = (
            Exchange(transport, place, Channel.ROUNDS, seconds, LENGTH)  # type: ignore[arg-type]
            if bits is None
            else CodedExchange(transport, place, Channel.ROUNDS, seconds, Coding(bits, LENGTH))  # type: ignore[arg-type]
        )
        partners = Partners(votes[rank // ranks], seconds, refused if rank == 0 else "")
        committed = CommittedExchange(exchange, partners, the_other, Guard())
        committed.begin(vector(rank), (0, 1), 7, "a test")
        assert list(committed.progress()) == []
        mean = torch.zeros(LENGTH)
        for start, stop, piece in committed.finish():
            mean[start:stop] = piece
        return Outcome(mean, committed.report, partners)

    with ThreadPoolExecutor(2 * ranks) as threads:
        return list(threads.map(run, range(2 * ranks)))


def nothing(rank: int, channel: int) -> bool:
    return False


def assert_skipped(outcome: Outcome, rank: int, missed: str, ranks: int = 1) -> None:
    assert torch.equal(outcome.mean, vector(rank)), rank
    assert outcome.report.group == (rank // ranks,)
    assert outcome.report.missed == f"replica {1 - rank // ranks} {missed}"
    assert outcome.report.compared_elements == 0
    assert outcome.partners.ended == [7]


def test_without_faults_the_mean_is_that_of_the_exchange() -> None:
    for outcome in average(nothing, ranks=2, seconds=LONG_SECONDS):
        assert outcome.report.group == (0, 1)
        assert outcome.partners.succeeded == 1
        assert not outcome.partners.avoided
        assert outcome.partners.ended == [7]
    found = average(nothing, seconds=LONG_SECONDS)
    expected = (vector(0) + vector(1)) * 0.5
    assert torch.equal(found[0].mean, expected)
    assert torch.equal(found[1].mean, expected)


def test_a_coded_mean_is_kept_whole() -> None:
    found = average(nothing, bits=16, seconds=LONG_SECONDS)
    for outcome in found:
        torch.testing.assert_close(outcome.mean, (vector(0) + vector(1)) / 2, atol=1e-2, rtol=0)
    torch.testing.assert_close(found[0].mean + found[1].mean, vector(0) + vector(1))


def test_a_partner_that_is_not_available_costs_nothing() -> None:
    """Rank 0 posts nothing; rank 1, which did, gets no answer."""
    first, second = average(nothing, refused="is behind")
    assert_skipped(first, 0, "is behind")
    assert_skipped(second, 1, "missed the deadline")
    assert (first.partners.begun, first.partners.avoided) == ([None], [])
    assert (second.partners.begun, second.partners.avoided) == ([0], [late(0)])
    assert not first.report.in_doubt


@pytest.mark.parametrize("bits", [None, 8])
def test_both_skip_the_round_when_a_vector_is_lost_one_way(bits: int | None) -> None:
    first, second = average(lambda rank, channel: (rank, channel) == (1, Channel.ROUNDS), bits=bits)
    assert_skipped(first, 0, "missed the deadline")
    assert_skipped(second, 1, "missed the deadline")
    assert not first.report.in_doubt, "it never said that it was prepared"


def test_a_lost_token_leaves_the_rank_that_misses_it_in_doubt() -> None:
    """This cannot be excluded: one uses the mean, the other skips the round; their mean is off by this."""
    first, second = average(lambda rank, channel: (rank, channel) == (1, Channel.COMMITS))
    assert_skipped(first, 0, "missed the deadline")
    assert first.report.in_doubt
    assert not second.report.in_doubt
    assert torch.equal(second.mean, (vector(0) + vector(1)) * 0.5)
    off = (first.mean + second.mean - vector(0) - vector(1)) / 2
    torch.testing.assert_close(off, (vector(0) - vector(1)) / 4)


def test_all_ranks_of_both_replicas_decide_alike() -> None:
    """One of two ranks of replica 1 does not send its vector: no rank uses a mean, though two have theirs."""
    found = average(lambda rank, channel: (rank, channel) == (3, Channel.ROUNDS), ranks=2)
    for rank, outcome in enumerate(found):
        assert torch.equal(outcome.mean, vector(rank)), rank
        assert outcome.report.group == (rank // 2,)
        assert outcome.partners.succeeded == 0
    assert "another rank" in found[0].report.missed
    assert "missed the deadline" in found[1].report.missed
    assert [outcome.partners.avoided for outcome in found] == [[], [late(3)], [], [late(1)]]


@pytest.mark.parametrize(
    ("bits", "factor", "why"),
    [
        (None, math.nan, "numbers that are not finite"),
        (None, 1e6, "absurd numbers"),
        (8, 1e6, "absurd numbers"),
    ],
)
def test_poison_is_refused_on_all_ranks_of_both_replicas(bits: int | None, factor: float, why: str) -> None:
    """Rank 2, of replica 1, sends poison; no rank uses anything of the round."""
    found = average(
        nothing, ranks=2, bits=bits, altered=lambda rank, numbers: numbers * factor if rank == 2 else numbers
    )
    for rank, outcome in enumerate(found):
        assert torch.equal(outcome.mean, vector(rank)), rank
        assert outcome.report.group == (rank // 2,)
    assert not any(outcome.report.in_doubt for outcome in found[:2])
    assert f"replica 1 sent {why}" in found[0].report.missed
    assert "refused by, another rank" in found[1].report.missed
    ((rank, exchanges, _),) = found[0].partners.avoided
    assert (rank, exchanges) == (2, 10)


def test_a_merge_does_not_wait_for_the_partner_to_merge() -> None:
    """With overlap replicas merge at different times; here one after the other, in one thread."""
    both = [
        CommittedExchange(
            Exchange(transport, Place(rank, 2), Channel.ROUNDS, SHORT_SECONDS),
            Partners(Votes(1), SHORT_SECONDS),
            the_other,
            Guard(),
        )
        for rank, transport in enumerate(loopback_world(2, chunk_bytes=4096))
    ]
    for rank, committed in enumerate(both):
        committed.begin(vector(rank), (0, 1), 7, "a test")
    for committed in both * 2:  # the vectors, then the tokens
        assert list(committed.progress()) == []
    for committed in both:
        ((_, _, mean),) = committed.finish()
        assert torch.equal(mean, (vector(0) + vector(1)) * 0.5)
        assert committed.report.group == (0, 1)


def test_a_round_without_a_planned_partner_is_no_miss() -> None:
    (transport,) = loopback_world(1)
    partners = Partners(Votes(1), SHORT_SECONDS)
    committed = CommittedExchange(
        Exchange(transport, Place(0, 1), Channel.ROUNDS, 1.0), partners, the_other, Guard()
    )
    committed.begin(vector(0), (0,), 3, "a test")
    ((start, stop, mean),) = committed.finish()
    assert (start, stop) == (0, LENGTH)
    assert torch.equal(mean, vector(0))
    assert (committed.report.missed, partners.begun, partners.ended) == ("", [None], [3])
