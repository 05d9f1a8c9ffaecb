"""Replicas of different layouts have the same vectors: each rank gives and gets its part."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_noloco.engine.layout import held_of
from megatron_noloco.federation.gather import Gather
from megatron_noloco.federation.movement import Movement, alone
from megatron_noloco.plans.canonical import Holding
from tests.kit.layouts import VOCABULARY, Layout, two_layouts
from tests.loopback import loopback_world
from tests.unit.fleet import noise

MOST_RANKS = 12  # of a replica


def holdings_of(layout: Layout) -> list[Holding]:
    architecture, topology = replace(layout.architecture, vocab_size=VOCABULARY), layout.topology
    return [
        Holding(*held_of(layout.parts(at), architecture, topology, at))
        for at in map(topology.position, range(topology.replica_size))
    ]


def movements(holdings: Sequence[Holding], intervals: list[range], bucket: int) -> list[Movement]:
    """Return those of the ranks of a replica."""
    if len(holdings) == 1:
        return [Movement(holdings, intervals, bucket=bucket)]
    world = loopback_world(len(holdings))
    return [Movement(holdings, intervals, transport, bucket=bucket) for transport in world]


def part_of(canonical: Tensor, holding: Holding, interval: range) -> Tensor:
    """What a rank has of an interval of a vector, in ascending order."""
    parts = [
        canonical[block.first :].as_strided((block.rows, block.width), (block.matrix.columns, 1))
        for block in holding.between(interval.start, interval.stop)
    ]
    return torch.cat([part.reshape(-1) for part in parts]) if parts else torch.empty(0)


@settings(max_examples=20)
@given(two_layouts(), st.sampled_from((700, 10**6)))
def test_a_replica_of_any_layout_gets_the_vector_of_another(
    layouts: tuple[Layout, Layout], bucket: int
) -> None:
    assume(all(layout.topology.replica_size <= MOST_RANKS for layout in layouts))
    giver, taker = (holdings_of(layout) for layout in layouts)
    length = max(holding.stop for holding in giver)
    vector, found = noise(length, seed=1), [torch.zeros(size_of(holding)) for holding in taker]
    giving: list[Any] = [
        Gather(movement).whole(scattered(vector, movement.own, range(length)), None)
        for movement in movements(giver, [range(length)], bucket)
    ]
    taking: list[Any] = [
        Gather(movement).whole(None, found[movement.rank])
        for movement in movements(taker, [range(length)], bucket)
    ]

    for at in range(len(giving[0].buckets)):
        result = taking[0].result(at)
        taking[0].hand_out(at, result.copy_(giving[0].content(at)))
    for transfer in (*giving, *taking):
        transfer.wait()
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


def test_a_model_has_at_least_a_weight_for_each_fragment() -> None:
    with pytest.raises(ValueError, match="fragments 11 are more than the 10 weights"):
        alone(10, 11)
