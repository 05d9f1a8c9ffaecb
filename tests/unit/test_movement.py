"""Replicas of different layouts exchange vectors: each rank gets its part of the same mean."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from megatron_noloco.federation.moved_exchange import MovedExchange
from megatron_noloco.federation.passes import DEPTH, Dealing, Moving, Work, whole
from megatron_noloco.federation.speakers import Receives, Sends
from torch import Tensor

from megatron_noloco.engine.layout import held_of
from megatron_noloco.federation.movement import Movement, alone
from megatron_noloco.outer import Channel, CodedExchange, Coding, Exchange
from megatron_noloco.plans.canonical import Block, Holding, Matrix
from megatron_noloco.plans.topology import Place
from tests.unit.fleet import noise
from tests.unit.test_layouts import VOCABULARY, Layout, two_layouts
from tools.loopback import loopback_world

SECONDS = 20.0
MOST_RANKS = 12  # of a replica


def holdings_of(layout: Layout) -> list[Holding]:
    architecture, topology = replace(layout.architecture, vocab_size=VOCABULARY), layout.topology
    return [
        Holding(*held_of(layout.parts(at), architecture, topology, at))
        for at in map(topology.position, range(topology.replica_size))
    ]


def movements(holdings: Sequence[Holding], intervals: list[range], slab: int) -> list[Movement]:
    """Return those of the ranks of a replica."""
    if len(holdings) == 1:
        return [Movement(holdings, intervals, slab=slab)]
    world = loopback_world(len(holdings))
    return [Movement(holdings, intervals, transport, slab=slab) for transport in world]


def part_of(canonical: Tensor, holding: Holding, interval: range) -> Tensor:
    """What a rank has of an interval of a vector, in ascending order."""
    parts = [
        canonical[block.first :].as_strided((block.rows, block.width), (block.matrix.columns, 1))
        for block in holding.between(interval.start, interval.stop)
    ]
    return torch.cat([part.reshape(-1) for part in parts]) if parts else torch.empty(0)


def means(
    replicas: list[list[Movement]], vectors: list[Tensor], number: int, bits: int | None
) -> list[list[Tensor]]:
    """Exchange one interval of two vectors; returns the mean of each rank."""
    between, slab = loopback_world(2, chunk_bytes=256), replicas[0][0].slab
    moved: list[list[MovedExchange]] = [[], []]
    for replica, ranks in enumerate(replicas):

        def make(replica: int = replica) -> list[Exchange]:
            place, transport = Place(replica, 2), between[replica]
            channels = [Channel.SLABS + index for index in range(DEPTH)]
            if bits is None:
                return [Exchange(transport, place, channel, SECONDS, slab) for channel in channels]
            return [
                CodedExchange(transport, place, channel, SECONDS, Coding(bits, slab)) for channel in channels
            ]

        for movement in ranks:
            moved[replica].append(MovedExchange(movement, make, tag=3, background=False))
            interval = movement.intervals[number]
            vector = part_of(vectors[replica], movement.own, interval)
            moved[replica][-1].begin(vector, (0, 1), number, "a test")
    everyone = [one for ranks in moved for one in ranks]
    while not all(one.done for one in everyone):
        for one in everyone:
            one.poll()
    assert not any(one.wait(SECONDS) for one in everyone)
    return [[one.mean for one in ranks] for ranks in moved]


@settings(max_examples=20)
@given(two_layouts(), st.integers(1, 3), st.sampled_from((700, 2048, 10**6)), st.sampled_from((None, 8)))
def test_each_rank_of_any_layout_gets_its_part_of_one_mean(
    layouts: tuple[Layout, Layout], fragments: int, slab: int, bits: int | None
) -> None:
    assume(all(layout.topology.replica_size <= MOST_RANKS for layout in layouts))
    held = [holdings_of(layout) for layout in layouts]
    length = max(holding.stop for holding in held[0])
    edges = [length * part // fragments for part in range(fragments + 1)]
    intervals = [range(*ends) for ends in pairwise(edges)]
    vectors = [noise(length, seed=replica) for replica in range(2)]
    replicas = [movements(holdings, intervals, slab) for holdings in held]
    expected = torch.empty(length)
    single = [[one] for one in (Movement(alone(length).holdings, intervals, slab=slab),) * 2]
    for number, interval in enumerate(intervals):
        (mean,), (other,) = means(single, vectors, number, bits)
        assert torch.equal(mean, other) or bits
        expected[interval.start : interval.stop] = mean
        for replica, found in enumerate(means(replicas, vectors, number, bits)):
            whole = (mean, other)[replica]
            expected[interval.start : interval.stop] = whole
            for holding, part in zip(held[replica], found, strict=True):
                assert torch.equal(part, part_of(expected, holding, interval))


@settings(max_examples=20)
@given(two_layouts(), st.sampled_from((700, 10**6)))
def test_a_replica_of_any_layout_gets_the_vector_of_another(
    layouts: tuple[Layout, Layout], slab: int
) -> None:
    assume(all(layout.topology.replica_size <= MOST_RANKS for layout in layouts))
    giver, taker = (holdings_of(layout) for layout in layouts)
    length = max(holding.stop for holding in giver)
    vector, between = noise(length, seed=1), loopback_world(2, chunk_bytes=256)
    work: list[Work] = [Sends(between[0], {1: 5}), Receives(between[1], 0, 5, SECONDS)]
    passes, found = list[Moving](), list[Tensor]()
    for movement in movements(giver, [range(length)], slab):
        gives = scattered(vector, movement.own, range(length))
        passes.append(whole(movement, 3, gives, None, None if movement.rank else work[0]))
    for movement in movements(taker, [range(length)], slab):
        found.append(torch.zeros(size_of(movement.own)))
        passes.append(whole(movement, 3, None, found[-1], None if movement.rank else work[1]))
    while not all(moving.done for moving in passes):
        for moving in passes:
            moving.poll()
    assert not any(moving.failure for moving in passes)
    for holding, part in zip(taker, found, strict=True):
        assert torch.equal(part, scattered(vector, holding, range(length)))


def size_of(holding: Holding) -> int:
    """Elements of a vector with the places of a rank, up to the last one."""
    return max((block.own + block.size for block in holding.between(0, holding.stop)), default=0)


def scattered(canonical: Tensor, holding: Holding, interval: range) -> Tensor:
    """What a rank has of a vector, at its places; zeros elsewhere."""
    found, parts = torch.zeros(size_of(holding)), part_of(canonical, holding, interval)
    blocks = holding.between(interval.start, interval.stop)
    for block, part in zip(blocks, parts.split([block.size for block in blocks]), strict=True):
        found[block.own : block.own + block.size] = part
    return found


def test_after_a_failure_all_ranks_come_to_the_end_of_a_pass() -> None:
    layout = [Matrix(0, 1, 10)]
    holdings = [Holding([Block(0, layout[0], 0, 5 * rank, 1, 5)]) for rank in range(2)]

    def lost(place: range, content: Tensor, result: Tensor) -> Dealing:
        raise ConnectionError("gone")

    found = [torch.ones(5), torch.ones(5)]
    passes = [
        whole(movement, 0, None, found[movement.rank], None if movement.rank else lost)
        for movement in movements(holdings, [range(10)], slab=4)
    ]
    while not all(moving.done for moving in passes):
        for moving in passes:
            moving.poll()
    assert isinstance(passes[0].failure, ConnectionError)
    assert not any(part.any() for part in found)


def test_a_model_has_at_least_a_weight_for_each_fragment() -> None:
    with pytest.raises(ValueError, match="fragments 11 are more than the 10 weights"):
        alone(10, 11)
