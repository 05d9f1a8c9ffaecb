"""One model at the end of a federation."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_noloco.federation.final import FinalMean, parent_of
from megatron_noloco.federation.keeping_up import FINAL, KeepingUp
from megatron_noloco.federation.transport import FederationTransport
from megatron_noloco.outer import ExchangeReport
from megatron_noloco.plans.topology import Place
from megatron_noloco.settings import FederationSettings, NolocoSettings
from megatron_noloco.transport.protocol import ExchangeTimeoutError, Message
from tests.unit.federated import SECONDS, connected, members, until

LOST = "replica {} was lost, or its numbers are not finite"


@given(st.sets(st.integers(0, 300), min_size=1))
def test_every_member_hangs_on_the_root_by_few_others(members: set[int]) -> None:
    for slot in members:
        above, steps = slot, 0
        while (parent := parent_of(above, members)) is not None:
            assert parent in members
            assert parent < above
            above, steps = parent, steps + 1
        assert above == min(members)
        assert steps <= 9


def final(rank: FederationTransport, seconds: float = SECONDS) -> FinalMean:
    noloco = NolocoSettings(local_steps=2, deadline_seconds=seconds)
    return FinalMean(rank, KeepingUp(rank, noloco, FederationSettings(slots=8), steps=10), seconds)


def averaged(made: FinalMean, vector: Tensor, members: tuple[int, ...]) -> tuple[Tensor, ExchangeReport]:
    made.begin(vector, members, FINAL, "the end")
    ((_, _, mean),) = made.finish()
    return mean, made.report


def together(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def ends(ranks: list[FederationTransport], weights: list[Tensor]) -> list[tuple[Tensor, ExchangeReport]]:
    def end(at: int) -> tuple[Tensor, ExchangeReport]:
        made = final(ranks[at])
        return averaged(made, weights[at], made.members())

    return together(*(lambda at=at: end(at) for at in range(len(ranks))))


def vectors(count: int) -> list[Tensor]:
    return [torch.randn(1000, generator=torch.Generator().manual_seed(seed)) for seed in range(count)]


@pytest.mark.parametrize("listens", ["hph", "hphp", "phhh"])
def test_those_that_no_other_can_connect_to_get_the_same_mean(tmp_path: Path, listens: str) -> None:
    """They do not see each other."""
    weights = vectors(len(listens))
    with members(tmp_path, listens) as ranks:
        others = {"p": len(listens) - 1, "h": listens.count("p")}
        until(lambda: [len(rank.present()) for rank in ranks] == [others[kind] for kind in listens])
        found = ends(ranks, weights)
    for one, report in found:
        assert torch.equal(one, found[0][0])
        torch.testing.assert_close(one, torch.stack(weights).mean(0))
        assert not report.missed


@pytest.mark.parametrize("count", [2, 3, 5, 7])
def test_all_have_the_same_bits_of_the_mean(tmp_path: Path, count: int) -> None:
    """Also with empty slots, and where the number of replicas is no power of two."""
    weights = vectors(count)
    with connected(tmp_path, count, slots=8) as ranks:
        found = ends(ranks, weights)
    mean = torch.stack(weights).mean(0)
    for (one, report), own in zip(found, weights, strict=True):
        assert torch.equal(one, found[0][0])
        torch.testing.assert_close(one, mean)
        assert report.group == tuple(range(count))
        assert not report.missed
        assert report.standard_deviation == pytest.approx(float((own - mean).square().mean().sqrt()))


def test_one_that_comes_late_is_waited_for_as_long_as_it_trains(tmp_path: Path) -> None:
    with connected(tmp_path, 3) as ranks, ThreadPoolExecutor(1) as pool:
        members = pool.submit(final(ranks[0], seconds=0.5).members)
        ranks[1].partners.leave_out(FINAL - 1)
        for number in range(4):  # longer than the deadline
            ranks[2].partners.begin(number, None)
            until(lambda number=number: ranks[0].begun()[2] == number)
            with pytest.raises(TimeoutError):
                members.exception(timeout=0.3)
        assert members.result(SECONDS) == (0, 1), "it trains no more, and is left out"


def ends_without(folder: Path, lost: int, weights: list[Tensor]) -> list[tuple[Tensor, ExchangeReport]]:
    """What all but one of the replicas get, which is gone when they have agreed who averages."""
    members = tuple(range(len(weights)))
    with connected(folder, len(weights)) as ranks:
        for rank in ranks:
            rank.partners.leave_out(FINAL - 1)
        ranks[lost].close()
        calls = (
            lambda at=at: averaged(final(ranks[at]), weights[at], members) for at in members if at != lost
        )
        return together(*calls)


def test_a_child_that_is_lost_is_left_out_and_reported(tmp_path: Path) -> None:
    weights = vectors(4)
    found = ends_without(tmp_path, 3, weights)
    assert parent_of(3, {0, 1, 2, 3}) == 2
    for mean, _ in found:
        assert torch.equal(mean, found[0][0])
        torch.testing.assert_close(mean, torch.stack(weights[:3]).mean(0))
    assert [report.missed for _, report in found] == ["", "", LOST.format(3)]


def test_one_that_loses_its_parent_keeps_what_it_has(tmp_path: Path) -> None:
    weights = vectors(4)
    found = ends_without(tmp_path, 0, weights)
    assert torch.equal(found[0][0], weights[1])
    assert torch.equal(found[1][0], found[2][0])
    torch.testing.assert_close(found[1][0], (weights[2] + weights[3]) / 2)
    assert [report.missed for _, report in found] == [LOST.format(0), LOST.format(0), ""]


@pytest.mark.parametrize("wrong", [math.nan, 1e6])
def test_absurd_numbers_are_left_out(tmp_path: Path, wrong: float) -> None:
    weights = vectors(3)
    weights[1] = weights[1] * wrong
    with connected(tmp_path, 3) as ranks:
        found = ends(ranks, weights)
    assert torch.equal(found[0][0], found[2][0])
    torch.testing.assert_close(found[0][0], (weights[0] + weights[2]) / 2)
    assert [report.missed for _, report in found][::2] == [LOST.format(1), ""]


class Late:
    """A transport where only one slot is in time; chunks of the others come later, into the memory given them."""

    def __init__(self, place: Place, in_time: int) -> None:
        self.place, self.partners = place, Mock(agree=lambda votes: votes)
        self._in_time, self._given_up = in_time, list[Tensor]()
        self.sent: list[tuple[Tensor, Tensor]] = []  # what was posted, and how it was then

    def post(self, sends: list[Message], receives: list[Message], tag: int) -> Mock:
        late = ExchangeTimeoutError(0, tag, 1.0)
        self.sent += [(message.buffer, message.buffer.clone()) for message in sends]

        def arrivals(_: float) -> list[Any]:
            if receives[0].rank != self._in_time:
                self._given_up += [message.buffer for message in receives]
                raise late
            for message, value in zip(receives, (3.0, 1.0), strict=True):
                message.buffer.fill_(value)
            for buffer in self._given_up:
                buffer.fill_(1e3)
            return []

        return Mock(arrivals=arrivals, finish=Mock(side_effect=late))


def test_what_comes_after_its_deadline_changes_no_mean() -> None:
    transport = Late(Place(0, 4), in_time=2)
    made = FinalMean(transport, Mock(), 1.0)  # type: ignore[arg-type]
    mean, report = averaged(made, torch.full((10,), 5.0), (0, 1, 2))
    assert (mean == 4.0).all()
    assert report.missed == LOST.format(1)


def test_a_parent_that_asks_late_gets_the_sum() -> None:
    transport = Late(Place(2, 4), in_time=3)
    made = FinalMean(transport, Mock(), 1.0)  # type: ignore[arg-type]
    mean, report = averaged(made, torch.full((10,), 5.0), (0, 2, 3))
    assert (mean == 4.0).all()
    assert report.missed == LOST.format(0)
    assert all(torch.equal(*buffer_and_then) for buffer_and_then in transport.sent)
