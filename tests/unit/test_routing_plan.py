"""Routes as theorems: balanced, invertible, computed alike by whoever asks."""

import math
from collections import Counter
from typing import Literal, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_noloco.plans.routing import Routes, Routing, RoutingInterval

Interval = Literal["round", "step", "microbatch"]
MOVING = get_args(Interval)

few = settings(max_examples=60)
replicas_ = st.integers(1, 9)
boundaries = st.integers(0, 7)
intervals = st.sampled_from(get_args(RoutingInterval))
seeds = st.integers(0, 2**32)
steps = st.integers(0, 10**7)


def hops(routes: Routes, boundary: int, microbatch: int) -> list[int]:
    """Where each replica's microbatch goes."""
    return [routes.next_replica(boundary, replica, microbatch) for replica in range(routes.replicas)]


def table(routes: Routes, microbatches: int, boundaries: int = 3) -> list[list[list[int]]]:
    """All hops of a step, by microbatch and boundary."""
    return [[hops(routes, b, m) for b in range(boundaries)] for m in range(microbatches)]


class TestBalance:
    @few
    @given(replicas=replicas_, interval=intervals, seed=seeds, step=steps, boundary=boundaries)
    def test_every_replica_receives_exactly_one(
        self, replicas: int, interval: RoutingInterval, seed: int, step: int, boundary: int
    ) -> None:
        routes = Routing(replicas, 3, seed, interval).routes(step, step // 50)
        for microbatch in range(3):
            assert sorted(hops(routes, boundary, microbatch)) == list(range(replicas))

    @few
    @given(replicas=replicas_, interval=intervals, seed=seeds, step=steps, boundary=boundaries)
    def test_previous_undoes_next(
        self, replicas: int, interval: RoutingInterval, seed: int, step: int, boundary: int
    ) -> None:
        """So that a send and its receive name each other, and a gradient comes back over the same hop."""
        routes = Routing(replicas, 2, seed, interval).routes(step, step // 50)
        for microbatch in range(2):
            for replica in range(replicas):
                there = routes.next_replica(boundary, replica, microbatch)
                assert routes.previous_replica(boundary, there, microbatch) == replica
                back = routes.previous_replica(boundary, replica, microbatch)
                assert routes.next_replica(boundary, back, microbatch) == replica


class TestOrigin:
    @few
    @given(
        replicas=replicas_,
        interval=intervals,
        seed=seeds,
        step=steps,
        stage=st.integers(0, 8),
        data=st.data(),
    )
    def test_is_where_following_the_route_began(
        self,
        replicas: int,
        interval: RoutingInterval,
        seed: int,
        step: int,
        stage: int,
        data: st.DataObject,
    ) -> None:
        routes = Routing(replicas, 4, seed, interval).routes(step, step // 50)
        start = data.draw(st.integers(0, replicas - 1))
        for microbatch in range(4):
            replica = start
            for boundary in range(stage):
                replica = routes.next_replica(boundary, replica, microbatch)
            assert routes.origin(stage, replica, microbatch) == start

    def test_at_the_first_stage_is_the_replica_itself(self) -> None:
        routes = Routing(6, 2, 3, "microbatch").routes(8, 0)
        assert [routes.origin(0, replica, 1) for replica in range(6)] == list(range(6))

    @pytest.mark.parametrize("interval", MOVING)
    def test_every_sample_is_used_once(self, interval: Interval) -> None:
        """At the last stage, the origins of a microbatch are all the replicas: none twice, none left out."""
        routes = Routing(5, 4, 3, interval).routes(8, 2)
        for microbatch in range(4):
            assert {routes.origin(3, replica, microbatch) for replica in range(5)} == set(range(5))


class TestInterval:
    """When routes are drawn anew. With 8 replicas, two draws agree by chance once in 40320 times."""

    STEPS, MICROBATCHES, LOCAL_STEPS = 12, 4, 4

    def tables(self, interval: RoutingInterval) -> list[list[list[list[int]]]]:
        routing = Routing(8, self.MICROBATCHES, 5, interval)
        return [
            table(routing.routes(step, step // self.LOCAL_STEPS), self.MICROBATCHES)
            for step in range(self.STEPS)
        ]

    def distinct(self, interval: RoutingInterval) -> int:
        """How many different sets of routes the microbatches of all steps see."""
        return len({repr(routes) for step in self.tables(interval) for routes in step})

    def test_round(self) -> None:
        tables = self.tables("round")
        assert self.distinct("round") == self.STEPS // self.LOCAL_STEPS
        for first in range(0, self.STEPS, self.LOCAL_STEPS):
            assert all(here == tables[first] for here in tables[first : first + self.LOCAL_STEPS])
        assert all(step == [step[0]] * self.MICROBATCHES for step in tables)

    def test_step(self) -> None:
        assert self.distinct("step") == self.STEPS
        assert all(step == [step[0]] * self.MICROBATCHES for step in self.tables("step"))

    def test_microbatch(self) -> None:
        assert self.distinct("microbatch") == self.STEPS * self.MICROBATCHES

    def test_off(self) -> None:
        assert self.tables("off") == [[[list(range(8))] * 3] * self.MICROBATCHES] * self.STEPS

    @pytest.mark.parametrize("interval", MOVING)
    def test_boundaries_are_drawn_apart(self, interval: Interval) -> None:
        routes = Routing(8, 1, 5, interval).routes(3, 3)
        assert len({tuple(hops(routes, boundary, 0)) for boundary in range(6)}) == 6

    def test_a_round_does_not_depend_on_the_step_nor_a_step_on_the_round(self) -> None:
        by_round, by_step = Routing(8, 2, 5, "round"), Routing(8, 2, 5, "step")
        assert by_round.routes(7, 1) == by_round.routes(9, 1) != by_round.routes(9, 2)
        assert by_step.routes(7, 1) == by_step.routes(7, 2) != by_step.routes(8, 2)


class TestStraight:
    @pytest.mark.parametrize("interval", get_args(RoutingInterval))
    def test_one_replica_has_nowhere_to_go(self, interval: RoutingInterval) -> None:
        routing = Routing(1, 2, 5, interval)
        assert routing.routes(4, 1) == routing.straight()
        assert table(routing.straight(), 2) == [[[0]] * 3] * 2

    @pytest.mark.parametrize("interval", get_args(RoutingInterval))
    def test_evaluation_never_leaves_its_replica(self, interval: RoutingInterval) -> None:
        straight = Routing(5, 2, 5, interval).straight()
        for microbatch in range(100):  # more than a step has
            assert hops(straight, 1, microbatch) == list(range(5))
            assert [straight.origin(4, replica, microbatch) for replica in range(5)] == list(range(5))
            assert [straight.previous_replica(2, replica, microbatch) for replica in range(5)] == list(
                range(5)
            )

    def test_off_is_straight(self) -> None:
        routing = Routing(5, 2, 5, "off")
        assert routing.routes(9, 3) == routing.straight()


GOLDEN = {  # [microbatch][boundary][replica]: who is next
    "round": [[[0, 3, 2, 1], [1, 3, 2, 0]], [[0, 3, 2, 1], [1, 3, 2, 0]]],
    "step": [[[1, 0, 2, 3], [3, 0, 1, 2]], [[1, 0, 2, 3], [3, 0, 1, 2]]],
    "microbatch": [[[3, 2, 1, 0], [1, 3, 2, 0]], [[3, 2, 1, 0], [2, 3, 1, 0]]],
}


class TestPurity:
    @few
    @given(replicas=replicas_, interval=intervals, seed=seeds, step=steps)
    def test_ranks_that_asked_different_questions_agree(
        self, replicas: int, interval: RoutingInterval, seed: int, step: int
    ) -> None:
        asked_much, fresh = Routing(replicas, 3, seed, interval), Routing(replicas, 3, seed, interval)
        for other in range(5):
            table(asked_much.routes(step + other, other), 3)
        assert table(asked_much.routes(step, step // 50), 3) == table(fresh.routes(step, step // 50), 3)

    @pytest.mark.parametrize("interval", MOVING)
    def test_seeds_differ(self, interval: Interval) -> None:
        assert table(Routing(8, 2, 1, interval).routes(4, 1), 2) != table(
            Routing(8, 2, 2, interval).routes(4, 1), 2
        )

    def test_golden(self) -> None:
        """A change of these numbers splits a run whose replicas were installed on different days."""
        now = {interval: table(Routing(4, 2, 1234, interval).routes(7, 3), 2, 2) for interval in MOVING}
        assert now == GOLDEN


@pytest.mark.parametrize("replicas", [2, 4])
def test_destinations_are_uniform(replicas: int) -> None:
    """A microbatch stays in its replica as often as it goes to any other: a share of 1 - 1/R leaves."""
    draws = 2_000
    routing = Routing(replicas, 1, 3, "step")
    seen = Counter(
        (replica, there)
        for step in range(draws)
        for replica, there in enumerate(hops(routing.routes(step, 0), 0, 0))
    )
    tolerance = 5 * math.sqrt(draws * (1 - 1 / replicas) / replicas)  # five standard deviations
    for replica in range(replicas):
        for there in range(replicas):
            assert seen[replica, there] == pytest.approx(draws / replicas, abs=tolerance)
