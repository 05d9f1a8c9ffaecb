"""Connections to the next round's group: who is greeted when, and that nothing else changes."""

from typing import Any

import pytest
import torch

from megatron_noloco.outer.messages import Contacts
from megatron_noloco.plans.topology import Place
from megatron_noloco.transport.loopback import loopback_world
from tests.unit import test_overlap
from tests.unit.test_outer import Fleet, Listening
from tests.unit.test_overlap import K, Training

ROUNDS = 8


def training(replicas: int, group_size: int, lazily: bool, delay_steps: int = 0, **method: Any) -> Training:
    fleet = test_overlap.training(replicas, delay_steps, group_size, **method)
    for transport in fleet.transports:
        transport.connects_lazily = lazily
    return fleet


def greeted(fleet: Fleet) -> list[set[int]]:
    """The ranks that each rank has sent an empty message, since the last call; fails for one greeted twice."""
    found = []
    for transport in fleet.transports:
        ranks = [rank for rank, buffer in transport.sent if not len(buffer)]
        assert len(set(ranks)) == len(ranks)
        found.append(set(ranks))
        transport.sent.clear()
    return found


@pytest.mark.parametrize(("replicas", "group_size"), [(6, 2), (7, 2), (6, 3), (5, 4)])
@pytest.mark.parametrize("delay_steps", [0, 2, K])
def test_the_next_group_is_greeted_in_the_local_phase_and_once(
    replicas: int, group_size: int, delay_steps: int
) -> None:
    """The lower of two ranks greets; a replica with a bye greets nobody."""
    fleet = training(replicas, group_size, lazily=True, delay_steps=delay_steps)
    known: set[tuple[int, int]] = set()
    for round_index in range(ROUNDS):
        fleet.run(K - 1)
        pairs = {
            (low, high)
            for group in fleet.grouping.groups(round_index)
            for low in group
            for high in group
            if low < high
        }
        expected = pairs - known
        assert {(low, high) for low, ranks in enumerate(greeted(fleet)) for high in ranks} == expected
        known |= pairs
        fleet.run(1)
        assert greeted(fleet) == [set()] * replicas, "the round itself greets nobody"


@pytest.mark.parametrize(
    "method",
    [{}, {"payload": "int8"}, {"delay_steps": 2}, {"consensus_weight": 0.3}, {"fragments": 2}],
)
def test_training_and_its_bytes_are_the_same_to_the_last_bit(method: dict[str, Any]) -> None:
    fleets = [training(5, 2, lazily, **method) for lazily in (False, True)]
    steps = [fleet.run(3 * K + 2) for fleet in fleets]
    reports = [[report for step in of_fleet for ended in step for report in ended] for of_fleet in steps]
    for name in ("theta", "phi", "delta"):
        assert torch.equal(*(getattr(fleet, name) for fleet in fleets))
    sent = [[(report.exchange.group, report.exchange.bytes_sent) for report in found] for found in reports]
    assert sent[0] == sent[1]
    counts = [sum(len(transport.sent) for transport in fleet.transports) for fleet in fleets]
    assert counts[0] < counts[1]


def test_where_connections_are_there_already_nobody_is_greeted() -> None:
    fleet = training(4, 2, lazily=False)
    fleet.run(2 * K)
    assert greeted(fleet) == [set()] * 4


def test_a_partner_that_never_answers_is_not_waited_for() -> None:
    transport = Listening(loopback_world(2)[1])
    transport.connects_lazily = True
    contacts = Contacts(transport, Place(1, 2))
    contacts.open((0, 1), 0)
    for _ in range(3):
        contacts.progress()
    assert transport.sent == []
