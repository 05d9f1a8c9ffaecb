"""The mean over replicas of a federation at the end."""

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron_noloco.federation.commit import committing
from megatron_noloco.federation.control import Hello
from megatron_noloco.federation.keeping_up import AT_ITS_END, FINAL, AtEnd, KeepingUp
from megatron_noloco.federation.peers import Peers
from megatron_noloco.federation.tree_mean import Tree, TreeMean, parent_of
from torch import Tensor

from megatron_noloco.federation.movement import SLAB, alone
from megatron_noloco.federation.network import FederationTransport, Network
from megatron_noloco.federation.rendezvous import SharedFolder
from megatron_noloco.outer import ExchangeReport
from megatron_noloco.plans.grouping import Group
from megatron_noloco.plans.topology import Place
from megatron_noloco.settings import FederationSettings, NolocoSettings
from megatron_noloco.transport.interface import Message
from tests.harness import free_port
from tests.unit.federated import (
    RUN,
    SECONDS,
    Wire,
    ask_to_stop,
    connected,
    learn,
    lose,
    members,
    opened,
    transport,
    until,
)

ELEMENTS = 1000
ENDED = AT_ITS_END + 5  # after 10 local steps, with a round every 2


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


def keeping_up(rank: FederationTransport, seconds: float = SECONDS) -> KeepingUp:
    noloco = NolocoSettings(local_steps=2, deadline_seconds=seconds)
    return KeepingUp(rank, noloco, FederationSettings(), steps=10)


def averaged(mean: TreeMean, vector: Tensor, members: Group, number: int) -> tuple[Tensor, ExchangeReport]:
    mean.begin(vector, members, number, "a test")
    ((_, _, found),) = mean.finish()
    return found, mean.report


def final(
    rank: FederationTransport, vector: Tensor, members: Group | None = None, done: int = 10
) -> tuple[Tensor, ExchangeReport]:
    own, end = keeping_up(rank), AtEnd(members or (), {}, {})
    if members is None:
        end = wait_at_end(own, done)
    mean = tree_mean(Tree(rank, SECONDS, own.is_at_its_end, end.left_out, end.links), len(vector))
    return averaged(mean, vector, end.group, FINAL)


def wait_at_end(own: KeepingUp, done: int = 10) -> AtEnd:
    waiting = own.at_end(done)
    while (end := waiting.look()) is None:
        time.sleep(0.01)
    return end


def tree_mean(tree: Tree, length: int, slab: int = SLAB) -> TreeMean:
    """Of a replica of one rank."""
    movement = alone(length, slab=slab)
    return TreeMean(committing(movement, None, tree.transport.place, NolocoSettings()), tree)


def together(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def ends(ranks: list[FederationTransport], weights: list[Tensor]) -> list[tuple[Tensor, ExchangeReport]]:
    return together(*(lambda at=at: final(ranks[at], weights[at]) for at in range(len(ranks))))


def vectors(count: int, elements: int = ELEMENTS) -> list[Tensor]:
    return [torch.randn(elements, generator=torch.Generator().manual_seed(seed)) for seed in range(count)]


def all_have(found: Sequence[tuple[Tensor, ExchangeReport]], weights: Sequence[Tensor]) -> None:
    """All have the mean of these weights, to the last bit alike."""
    for mean, _ in found:
        assert torch.equal(mean, found[0][0])
    torch.testing.assert_close(found[0][0], torch.stack(list(weights)).mean(0))


# At the end


@pytest.mark.parametrize("listens", ["hph", "hphp", "phhh"])
def test_those_that_no_other_can_connect_to_get_the_same_mean(tmp_path: Path, listens: str) -> None:
    """They do not see each other."""
    weights = vectors(len(listens))
    with members(tmp_path, listens) as ranks:
        others = {"p": len(listens) - 1, "h": listens.count("p")}
        until(lambda: [len(rank.present()) for rank in ranks] == [others[kind] for kind in listens])
        found = ends(ranks, weights)
    all_have(found, weights)
    assert not any(report.missed for _, report in found)


@pytest.mark.parametrize(
    ("count", "apart"),
    [
        (3, "01"),
        (3, "12"),
        (4, "23"),
        (4, "03 13"),  # the third reaches the last one, and no other does
        (4, "01 23"),  # each lacks a connection
        (6, "12 14 34 05"),
        (7, "06 15 24 35"),
    ],
)
def test_all_that_anybody_reaches_are_in_the_mean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, apart: str
) -> None:
    """Some pairs cannot connect to each other; all listen."""
    pairs, fits = [{*map(int, pair)} for pair in apart.split()], Peers._fits

    def connects(self: Peers, hello: Hello, asked: bool = False) -> bool:
        return {self.member.slot, hello.member.slot} not in pairs and fits(self, hello, asked)

    monkeypatch.setattr(Peers, "_fits", connects)
    weights, slots = vectors(count), range(count)
    with ExitStack() as stack:
        ranks = [stack.enter_context(transport(tmp_path, slot, count)) for slot in slots]
        others = [
            [other for other in slots if other != slot and {slot, other} not in pairs] for slot in slots
        ]
        until(lambda: [rank.present() for rank in ranks] == others)
        found = ends(ranks, weights)
    all_have(found, weights)
    assert not any(report.missed for _, report in found)


@pytest.mark.parametrize("count", [2, 3, 5, 7])
def test_all_have_the_same_bits_of_the_mean(tmp_path: Path, count: int) -> None:
    """Also with empty slots, and where the number of replicas is no power of two."""
    weights = vectors(count)
    with connected(tmp_path, count, slots=8) as ranks:
        found = ends(ranks, weights)
    all_have(found, weights)
    for (mean, report), own in zip(found, weights, strict=True):
        assert report.group == tuple(range(count))
        assert not report.missed
        assert report.standard_deviation == pytest.approx(float((own - mean).square().mean().sqrt()))


@pytest.mark.parametrize("slots", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_one_that_ended_far_behind_gets_the_mean_and_is_not_in_it(
    tmp_path: Path, slots: tuple[int, int, int]
) -> None:
    """Wherever it is in the tree; 3 rounds behind it is in it, 4 rounds behind it is not."""
    weights, steps = vectors(3), dict(zip(slots, (18, 12, 10), strict=True))
    with connected(tmp_path, 3) as ranks:
        found = together(*(lambda at=at: final(ranks[at], weights[at], done=steps[at]) for at in range(3)))
    all_have(found, [weights[at] for at in sorted(slots[:2])])
    why = "ended at local step 10, more than federation.rounds_behind (3) rounds before the furthest at 18"
    for _, report in found:
        assert report.group == tuple(sorted(slots[:2]))
        assert report.missed == f"without replica {slots[2]}, which {why}"


def test_one_that_comes_late_is_waited_for_as_long_as_it_trains(tmp_path: Path) -> None:
    with connected(tmp_path, 3) as ranks, ThreadPoolExecutor(1) as pool:
        members = pool.submit(wait_at_end, keeping_up(ranks[0], seconds=2.0))
        ranks[1].partners.leave_out(ENDED)
        for number in range(4):  # longer than the deadline
            ranks[2].partners.begin(number, None)
            until(lambda number=number: ranks[0].begun()[2] == number)
            with pytest.raises(TimeoutError):
                members.exception(timeout=0.6)
        assert members.result(SECONDS)[:2] == ((0, 1), {2: "began no round for 2 s"})


def test_one_that_is_to_stop_while_sums_travel_keeps_its_weights(tmp_path: Path) -> None:
    """Its children are at their end, too, and send nothing."""
    weights = vectors(3)
    with connected(tmp_path, 3) as ranks, ThreadPoolExecutor(1) as pool:
        for rank in ranks:
            rank.partners.leave_out(FINAL - 1)
        until(lambda: all([*rank.begun().values()] == [FINAL - 1] * 2 for rank in ranks))
        ending = pool.submit(final, ranks[0], weights[0], (0, 1, 2))
        ask_to_stop(ranks[0])
        found, report = ending.result(SECONDS / 2)
    assert torch.equal(found, weights[0])
    assert report.group == (0,)


def test_one_that_has_left_is_not_waited_for(tmp_path: Path) -> None:
    with connected(tmp_path, 2) as ranks, ThreadPoolExecutor(1) as pool:
        members = pool.submit(wait_at_end, keeping_up(ranks[0]))
        until(lambda: ranks[1].begun() == {0: ENDED})
        keeping_up(ranks[1]).leave()
        assert members.result(SECONDS / 2)[:2] == ((0,), {1: "has left"})


def test_one_whose_connection_is_lost_for_a_moment_is_waited_for(tmp_path: Path) -> None:
    with connected(tmp_path, 3) as ranks, ThreadPoolExecutor(1) as pool:
        ranks[1].partners.leave_out(ENDED)
        until(lambda: ranks[0].begun() == {1: ENDED, 2: -1})
        members = pool.submit(wait_at_end, keeping_up(ranks[0]))
        until(lambda: ranks[1].begun()[0] == ENDED)
        ranks[1]._closing.set()  # it does not look for the address
        ranks[1]._looking.join()
        directory = ranks[1].service.peers.directory
        directory.addresses = {slot: one for slot, one in directory.addresses.items() if slot}
        lose(ranks[1], 0)
        until(lambda: ranks[0].present() == [2])
        ranks[2].partners.leave_out(ENDED)
        until(lambda: ranks[0].begun() == {2: ENDED})
        with pytest.raises(TimeoutError):
            members.exception(timeout=0.6)
        learn(ranks[1], {0: ranks[0].address})
        assert members.result(SECONDS)[:2] == ((0, 1, 2), {})


def test_a_connection_that_is_lost_while_sums_travel_is_no_loss(tmp_path: Path) -> None:
    """Again and again; one side notices it later than the other."""
    weights, port = vectors(2, elements=4_000_000), free_port()
    hidden = Network(SharedFolder(tmp_path, RUN), RUN, None)
    listens = replace(hidden, listen=f"tcp://127.0.0.1:{port}")
    with (
        closing(Wire(to=port)) as wire,
        opened(replace(listens, advertise=f"tcp://127.0.0.1:{wire.port}"), hidden) as ranks,
    ):
        until(lambda: [rank.present() for rank in ranks] == [[1], [0]])
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(ends, ranks, weights)
            for _ in range(4):
                time.sleep(0.15)
                wire.cut()
            means = found.result(5 * SECONDS)  # on a busy machine
    all_have(means, weights)


def ends_without(folder: Path, lost: int, weights: list[Tensor]) -> list[tuple[Tensor, ExchangeReport]]:
    """What all but one of the replicas get, which has left when they have agreed who averages."""
    slots = tuple(range(len(weights)))
    with connected(folder, len(weights)) as ranks:
        for rank in ranks:
            rank.partners.leave_out(ENDED)
        others = [at for at in slots if at != lost]
        until(lambda: all([*ranks[at].begun().values()].count(ENDED) == len(others) for at in others))
        keeping_up(ranks[lost]).leave()
        until(lambda: all(ranks[at].begun()[lost] > FINAL for at in others))
        ranks[lost].close()
        return together(*(lambda at=at: final(ranks[at], weights[at], slots) for at in others))


def test_a_child_that_is_lost_is_left_out_and_reported(tmp_path: Path) -> None:
    weights = vectors(4)
    found = ends_without(tmp_path, 3, weights)
    assert parent_of(3, {0, 1, 2, 3}) == 2
    all_have(found, weights[:3])
    assert [report.missed for _, report in found] == [
        "without replica 3, which was lost, or is not finite"
    ] * 3


def test_one_that_loses_its_parent_keeps_what_it_has(tmp_path: Path) -> None:
    weights = vectors(4)
    found = ends_without(tmp_path, 0, weights)
    assert torch.equal(found[0][0], weights[1])
    all_have(found[1:], weights[2:])
    assert [report.group for _, report in found] == [(1,), (2, 3), (2, 3)]
    lost = [f"without replica {slot}, which was lost, or is not finite" for slot in (0, 2, 3)]
    assert found[0][1].missed == "; ".join(lost)


@pytest.mark.parametrize("wrong", [math.nan, 1e6])
def test_absurd_numbers_are_left_out(tmp_path: Path, wrong: float) -> None:
    weights = vectors(3)
    weights[1] = weights[1] * wrong
    with connected(tmp_path, 3) as ranks:
        found = ends(ranks, weights)
    all_have([found[0], found[2]], [weights[0], weights[2]])
    assert [report.group for _, report in found][::2] == [(0, 2), (0, 2)]


class Late:
    """A transport where only one slot is in time; what the others send comes later, into the memory given them."""

    def __init__(self, place: Place, in_time: int) -> None:
        self.place, self.partners = place, Mock(hidden=lambda: set(), stopped=lambda: False)
        self._in_time, self._given_up = in_time, list[Tensor]()
        self.sent: list[tuple[Tensor, Tensor]] = []  # what was posted, and how it was then

    def post(self, sends: list[Message], receives: list[Message], tag: int) -> Mock:
        self.sent += [(message.buffer, message.buffer.clone()) for message in sends]
        for message in receives:
            if message.rank != self._in_time:
                self._given_up.append(message.buffer)
                continue
            if message.buffer.dtype == torch.uint8:
                message.buffer[self._in_time] = 1
            else:
                message.buffer.fill_(3.0)
            for late in self._given_up:
                late.fill_(100)
        comes = bool(receives) and receives[0].rank == self._in_time
        return Mock(arrived=lambda: [], done=lambda: comes)


def late(own: int, in_time: int, members: Group) -> tuple[Late, Tensor, ExchangeReport]:
    transport: Any = Late(Place(own, 4), in_time)
    mean = tree_mean(Tree(transport, 0.05, lambda rank: True), 10)
    return transport, *averaged(mean, torch.full((10,), 5.0), members, FINAL)


def test_what_comes_after_its_deadline_changes_no_mean() -> None:
    _, mean, report = late(0, 2, (0, 1, 2))
    assert (mean == 4.0).all()
    assert report.group == (0, 2)


def test_a_parent_that_asks_late_gets_the_sum() -> None:
    transport, mean, report = late(2, 3, (0, 2, 3))
    assert (mean == 4.0).all()
    assert report.group == (2, 3)
    assert all(torch.equal(*buffer_and_then) for buffer_and_then in transport.sent)


class Hasty(Late):
    """A transport where the parent sends the mean between two looks, and then leaves at once."""

    def __init__(self, place: Place) -> None:
        super().__init__(place, in_time=0)
        self.looks = 0

    def may_come(self, rank: int) -> bool:
        self.looks += 1
        return self.looks == 1

    def post(self, sends: list[Message], receives: list[Message], tag: int) -> Mock:
        super().post(sends, receives, tag)
        return Mock(arrived=lambda: [], done=lambda: bool(receives) and self.looks == 2)


def test_a_parent_that_leaves_as_soon_as_it_has_sent_the_mean_is_not_lost() -> None:
    transport: Any = Hasty(Place(1, 2))
    mean = tree_mean(Tree(transport, SECONDS, transport.may_come), 10)
    found, report = averaged(mean, torch.full((10,), 5.0), (0, 1), FINAL)
    assert (found == 3.0).all()
    assert report.group == (0,)
