"""Replicas of different layouts have the same vectors: each rank gives and gets its part."""

from typing import Any

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_noloco.federation.gather import Gather
from tests.kit.fleet import noise
from tests.kit.layouts import MOST_RANKS, Layout, holdings_of, movements, scattered, size_of, two_layouts


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
