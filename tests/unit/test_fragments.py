"""Weights that are exchanged in fragments: when, which, and the theorems of method.md for each of them."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_noloco.config.summary import outer_state
from megatron_noloco.outer import NoRounds, OuterOptimizer, TorchWeights
from megatron_noloco.outer.round import Fragment, cut
from megatron_noloco.plans.fragments import fragment_after, most_under_way
from megatron_noloco.plans.topology import Topology
from megatron_noloco.settings import NolocoSettings, OverlapSettings
from megatron_noloco.transport.loopback import loopback_world
from tests.unit import test_overlap
from tests.unit.test_outer import Diloco, assert_close, noise
from tests.unit.test_overlap import K, Training, held, resumed, states, told
from tests.unit.test_payload import without_left_over

ELEMENTS = 37

phases = st.integers(1, 40).flatmap(lambda k: st.tuples(st.just(k), st.integers(1, k)))


def training(
    replicas: int, fragments: int, delay_steps: int = 0, group_size: int = 2, **method: Any
) -> Training:
    return test_overlap.training(replicas, delay_steps, group_size, ELEMENTS, fragments=fragments, **method)


def elements_of(fragment: Fragment) -> list[int]:
    """Their places in the vector of weights."""
    return [element for start, stop in fragment.ranges for element in range(start, stop)]


# When


@given(phases)
def test_every_fragment_has_one_round_in_a_local_phase_and_none_share_a_step(phase: tuple[int, int]) -> None:
    k, fragments = phase
    due = [fragment_after(done, k, fragments) for done in range(1, 3 * k + 1)]
    assert [one for one in due if one] == [(r, f) for r in range(3) for f in range(fragments)]
    assert [due[done - 1] for done in (k, 2 * k, 3 * k)] == [(r, fragments - 1) for r in range(3)]
    steps = [done for done, one in enumerate(due) if one]
    assert {later - earlier for earlier, later in pairwise(steps)} <= {k // fragments, -(-k // fragments)}


@given(phases, st.data())
def test_so_many_rounds_are_under_way_at_a_time(phase: tuple[int, int], data: st.DataObject) -> None:
    k, fragments = phase
    delay_steps = data.draw(st.integers(0, k))
    ends: list[int] = []
    most = 0
    for done in range(1, 4 * k + 1):
        ends = [end for end in ends if end > done]
        if fragment_after(done, k, fragments):
            ends.append(done + delay_steps)
            most = max(most, len(ends))
    assert most_under_way(k, fragments, delay_steps) == most


# Which


@given(st.data())
def test_every_weight_is_in_one_fragment_and_all_copies_are_in_the_first(data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 60))
    fragments = data.draw(st.integers(1, min(length, 8)))
    edges = sorted(data.draw(st.sets(st.integers(0, length), max_size=6)))
    copied = list(zip(edges[::2], edges[1::2], strict=False))
    found = cut(length, copied, fragments)
    assert sorted(element for one in found for element in elements_of(one)) == list(range(length))
    copies = [element for start, stop in copied for element in range(start, stop)]
    first, *others = found
    assert [
        elements_of(first)[place] for start, stop in first.exact for place in range(start, stop)
    ] == copies
    assert not any(one.exact for one in others)
    sizes = [one.length for one in others] if len(copies) > length // fragments else [f.length for f in found]
    assert not sizes or max(sizes) - min(sizes) <= 1
    for one in others:
        assert elements_of(one) == sorted(elements_of(one))


def test_more_fragments_than_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="fragments 4 are more than the 3 weights of a rank"):
        cut(3, [], 4)


@pytest.mark.parametrize("delay_steps", [0, 1])
def test_every_weight_is_exchanged_once_in_a_local_phase(delay_steps: int) -> None:
    fleet = training(4, 3, delay_steps)
    numbered = torch.arange(1.0, ELEMENTS + 1).expand(4, -1)
    for phase in range(3):
        for step in range(K):
            fleet.train(numbered)
            before = [len(transport.sent) for transport in fleet.transports]
            fleet.step(torch.zeros_like(numbered))
            sent = [len(t.sent) - n for t, n in zip(fleet.transports, before, strict=True)]
            assert sent == [int(fragment_after(phase * K + step + 1, K, 3) is not None)] * 4
    for transport in fleet.transports:
        for phase in range(3):
            vectors = [vector / 0.7 for _, vector in transport.sent[3 * phase : 3 * phase + 3]]
            assert sorted(torch.cat(vectors).round().int().tolist()) == list(range(1, ELEMENTS + 1))
            assert max(map(len, vectors)) - min(map(len, vectors)) <= 1


# The theorems, fragment by fragment


class Reference:
    """The definition in double precision: what round.py says of theta, phi and delta, for the elements due."""

    def __init__(self, fleet: Training, gamma: float) -> None:
        self.fleet, self.gamma = fleet, gamma
        self.theta, self.phi, self.delta = (x.double() for x in (fleet.theta, fleet.phi, fleet.delta))
        self.under_way: dict[int, tuple[list[int], Tensor, Tensor]] = {}  # by the step of the merge

    def step(self, updates: Tensor, done: int) -> None:
        settings, fleet = self.fleet.settings, self.fleet
        self.theta = self.theta + updates.double()
        self.merge(done)
        begins = fragment_after(done, K, settings.fragments)
        if begins is None:
            return
        round_index, index = begins
        at = elements_of(cut(ELEMENTS, [], settings.fragments)[index])
        theta, phi = self.theta[:, at], self.phi[:, at]
        mean = torch.empty_like(theta)
        for group in map(list, fleet.grouping.groups(round_index, fragment=index)):
            c = 0.7 * (theta[group] - phi[group]) + self.gamma * phi[group]
            mean[group] = c.mean(dim=0)
        self.under_way[done + settings.delay_steps] = at, mean, theta
        self.merge(done)

    def merge(self, done: int) -> None:
        if done in self.under_way:
            at, mean, snapshot = self.under_way.pop(done)
            self.delta[:, at] = 0.5 * self.delta[:, at] + mean - self.gamma * self.phi[:, at]
            self.phi[:, at] += self.delta[:, at]
            self.theta[:, at] += self.phi[:, at] - snapshot


@pytest.mark.parametrize("fragments", [1, 3, K])
@pytest.mark.parametrize("delay_steps", [0, 1, K])
@pytest.mark.parametrize(("replicas", "group_size"), [(4, 2), (3, 2), (5, 3)])
def test_each_fragment_has_rounds_of_its_own(
    fragments: int, delay_steps: int, replicas: int, group_size: int
) -> None:
    fleet = training(replicas, fragments, delay_steps, group_size, consensus_weight=0.3)
    reference = Reference(fleet, 0.3)
    for done in range(1, 4 * K + 1):
        updates = 0.1 * noise(replicas, ELEMENTS, seed=done)
        fleet.step(updates)
        reference.step(updates, done)
        assert_close(fleet.theta, reference.theta)


@pytest.mark.parametrize("delay_steps", [0, 2])
def test_all_in_one_group_take_dilocos_outer_steps(delay_steps: int) -> None:
    """Fact 1. Each fragment begins its rounds at its own step."""
    fleet = training(3, 3, delay_steps, 3, consensus_weight=0.2)
    assert_mean_follows_diloco(fleet, seed=0)
    assert_close(fleet.phi, fleet.phi.mean(dim=0).expand(3, -1))


def assert_mean_follows_diloco(fleet: Training, seed: int) -> None:
    """Over three local phases; the outer gradients are as they are when the fragment's round begins."""
    references: dict[int, Diloco] = {}
    fragments = cut(ELEMENTS, [], fleet.settings.fragments)
    for done in range(1, 3 * K + 1):
        update = 0.1 * noise(fleet.replicas, ELEMENTS, seed=seed + done)
        begins = fragment_after(done, K, fleet.settings.fragments)
        fleet.land()
        before, theta = fleet.phi, fleet.theta + update
        theta = theta + corrections_due(fleet, done)
        fleet.step(update)
        fleet.land()
        if begins is None:
            continue
        at = elements_of(fragments[begins[1]])
        phi = before[:, at].double()
        reference = references.setdefault(begins[1], Diloco(phi.mean(dim=0), 0.5, 0.7))
        reference.step((theta[:, at].double() - phi).mean(dim=0))
        assert_close(fleet.phi[:, at].double().mean(dim=0), reference.phi, 5e-6)
        assert_close(fleet.delta[:, at].double().mean(dim=0), reference.delta, 5e-6)
    assert len(references) == len(fragments)


def corrections_due(fleet: Training, done: int) -> Tensor:
    """What the merges after step `done` will add."""
    found = torch.zeros_like(fleet.theta)
    for row, outer in zip(found, fleet.outer, strict=True):
        for running in outer._under_way:
            if running.due == done:
                running.fragment.scatter(running.correction, row)
    return found


@settings(max_examples=20)
@given(
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(2, K),
    st.integers(0, K),
    st.sampled_from(["fp32", "int16", "int8", "int4"]),
    st.integers(0, 10_000),
)
def test_the_mean_follows_diloco_for_any_grouping(
    replicas: int, group_size: int, fragments: int, delay_steps: int, payload: str, seed: int
) -> None:
    """Fact 3."""
    method = {"consensus_weight": 0.3, "payload": payload, "seed": seed}
    fleet = training(replicas, fragments, delay_steps, min(group_size, replicas), **method)
    assert_mean_follows_diloco(fleet, seed)


def test_two_replicas_have_bitwise_the_same_slow_weights() -> None:
    """Fact 4. Of the fast weights only the fragment that has just had its round is the same."""
    fleet = training(2, 3)
    fragments = cut(ELEMENTS, [], 3)
    for _ in range(4 * K):
        fleet.run(1)
        assert torch.equal(fleet.phi[0], fleet.phi[1])
        assert torch.equal(fleet.delta[0], fleet.delta[1])
        begins = fragment_after(fleet.done, K, 3)
        if begins is not None:
            at = elements_of(fragments[begins[1]])
            assert torch.equal(*fleet.theta[:, at])
        assert not torch.equal(*fleet.theta)


def test_fragments_of_a_round_have_different_partners() -> None:
    fleet = training(8, K)
    partners = []
    for done in range(1, 8 * K + 1):
        report = fleet.run(1)[0][0][0]
        assert (report.round_index, report.fragment) == fragment_after(done, K, K)
        partners.append(set(report.exchange.group) - {0})
    by_round = [set.union(*partners[first : first + K]) for first in range(0, len(partners), K)]
    assert sum(map(len, by_round)) / len(by_round) > 2.5, "of 4 drawn from 7, with repetition, 3.2 differ"


# Copies on other ranks of a replica


class WithCopies(TorchWeights):
    def __init__(self, parts: Sequence[Tensor], copied: list[tuple[int, int]]) -> None:
        super().__init__(parts)
        self._ranges = copied

    def copied(self) -> list[tuple[int, int]]:
        return self._ranges


@pytest.mark.parametrize("payload", ["fp32", "int4"])
@pytest.mark.parametrize("delay_steps", [0, 2])
@pytest.mark.parametrize("whole", [False, True], ids=["a part of the weights", "all of a rank's weights"])
def test_copies_stay_bitwise_equal(payload: Any, delay_steps: int, whole: bool) -> None:
    """Two stages of each of four replicas hold 600 weights in common, at different places, as tied embeddings."""
    topology = Topology(replicas=4, pp=2)
    own = 0 if whole else 900
    ranges = {0: [(0, 250), (500 * (not whole), 350 + 500 * (not whole))], 1: [(own, own + 600)]}
    if whole:
        ranges[0] = [(0, 600)]
    masters = [noise(600 + own, seed=2 + topology.position(rank).stage) for rank in range(8)]

    def copies(rank: int) -> Tensor:
        return torch.cat([masters[rank][a:b] for a, b in ranges[topology.position(rank).stage]])

    def change(rank: int, seed: int) -> None:
        """The same for both copies of a replica."""
        position = topology.position(rank)
        masters[rank] += 0.1 * noise(len(masters[rank]), seed=100 * seed + rank)
        shared, taken = noise(600, seed=1000 * seed + position.replica), 0
        for start, stop in ranges[position.stage]:
            masters[rank][start:stop] = before[rank][start:stop] + shared[taken : taken + stop - start]
            taken += stop - start

    for rank in range(8):  # equal copies, everywhere
        taken = 0
        for start, stop in ranges[topology.position(rank).stage]:
            masters[rank][start:stop] = noise(600, seed=9)[taken : taken + stop - start]
            taken += stop - start
    method = NolocoSettings(
        local_steps=K,
        fragments=3,
        payload=payload,
        overlap=OverlapSettings("delayed", delay_steps),
        deadline_seconds=20,
    )
    outer = [
        OuterOptimizer(
            WithCopies([masters[t.rank]], ranges[topology.position(t.rank).stage]),
            t,
            topology.place(t.rank),
            method,
        )
        for t in loopback_world(8, 1000)
    ]
    with ThreadPoolExecutor(8) as threads:
        for done in range(1, 4 * K + 1):
            before = [master.clone() for master in masters]
            for rank in range(8):
                change(rank, done)
            list(threads.map(lambda one, done=done: one.after_local_step(done), outer))
            for replica in range(4):
                assert torch.equal(copies(2 * replica), copies(2 * replica + 1))
    assert not torch.equal(copies(0), copies(2)), "replicas differ"


# Checkpoints, evaluation, memory


@pytest.mark.parametrize("saved", range(K + 1, 2 * K + 1))
@pytest.mark.parametrize(("delay_steps", "payload"), [(0, "fp32"), (2, "int4"), (K, "fp32")])
def test_state_continues_a_run_bit_for_bit_from_any_step(saved: int, delay_steps: int, payload: str) -> None:
    fleet = training(4, 3, delay_steps, payload=payload)
    fleet.run(saved)
    other = resumed(fleet, delay_steps, payload=payload, fragments=3)
    expected, found = fleet.run(4 * K - saved), other.run(4 * K - saved)
    fleet.land()
    other.land()
    for name in ("theta", "phi", "delta"):
        assert torch.equal(getattr(fleet, name), getattr(other, name))
    assert list(map(told, found)) == list(map(told, expected))


@pytest.mark.parametrize("fragments", [1, 2, 4])
def test_with_another_number_of_fragments_corrections_are_merged_at_once(fragments: int) -> None:
    fleet = training(4, 3, K)
    fleet.run(2 * K)
    assert [len(outer._under_way) for outer in fleet.outer] == [3] * 4
    found = states(fleet)
    other = resumed(fleet, K, fragments=fragments)
    assert torch.equal(other.phi, fleet.phi)
    assert torch.equal(other.delta, fleet.delta)
    assert_close(other.theta, fleet.theta + torch.stack([state["correction"] for state in found]))
    reports = [step[0] for step in other.run(K)]
    assert all(report.round_index == 2 for step in reports for report in step)
    other.run(K)


def test_without_rounds_all_corrections_are_merged_at_once() -> None:
    fleet = training(2, 3, K)
    fleet.run(2 * K)
    (state, _) = states(fleet)
    parameter = fleet.theta[0].clone()
    NoRounds(TorchWeights([parameter])).restore(state)
    assert torch.equal(parameter, fleet.theta[0] + state["correction"])
    assert int((state["correction"] != 0).sum()) == ELEMENTS, "all three fragments are under way"


@pytest.mark.parametrize("payload", ["fp32", "int8"])
def test_nothing_is_allocated_from_round_to_round(payload: str) -> None:
    fleet = training(2, 3, 3, payload=payload)
    fleet.run(3 * K)
    places = []
    for _ in range(3):
        kept = [vector for of_round in fleet.memory for vector in without_left_over(of_round).values()]
        places.append(sorted(vector.data_ptr() for vector in kept))
        fleet.run(K)
    assert all(before == after for before, after in pairwise(places))


@pytest.mark.parametrize(("delay_steps", "at_a_time"), [(0, 1), (1, 1), (2, 2), (K, 4)])
def test_config_tells_the_bytes_of_the_outer_state(delay_steps: int, at_a_time: int) -> None:
    fleet = Training(noise(1000, seed=1).expand(2, -1), 2, delay_steps, fragments=K)
    fleet.run(3 * K)
    noloco = NolocoSettings(local_steps=K, fragments=K, overlap=OverlapSettings("delayed", delay_steps))
    bytes_per_weight = sum(vector.nbytes for vector in held(fleet)) / 2000
    assert bytes_per_weight == 8 + at_a_time * (3 if delay_steps else 2)
    assert outer_state(noloco, replicas=2).startswith(f"{bytes_per_weight:g} bytes per parameter (")
    in_groups = outer_state(replace(noloco, group_size=4), replicas=4)
    assert ("for each of" in in_groups) == (at_a_time > 1)
