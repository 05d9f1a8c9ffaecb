"""The schedule of the weight decay."""

import math

import pytest

from megatron_noloco.engine.weight_decay import STYLES, WeightDecay


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(("start", "end"), [(0.1, 0.5), (0.5, 0.0)])
def test_it_goes_from_the_start_to_the_end_and_stays(style: str, start: float, end: float) -> None:
    decay = WeightDecay(start, end, style, 10)
    values = [decay.at(done) for done in range(13)]
    assert values[0] == start
    assert values[10:] == pytest.approx([end] * 3)
    assert values[5] == pytest.approx((start + end) / 2)
    assert values[:11] == sorted(values[:11], reverse=start > end)


def test_the_styles() -> None:
    assert WeightDecay(0.0, 1.0, "linear", 4).at(1) == 0.25
    assert WeightDecay(0.0, 1.0, "cosine", 4).at(1) == pytest.approx((1 - math.sqrt(0.5)) / 2)


def test_a_constant_one_is_no_schedule() -> None:
    assert WeightDecay.of({"lr": 0.1, "weight_decay": 0.1}) is None
