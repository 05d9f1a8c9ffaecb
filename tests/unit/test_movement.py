"""Replicas of different layouts exchange vectors: each rank gets its part of the same mean."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_noloco.engine.layout import held_of
from megatron_noloco.federation.movement import DEPTH, MovedExchange, Movement, alone
from megatron_noloco.outer import Channel, CodedExchange, Coding, Exchange
from megatron_noloco.plans.canonical import Holding
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
            list(one.progress())
    return [[next(one.finish()).mean for one in ranks] for ranks in moved]


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


def test_ranges_of_fragments_divide_the_weights_of_a_rank() -> None:
    holding = alone(10).holdings[0]
    assert holding.ranges(0, 10) == [(0, 10)]
    assert holding.ranges(3, 7) == [(3, 7)]
    with pytest.raises(ValueError, match="fragments 11 are more than the 10 weights"):
        alone(10, 11)
