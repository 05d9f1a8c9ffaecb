"""Trajectories that other programs recorded, against our outer step: torchft's DiLoCo, and the authors' NoLoCo."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from megatron_noloco.outer.step import combine, outer_step
from megatron_noloco.plans.fragments import fragment_after
from megatron_noloco.plans.grouping import Group, Grouping
from tests.kit.fleet import Fleet

RECORDED = Path(__file__).parent / "recorded"
TORCHFT = json.loads((RECORDED / "torchft_diloco.json").read_text())["cases"]
SYNC_EVERY, FRAGMENTS, OUTER_LR = 6, 2, 2.0  # of these records
UPDATE = -2.0  # of every weight in a local step: the gradient is 2, the learning rate 1


def named(name: str) -> Any:
    return next(case for case in TORCHFT if case["name"] == name)


@pytest.mark.parametrize("case", TORCHFT[:6], ids=lambda case: case["name"])
def test_fragments_and_outer_steps_are_torchfts(case: Any) -> None:
    """Streaming DiLoCo: a fragment begins `delay` steps before its step, and is mixed with the local weights.

    torchft drops the local steps taken meanwhile (mixing 0), keeps a share, or keeps the local weights (mixing 1).
    `OuterOptimizer` keeps the local steps and moves them with the outcome; so the mixing here is the test's own.
    """
    theta, phi = torch.tensor(case["weights"][0]).double(), torch.tensor(case["slow"]["0"]).double()
    noted: dict[int, Tensor] = {}
    for done, expected in enumerate(case["weights"][1:], start=1):
        theta = theta + UPDATE
        begins = fragment_after(done + case["delay"], SYNC_EVERY, FRAGMENTS)
        if begins:
            noted[begins[1]] = combine(theta, phi, OUTER_LR, OUTER_LR)  # its mean: all replicas are equal
        ends = fragment_after(done, SYNC_EVERY, FRAGMENTS)
        if ends:
            fragment = ends[1]
            slow, _ = outer_step(phi, torch.zeros(2).double(), noted.pop(fragment), 0.0, OUTER_LR)
            phi[fragment] = slow[fragment]
            theta[fragment] = torch.lerp(slow, theta, case["mixing"])[fragment]
        assert theta.tolist() == expected
        assert phi.tolist() == case["slow"].get(str(done), phi.tolist())


def trajectory(fleet: Fleet, steps: int) -> list[list[float]]:
    """Return the weights of the first replica after each of `steps` local steps of all."""
    weights = []
    for _ in range(steps):
        fleet.step(torch.full((fleet.replicas, 2), UPDATE))
        weights.append(fleet.theta[0].tolist())
    return weights


def diloco(start: Sequence[float]) -> Fleet:
    """Return two replicas as torchft's records have them."""
    method = {"method": "diloco", "outer_momentum": 0.0, "outer_lr": OUTER_LR}
    return Fleet(
        torch.tensor([start, start], dtype=torch.float32),
        local_steps=SYNC_EVERY,
        fragments=FRAGMENTS,
        **method,
    )


def test_the_outer_optimizer_is_torchfts_diloco() -> None:
    start, *expected = named("delay 0, mixing 0")["weights"]
    assert trajectory(diloco(start), len(expected)) == expected


def test_takeover_continues_as_torchft() -> None:
    """torchft's second replica fails, comes back, and has the state of the first one from its next round on."""
    case = named("one of two fails and recovers")
    start, *expected = case["weights"]
    steps = next(step for step, weights in enumerate(case["weights"]) if weights == case["recovered"][3])
    fleet = diloco(start)
    assert trajectory(fleet, steps) == expected[:steps]
    back = diloco(start)
    back.done = steps
    back.train(fleet.theta)
    for outer, other in zip(back.outer, fleet.outer, strict=True):
        outer.restore(other.state())
    after = case["recovered"][4:]
    assert trajectory(back, len(after)) == after == expected[steps : steps + len(after)]


def test_the_outer_optimizer_is_that_of_the_authors() -> None:
    """recorded/noloco_authors.py ran their code: pairs, alpha 0.5, beta = gamma = 0.7; fp32 rounds otherwise."""
    recorded = json.loads((RECORDED / "noloco_authors.json").read_text())
    numbers, rounds = recorded["numbers"], recorded["noloco"]["rounds"]
    start = torch.tensor(recorded["noloco"]["start"])
    method = {"outer_lr": numbers["outer_lr"], "outer_momentum": numbers["outer_momentum"]}
    fleet = Fleet(start.expand(len(rounds[0]["before"]), -1), **method)
    assert all(outer.settings.gamma == outer.settings.outer_lr for outer in fleet.outer)
    for index, one in enumerate(rounds):
        groups = {member: tuple(sorted(group)) for group in one["groups"] for member in group}
        fleet.train(torch.tensor(one["before"]))
        for outer in fleet.outer:
            outer.grouping = cast(Grouping, Recorded(groups))
        fleet.exchange(index)
        torch.testing.assert_close(fleet.theta, torch.tensor(one["after"]), rtol=1e-6, atol=1e-6)


@dataclass(frozen=True)
class Recorded:
    """Groups that were recorded, in place of a plan's."""

    groups: Mapping[int, Group]

    def group(self, replica: int, *_: int) -> Group:
        return self.groups[replica]
