"""The plans as theorems: what every rank computes alone, all compute alike."""

import math
from collections import Counter
from dataclasses import replace
from itertools import combinations, product
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_noloco.plans.draws import Stream, draw_permutation, draw_words
from megatron_noloco.plans.grouping import Grouping, Sites, goes_across, prime_factors
from megatron_noloco.plans.sample_order import BatchPlan, Order
from megatron_noloco.plans.stability import (
    cycle_spread_factor,
    rounds_to_halve,
    spread_factor,
    spread_factors_of_sites,
)
from megatron_noloco.plans.topology import Place, Position, Topology
from megatron_noloco.settings import NolocoSettings, groups_problem
from tests.kit.golden import recorded

few = settings(max_examples=60)
small = st.integers(1, 4)


class TestDraws:
    def test_golden(self) -> None:
        """A change of these numbers splits a run whose replicas were installed on different days."""
        counters = [(), (0,), (1,), (7, 3)]
        now = {
            f"seed {seed} {stream.name} {counter}": {
                "words": " ".join(f"{word:016x}" for word in draw_words(3, seed, stream, *counter).tolist()),
                "permutation": " ".join(map(str, draw_permutation(8, seed, stream, *counter).tolist())),
            }
            for seed in (0, 1234)
            for stream in Stream
            for counter in counters
        }
        now["samples"] = {
            f"{samples} samples, seed {seed}": " ".join(
                map(str, Order.of(samples, seed).ids(samples - 4, 8).tolist())
            )
            for samples in (17, 1000, 10**12)
            for seed in (0, 1234)
        }
        assert now == recorded("draws", now)

    def test_streams_and_counters_are_independent(self) -> None:
        """For equally many counters: numpy's seeds take (1,) and (1, 0) for the same."""
        words = {
            draw_words(1, seed, stream, *counters)[0]
            for seed in (0, 1)
            for stream in Stream
            for counters in [(0, 0), (0, 1), (1, 0), (1, 1)]
        }
        assert len(words) == 2 * len(Stream) * 4


def test_the_factors_of_large_primes_are_found_at_once() -> None:
    prime = 1_000_000_007
    assert prime_factors(4 * 9 * prime) == (2, 2, 3, 3, prime)


class TestGrouping:
    @few
    @given(replicas=st.integers(1, 17), size=st.integers(1, 17), round_index=st.integers(0, 10**6))
    def test_every_replica_is_in_exactly_one_group(self, replicas: int, size: int, round_index: int) -> None:
        size = min(size, replicas)
        grouping = Grouping(replicas, size, seed=5)
        groups = grouping.groups(round_index)
        assert sorted(replica for group in groups for replica in group) == list(range(replicas))
        assert all(list(group) == sorted(group) for group in groups)
        rest = [replicas % size] if replicas % size else []
        assert [len(group) for group in groups] == [size] * (replicas // size) + rest
        for replica in range(replicas):
            assert grouping.group(replica, round_index) == next(g for g in groups if replica in g)

    def test_all_replicas_skip_rounds_equally_often(self) -> None:
        grouping = Grouping(replicas=5, group_size=2, seed=0)
        skipped = Counter(grouping.groups(round_index)[-1] for round_index in range(500))
        assert set(skipped) == {(replica,) for replica in range(5)}
        assert max(skipped.values()) < 2 * min(skipped.values())

    def test_rounds_fragments_and_seeds_draw_apart(self) -> None:
        """And ranks that asked different questions before agree."""
        grouping = Grouping(16, 2, seed=1)
        drawn = [
            *(grouping.groups(4, fragment=fragment) for fragment in range(5)),
            grouping.groups(5),
            Grouping(16, 2, seed=2).groups(4),
        ]
        assert all(one != other for one, other in combinations(drawn, 2))
        assert drawn[0] == Grouping(16, 2, seed=1).groups(4)

    @pytest.mark.parametrize("replicas", [4, 8])
    def test_partners_are_uniform(self, replicas: int) -> None:
        rounds = 2_000
        grouping = Grouping(replicas, 2, seed=3)
        drawn = Counter(pair for round_index in range(rounds) for pair in grouping.groups(round_index))
        share = 1 / (replicas - 1)
        tolerance = 5 * math.sqrt(rounds * share * (1 - share))  # five standard deviations
        for pair in combinations(range(replicas), 2):
            assert drawn[pair] == pytest.approx(rounds * share, abs=tolerance)


def at_sites(number: int, of_each: int, interval: int, seed: int = 3) -> Grouping:
    """Replicas take turns: 0 is at the first site, 1 at the second."""
    sites = Sites(tuple(replica % number for replica in range(number * of_each)), interval)
    return Grouping(number * of_each, 8, seed, "cycle", sites)


class TestSites:
    @few
    @given(
        number=st.integers(2, 6),
        of_each=st.integers(2, 8),
        interval=st.integers(2, 9),
        round_index=st.integers(0, 10**6),
        fragment=st.integers(0, 3),
    )
    def test_groups_cross_sites_at_the_interval(
        self, number: int, of_each: int, interval: int, round_index: int, fragment: int
    ) -> None:
        grouping = at_sites(number, of_each, interval)
        groups = grouping.groups(round_index, fragment)
        assert sorted(replica for group in groups for replica in group) == list(range(number * of_each))
        crosses = goes_across(round_index + fragment, interval)
        size = {len(group) for group in groups}
        assert size <= set(prime_factors(number) if crosses else prime_factors(of_each))
        of_group = {
            len({grouping.sites.of[replica] for replica in group}) for group in groups if grouping.sites
        }
        assert of_group == (size if crosses else {1})

    @pytest.mark.parametrize(("number", "of_each"), [(2, 8), (3, 4), (4, 4), (6, 6)])
    def test_plain_averages_over_sites_make_all_equal(self, number: int, of_each: int) -> None:
        """Where whole cycles inside come before each round across. Their mean is kept at any time."""
        grouping = at_sites(number, of_each, interval=2 * len(prime_factors(of_each)) + 1)
        values = np.random.default_rng(0).standard_normal((number * of_each, 5))
        mean = values.mean(axis=0)
        for round_index in range(len(grouping.cycle.across) * grouping.cycle.interval):
            assert values.std(axis=0).min() > 1e-3
            for group in map(list, grouping.groups(round_index)):
                values[group] = values[group].mean(axis=0)
            assert values.mean(axis=0) == pytest.approx(mean)
        assert values == pytest.approx(np.broadcast_to(mean, values.shape))

    @pytest.mark.parametrize(("number", "of_each"), [(2, 4), (3, 2)])
    def test_every_replica_meets_every_other_one(self, number: int, of_each: int) -> None:
        grouping = at_sites(number, of_each, interval=3)
        met = {
            pair
            for round_index in range(100)
            for group in grouping.groups(round_index)
            for pair in combinations(group, 2)
        }
        assert met == set(combinations(range(number * of_each), 2))

    @pytest.mark.parametrize(
        ("number", "of_each", "interval", "alpha", "gamma", "nesterov"),
        [
            (2, 8, 3, 0.5, 0.7, False),  # rounds across fall into a cycle
            (2, 8, 4, 0.9, 0.5, True),
            (4, 4, 3, 0.5, 0.7, False),  # the sites have a cycle of their own
            (3, 4, 5, 0.5, 0.7, False),
        ],
    )
    def test_spread_shrinks_over_sites_as_rho(
        self, number: int, of_each: int, interval: int, alpha: float, gamma: float, nesterov: bool
    ) -> None:
        cycle = at_sites(number, of_each, interval).cycle
        method = alpha, gamma, cycle.inside, cycle.across, interval, nesterov
        inside, between = spread_factors_of_sites(*method)
        largest = cycle_spread_factor(
            alpha, gamma, cycle.inside, 0.0, nesterov, False, cycle.across, interval
        )
        assert largest == pytest.approx(max(inside, between))
        measured = np.array([
            measured_at_sites(at_sites(number, of_each, interval, seed), alpha, gamma, nesterov)
            for seed in range(6)
        ])  # fmt: skip
        assert np.exp(np.log(measured).mean(axis=0)) == pytest.approx([inside, between], abs=0.03)

    def test_between_sites_shrinks_once_per_interval(self) -> None:
        for gamma, interval in product((0.5, 1.0), (2, 5, 50)):
            _, between = spread_factors_of_sites(0, gamma, (2, 2), (2,), interval)
            assert between == pytest.approx((1 - gamma) ** (2 / interval))


def measured_at_sites(grouping: Grouping, alpha: float, gamma: float, nesterov: bool) -> tuple[float, float]:
    """Gossip itself: rho inside sites and between them, over 20 periods after one."""
    assert grouping.sites is not None
    site = np.array(grouping.sites.of)
    phi = np.random.default_rng(grouping.seed).standard_normal((len(site), 200))
    phi -= phi.mean(axis=0)
    momentum, squares, period = np.zeros_like(phi), [], grouping.cycle.rounds
    for round_index in range(21 * period):
        pull = -gamma * phi
        for group in map(list, grouping.groups(round_index)):
            pull[group] += gamma * phi[group].mean(axis=0)
        momentum = alpha * momentum + pull
        phi = phi + (alpha * momentum + pull if nesterov else momentum)
        phi -= phi.mean(axis=0)
        both = np.hstack([phi, momentum])  # a momentum makes either swing
        means = np.stack([both[site == one].mean(axis=0) for one in range(max(site) + 1)])
        squares.append((((both - means[site]) ** 2).mean(), (means**2).mean()))
    inside, between = np.array(squares[-1]) / squares[period - 1]
    return float(inside ** (1 / (20 * period))), float(between ** (1 / (20 * period)))


class TestTopology:
    def test_in_words(self) -> None:
        assert Topology().in_words(1) == "1 replica x pipeline 1 x data 1 x tensor 1 = 1 rank"
        words = Topology(pp=2, dp=4, tp=2, vpp=3, ep=2).in_words(100)
        assert words == (
            "100 replicas x pipeline 2 (3 virtual stages each) x data 4 (expert 2) x tensor 2 = 1,600 ranks"
        )

    @few
    @given(shape=st.tuples(small, small, small, small))
    def test_ranks_and_positions_are_a_bijection(self, shape: tuple[int, int, int, int]) -> None:
        topology = Topology(*shape)
        positions = [topology.position(rank) for rank in range(topology.world_size)]
        assert len(set(positions)) == topology.world_size == math.prod(shape)
        for rank, position in enumerate(positions):
            assert topology.rank(position) == rank
            assert topology.grid[position.replica, position.stage, position.dp, position.tp] == rank

    def test_shards_are_neighbours_and_a_replica_is_contiguous(self) -> None:
        """Virtual stages and sequence parallelism need no ranks."""
        topology = Topology(replicas=3, pp=2, dp=2, tp=4, vpp=3, sequence_parallel=True)
        assert [topology.position(rank).tp for rank in range(4)] == [0, 1, 2, 3]
        assert {topology.position(rank).stage for rank in range(4)} == {0}
        assert [topology.position(rank).replica for rank in range(48)] == [0] * 16 + [1] * 16 + [2] * 16

    def test_counterparts_differ_in_their_replica_only(self) -> None:
        topology = Topology(replicas=3, pp=2, dp=2, tp=2)
        for rank in range(topology.world_size):
            here, place = topology.position(rank), topology.place(rank)
            assert (place.replica, place.replicas) == (here.replica, 3)
            assert place.rank_of(here.replica) == place.rank == rank
            for replica in range(3):
                there = topology.position(place.rank_of(replica))
                assert there == Position(replica, here.stage, here.dp, here.tp)

    def test_a_replica_of_one_rank_needs_no_topology(self) -> None:
        assert Place(2, 4) == Topology(replicas=4).place(2)
        assert Place(2, 4, ranks_per_replica=3).rank == 6


RHO = [  # the table of method.md: alpha, gamma, n, error of the pull, Nesterov, rho
    (0.5, 0.7, 2, 0.0, False, 0.700),
    (0.5, 0.3, 2, 0.0, False, 0.625),
    (0.3, 0.7, 2, 0.0, False, 0.553),
    (0.0, 1.0, 2, 0.0, False, 0.500),
    (0.9, 0.7, 2, 0.0, False, 1.098),
    (0.9, 0.35, 2, 0.0, False, 0.992),
    (0.5, 1.4, 2, 0.0, False, 0.952),
    (0.5, 0.7, 4, 0.0, False, 0.594),
    (0.5, 0.7, 2, 0.41, False, 0.769),  # int4
    (0.5, 1.4, 2, 0.41, False, 1.123),
    (0.5, 0.7, 2, 0.0, True, 0.581),
    (0.9, 0.7, 2, 0.0, True, 0.916),
    (0.9, 0.35, 4, 0.0, True, 0.722),
    (0.5, 1.4, 2, 0.0, True, 1.127),
    (0.9, 0.35, 2, 0.41, True, 0.897),
]


def measured_spread_factor(
    alpha: float,
    gamma: float,
    group_size: int,
    pull_error: float = 0.0,
    nesterov: bool = False,
    kept: bool = False,
    fragment: int = 0,
) -> float:
    """Gossip itself: 256 replicas of 256 weights, zero outer gradients, groups from Grouping."""
    draw = np.random.default_rng(1)
    replicas, settle, rounds = 256, 20, 120
    grouping = Grouping(replicas, group_size, seed=11)
    phi = np.random.default_rng(0).standard_normal((replicas, 256))
    phi -= phi.mean(axis=0)  # stays zero: a mean beside a vanishing spread would cost its digits
    momentum, rounding = np.zeros_like(phi), np.zeros_like(phi)
    spread_squared = []
    for round_index in range(rounds):
        groups = np.array(grouping.groups(round_index, fragment=fragment))
        combined = gamma * phi + rounding
        size = np.sqrt(combined[groups].var(axis=1, ddof=1).mean())
        error = pull_error * size * draw.standard_normal(phi.shape)
        if kept:
            combined, rounding = combined - error, error
        pull = np.empty_like(phi)
        pull[groups] = combined[groups].mean(axis=1, keepdims=True)
        pull -= gamma * phi
        if not kept:
            pull += np.sqrt(1 - 1 / group_size) * error
        momentum = alpha * momentum + pull
        phi = phi + (alpha * momentum + pull if nesterov else momentum)
        phi -= phi.mean(axis=0)
        spread_squared.append(phi.var(axis=0).mean())
    return (spread_squared[-1] / spread_squared[settle]) ** (1 / (rounds - 1 - settle))


class TestStability:
    @pytest.mark.parametrize(("alpha", "gamma", "n", "error", "nesterov", "rho"), RHO)
    def test_rho_is_that_of_the_table_and_simulated_replicas_obey_it(
        self, alpha: float, gamma: float, n: int, error: float, nesterov: bool, rho: float
    ) -> None:
        assert spread_factor(alpha, gamma, n, error, nesterov) == pytest.approx(rho, abs=5.01e-4)
        assert measured_spread_factor(alpha, gamma, n, error, nesterov) == pytest.approx(rho, abs=0.005)

    @pytest.mark.parametrize(
        ("alpha", "gamma", "n", "nesterov"),
        [(0.0, 1.0, 4, False), (0.5, 0.7, 8, False), (0.3, 1.6, 4, False), (0.9, 0.9, 4, True)],
    )
    def test_so_do_those_that_keep_their_errors(
        self, alpha: float, gamma: float, n: int, nesterov: bool
    ) -> None:
        found = measured_spread_factor(alpha, gamma, n, 0.5, nesterov, kept=True)
        assert found == pytest.approx(spread_factor(alpha, gamma, n, 0.5, nesterov, kept=True), abs=0.01)

    @pytest.mark.parametrize("fragment", [1, 5])
    def test_so_do_their_fragments(self, fragment: int) -> None:
        assert measured_spread_factor(0.5, 0.7, 2, fragment=fragment) == pytest.approx(0.7, abs=0.005)

    def test_without_a_group_nothing_pulls_together(self) -> None:
        assert spread_factor(0.5, 0.7, 1) == pytest.approx(1.0)

    def test_the_problem_names_the_numbers_and_a_remedy(self) -> None:
        drifts = NolocoSettings(outer_momentum=0.9, consensus_weight=0.7, payload="fp32")
        assert groups_problem(drifts, None).startswith(
            "outer_momentum (alpha) 0.9, consensus_weight (gamma) 0.7, group_size (n) 2: replicas would drift "
            "apart, rho = 1.098 >= 1; outer_momentum 0.8"
        )

    @pytest.mark.parametrize(
        ("alpha", "gamma", "n", "payload"),
        [(0.9, 0.7, 2, "fp32"), (0.5, 1.4, 2, "int4"), (0.95, 0.7, 8, "int4")],
    )
    def test_the_suggested_momentum_is_the_largest_stable_one(
        self, alpha: float, gamma: float, n: int, payload: Literal["fp32", "int4"]
    ) -> None:
        drifts = NolocoSettings(outer_momentum=alpha, consensus_weight=gamma, group_size=n, payload=payload)
        suggested = float(groups_problem(drifts, None).partition("; outer_momentum ")[2].split()[0])
        assert groups_problem(drifts.replace(outer_momentum=suggested), None) == ""
        assert groups_problem(drifts.replace(outer_momentum=suggested + 0.01), None) != ""

    def test_rounds_to_halve(self) -> None:
        assert rounds_to_halve(0.25) == pytest.approx(1)  # the spread squared quarters as the spread halves
        assert rounds_to_halve(0.5) == pytest.approx(2)
        assert rounds_to_halve(0.0) == 0
        assert rounds_to_halve(1.0) == rounds_to_halve(1.1) == math.inf


class TestOrder:
    @few
    @given(samples=st.integers(50, 300), seed=st.integers(0, 2**31), epoch=st.integers(0, 100))
    def test_epochs_and_seeds_differ(self, samples: int, seed: int, epoch: int) -> None:
        first = epoch * samples
        ids = Order.of(samples, seed).ids(first, samples).tolist()
        assert ids != Order.of(samples, seed).ids(first + samples, samples).tolist()
        assert ids != Order.of(samples, seed + 1).ids(first, samples).tolist()
        assert ids != sorted(ids)

    def test_a_trillion_samples_cost_nothing(self) -> None:
        ids = Order.of(10**12, seed=0).ids(5 * 10**11, 1000)
        assert len(set(ids.tolist())) == 1000
        assert ids.mean() == pytest.approx(5e11, rel=0.1)


def places_of_step(plan: BatchPlan, step: int) -> list[int]:
    return [
        plan.first(step, replica, dp, microbatch) + sample
        for replica in range(plan.replicas)
        for dp in range(plan.dp)
        for microbatch in range(plan.microbatches)
        for sample in range(plan.micro_batch_size)
    ]


class TestBatchPlan:
    @few
    @given(shape=st.tuples(small, small, small, small), step=st.integers(0, 10**6))
    def test_a_step_tiles_consecutive_places(self, shape: tuple[int, int, int, int], step: int) -> None:
        """In order, so that several data-parallel ranks read what one with all their microbatches would."""
        plan = BatchPlan(*shape)
        start = step * math.prod(shape)
        assert plan.global_batch == plan.replicas * plan.replica_batch == math.prod(shape)
        assert places_of_step(plan, step) == list(range(start, start + plan.global_batch))
        of_slot = replace(plan, slot=7)  # of a federation
        assert of_slot.first(step, 7 + plan.replicas - 1, 0, 0) == plan.first(step, plan.replicas - 1, 0, 0)


class TestCycles:
    @given(st.integers(2, 60), st.integers(0, 9), st.integers(0, 5))
    @few
    def test_plain_averages_along_a_cycle_make_all_replicas_equal(
        self, replicas: int, seed: int, cycle: int
    ) -> None:
        factors = prime_factors(replicas)
        grouping = Grouping(replicas, max(factors), seed, pairing="cycle")
        weights = np.random.default_rng(seed).normal(size=replicas)
        after = weights.copy()
        for round_index in range(cycle * len(factors), (cycle + 1) * len(factors)):
            groups = grouping.groups(round_index)
            assert sorted(member for group in groups for member in group) == list(range(replicas))
            for group in groups:
                assert list(group) == sorted(group)
                after[list(group)] = after[list(group)].mean()
        np.testing.assert_allclose(after, weights.mean(), rtol=0, atol=1e-12)

    def test_labels_are_drawn_again_in_each_cycle(self) -> None:
        grouping = Grouping(16, 2, seed=0, pairing="cycle")
        assert len({tuple(grouping.groups(4 * cycle)) for cycle in range(10)}) == 10

    def test_plain_averages_leave_no_spread_but_that_of_the_errors(self) -> None:
        assert cycle_spread_factor(0.0, 1.0, (2, 2, 2)) == pytest.approx(0.0, abs=1e-9)
        assert cycle_spread_factor(0.0, 1.0, (2,), pull_error=0.4) == pytest.approx(0.16)

    @pytest.mark.parametrize(("digits", "rho"), [(2, 0.585), (3, 0.633), (4, 0.659), (6, 0.684)])
    def test_cycles_bring_replicas_together_faster_than_random_pairs(self, digits: int, rho: float) -> None:
        """The table of method.md; 0.700 for random pairs."""
        assert cycle_spread_factor(0.5, 0.7, (2,) * digits) == pytest.approx(rho, abs=5.01e-4)

    @pytest.mark.parametrize(
        ("alpha", "gamma", "error", "nesterov"),
        [(0.5, 0.7, 0, False), (0.3, 0.7, 0.4, False), (0.8, 0.35, 1.0, False), (0.9, 0.7, 0.4, True)],
    )
    @pytest.mark.parametrize(("replicas", "fragment"), [(8, 0), (8, 2), (12, 0), (12, 1)])
    def test_the_factor_is_that_of_a_simulation(
        self, alpha: float, gamma: float, error: float, nesterov: bool, replicas: int, fragment: int
    ) -> None:
        factors = prime_factors(replicas)
        grouping = Grouping(replicas, max(factors), seed=1, pairing="cycle")
        draw = np.random.default_rng(0)
        phi, delta = draw.normal(size=(replicas, 4000)), np.zeros((replicas, 4000))
        logs, cycles = [], 60
        for round_index in range(cycles * len(factors)):
            for group in map(list, grouping.groups(round_index, fragment=fragment)):
                pull = gamma * (phi[group].mean(axis=0) - phi[group])
                noise = draw.normal(size=pull.shape)
                noise -= noise.mean(axis=0)
                noise *= error * pull.std() / noise.std()
                delta[group] = alpha * delta[group] + pull + noise
                phi[group] += alpha * delta[group] + pull + noise if nesterov else delta[group]
            scale = phi.std()
            logs.append(math.log(scale))
            phi, delta = (phi - phi.mean(axis=0)) / scale, delta / scale
        found = math.exp(2 * np.mean(logs[len(logs) // 4 :]))
        order = factors[fragment:] + factors[:fragment]
        assert found == pytest.approx(cycle_spread_factor(alpha, gamma, order, error, nesterov), abs=0.03)

    @pytest.mark.parametrize(
        ("alpha", "gamma", "nesterov"), [(0.0, 1.0, False), (0.5, 0.7, False), (0.8, 0.7, True)]
    )
    @pytest.mark.parametrize("replicas", [8, 9])
    def test_so_is_that_of_cycles_that_keep_their_errors(
        self, alpha: float, gamma: float, nesterov: bool, replicas: int
    ) -> None:
        order = prime_factors(replicas)
        grouping = Grouping(replicas, max(order), seed=1, pairing="cycle")
        draw = np.random.default_rng(0)
        phi, (delta, kept) = draw.normal(size=(replicas, 4000)), np.zeros((2, replicas, 4000))
        logs = []
        for round_index in range(120):
            for group in map(list, grouping.groups(round_index)):
                combined = gamma * phi[group] + kept[group]
                size = math.sqrt(combined.var(axis=0, ddof=1).mean())
                kept[group] = 0.5 * size * draw.normal(size=combined.shape)
                pull = (combined - kept[group]).mean(axis=0) - gamma * phi[group]
                delta[group] = alpha * delta[group] + pull
                phi[group] += alpha * delta[group] + pull if nesterov else delta[group]
            phi -= phi.mean(axis=0)
            logs.append(math.log(scale := phi.std()))
            phi, delta, kept = phi / scale, delta / scale, kept / scale
        found = math.exp(2 * np.mean(logs[30:]))
        rho = cycle_spread_factor(alpha, gamma, order, 0.5, nesterov, kept=True)
        assert found == pytest.approx(rho, abs=0.02)

    @pytest.mark.parametrize("replicas", [8, 16])
    def test_fragments_of_a_round_meet_a_whole_cycle(self, replicas: int) -> None:
        digits = len(prime_factors(replicas))
        grouping = Grouping(replicas, 2, seed=0, pairing="cycle")
        for first in (0, digits):  # round of a cycle
            cycle = [grouping.group(3, first + digit) for digit in range(digits)]
            fragments = [grouping.group(3, first, fragment=fragment) for fragment in range(digits)]
            assert len(set(cycle)) == digits
            assert set(fragments) == set(cycle)
            assert grouping.group(3, first, fragment=digits) == fragments[0]
