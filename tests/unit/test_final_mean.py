"""The mean at the end: the same tree on all replicas, the same bits for all, whatever streams are lost."""

import asyncio
import random
from collections.abc import Mapping, Sequence, Set
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_noloco.federation.catch_up import MeanGroup
from megatron_noloco.federation.final_mean import FINAL, FinalMean, parents
from megatron_noloco.federation.gather import Gather
from megatron_noloco.federation.movement import alone
from megatron_noloco.federation.node import Node
from megatron_noloco.federation.pairing import Pairing
from megatron_noloco.federation.rounds import Leading, Replica
from megatron_noloco.outer import ExchangeReport
from megatron_noloco.plans.topology import Place
from megatron_noloco.settings import NolocoSettings
from tests.unit.fleet import noise
from tests.unit.memory_streams import Faults
from tests.unit.nodes import NodeOfWorkers, Nodes, Worker, address_of, run, until

LENGTH = 50
Links = Mapping[int, Set[int]]


@st.composite
def connected(draw: st.DrawFn, most: int = 12) -> dict[int, set[int]]:
    """Draw slots, and who names links to whom, so that all reach each other."""
    slots = sorted(draw(st.sets(st.integers(0, 40), min_size=1, max_size=most)))
    links: dict[int, set[int]] = {slot: set() for slot in slots}
    order = draw(st.permutations(slots))
    for number, slot in enumerate(order[1:], 1):
        links[slot].add(draw(st.sampled_from(order[:number])))
    for one in slots:
        links[one] |= draw(st.sets(st.sampled_from(slots), max_size=3)) - {one}
    return links


def root_of(slot: int, tree: Mapping[int, int | None]) -> int:
    for _ in tree:
        above = tree[slot]
        if above is None:
            return slot
        slot = above
    raise AssertionError("a circle")


def reached(first: int, links: Links) -> set[int]:
    found = {first}
    while True:
        more = (
            {slot for slot in links if links[slot] & found}
            | found
            | set().union(*(links[one] for one in found))
        )
        if more == found:
            return found
        found = more


@given(st.integers(0, 2**12), connected())
def test_parents_are_a_tree_along_links(seed: int, links: dict[int, set[int]]) -> None:
    tree = parents(links.keys(), links)
    assert tree.keys() == links.keys()
    for slot, above in tree.items():
        assert above is None or above in links[slot] or slot in links[above]
        assert root_of(slot, tree) == min(reached(slot, links))
    order = list(links)
    random.Random(seed).shuffle(order)
    assert parents(set(order), {slot: links[slot] for slot in order}) == tree, "all compute the same"


@given(st.integers(1, 100), st.sets(st.integers(0, 99)))
def test_linked_tree_has_logarithmic_shape(count: int, gone: set[int]) -> None:
    for members in ({*range(count)}, {*range(count)} - gone):
        tree = parents(members, {slot: members - {slot} for slot in members})
        assert sum(above is None for above in tree.values()) == min(1, len(members))
        for slot in members:
            depth, at = 0, tree[slot]
            while at is not None:
                depth, at = depth + 1, tree[at]
            assert depth <= count.bit_length()
    tree = parents({*range(count)}, {slot: {*range(count)} - {slot} for slot in range(count)})
    assert max(map([*tree.values()].count, range(count))) <= (count - 1).bit_length()


def final(thread: Any, vector: Tensor, end: MeanGroup) -> tuple[Tensor, ExchangeReport]:
    """Return what a replica of one rank gets."""
    partners: Any = None
    replica = Replica(
        Gather(alone(LENGTH)),
        Place(thread.node.slot, 64),
        Pairing(NolocoSettings(), 1),
        Leading(thread, partners),
    )
    mean = FinalMean(replica, end, 60.0)
    mean.begin(vector, end.group, FINAL, "a test")
    (piece,) = mean.finish()
    return piece.mean, mean.report


def means(
    vectors: Mapping[int, Tensor],
    end: MeanGroup,
    faults: Faults,
    absent: Sequence[int] = (),
    late_seconds: float = 0.0,
) -> dict[int, tuple[Tensor, ExchangeReport]]:
    """Return what each replica gets, but for some that leave when all know who averages.

    Args:
        late_seconds: after which the first replica comes to its mean.
    """

    async def main() -> dict[int, tuple[Tensor, ExchangeReport]]:
        first = min(vectors)
        async with Nodes(faults) as nodes:
            made = [await nodes.add(slot, address_of(first) if slot != first else {}) for slot in vectors]
            others = len(vectors) - 1
            await until(lambda: all(len(node.present()) == others for node in made), 1000.0)
            for node in made:
                node.go_on(5, "ended")
            await until(
                lambda: all(
                    sum(status.phase == "ended" for status in node.present().values()) == others
                    for node in made
                ),
                1000.0,
            )
            for node in list(made):
                if node.slot in absent:
                    made.remove(node)
                    nodes.nodes.remove(node)
                    await node.close()
            loop, workers = asyncio.get_running_loop(), [Worker() for _ in made]

            async def average(worker: Worker, node: Node) -> tuple[Tensor, ExchangeReport]:
                await asyncio.sleep(late_seconds if node.slot == first else 0.0)
                thread = NodeOfWorkers(node)
                return await loop.run_in_executor(worker, final, thread, vectors[node.slot], end)

            found = await asyncio.gather(*map(average, workers, made))
            for worker in workers:
                worker.shutdown()
            return {node.slot: one for node, one in zip(made, found, strict=True)}

    return run(main())


def nothing_lost(number: int) -> tuple[int | None, int | None]:
    return None, None


def all_have(found: Mapping[int, tuple[Tensor, ExchangeReport]], vectors: Mapping[int, Tensor]) -> None:
    """All have the mean of these vectors, to the last bit alike."""
    first, *others = (mean for mean, _ in found.values())
    assert all(torch.equal(first, other) for other in others)
    torch.testing.assert_close(first, torch.stack([*vectors.values()]).mean(0))
    assert all(report.group == tuple(sorted(vectors)) for _, report in found.values())


def vectors_of(slots: Set[int]) -> dict[int, Tensor]:
    base = noise(LENGTH, seed=0)
    return {slot: base + 0.01 * noise(LENGTH, seed=1 + slot) for slot in sorted(slots)}


@settings(max_examples=20)
@given(connected(6), st.integers(0, 2**12))
def test_all_get_one_mean_over_any_graph_with_losses(links: dict[int, set[int]], seed: int) -> None:
    draws = random.Random(seed)

    def faults(number: int) -> tuple[int | None, int | None]:
        """Lose a stream that begins late, twice at most for each carrier."""
        cut = draws.randrange(1, 600) if 3 <= number < 6 and draws.random() < 0.5 else None
        return (cut, None) if draws.random() < 0.5 else (None, cut)

    vectors = vectors_of(links.keys())
    all_have(means(vectors, MeanGroup(tuple(vectors), {}, links), faults), vectors)


def complete(slots: int) -> dict[int, set[int]]:
    return {slot: {*range(slots)} - {slot} for slot in range(slots)}


def test_a_child_that_is_early_asks_twice_a_second() -> None:
    vectors, streams = vectors_of({0, 1}), list[int]()

    def counted(number: int) -> tuple[None, None]:
        streams.append(number)
        return None, None

    found = means(vectors, MeanGroup((0, 1), {}, complete(2)), counted, late_seconds=10.0)
    all_have(found, vectors)
    assert 20 <= len(streams) < 30
    assert found[1][1].bytes_sent == 4 * LENGTH, "of the sum that counts"


def test_a_child_that_is_lost_is_left_out_and_reported() -> None:
    vectors = vectors_of({*range(4)})
    found = means(vectors, MeanGroup((0, 1, 2, 3), {}, complete(4)), nothing_lost, absent=[3])
    del vectors[3]
    all_have(found, vectors)
    missed = "without replica 3, which was lost, or is not finite"
    assert {report.missed for _, report in found.values()} == {missed}


def test_replica_without_parent_roots_its_own_tree() -> None:
    vectors = vectors_of({*range(4)})
    found = means(vectors, MeanGroup((0, 1, 2, 3), {}, complete(4)), nothing_lost, absent=[0])
    all_have({1: found[1]}, {1: vectors[1]})
    all_have({slot: found[slot] for slot in (2, 3)}, {slot: vectors[slot] for slot in (2, 3)})


@pytest.mark.parametrize("slot", range(4))
def test_replica_far_behind_gets_mean_without_being_in_it(slot: int) -> None:
    vectors = vectors_of({*range(4)})
    found = means(vectors, MeanGroup((0, 1, 2, 3), {slot: "ended early"}, complete(4)), nothing_lost)
    del vectors[slot]
    all_have(found, vectors)
    assert {report.missed for _, report in found.values()} == {f"without replica {slot}, which ended early"}


@pytest.mark.parametrize("wrong", [float("nan"), 1e6])
def test_absurd_numbers_are_left_out(wrong: float) -> None:
    vectors = vectors_of({*range(3)})
    vectors[1] = vectors[1] * wrong
    found = means(vectors, MeanGroup((0, 1, 2), {}, complete(3)), nothing_lost)
    del found[1], vectors[1]
    all_have(found, vectors)
