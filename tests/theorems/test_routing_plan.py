"""Routes as theorems: balanced, invertible, the same on every rank that computes them."""

import math
from collections import Counter
from typing import Literal, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_noloco.plans.routing import Routes, Routing, RoutingInterval

Interval = Literal["round", "microbatch"]
MOVING = get_args(Interval)

few = settings(max_examples=60)
replicas_ = st.integers(1, 9)
intervals = st.sampled_from(get_args(RoutingInterval))
seeds = st.integers(0, 2**32)
steps = st.integers(0, 10**7)


def hops(routes: Routes, boundary: int, microbatch: int) -> list[int]:
    """Where each replica's microbatch goes."""
    return [routes.next_replica(boundary, replica, microbatch) for replica in range(routes.replicas)]


def table(routes: Routes, microbatches: int, boundaries: int = 3) -> list[list[list[int]]]:
    """All hops of a step, by microbatch and boundary."""
    return [[hops(routes, b, m) for b in range(boundaries)] for m in range(microbatches)]


@few
@given(replicas=replicas_, interval=intervals, seed=seeds, step=steps, boundary=st.integers(0, 7))
def test_each_replica_receives_one_microbatch_per_hop(
    replicas: int, interval: RoutingInterval, seed: int, step: int, boundary: int
) -> None:
    routes = Routing(replicas, 3, seed, interval).routes(step, step // 50)
    for microbatch in range(3):
        there = hops(routes, boundary, microbatch)
        assert sorted(there) == list(range(replicas))
        back = [routes.previous_replica(boundary, replica, microbatch) for replica in there]
        assert back == list(range(replicas))


@few
@given(replicas=replicas_, interval=intervals, seed=seeds, step=steps, stage=st.integers(0, 8))
def test_the_origin_is_where_following_the_route_began(
    replicas: int, interval: RoutingInterval, seed: int, step: int, stage: int
) -> None:
    """From every replica: so at each stage the origins of a microbatch are all the replicas, each once."""
    routes = Routing(replicas, 4, seed, interval).routes(step, step // 50)
    for microbatch in range(4):
        for start in range(replicas):
            replica = start
            for boundary in range(stage):
                replica = routes.next_replica(boundary, replica, microbatch)
            assert routes.origin(stage, replica, microbatch) == start


class TestInterval:
    """When routes are drawn again. With 8 replicas, two draws agree by chance once in 40320 times."""

    STEPS, MICROBATCHES, LOCAL_STEPS = 12, 4, 4

    def tables(self, interval: RoutingInterval) -> list[list[list[list[int]]]]:
        routing = Routing(8, self.MICROBATCHES, 5, interval)
        return [
            table(routing.routes(step, step // self.LOCAL_STEPS), self.MICROBATCHES)
            for step in range(self.STEPS)
        ]

    def test_round(self) -> None:
        tables = self.tables("round")
        first = tables[:: self.LOCAL_STEPS]
        assert tables == [drawn for drawn in first for _ in range(self.LOCAL_STEPS)]
        assert all(step == [step[0]] * self.MICROBATCHES for step in tables)
        assert len({repr(step[0]) for step in first}) == self.STEPS // self.LOCAL_STEPS

    def test_microbatch(self) -> None:
        drawn = {repr(routes) for step in self.tables("microbatch") for routes in step}
        assert len(drawn) == self.STEPS * self.MICROBATCHES
        routing = Routing(8, 2, 5, "microbatch")
        assert routing.routes(7, 1) == routing.routes(7, 2), "whatever the round"

    @pytest.mark.parametrize("interval", MOVING)
    def test_boundaries_and_seeds_are_drawn_apart(self, interval: Interval) -> None:
        routes = Routing(8, 1, 5, interval).routes(3, 3)
        drawn = [hops(routes, boundary, 0) for boundary in range(6)]
        drawn.append(hops(Routing(8, 1, 6, interval).routes(3, 3), 0, 0))
        assert len(set(map(tuple, drawn))) == 7


@pytest.mark.parametrize("interval", get_args(RoutingInterval))
def test_off_one_replica_and_evaluation_never_leave_a_replica(interval: RoutingInterval) -> None:
    straight = Routing(5, 2, 5, interval).straight()
    for microbatch in range(100):  # more than a step has
        assert hops(straight, 1, microbatch) == list(range(5))
        assert [straight.origin(4, replica, microbatch) for replica in range(5)] == list(range(5))
    alone, off = Routing(1, 2, 5, interval), Routing(5, 2, 5, "off")
    assert alone.routes(4, 1) == alone.straight()
    assert off.routes(9, 3) == off.straight()


GOLDEN = {  # [microbatch][boundary][replica]: who is next
    "round": [[[0, 3, 2, 1], [1, 3, 2, 0]], [[0, 3, 2, 1], [1, 3, 2, 0]]],
    "microbatch": [[[3, 2, 1, 0], [1, 3, 2, 0]], [[3, 2, 1, 0], [2, 3, 1, 0]]],
}


def test_golden() -> None:
    """A change of these numbers splits a run whose replicas were installed on different days."""
    now = {interval: table(Routing(4, 2, 1234, interval).routes(7, 3), 2, 2) for interval in MOVING}
    assert now == GOLDEN


@few
@given(replicas=replicas_, interval=intervals, seed=seeds, step=steps)
def test_ranks_that_asked_different_questions_agree(
    replicas: int, interval: RoutingInterval, seed: int, step: int
) -> None:
    asked_much, fresh = Routing(replicas, 3, seed, interval), Routing(replicas, 3, seed, interval)
    for other in range(5):
        table(asked_much.routes(step + other, other), 3)
    assert table(asked_much.routes(step, step // 50), 3) == table(fresh.routes(step, step // 50), 3)


@pytest.mark.parametrize("replicas", [2, 4])
def test_destinations_are_uniform(replicas: int) -> None:
    """A microbatch stays in its replica as often as it goes to any other: a share of 1 - 1/R leaves."""
    draws = 2_000
    routing = Routing(replicas, 1, 3, "microbatch")
    seen = Counter(
        (replica, there)
        for step in range(draws)
        for replica, there in enumerate(hops(routing.routes(step, 0), 0, 0))
    )
    tolerance = 5 * math.sqrt(draws * (1 - 1 / replicas) / replicas)  # five standard deviations
    for replica in range(replicas):
        for there in range(replicas):
            assert seen[replica, there] == pytest.approx(draws / replicas, abs=tolerance)
