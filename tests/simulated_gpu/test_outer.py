"""Rounds of weights on simulated GPUs are those on CPUs, bit for bit, whatever the order of the streams."""

import itertools
from typing import Any

import pytest

from megatron_noloco.outer import vectors
from tests.simulated_gpu import Order, installed
from tests.simulated_gpu.rounds import AT_ONCE, after_rounds, differences

METHODS: dict[str, dict[str, Any]] = {
    "pairs": {},
    "without momentum": {"outer_momentum": 0.0, "outer_lr": 1.0, "consensus_weight": None},
    "a group of 4, int4": {"group_size": 4, "payload": "int4"},
    "three fragments, int8": {"fragments": 3, "payload": "int8"},
}
ALL = [
    {"group_size": group, "payload": payload, "fragments": fragments}
    for group, payload, fragments in itertools.product((2, 4), ("fp32", "int8", "int4"), (1, 3))
]
where = pytest.mark.parametrize("slow_weights", ["host", "device"])
delay = pytest.mark.parametrize("overlap_steps", [0, 2])


@pytest.fixture(autouse=True)
def several_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "_AT_ONCE", AT_ONCE)


def check(method: dict[str, Any], orders: tuple[Order, ...]) -> None:
    expected = after_rounds(None, method)
    with installed():
        for order in orders:
            assert not differences(expected, after_rounds(order, method)), order


@where
@delay
@pytest.mark.parametrize("name", METHODS)
def test_rounds_are_those_of_a_cpu(name: str, overlap_steps: int, slow_weights: str) -> None:
    method = {**METHODS[name], "overlap_steps": overlap_steps, "slow_weights": slow_weights}
    check(method, (Order.LATE, Order.SIDE_FIRST))


@pytest.mark.slow
@where
@delay
@pytest.mark.parametrize("method", ALL, ids=str)
def test_all_methods_are_those_of_a_cpu(
    method: dict[str, Any], overlap_steps: int, slow_weights: str
) -> None:
    check({**method, "overlap_steps": overlap_steps, "slow_weights": slow_weights}, tuple(Order))
