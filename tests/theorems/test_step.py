"""The three functions of the algorithm against Eq. 1-3 of the paper, computed literally in float64."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_noloco.outer.step import combine, merge, outer_step

ELEMENTS = 7
Numbers = Any  # numpy's, of shape [replicas, elements]


def equations(
    theta: Numbers, phi: Numbers, delta: Numbers, alpha: float, beta: float, gamma: float, nesterov: bool
) -> Any:
    """Return phi and delta of each member after a round, as the paper writes it: two means, no combined vector."""
    change = beta * (theta - phi).mean(0) - gamma * (phi - phi.mean(0))
    delta = alpha * delta + change
    return phi + (alpha * delta + change if nesterov else delta), delta


def close(found: Tensor, expected: Numbers) -> None:
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12, atol=1e-12)


@settings(max_examples=80, deadline=None)
@given(
    alpha=st.floats(0, 0.99),
    beta=st.floats(0.01, 2),
    gamma=st.one_of(st.none(), st.floats(0, 2)),
    nesterov=st.booleans(),
    members=st.integers(1, 5),
    overlap_steps=st.integers(0, 3),
    rounds=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_functions_are_the_equations(
    alpha: float,
    beta: float,
    gamma: float | None,
    nesterov: bool,
    members: int,
    overlap_steps: int,
    rounds: int,
    seed: int,
) -> None:
    """For random numbers of the method, group sizes and delays, over several rounds; gamma None is beta."""
    gamma, draw = beta if gamma is None else gamma, np.random.default_rng(seed)
    phi, delta = draw.normal(size=(2, members, ELEMENTS))
    theta = phi + 0.1 * draw.normal(size=phi.shape)
    found = [tuple(map(torch.tensor, state)) for state in zip(theta, phi, delta, strict=True)]
    for _ in range(rounds):
        noted, later = theta, 0.1 * draw.normal(size=(overlap_steps, *theta.shape)).sum(0)
        phi, delta = equations(theta, phi, delta, alpha, beta, gamma, nesterov)
        theta = theta + later + (phi - noted)  # without delay: phi
        mean_c = torch.stack([combine(fast, slow, beta, gamma) for fast, slow, _ in found]).mean(0)
        for member, (fast, slow, momentum) in enumerate(found):
            new_slow, momentum = outer_step(slow, momentum, mean_c, alpha, gamma, nesterov)
            fast = merge(fast + torch.tensor(later[member]), new_slow - fast)
            found[member] = (fast, new_slow, momentum)
            for ours, expected in zip(found[member], (theta, phi, delta), strict=True):
                close(ours, expected[member])
        if not overlap_steps:
            np.testing.assert_allclose(theta, phi, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("gamma", [0.7, 0.3])
def test_results_can_be_written_over_the_arguments(gamma: float, nesterov: bool) -> None:
    theta, phi, delta, mean_c = torch.randn(4, ELEMENTS, generator=torch.Generator().manual_seed(0))
    expected_c = combine(theta, phi, 0.7, gamma)
    expected = outer_step(phi, delta, mean_c, 0.5, gamma, nesterov)
    expected_theta = merge(theta, phi)
    assert merge(theta.clone(), phi, out=(out := theta.clone())) is out
    assert torch.equal(out, expected_theta)
    assert torch.equal(combine(theta, phi, 0.7, gamma, out=theta), expected_c)
    outer_step(phi, delta, mean_c, 0.5, gamma, nesterov, out=(phi, delta))
    assert torch.equal(phi, expected[0])
    assert torch.equal(delta, expected[1])
