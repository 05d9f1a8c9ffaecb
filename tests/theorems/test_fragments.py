"""Weights exchanged in fragments: when, which, with whom, and that copies of weights stay equal."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_noloco.outer import OuterOptimizer, TorchWeights
from megatron_noloco.outer.payload import BLOCK
from megatron_noloco.outer.round import Fragment, cut
from megatron_noloco.plans.fragments import fewest_steps, fragment_after, most_under_way
from megatron_noloco.plans.topology import Place, Topology
from megatron_noloco.settings import PAPER, NolocoSettings
from tests.kit.fleet import SECONDS, K, assert_close, fleet_of, noise
from tests.kit.loopback import loopback_world

phases = st.integers(1, 40).flatmap(lambda k: st.tuples(st.just(k), st.integers(1, k)))


def elements_of(fragment: Fragment) -> list[int]:
    """Return their places in the vector of weights."""
    return [element for start, stop in fragment.ranges for element in range(start, stop)]


@given(phases)
def test_each_fragment_has_its_own_step_in_a_phase(phase: tuple[int, int]) -> None:
    k, fragments = phase
    due = [fragment_after(done, k, fragments) for done in range(1, 3 * k + 1)]
    assert [one for one in due if one] == [(r, f) for r in range(3) for f in range(fragments)]
    assert [due[done - 1] for done in (k, 2 * k, 3 * k)] == [(r, fragments - 1) for r in range(3)]
    steps = [done for done, one in enumerate(due) if one]
    assert {later - earlier for earlier, later in pairwise(steps)} <= {k // fragments, -(-k // fragments)}


@given(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3), st.floats(0.01, 0.9))
def test_fewest_steps_between_rounds(exchange_seconds: float, step_seconds: float, share: float) -> None:
    """With them exchanges take at most this share of the time, and with a step less more."""
    steps = fewest_steps(exchange_seconds, step_seconds, share)
    taken = [exchange_seconds / (exchange_seconds + k * step_seconds) for k in (steps, steps - 1)]
    assert taken[0] <= share * (1 + 1e-9)
    assert steps == 1 or taken[1] > share * (1 - 1e-9)
    assert fewest_steps(exchange_seconds, step_seconds, share, least=steps + 2) == steps + 2
    assert fewest_steps(exchange_seconds, step_seconds, share, most=1) == 1


@given(phases, st.data())
def test_the_most_rounds_that_are_under_way_at_a_time(phase: tuple[int, int], data: st.DataObject) -> None:
    k, fragments = phase
    overlap_steps = data.draw(st.integers(0, k))
    ends: list[int] = []
    most = 0
    for done in range(1, 4 * k + 1):
        ends = [end for end in ends if end > done]
        if fragment_after(done, k, fragments):
            ends.append(done + overlap_steps)
            most = max(most, len(ends))
    assert most_under_way(k, fragments, overlap_steps) == most


@given(st.data())
def test_weights_are_in_one_fragment_copies_in_first(data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 60))
    fragments = data.draw(st.integers(1, min(length, 8)))
    edges = sorted(data.draw(st.sets(st.integers(0, length), max_size=6)))
    copied = list(zip(edges[::2], edges[1::2], strict=False))
    first, *others = found = cut(length, copied, fragments)
    assert sorted(element for one in found for element in elements_of(one)) == list(range(length))
    copies = [element for start, stop in copied for element in range(start, stop)]
    exact = [elements_of(first)[place] for start, stop in first.exact for place in range(start, stop)]
    assert exact == copies
    assert not any(one.exact for one in others)
    sizes = [one.length for one in (others if len(copies) > length // fragments else found)]
    assert not sizes or max(sizes) - min(sizes) <= 1
    assert all(elements_of(one) == sorted(elements_of(one)) for one in others)


def test_fragments_of_a_round_have_different_partners() -> None:
    fleet = fleet_of(8, fragments=K)
    partners = [set(step[0][0].exchange.group) - {0} for step in fleet.run(8 * K)]
    by_round = [set.union(*partners[first : first + K]) for first in range(0, len(partners), K)]
    assert sum(map(len, by_round)) / len(by_round) > 2.5, "of 4 drawn from 7, with repetition, 3.2 differ"


class WithCopies(TorchWeights):
    def __init__(self, parts: Sequence[Tensor], copied: list[tuple[int, int]]) -> None:
        super().__init__(parts)
        self._ranges = copied

    def copied(self) -> list[tuple[int, int]]:
        return self._ranges


def test_errors_of_several_ranges_are_kept_at_their_places() -> None:
    """In int4, plain averages: what replicas have and keep adds up to what they had, element by element."""
    replicas = 3
    start = noise(replicas, 6 * BLOCK, seed=5)
    settings = NolocoSettings(
        **PAPER
        | {
            "method": "diloco",
            "local_steps": 2,
            "fragments": 2,
            "payload": "int4",
            "deadline_seconds": SECONDS,
        }
        | {"outer_momentum": 0.0, "outer_lr": 1.0, "consensus_weight": None}
    )
    outer = [
        OuterOptimizer(WithCopies([own.clone()], [(100, 600)]), transport, Place(rank, replicas), settings)
        for rank, (own, transport) in enumerate(zip(start, loopback_world(replicas), strict=True))
    ]
    assert max(len(fragment.ranges) for fragment in outer[0]._fragments) > 1
    with ThreadPoolExecutor(replicas) as threads:
        for done in range(1, 9):
            list(threads.map(lambda one, done=done: one.after_local_step(done), outer))
    kept = torch.stack([one.rounding for one in outer])
    assert all(kept.view(replicas, -1, BLOCK)[:, 2:].any(dim=-1).flatten())
    assert_close((torch.stack([one.slow_weights for one in outer]) + kept).mean(0), start.mean(0))


@pytest.mark.parametrize("fragments", [1, 3])
@pytest.mark.parametrize("payload", ["fp32", "int4"])
@pytest.mark.parametrize("overlap_steps", [0, 2])
@pytest.mark.parametrize("whole", [False, True], ids=["a part of the weights", "all of a rank's weights"])
@pytest.mark.parametrize("method", ["noloco", "diloco"])
def test_copies_stay_bitwise_equal(
    method: Any, payload: Any, overlap_steps: int, fragments: int, whole: bool
) -> None:
    """Two stages of each of eight replicas hold 600 weights in common, at different places, as tied embeddings."""
    replicas = 8
    topology = Topology(replicas=replicas, pp=2)
    own = 0 if whole else 900
    first = [(0, 600)] if whole else [(0, 250), (500, 850)]
    ranges = [
        first if topology.position(rank).stage == 0 else [(own, own + 600)] for rank in range(2 * replicas)
    ]
    weights = [noise(600 + own, seed=2 + topology.position(rank).stage) for rank in range(2 * replicas)]
    places = [torch.cat([torch.arange(*one) for one in of_rank]) for of_rank in ranges]
    for rank, of_rank in enumerate(places):
        weights[rank][of_rank] = noise(600, seed=9)
    settings = NolocoSettings(
        method=method,
        local_steps=K,
        fragments=fragments,
        payload=payload,
        overlap_steps=overlap_steps,
        deadline_seconds=SECONDS,
    )
    outer = [
        OuterOptimizer(WithCopies([weights[rank]], ranges[rank]), transport, topology.place(rank), settings)
        for rank, transport in enumerate(loopback_world(2 * replicas))
    ]
    with ThreadPoolExecutor(2 * replicas) as threads:
        for done in range(1, 4 * K + 1):
            for rank in range(2 * replicas):  # copies change alike in a replica
                updates = noise(600 + own, seed=100 * done + rank)
                updates[places[rank]] = noise(600, seed=1000 * done + topology.position(rank).replica)
                weights[rank] += 0.1 * updates
            list(threads.map(lambda one, done=done: one.after_local_step(done), outer))
            copies = [of_rank[at] for of_rank, at in zip(weights, places, strict=True)]
            for replica in range(replicas):
                assert torch.equal(copies[2 * replica], copies[2 * replica + 1])
    if method == "noloco" or overlap_steps:
        assert not torch.equal(copies[0], copies[2]), "replicas differ"
