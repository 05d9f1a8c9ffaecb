"""A pair that exchanges buckets gets the bits of an exchange inside one job, in any layout."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_noloco.federation.gather import Gather, Leader
from megatron_noloco.federation.mesh import Patience
from megatron_noloco.federation.movement import Movement, alone
from megatron_noloco.federation.rounds import _Round
from megatron_noloco.outer import Exchange, ExchangeReport
from megatron_noloco.outer.finite_mean import MEASURED
from megatron_noloco.outer.payload import BLOCK
from megatron_noloco.plans.topology import Place
from tests.kit.fleet import noise
from tests.kit.layouts import MOST_RANKS, Layout, holdings_of, movements, part_of, two_layouts
from tests.kit.loopback import loopback_world
from tests.kit.memory_mesh import World
from tests.kit.worlds import members_of, replica_of, run_all

SECONDS = 60.0
PAYLOADS = {None: "fp32", 8: "int8", 4: "int4", 3: "int3"}
payloads = st.sampled_from((None, 8, 4, 3))


class Found(NamedTuple):
    """Of one replica."""

    means: list[Tensor]  # by rank
    report: ExchangeReport
    squared_norm: float


def swapped(
    replicas: Sequence[Sequence[Movement]], vectors: Sequence[Tensor], number: int, bits: int | None
) -> list[Found]:
    """Exchange one interval of two vectors."""
    world = World()
    members = [members_of(world, slot) for slot in range(2)]

    def one(slot: int) -> Found:
        transfers, results = list[Any](), list[Tensor]()
        for movement in replicas[slot]:
            fragment = number % len(movement.intervals)
            part = part_of(vectors[slot], movement.own, movement.intervals[fragment])
            results.append(torch.zeros_like(part))
            transfers.append(Gather(movement).fragment(fragment, part, results[-1]))
        leader: Leader = transfers[0]
        report = ExchangeReport((0, 1))
        replica = replica_of(members[slot], replicas[slot][0], PAYLOADS[bits])
        assert replica.partners is not None
        swap = _Round(replica, replica.partners, 1 - slot, number, leader, report)
        mesh = members[slot].mesh
        squared_norm = swap._swap("r/", Patience(mesh, swap._partner))
        for transfer in transfers:
            transfer.wait()
        return Found(results, report, squared_norm)

    return run_all(world, [(members[slot], lambda slot=slot: one(slot)) for slot in range(2)])  # type: ignore[misc]


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
            whole = torch.zeros(length)
            whole[interval.start : interval.stop] = expected[replica].means[0]
            for holding, part in zip(held[replica], found[replica].means, strict=True):
                assert torch.equal(part, part_of(whole, holding, interval))
