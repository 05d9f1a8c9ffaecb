"""What the outer optimizer keeps: memory from round to round, checkpoints, and an evaluation's slow weights."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_noloco.config import Known, facts_in_words
from megatron_noloco.outer import Exchange, NoRounds, OuterOptimizer, RoundReport, TorchWeights
from megatron_noloco.outer.payload import BLOCK
from megatron_noloco.outer.vectors import BUCKET
from megatron_noloco.plans.topology import Topology
from megatron_noloco.settings import NolocoSettings
from tests.kit.configs import config
from tests.kit.fleet import ELEMENTS, Fleet, K, assert_close, assert_equal, fleet_of


def resumed(fleet: Fleet, moved: bool = False, **method: Any) -> Fleet:
    """Return another process with what a checkpoint of `fleet` holds now."""
    other = fleet_of(fleet.replicas, fleet.grouping.group_size, **method)
    other.train(fleet.theta)
    for outer, state in zip(other.outer, fleet.states(), strict=True):
        outer.restore(state, moved)
    other.done = fleet.done
    return other


def corrections(fleet: Fleet) -> Tensor:
    return torch.stack([state["correction"] for state in fleet.states()])


def figures(steps: list[list[list[RoundReport]]]) -> list[str]:
    """Return the reports without their times."""
    reports = [report for step in steps for of_replica in step for report in of_replica]
    exchanges = [replace(report.exchange, seconds=0.0, wait_seconds=0.0) for report in reports]
    return [
        repr(replace(report, pause_seconds=0.0, exchange=exchange))
        for report, exchange in zip(reports, exchanges, strict=True)
    ]


@pytest.mark.parametrize("saved", range(K, 2 * K + 1))
@pytest.mark.parametrize(
    ("group_size", "overlap_steps", "fragments", "payload"),
    [
        (2, 0, 3, "fp32"),
        (2, 2, 1, "int4"),
        (3, 0, 1, "int4"),
        (3, 2, 3, "int4"),
        (2, 2, 1, "fp32"),
        (2, K, 1, "fp32"),
        (2, K, 3, "int4"),
    ],
)
def test_a_resume_continues_bit_for_bit_from_any_step(
    saved: int, group_size: int, overlap_steps: int, fragments: int, payload: str
) -> None:
    """The rounds that were under way are reported as they would have been."""
    elements = 4 * BLOCK if payload == "int4" else ELEMENTS
    method = {"overlap_steps": overlap_steps, "fragments": fragments, "payload": payload}
    fleet = fleet_of(4, group_size, elements, **method)
    fleet.run(saved)
    assert bool(fleet.rounding.any()) == (group_size > 2)
    other = resumed(fleet, elements=elements, **method)
    expected, found = fleet.run(3 * K - saved), other.run(3 * K - saved)
    fleet.wait()
    other.wait()
    assert_equal(fleet, other)
    assert figures(found) == figures(expected)


@pytest.mark.parametrize("fragments", [1, 3])
@pytest.mark.parametrize("overlap_steps", [0, 1, K])
def test_checkpoint_holds_unmerged_corrections(fragments: int, overlap_steps: int) -> None:
    """Resumed without rounds, they are merged at once."""
    fleet = fleet_of(2, fragments=fragments, overlap_steps=overlap_steps)
    for _ in range(2 * K + 1):
        fleet.run(1)
        under_way = len(fleet.outer[0]._under_way)
        assert under_way <= (fragments if overlap_steps == K else 1)
        state, _ = fleet.states()
        assert len(state.get("delayed_rounds", [])) == under_way
        parameter = fleet.theta[0].clone()
        NoRounds(TorchWeights([parameter])).restore(state)
        assert torch.equal(parameter, fleet.theta[0] + state.get("correction", torch.zeros(())))
        moved = int((parameter != fleet.theta[0]).sum())
        assert (moved > 0) == (under_way > 0)
        if under_way == fragments:
            assert moved == ELEMENTS


@pytest.mark.parametrize(
    ("before", "after", "moved", "at_once"),
    [
        ({"overlap_steps": 3}, {"local_steps": 2}, False, True),
        ({"overlap_steps": 3}, {"local_steps": 2, "overlap_steps": 1}, False, True),
        ({"overlap_steps": K, "fragments": 3}, {"overlap_steps": K, "fragments": 1}, False, True),
        ({"overlap_steps": K, "fragments": 3}, {"overlap_steps": K, "fragments": 2}, False, True),
        ({"overlap_steps": K, "fragments": 3}, {"overlap_steps": K, "fragments": 4}, False, True),
        ({"overlap_steps": K, "fragments": 3}, {"overlap_steps": K, "fragments": 3}, True, True),
        ({"overlap_steps": K, "fragments": 3}, {"overlap_steps": 1, "fragments": 3}, False, False),
        ({"overlap_steps": 3}, {"overlap_steps": 0}, False, False),
        ({"overlap_steps": 3}, {"overlap_steps": 3}, True, False),
    ],
)
def test_new_schedule_merges_corrections_at_once(
    before: dict[str, Any], after: dict[str, Any], moved: bool, at_once: bool
) -> None:
    """With another delay, they are merged at the step that was planned."""
    fleet = fleet_of(4, **before)
    fleet.run(2 * K)
    other = resumed(fleet, moved, **after)
    assert torch.equal(other.phi, fleet.phi)
    assert torch.equal(other.delta, fleet.delta)
    assert_close(other.theta, fleet.theta + corrections(fleet) * at_once)
    assert bool(corrections(fleet).count_nonzero())
    reported = [report.round_index for step in other.run(2 * K) for report in step[0]]
    assert reported.count(1) == (0 if at_once else len(fleet.outer[0]._under_way))


def evaluate(outer: OuterOptimizer) -> None:
    before = outer.weights.read()
    with outer.evaluating() as slow, outer.weights.writing() as write:
        write(0, slow)
    assert torch.equal(outer.weights.read(), before)


@pytest.mark.parametrize(("group_size", "fragments"), [(3, 1), (2, 3)])
def test_arriving_early_changes_nothing(group_size: int, fragments: int) -> None:
    """To evaluate, save or ask for progress, each at every step of a phase, leaves every bit as it would be."""
    plain, disturbed = (fleet_of(4, group_size, overlap_steps=3, fragments=fragments) for _ in range(2))
    plain.run(3 * K)
    for done in range(3 * K):
        disturbed.run(1)
        disturbed.each([evaluate, OuterOptimizer.state, OuterOptimizer.progress][done % 3])
    plain.wait()
    disturbed.wait()
    assert_equal(plain, disturbed)


@pytest.mark.parametrize("payload", ["fp32", "int8"])
def test_a_replica_that_restores_ends_what_its_partner_waits_for(payload: str) -> None:
    """Also an exchange of several messages, one after another."""
    fleet = fleet_of(2, overlap_steps=2, payload=payload)
    before = fleet.states()
    fleet.run(K)
    fleet.each(lambda outer: outer.restore(before[0]) if outer.place.replica == 0 else outer.wait())
    fleet.outer[1].restore(before[1])
    assert not any(reports for step in fleet.run(K) for reports in step), "the round is not used"


def test_without_rounds_the_weights_are_all_there_is() -> None:
    parameter = torch.arange(4.0)
    alone = NoRounds(TorchWeights([parameter]))
    assert [alone.after_local_step(done) for done in range(1, 200)] == [[]] * 199
    with alone.evaluating() as slow:
        parameter.zero_()
        assert slow.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert parameter.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert {name: tensor.tolist() for name, tensor in alone.state().items()} == {"slow_weights": [0, 1, 2, 3]}


# Memory


@pytest.mark.parametrize(
    ("group_size", "method"),
    [
        (2, {}),
        (3, {}),
        (2, {"overlap_steps": 2}),
        (2, {"overlap_steps": 3, "fragments": 3}),
        (2, {"overlap_steps": 3, "fragments": 3, "payload": "int8"}),
        *((n, {"payload": f"int{bits}"}) for n in (2, 3) for bits in (8, 4, 3)),
    ],
)
def test_nothing_is_allocated_from_round_to_round(group_size: int, method: dict[str, Any]) -> None:
    fleet = fleet_of(group_size, group_size, elements=3000, **method)
    fleet.run(3 * K)
    places = []
    for _ in range(3):
        fleet.run(K)
        places.append(sorted(vector.data_ptr() for vector in (*fleet.memory, *fleet.messages)))
    assert places[0] == places[1] == places[2]


@pytest.mark.parametrize(
    ("method", "at_a_time", "total", "part"),
    [
        ({}, 1, "12", "slow weights 4, outer momentum 4, combined vector 4"),
        ({"overlap_steps": 2}, 1, "16", ""),
        ({"fragments": K}, 1, "9", ""),
        ({"fragments": K, "overlap_steps": 1}, 1, "10", ""),
        ({"fragments": K, "overlap_steps": 2}, 2, "12", ""),
        ({"fragments": K, "overlap_steps": K}, 4, "16", ""),
        ({"payload": "int8"}, 1, "12", ""),
        ({"payload": "int4"}, 1, "12", ""),
    ],
)
def test_the_banner_has_the_bytes_of_the_outer_state(
    method: dict[str, Any], at_a_time: int, total: str, part: str
) -> None:
    fleet = fleet_of(2, elements=20 * BLOCK, **method)
    fleet.run(3 * K)
    held = sum(vector.nbytes for vector in fleet.memory) / (2 * 20 * BLOCK)
    assert f"{held:.3g}" == total
    line = outer_state(fleet.settings, 2)
    assert line.startswith(f"{total} bytes per parameter (")
    assert part in line
    in_groups = outer_state(fleet.settings.replace(group_size=4), 4)
    assert "at most 128 MiB to receive in" in in_groups
    assert (f"for each of {at_a_time} rounds" in in_groups) == (at_a_time > 1)
    assert ("rounding errors 4, " in in_groups) == (fleet.settings.payload == "int4")
    assert "to receive in" not in outer_state(fleet.settings, 1)


def outer_state(settings: NolocoSettings, replicas: int) -> str:
    """Return what the banner says of the outer state."""
    run = config(noloco=settings.model_dump())
    return facts_in_words(Known(run, Topology(replicas)))["outer state"]


@pytest.mark.parametrize("payload", ["fp32", "int8", "int4"])
@pytest.mark.parametrize("members", [2, 4])
def test_messages_take_the_memory_of_a_window(
    members: int, payload: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the vector is."""
    monkeypatch.setattr(Exchange, "bucket", BLOCK)
    fleet = fleet_of(members, members, elements=40 * BLOCK, payload=payload)
    fleet.run(K)
    of_rank = sum(buffer.nbytes for buffer in fleet.messages) / members
    assert of_rank * BUCKET / BLOCK <= 128 * 2**20
