"""A replica whose weights, gradients or losses are not finite ends before it saves or sends them."""

import math
from collections.abc import Sequence

import pytest
import torch

from megatron_noloco.outer import TorchWeights
from megatron_noloco.outer.health import Health, NotFiniteError


def health(weights: torch.Tensor | None = None) -> Health:
    return Health(TorchWeights([torch.zeros(3) if weights is None else weights]), list)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_only_weights_that_are_not_finite_end_a_replica(dtype: torch.dtype) -> None:
    """Not those whose sum is more than fp16 can hold."""
    weights = torch.full((100_000,), 3.0, dtype=dtype)
    assert health(weights).check()
    for wrong in (math.nan, math.inf):
        weights[7] = wrong
        with pytest.raises(NotFiniteError, match="weights of this replica are no longer finite"):
            health(weights).check()


def test_ten_skipped_steps_in_a_row_end_a_replica() -> None:
    watched = health()
    for skipped in [True] * 9 + [False] + [True] * 9:
        watched.after_step((), skipped)
    assert not watched.check(), "a state that would not be worth saving"
    with pytest.raises(NotFiniteError, match="the last 10 local steps were skipped"):
        watched.after_step((), True)


@pytest.mark.parametrize(
    ("skipped", "loss", "ends"), [(True, 1.0, True), (False, math.nan, True), (False, 1.0, False)]
)
def test_a_short_run_whose_steps_are_all_lost_ends(skipped: bool, loss: float, ends: bool) -> None:
    watched = health()
    watched.check_run()
    for _ in range(3):
        watched.after_step([torch.tensor(loss)], skipped)
    if ends:
        with pytest.raises(NotFiniteError, match="all 3 local steps were lost"):
            watched.check_run()
    watched.after_step([torch.tensor(1.0)], False)
    watched.check_run()


@pytest.mark.parametrize(("last", "ends"), [(math.inf, True), (math.nan, True), (1.0, False)])
def test_ten_losses_in_a_row_that_are_not_finite_end_a_replica(last: float, ends: bool) -> None:
    watched = health()
    for loss in (*[math.nan] * 9, last):
        watched.after_step([torch.tensor(2.0), torch.tensor(loss)], False)
    if ends:
        with pytest.raises(NotFiniteError, match="the losses of the last 10 local steps are not finite"):
            watched.check()
    else:
        assert watched.check()


def test_a_rank_without_losses_ends_with_the_last_stage() -> None:
    told = list[list[int]]()

    def with_last_stage(numbers: Sequence[int]) -> list[int]:
        told.append(list(numbers))
        return [1, 0]

    with pytest.raises(NotFiniteError, match="losses"):
        Health(TorchWeights([torch.zeros(3)]), with_last_stage).check()
    assert told == [[1, 10]]
