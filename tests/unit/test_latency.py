"""The latency model: the ratios that the paper and its sources give."""

import pytest
from numpy.random import default_rng

from tools.simulate_latency import all_reduce_over_pair, diloco_over_noloco


@pytest.mark.parametrize(
    ("replicas", "jitter", "expected"),
    [(4, 0.01, 2.0), (4, 1.0, 2.2), (4, 2.5, 2.4), (16, 0.01, 4.0), (16, 1.0, 5.1), (16, 2.5, 6.8)],
)
def test_a_tree_all_reduce_against_a_pair(replicas: int, jitter: float, expected: float) -> None:
    assert all_reduce_over_pair(default_rng(0), replicas, jitter, 4000) == pytest.approx(expected, rel=0.04)


def test_even_messages_cost_a_tree_its_depth() -> None:
    assert all_reduce_over_pair(default_rng(1), 64, 0.0, 10) == pytest.approx(6.0)


@pytest.mark.parametrize(("local_steps", "expected"), [(5, 2.10), (25, 1.44)])
def test_waiting_for_all_against_waiting_for_one(local_steps: int, expected: float) -> None:
    found = diloco_over_noloco(default_rng(0), 1024, local_steps, 200)
    assert found == pytest.approx(expected, rel=0.03)


def test_with_two_replicas_both_methods_wait_alike() -> None:
    assert diloco_over_noloco(default_rng(0), 2, 5, 50) == pytest.approx(1.0)
