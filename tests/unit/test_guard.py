"""A vector is compared with those of past exchanges before it is used."""

import math

import pytest
import torch
from torch import Tensor

from megatron_noloco.federation.commit import Guard, PoisonedError
from megatron_noloco.outer import ExchangeReport
from megatron_noloco.outer.mean import finite_mean

LENGTH = 1000


def drawn(seed: int) -> Tensor:
    return torch.randn(LENGTH, generator=torch.Generator().manual_seed(seed))


def check(guard: Guard, mine: Tensor, theirs: Tensor) -> float:
    report = ExchangeReport((0, 1))
    finite_mean([mine, theirs], torch.empty(LENGTH), report)
    return guard.check(mine, report)


def seasoned(ratio: float, rounds: int = 10) -> Guard:
    guard = Guard()
    for number in range(rounds):
        guard.accept(check(guard, drawn(0), drawn(0) + ratio * drawn(number + 1)))
    return guard


def test_the_ratio_is_that_of_distance_and_norm() -> None:
    mine, theirs = drawn(1), drawn(2)
    expected = float((mine - theirs).norm() / mine.norm())
    assert check(Guard(), mine, theirs) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("theirs", "why"),
    [
        (1e6 * drawn(0), "absurd numbers, 1e\\+06 times this replica's norm"),
        (2.5 * drawn(0), "absurd"),
        (-1.0 * drawn(0), "absurd"),
        (drawn(9), "absurd"),
        (1e30 * drawn(0), "not finite"),
        (drawn(0).index_fill(0, torch.tensor([7]), math.nan), "not finite"),
        (drawn(0).index_fill(0, torch.tensor([7]), math.inf), "not finite"),
    ],
)
def test_poison_is_refused(theirs: Tensor, why: str) -> None:
    with pytest.raises(PoisonedError, match=why) as caught:
        check(seasoned(0.01), drawn(0), theirs)
    assert caught.value.by_partner


def test_a_replica_that_was_away_is_accepted() -> None:
    """Its distance is fifty times that of other partners."""
    assert check(seasoned(0.01), drawn(0), drawn(0) + 0.5 * drawn(9)) == pytest.approx(0.5, rel=0.1)


def test_the_first_exchange_may_be_of_weights_that_have_moved_far() -> None:
    assert check(Guard(), 0.2 * drawn(1), drawn(2)) < 10
    with pytest.raises(PoisonedError, match="absurd"):
        check(Guard(), 0.05 * drawn(1), drawn(2))


def test_the_limit_follows_partners_that_come_apart() -> None:
    guard = Guard()
    for number in range(100):
        guard.accept(check(guard, drawn(0), drawn(0) + 0.001 * 1.1**number * drawn(number + 1)))
    with pytest.raises(PoisonedError):
        check(guard, drawn(0), 1e6 * drawn(0))


def test_own_numbers_that_are_not_finite_do_not_blame_the_partner() -> None:
    mine = drawn(0).index_fill(0, torch.tensor([7]), math.nan)
    with pytest.raises(PoisonedError, match="was sent numbers that are not finite") as caught:
        check(Guard(), mine, drawn(0))
    assert not caught.value.by_partner


def test_zeros_are_compared_with_nothing() -> None:
    assert check(Guard(), torch.zeros(LENGTH), torch.zeros(LENGTH)) == 0
    assert check(Guard(), torch.zeros(LENGTH), drawn(0)) == 0
