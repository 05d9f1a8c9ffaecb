"""The schedules of the learning rate, as functions of the local steps done."""

import math

import pytest
import torch

from megatron_noloco.engine.schedules import DECAYS, WSD, DecayType, RatioLR


def ratios(schedule: WSD, steps: int) -> list[float]:
    return [schedule.ratio(done) for done in range(steps)]


def test_wsd_warms_up_stays_and_decays() -> None:
    schedule = WSD(total_num_steps=12, warmup_num_steps=4, decay_num_steps=4, min_ratio=0.2)
    assert ratios(schedule, 14) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2])


@pytest.mark.parametrize("decay_type", DECAYS)
def test_every_decay_begins_at_the_peak_and_ends_at_the_minimum(decay_type: DecayType) -> None:
    found = ratios(WSD(10, 10, decay_type=decay_type, min_ratio=0.1), 11)
    assert found[0] == 1
    assert found[-1] == pytest.approx(0.1)
    assert found == sorted(found, reverse=True)


def test_the_decays_have_their_shapes() -> None:
    halfway = {name: WSD(8, 8, decay_type=name).ratio(2) for name in DECAYS}
    assert halfway == pytest.approx(
        {"linear": 0.75, "cosine": (1 + math.cos(math.pi / 4)) / 2, "1-sqrt": 0.5}
    )


def test_group_rates_keep_their_ratio() -> None:
    def rates(schedule: RatioLR) -> list[float]:
        schedule.step()
        return schedule.get_last_lr()

    def schedule(decay: int) -> RatioLR:
        groups = [{"params": [torch.zeros(1)], "lr": lr} for lr in (0.02, 0.001)]
        return RatioLR(torch.optim.SGD(groups), WSD(10, decay))

    before = schedule(5)
    for _ in range(6):
        last = rates(before)
    assert last == pytest.approx([0.02 * 0.8, 0.001 * 0.8])
    after = schedule(10)  # resumed with another decay
    after.step(before.last_batch_iteration)
    assert rates(after) == pytest.approx([0.02 * 0.3, 0.001 * 0.3])
