"""A pair that swaps buckets on a stream gets the bits of an exchange inside one job, or an error on both sides."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_noloco.federation.gather import Gather, Leader
from megatron_noloco.federation.movement import Movement, alone
from megatron_noloco.federation.streams import Serve, Stream
from megatron_noloco.federation.swap import Swap
from megatron_noloco.outer import Exchange, ExchangeReport
from megatron_noloco.outer.finite_mean import MEASURED
from megatron_noloco.outer.payload import BLOCK, UnequalError
from megatron_noloco.plans.topology import Place
from tests.loopback import loopback_world
from tests.unit.fleet import noise
from tests.unit.memory_streams import Faults, MemoryCarrier
from tests.unit.test_layouts import Layout, two_layouts
from tests.unit.test_movement import MOST_RANKS, holdings_of, movements, part_of

SECONDS = 60.0
payloads = st.sampled_from((None, 8, 4))


class Found(NamedTuple):
    """Of one replica."""

    means: list[Tensor]  # by rank
    report: ExchangeReport
    squared_norm: float
    error: BaseException | None


def swapped(
    replicas: Sequence[Sequence[Movement]],
    vectors: Sequence[Tensor],
    number: int,
    bits: int | None,
    faults: Faults = lambda number: (None, None),
) -> list[Found]:
    """Exchange one interval of two vectors on a stream that may be cut."""
    worker, found = ThreadPoolExecutor(1), dict[int, Found]()

    async def one(replica: int, stream: Stream) -> None:
        report, squared_norm, error = ExchangeReport((0, 1)), 0.0, None
        transfers, results = list[Any](), list[Tensor]()
        for movement in replicas[replica]:
            fragment = number % len(movement.intervals)
            part = part_of(vectors[replica], movement.own, movement.intervals[fragment])
            results.append(torch.zeros_like(part))
            transfers.append(Gather(movement).fragment(fragment, part, results[-1]))
        leader: Leader = transfers[0]
        try:
            async with stream, asyncio.timeout(SECONDS):
                squared_norm = await Swap(stream, leader, worker, bits, number).run(report)
        except BaseException as failure:
            error = failure
        await asyncio.to_thread(leader.wait)
        for follower in transfers[1:]:
            await asyncio.to_thread(follower.wait)
        found[replica] = Found(results, report, squared_norm, error)

    async def both() -> None:
        places: dict[str, Serve] = {}
        carriers = [MemoryCarrier(places, "0", faults), MemoryCarrier(places, "1")]
        await carriers[1].listen(lambda stream: one(1, stream))
        await one(0, await carriers[0].dial("1"))
        async with asyncio.timeout(SECONDS):
            while len(found) < 2:
                await asyncio.sleep(0.001)
        for carrier in carriers:
            await carrier.close()

    asyncio.run(both())
    worker.shutdown()
    return [found[replica] for replica in range(2)]


def single(length: int, bucket: int, exact: Sequence[tuple[int, int]] = ()) -> list[Movement]:
    return [Movement(alone(length).holdings, [range(length)], exact=exact, bucket=bucket)]


def inside_one_job(
    vectors: Sequence[Tensor], number: int, bits: int | None, bucket: int, exact: Sequence[tuple[int, int]]
) -> list[tuple[Tensor, ExchangeReport]]:
    """Exchange the buckets of two vectors, one after the other, as the replicas of one job do."""
    length, transports = len(vectors[0]), loopback_world(2)

    def one(replica: int) -> tuple[Tensor, ExchangeReport]:
        exchange = Exchange(transports[replica], Place(replica, 2), 0, SECONDS, bits)
        mean, report = torch.zeros(length), ExchangeReport((0, 1))
        for start in range(0, length, bucket):
            here = [(first - start, last - start) for first, last in exact]
            inside = [(max(first, 0), last) for first, last in here if last > 0]
            exchange.begin(vectors[replica][start : start + bucket].clone(), (0, 1), number, "a test", inside)
            for piece in exchange.finish():
                mean[start + piece.start : start + piece.stop] = piece.mean
            report.add(exchange.report)
        return mean, report

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(one, range(2)))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[list[Tensor], list[tuple[int, int]]]:
    """Two vectors that are near each other but for some elements, and ranges that are to be exact."""
    length, seed = draw(st.integers(1, 12_000)), draw(st.integers(0, 99))
    base = noise(length, seed=seed)
    vectors = [base + 0.01 * noise(length, seed=seed + 1 + replica) for replica in range(2)]
    elements = st.integers(0, length - 1)
    for value in draw(st.lists(st.sampled_from((50.0, 1e30, float("inf"), float("nan"))), max_size=3)):
        vectors[draw(st.integers(0, 1))][draw(elements)] = value
    edges = sorted(draw(st.sets(elements, max_size=6)))
    return vectors, list(zip(edges[::2], edges[1::2], strict=False))


@settings(max_examples=40)
@given(pairs(), payloads, st.integers(1, 12), st.integers(0, 99))
def test_a_swap_has_the_bits_of_an_exchange_inside_a_job(
    drawn: tuple[list[Tensor], list[tuple[int, int]]], bits: int | None, blocks: int, number: int
) -> None:
    vectors, exact = drawn
    length, bucket = len(vectors[0]), blocks * BLOCK
    before = [vector.clone() for vector in vectors]
    found = swapped([single(length, bucket, exact)] * 2, vectors, number, bits)
    expected = inside_one_job(vectors, number, bits, bucket, exact)
    for one, (mean, report), own in zip(found, expected, before, strict=True):
        assert one.error is None
        assert torch.equal(one.means[0].view(torch.int32), mean.view(torch.int32))
        for name in MEASURED:
            assert repr(getattr(one.report, name)) == repr(getattr(report, name)), name
        parts = own.split(bucket)
        assert repr(one.squared_norm) == repr(sum(float(torch.dot(part, part)) for part in parts))
    assert all(
        torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(vectors, before, strict=True)
    )


@settings(max_examples=15)
@given(two_layouts(), st.integers(1, 3), st.sampled_from((4, 10**4)), payloads)
def test_any_layout_gets_parts_of_the_single_rank_mean(
    layouts: tuple[Layout, Layout], fragments: int, blocks: int, bits: int | None
) -> None:
    assume(all(layout.topology.replica_size <= MOST_RANKS for layout in layouts))
    held, bucket = [holdings_of(layout) for layout in layouts], blocks * BLOCK
    length = max(holding.stop for holding in held[0])
    single = alone(length, fragments, bucket)
    vectors = [noise(length, seed=replica) for replica in range(2)]
    for number, interval in enumerate(single.intervals):
        expected = swapped([[single]] * 2, vectors, number, bits)
        found = swapped([movements(one, [*single.intervals], bucket) for one in held], vectors, number, bits)
        for replica in range(2):
            assert found[replica].error is None
            whole = torch.zeros(length)
            whole[interval.start : interval.stop] = expected[replica].means[0]
            for holding, part in zip(held[replica], found[replica].means, strict=True):
                assert torch.equal(part, part_of(whole, holding, interval))


@settings(max_examples=60)
@given(st.data(), payloads, st.booleans())
def test_a_cut_at_any_byte_ends_both_sides(data: st.DataObject, bits: int | None, divided: bool) -> None:
    """The last bytes may be lost after one side has all, which is for the commit to find out."""
    length, bucket = 9000, 2 * BLOCK
    vectors = [noise(length, seed=0) + 0.01 * noise(length, seed=1 + replica) for replica in range(2)]
    vectors[0][5000] = 50.0
    replicas = [[Movement(alone(length).holdings, [range(length)], bucket=bucket)]] * 2
    total = swapped(replicas, vectors, 1, bits)[0].report.bytes_sent + 8
    limit = data.draw(st.integers(0, total - 1))
    cut = (limit, None) if divided else (None, limit)
    found = swapped(replicas, vectors, 1, bits, lambda number: cut)
    assert any(isinstance(one.error, ConnectionError) for one in found)
    assert all(one.error is None or isinstance(one.error, ConnectionError) for one in found)


@pytest.mark.parametrize("bits", [None, 8])
def test_vectors_of_unequal_lengths_are_refused(bits: int | None) -> None:
    vectors = [torch.ones(5000), torch.ones(5001)]
    found = swapped([single(len(one), BLOCK) for one in vectors], vectors, 0, bits)
    assert any(isinstance(one.error, UnequalError) for one in found)
    assert all("differ in length" in str(one.error) for one in found)
