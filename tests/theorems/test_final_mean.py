"""At their end all replicas have the same bits, whatever is lost, cut or killed meanwhile."""

import random
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_noloco.federation import final_mean as module
from megatron_noloco.federation.codes import bytes_of
from megatron_noloco.federation.end_of_run import EndOfRun, _digest, tree
from megatron_noloco.federation.final_mean import FINAL, FinalMean
from megatron_noloco.federation.members import Members
from megatron_noloco.federation.mesh import LostError, Member
from megatron_noloco.federation.movement import alone
from megatron_noloco.federation.rounds import _Doubt, is_plausible
from megatron_noloco.federation.statuses import LARGEST, FinalStatus, PeerStatus
from megatron_noloco.settings import FederationSettings, NolocoSettings
from tests.kit.memory_mesh import Message, World
from tests.kit.worlds import members_of, pause, replica_of, run_all

LENGTH, BUCKET = 64, 12
DEADLINE = 60.0
STAYS = 300.0  # a replica that has its mean
SETTINGS = NolocoSettings(local_steps=10, deadline_seconds=DEADLINE), FederationSettings()


@pytest.fixture(autouse=True)
def _few_buckets_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what is sent is released before the end."""
    monkeypatch.setattr(module, "_AHEAD", 2)


class End(NamedTuple):
    """What a replica has at its end."""

    mean: float
    group: tuple[int, ...]
    missed: str
    is_late: bool


def end(members: Members, weight: float, done: int = 100, length: int = LENGTH) -> End:
    """Come to the end, as the trainer does: wait for the others, and average."""
    replica = replica_of(members, alone(length, bucket=BUCKET), deadline=DEADLINE)
    end, found = EndOfRun(members, *SETTINGS, done, 1000), None
    while found is None:
        found = end.look()
        pause(members.mesh, 0.2)
    if not found:
        return End(weight, (members.slot,), "", True)
    mean = FinalMean(replica, end)
    mean.begin(torch.full((length,), weight), (members.slot,), FINAL, "a test")
    (piece,) = mean.finish()
    assert mean.is_late or bool((piece.mean == piece.mean[0]).all())
    return End(float(piece.mean[0]), mean.report.group, mean.report.missed, mean.is_late)


def test_what_a_round_in_doubt_has_changed_is_in_the_mean() -> None:
    """Of two rounds in doubt with another replica one counts, as that replica says at the end."""
    world = World()
    first, second = (members_of(world, slot) for slot in range(2))
    replica = replica_of(first, alone(LENGTH, bucket=BUCKET), deadline=DEADLINE)
    for number, change in ((4, 0.5), (5, 8.0)):
        replica.ledger.doubts.append(_Doubt(first.mesh, number, Member(1, 1)))
        replica.ledger.changes[number] = torch.full((LENGTH,), change)

    def one() -> Tensor:
        pause(first.mesh, 1.0)
        mean = FinalMean(replica, None)
        mean.begin(torch.ones(LENGTH), (0,), FINAL, "a test")
        return mean._vector

    def other() -> None:
        for number, word in ((4, b"+"), (5, b"gave the round up")):
            second.mesh.offer(f"round/{number}/verdict", word, Member(0, 1))
        pause(second.mesh, 10.0)

    vector, _ = run_all(world, [(first, one), (second, other)])
    assert (vector == 1.5).all()
    assert not any((replica.ledger.doubts, replica.ledger.changes, replica.ledger.late))


def at_their_end(
    world: World,
    count: int = 4,
    body: Callable[[Members], Any] | None = None,
    slot: int = 1,
    hidden: Collection[int] = (),
) -> list[Any]:
    """Let replicas with weights 1, 2, 4, 8 come to their end, and stay until the others have it.

    Args:
        body: what the replica in `slot` does instead.
    """
    members = [members_of(world, one, hidden=one in hidden) for one in range(count)]

    def one(own: Members) -> Any:
        found = end(own, float(2**own.slot)) if body is None or own.slot != slot else body(own)
        pause(own.mesh, STAYS)
        return found

    return run_all(world, [(own, partial(one, own)) for own in members])


def test_all_have_the_mean_of_all() -> None:
    assert at_their_end(World()) == [End(15 / 4, (0, 1, 2, 3), "", False)] * 4


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fault", ["kill receiver", "lose", "cut"])
def test_a_fault_at_any_message_leaves_one_model(fault: str, every: int) -> None:
    """The mean of the same replicas is the same everywhere, and only a killed replica is not in it."""
    seen: list[Message] = []
    at_their_end(World(lease=3.0, on_message=lambda world, number, message: seen.append(message)))
    assert len(seen) > 40
    for at in range(0, len(seen), every):

        def on_message(world: World, number: int, message: Message, at: int = at) -> Any:
            if number != at:
                return None
            if fault == "lose":
                return False
            if fault == "cut":
                return world.cut(message.sender, message.receiver)
            return world.kill(message.receiver)

        found = [one for one in at_their_end(World(at, lease=3.0, on_message=on_message)) if one]
        assert all(one[:2] == found[0][:2] for one in found), (at, seen[at], found)
        if fault != "kill receiver":
            assert found[0].mean == 15 / 4, (at, seen[at], found)


@pytest.mark.parametrize("seed", [0, 20, pytest.param(40, marks=pytest.mark.slow)])
def test_random_schedules_and_faults_leave_one_model(seed: int) -> None:
    """A replica that is cut from all others at once ends alone, so each has one cut at a time."""
    for one in range(seed, seed + 20):
        draws = random.Random(one)

        def on_message(world: World, number: int, message: Message, draws: random.Random = draws) -> Any:
            chance = draws.random()
            if chance < 0.06:
                return False if chance < 0.03 else draws.uniform(1, 25)
            ends, members = message[1:3], world.carriers
            if chance < 0.08 and not any(world.is_cut(end, other) for end in ends for other in members):
                world.cut(message.sender, message.receiver, draws.uniform(1, 60))
            return None

        found = [end for end in at_their_end(World(one, on_message=on_message)) if not end.is_late]
        assert len(found) >= 2
        assert len({end[:2] for end in found}) == 1, (one, found)


def test_a_slow_line_is_no_reason_to_give_up() -> None:
    """A vector takes 160 s of steady sending, the deadline of a round is 60 s."""
    world = World(rate=LENGTH * 4 / 160.0)
    assert at_their_end(world, 2) == [End(1.5, (0, 1), "", False)] * 2
    assert world.now > 300


def test_hidden_replicas_have_the_mean_by_way_of_a_third() -> None:
    found = at_their_end(World(), 3, hidden=(1, 2))
    assert [one.group for one in found] == [(0, 1, 2)] * 3
    assert {round(one.mean, 5) for one in found} == {round(7 / 3, 5)}


def test_the_tree_goes_around_whom_one_side_does_not_reach() -> None:
    def does_not_reach_2(own: Members) -> End:
        reaches = own.mesh.reaches
        own.mesh.reaches = lambda member: member.slot != 2 and reaches(member)  # type: ignore[method-assign]
        return end(own, 8.0)

    assert tree(range(4), set())[3] == 2
    found = at_their_end(World(), 4, does_not_reach_2, slot=3)
    assert found == [End(15 / 4, (0, 1, 2, 3), "", False)] * 4


def test_a_replica_that_never_ends_is_waited_for_and_named() -> None:
    def trains(members: Members) -> None:
        members.go_on(3)

    found = at_their_end(World(), 3, trains)
    assert found[0] == End(
        5 / 2, (0, 2), f"without replica 1, which began no round for {DEADLINE:g} s", False
    )
    assert found[2].mean == 5 / 2


def test_a_replica_that_ended_far_behind_is_not_in_the_mean() -> None:
    found = at_their_end(World(), 3, lambda members: end(members, 1e3, done=10))
    assert [one.mean for one in (found[0], found[2])] == [5 / 2] * 2
    assert found[1].is_late, "it takes the model of another"
    assert "ended at local step 10, more than federation.rounds_behind (3)" in found[0].missed


def test_the_lowest_slot_that_ended_far_behind_holds_nobody_up() -> None:
    world = World()
    first, second = at_their_end(world, 2, lambda own: end(own, 1.0, done=10), slot=0)
    assert first.is_late
    assert second.group == (1,)
    assert world.now < 10.0 + STAYS


@pytest.mark.parametrize("weight", [float("nan"), 1e6])
def test_a_sum_that_must_not_be_used_is_left_out(weight: float) -> None:
    found = at_their_end(World(), 3, lambda members: end(members, weight))
    assert found[0].mean == found[2].mean == 5 / 2
    assert found[0].group == (0, 2)


def test_a_hostile_child_counts_once_at_most() -> None:
    """It sends seven times its weights, of which the guard of ten norms lets some pass."""

    def lies(members: Members) -> None:
        come_to_end(members)
        mesh, root = members.mesh, Member(0, 1)
        attempt = 0
        while attempt < 3 and mesh.clock() < 900.0:  # the root may be done before
            peer = members.peer(0)
            status = FinalStatus() if peer is None else peer.status.mean
            if status.attempt > attempt:
                attempt = status.attempt
                buckets, base = torch.full((LENGTH,), 7.0).split(BUCKET), f"mean/{root}/{attempt}/"
                try:
                    for at, bucket in enumerate(buckets):
                        mesh.offer(f"{base}sum/1/{at}", bytes_of(bucket), root)
                    for at in range(len(buckets)):
                        mesh.fetch(root, f"{base}mean/1/{at}")
                    mesh.offer(f"{base}done/1", b"+")
                    return
                except LostError:
                    pass
            pause(mesh, 0.1)

    found = at_their_end(World(), 2, lies)
    assert found[0].mean in (1.0, 4.0), "a vote of one, or none"


@pytest.mark.parametrize("still", [0, 1, 3])
def test_a_member_that_stands_still_is_left_out(still: int) -> None:
    """It says that it is at its end, and does nothing else, though it answers."""
    world = World()
    found = at_their_end(world, body=come_to_end, slot=still)
    assert {round(3 * one.mean, 4) for one in found if one is not None} == {15 - 2**still}
    assert world.now < 600.0 + STAYS


def come_to_end(own: Members) -> None:
    own.go_on(9, "ended")
    own.publish_reached()


def one_of(slot: int) -> Member:
    return Member(slot, 1)


def hostile(own: Members, what: str) -> None:
    """Wait at the end of a run, and lie."""
    come_to_end(own)
    for number in range(1, 400):
        seen = max(status.mean.attempt for status in own.present().values())
        slots = sorted({own.slot, *own.present()})
        changes: dict[str, Any] = {
            "too high": {"attempt": LARGEST, "members": slots, "processes": _digest(map(one_of, slots))},
            "has a mean": {"final": f"{one_of(min(slots))}/{max(1, seen)}"},
            "all are refused": {"refused": slots},
            "refuses again and again": {"refused": slots[: number // 3]},
            "reaches nobody": {},
            "changes its mind": {"refused": slots[number % 3 :]},
            "proposes": {
                "attempt": number,
                "members": slots,
                "processes": _digest(map(one_of, slots)),
                "parents": [-1, *(len(slots) - 1) * [own.slot]],
            },
        }[what]
        reaches = {"reaches nobody": [], "changes its mind": slots[: number % 4]}.get(what, slots)
        own.change(mean=replace(own.status.mean, **changes), reaches=reaches)
        pause(own.mesh, 2.0)


@pytest.mark.parametrize("slot", [0, 1, 3])
@pytest.mark.parametrize(
    "what",
    [
        *("too high", "has a mean", "all are refused", "refuses again and again", "reaches nobody"),
        *("changes its mind", "proposes"),
    ],
)
def test_a_liar_at_the_end_leaves_one_model(what: str, slot: int) -> None:
    """Or none yet: who has no mean takes the state of a replica that has it."""
    found = at_their_end(World(), body=lambda own: hostile(own, what), slot=slot)
    honest = [one for one in found if one is not None]
    means = {round(one.mean, 4) for one in honest if not one.is_late}
    assert len(means) == 1
    assert sum(not one.is_late for one in honest) >= 2


def test_a_proposal_that_leaves_others_out_brings_no_absurd_mean() -> None:
    norm = float(LENGTH)
    assert is_plausible(norm, norm)
    assert is_plausible(norm, 0.0), "zeros are compared with nothing"
    for distance in (101 * norm, 1e60, float("inf"), float("nan")):
        assert not is_plausible(distance, norm)
    assert not is_plausible(1.0, float("nan")), "nor with numbers that are not finite"


def test_who_comes_when_all_have_their_mean_is_told_so() -> None:
    def trains_on(own: Members) -> End:
        own.go_on(-1, "training")
        pause(own.mesh, 100.0)
        return end(own, 4.0)

    found = at_their_end(World(), 3, trains_on, slot=2)
    assert [one.mean for one in found[:2]] == [1.5, 1.5]
    assert found[2].is_late or found[2].mean == 4.0


def test_who_comes_when_all_left_makes_no_mean_alone() -> None:
    """As a machine that was suspended: the run has a model already."""
    world = World()
    members = [members_of(world, slot) for slot in range(3)]

    def one(own: Members) -> End:
        if own.slot == 1:
            pause(own.mesh, 200.0)
        found = end(own, float(2**own.slot))
        pause(own.mesh, 20.0)
        own.close()
        return found

    found = run_all(world, [(own, partial(one, own)) for own in members])
    assert [one.mean for one in found] == [2.5, 2.0, 2.5]
    assert found[1].is_late


def test_the_tree_goes_around_a_pair_that_is_cut() -> None:
    members = [0, 1, 2, 3]
    assert tree(members, set()) == {0: -1, 1: 0, 2: 0, 3: 2}
    assert tree(members, {frozenset({2, 3})})[3] == 0
    assert tree(members, {frozenset({2, 3}), frozenset({0, 3})})[3] == 1
    assert tree(members, {frozenset({0, 1})})[1] == 2


@given(st.sets(st.integers(0, 40), min_size=1), st.integers(0, 99))
def test_a_tree_has_all_members_and_is_not_deep(slots: set[int], seed: int) -> None:
    order = sorted(slots)
    draws = torch.Generator().manual_seed(seed)
    missed = {
        frozenset((one, two))
        for one in order
        for two in order
        if one < two and float(torch.rand(1, generator=draws)) < 0.1
    }
    for parents in (tree(order, set()), tree(order, missed)):
        assert parents.keys() == slots

        def depth(slot: int, parents: dict[int, int] = parents) -> int:
            return 0 if parents[slot] < 0 else 1 + depth(parents[slot], parents)

        deepest = max(map(depth, order))
        assert parents is not tree(order, set()) or deepest <= len(order).bit_length()


@pytest.mark.parametrize("parents", [[-1, 0, 1, *range(2, 120)], [-1, 2, 1], [0, -1]])
def test_a_proposal_that_is_no_tree_is_left_alone(parents: list[int]) -> None:
    """A chain is too deep to be followed."""
    world = World()
    hostile, own = members_of(world, 0), members_of(world, 1)
    slots = list(range(len(parents)))
    processes = _digest(map(one_of, slots))
    proposal = FinalStatus(attempt=1, members=slots, processes=processes, parents=parents)
    hostile.mesh.publish(PeerStatus(phase="ended", mean=proposal))

    for slot in slots[2:]:
        world.join(slot, 1)
    assert own.present()[0].mean.attempt == 1
    assert EndOfRun(own, *SETTINGS, 100)._proposed(0) is None
