"""A round between two jobs counts for both or for neither, whatever is lost, late or killed."""

import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_noloco.federation.members import Members
from megatron_noloco.federation.mesh import Member, Patience
from megatron_noloco.federation.movement import alone
from megatron_noloco.federation.rounds import (
    ImplausibleError,
    Replica,
    _Doubt,
    check_plausible,
    late_change,
)
from megatron_noloco.outer import ExchangeReport, OuterOptimizer, TorchWeights
from megatron_noloco.settings import PAPER, NolocoSettings
from tests.kit.fleet import noise
from tests.kit.memory_mesh import Message, World
from tests.kit.worlds import (
    BUCKET,
    DEADLINE,
    LENGTH,
    Used,
    mean_of,
    members_of,
    pause,
    replica_of,
    run_all,
    take_part,
    vectors,
)

Body = Callable[[int, Replica], Any]


def both(world: World, body: Body, payload: str = "fp32", **options: Any) -> list[Any]:
    """Run a function on two replicas that see each other."""
    members = [members_of(world, slot) for slot in range(2)]
    replicas = [replica_of(one, payload=payload, **options) for one in members]
    return run_all(world, [(one, partial(body, one.slot, replicas[one.slot])) for one in members])


def rounds(own: list[Tensor], numbers: range = range(1)) -> Body:
    return lambda slot, replica: [take_part(replica, own[slot], number) for number in numbers]


def only(found: list[list[Used]]) -> list[Used]:
    return [one for (one,) in found]


@pytest.mark.parametrize("payload", ["fp32", "int8", "int4", "int3"])
def test_without_faults_rounds_count_and_give_the_mean(payload: str) -> None:
    own = vectors(length=5000)
    members = alone(5000, bucket=1024)
    for used in zip(*both(World(), rounds(own, range(3)), payload, movement=members), strict=True):
        assert all(one.counts for one in used)
        assert torch.allclose(used[0].vector + used[1].vector, own[0] + own[1], atol=1e-5), "the sum is kept"
        for one, mine in zip(used, own, strict=True):
            assert (one.vector - mean_of(own)).norm() < (mine - mean_of(own)).norm()
            assert one.report.squared_deviation > 0


@pytest.mark.parametrize(
    ("factor", "why"), [(math.nan, "sent numbers that are not finite"), (1e4, "sent absurd numbers")]
)
def test_a_vector_that_must_not_be_used_is_skipped_on_both_sides(factor: float, why: str) -> None:
    own = vectors()
    own[1] = own[1] * factor
    first, second = both(World(), rounds(own, range(2)))
    assert not any(one.counts or one.report.in_doubt for one in (*first, *second))
    assert first[0].report.missed.startswith(f"replica 1 {why}")
    assert second[0].report.missed.startswith(
        ("replica 0 does not accept the mean", "replica 0 was sent numbers", "replica 0 sent absurd numbers")
    )
    assert torch.equal(first[0].vector, own[0])
    assert why in first[1].report.missed, "it is avoided for some rounds"


def test_replicas_of_unlike_sizes_skip_the_round() -> None:
    world = World()
    sizes = [LENGTH, LENGTH + 1]
    members = [members_of(world, slot) for slot in range(2)]
    replicas = [replica_of(one, alone(size, bucket=BUCKET)) for one, size in zip(members, sizes, strict=True)]
    bodies = [
        (one, partial(take_part, replica, torch.ones(size), 0))
        for one, replica, size in zip(members, replicas, sizes, strict=True)
    ]
    found = run_all(world, bodies)
    assert not any(one.counts or one.report.in_doubt for one in found)


def test_an_absent_partner_is_awaited_until_the_deadline() -> None:
    def body(slot: int, replica: Replica) -> Any:
        mesh = replica.partners.members.mesh  # type: ignore[union-attr]
        if slot == 1:
            return pause(mesh, 100.0)
        found, ends = [], []
        for number in range(2):
            found.append(take_part(replica, vectors()[0], number, phase=30.0))
            ends.append(mesh.clock())
        return found, ends

    (first, second), ends = both(World(), body)[0]
    assert 30.0 + DEADLINE <= ends[0] < 31.0 + DEADLINE
    assert first.report.missed.startswith("replica 1 sends nothing")
    assert not first.report.in_doubt
    assert second.report.missed == "replica 1 missed its last deadline"
    assert ends[1] - ends[0] == pytest.approx(30.0)


def test_a_round_ends_at_once_where_a_carrier_has_failed() -> None:
    def body(slot: int, replica: Replica) -> Any:
        mesh = replica.partners.members.mesh  # type: ignore[union-attr]
        if slot == 1:
            pause(mesh, 5.0)
            world.carriers[Member(0, 1)].failure = ValueError("a bug")
            return None
        with pytest.raises(RuntimeError, match="has failed: ValueError"):
            take_part(replica, vectors()[0], 0)
        return mesh.clock()

    world = World()
    assert both(world, body)[0] < 6.0 < DEADLINE


def test_a_partner_is_waited_for_as_long_as_it_took_lately() -> None:
    """The second replica begins 6 s after the first, then never: it is waited for twice as long."""

    def body(slot: int, replica: Replica) -> Any:
        mesh = replica.partners.members.mesh  # type: ignore[union-attr]
        for number in range(3):
            if slot == 1:
                pause(mesh, 6.0)
            assert take_part(replica, vectors()[slot], number).counts
        if slot == 1:
            return pause(mesh, 500.0)
        began = mesh.clock()
        take_part(replica, vectors()[0], 3)
        return mesh.clock() - began

    assert 11.0 < both(World(), body, deadline=100.0, shortest=1.0)[0] < 14.0


def test_a_partner_that_skips_the_round_is_not_waited_for() -> None:
    def body(slot: int, replica: Replica) -> Any:
        members: Members = replica.partners.members  # type: ignore[union-attr]
        if slot == 1:
            pause(members.mesh, 2.0)
            members.begin_round(3, None)
            return pause(members.mesh, 20.0)
        found = take_part(replica, vectors()[0], 3)
        return found, members.mesh.clock()

    found, ended = both(World(), body)[0]
    assert ended < 3.5
    assert found.report.missed == "replica 1 has no part in this round"


def test_a_partner_that_withdraws_its_vector_gave_up() -> None:
    """Its word may come later than the refusal of a bucket."""

    def body(slot: int, replica: Replica) -> Any:
        members: Members = replica.partners.members  # type: ignore[union-attr]
        if slot == 0:
            members.begin_round(0, 1)
            members.mesh.offers.withdraw("round/0/b/")
            return pause(members.mesh, 60.0)
        return take_part(replica, vectors()[1], 0).report.missed

    assert both(World(), body)[1] == "replica 0 gave the round up"


def test_a_slow_link_costs_no_round() -> None:
    """A round takes 30 s of steady sending, three times the patience without a byte."""
    own = vectors()
    world = World(rate=LENGTH * 4 / 30.0)
    used = only(both(world, rounds(own), deadline=100.0))
    assert all(one.counts for one in used)
    assert world.now > 25.0


def test_patience_counts_from_the_beginning_of_a_wait() -> None:
    """A leader that gathers its own bucket for 20 s does not hold that against its partner."""
    world = World()
    giver, taker = (members_of(world, slot) for slot in range(2))

    def give() -> None:
        for number in range(2):
            giver.mesh.offer(f"piece/{number}", b"x", taker.mesh.me)
            pause(giver.mesh, 25.0)

    def take() -> list[bytes]:
        patience, found = Patience(taker.mesh, giver.mesh.me), []
        for piece in taker.mesh.fetch_all(["piece/0", "piece/1"], 1, patience, True):
            found.append(bytes(piece))
            pause(taker.mesh, 20.0)
        return found

    assert run_all(world, [(giver, give), (taker, take)])[1] == [b"x", b"x"]


def test_a_round_ends_by_its_deadline_though_bytes_come() -> None:
    used = only(both(World(rate=LENGTH * 4 / 60.0), rounds(vectors()), deadline=20.0))
    assert not any(one.counts for one in used)


class Faulty:
    """One round of two replicas in a world, later rounds in which a doubt is settled, and what each then has.

    Each replica adds up what it has used beyond its own vectors: so a round that counts adds the change to the
    mean, now or later.
    """

    def __init__(self, payload: str = "fp32", **world: Any) -> None:
        self.world, self.own = World(**world), vectors()
        self.in_doubt = 0
        self.moved = both(self.world, self._body, payload)

    def _body(self, slot: int, replica: Replica) -> Tensor:
        members: Members = replica.partners.members  # type: ignore[union-attr]
        first = take_part(replica, self.own[slot], 5)
        self.in_doubt += first.report.in_doubt
        moved = first.vector - self.own[slot]
        for number in range(6, 40):  # the other one has no part in these
            members.begin_round(number, None)
            pause(members.mesh, 10.0)
            exchange = replica.exchange()
            exchange.begin(late := torch.zeros(LENGTH), (), number, "a test")
            list(exchange.finish())
            moved += late
        assert not replica.ledger.doubts or members.mesh.world.dead  # type: ignore[attr-defined]
        return moved

    def check(self) -> bool | None:
        """Return whether the round counted; None where one of them was killed."""
        if any(one is None for one in self.moved):
            return None
        change = mean_of(self.own) - self.own[0]
        counts = [not torch.equal(moved, torch.zeros(LENGTH)) for moved in self.moved]
        assert counts[0] == counts[1], "a round counts for one side alone"
        if counts[0]:
            assert torch.allclose(self.moved[0], change, atol=2e-3)
        assert torch.allclose(self.moved[0] + self.moved[1], torch.zeros(LENGTH), atol=1e-6), (
            "the sum is kept"
        )
        return counts[0]


FAULTS: dict[str, Callable[[World, Message], Any]] = {
    "lose": lambda world, message: False,
    "late": lambda world, message: 25.0,
    "cut for 20 s": lambda world, message: world.cut(message.sender, message.receiver, 20.0),
    "cut for 200 s": lambda world, message: world.cut(message.sender, message.receiver, 200.0),
    "kill sender": lambda world, message: world.kill(message.sender),
    "kill receiver": lambda world, message: world.kill(message.receiver),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    ("payload", "every"), [("fp32", 1), ("int8", 4), pytest.param("int8", 1, marks=pytest.mark.slow)]
)
def test_a_fault_at_any_message_splits_no_verdict(payload: str, every: int, fault: str) -> None:
    seen: list[Message] = []
    Faulty(payload, on_message=lambda world, number, message: seen.append(message))
    assert len(seen) >= 10
    verdicts, in_doubt = set(), 0
    for at in range(0, len(seen), every):

        def on_message(world: World, number: int, message: Message, at: int = at) -> Any:
            return FAULTS[fault](world, message) if number == at else None

        faulty = Faulty(payload, seed=at, on_message=on_message)
        verdicts.add(faulty.check())
        in_doubt += faulty.in_doubt
    if every == 1:  # each kind of end is among those of all messages
        assert True in verdicts or fault.startswith("kill")
        assert not fault.startswith("cut") or False in verdicts or in_doubt


@pytest.mark.parametrize(
    "seed", [0, 20, 40, *(pytest.param(one, marks=pytest.mark.slow) for one in range(60, 200, 20))]
)
def test_random_schedules_and_faults_split_no_verdict(seed: int) -> None:
    for one in range(seed, seed + 20):
        draws = random.Random(one)

        def on_message(world: World, number: int, message: Message, draws: random.Random = draws) -> Any:
            chance = draws.random()
            if chance < 0.06:
                return False if chance < 0.03 else draws.uniform(1, 40)
            if chance < 0.08:
                world.cut(message.sender, message.receiver, draws.uniform(1, 60))
            return None

        Faulty(seed=one, on_message=on_message).check()


@pytest.mark.parametrize(
    ("norm", "deviation", "poisoned", "why"),
    [
        (1.0, 0.0, 0, ""),
        (1.0, 49.9, 0, ""),  # just below ten norms
        (0.0, 1e9, 0, ""),  # zeros are compared with nothing
        (1.0, 50.5, 0, "absurd"),
        (1.0, 0.0, 1, "sent numbers that are not finite"),
        (math.inf, 0.0, 1, "was sent numbers that are not finite"),
        (math.nan, 0.0, 0, "was sent numbers that are not finite"),
    ],
)
def test_a_mean_is_plausible_near_the_own_vector(
    norm: float, deviation: float, poisoned: int, why: str
) -> None:
    report = ExchangeReport((0, 1), squared_deviation=deviation, poisoned_elements=poisoned)
    check = partial(check_plausible, norm, report)
    if not why:
        check()
        return
    with pytest.raises(ImplausibleError, match=why) as refused:
        check()
    assert refused.value.is_ours == why.startswith("was sent")


def test_a_doubt_waits_for_the_end_of_its_round() -> None:
    """With overlapped fragments the next round may begin between the end of a round's thread and `finish`."""
    world = World()
    own = members_of(world, 0)
    replica, begun = replica_of(own), vectors()[0]
    replica.ledger.doubts.append(_Doubt(own.mesh, 4, Member(1, 1)))
    run_all(world, [(own, lambda: pause(own.mesh, 4000.0))])
    run_all(world, [(own, lambda: take_part(replica, begun, 5))])
    assert [doubt.number for doubt in replica.ledger.doubts] == [4]
    replica.ledger.changes[4] = torch.ones(LENGTH)
    run_all(world, [(own, lambda: take_part(replica, begun, 6))])
    assert not replica.ledger.doubts, "its partner was away for more than an hour"


def test_a_doubt_keeps_its_partner_away() -> None:
    """So at most one vector is kept for it."""
    world = World()
    own = members_of(world, 0)
    members_of(world, 1).go_on(4)
    replica = replica_of(own)
    replica.ledger.doubts.append(_Doubt(own.mesh, 4, Member(1, 1)))
    replica.ledger.changes[4] = torch.ones(LENGTH)
    used = run_all(world, [(own, lambda: take_part(replica, vectors()[0], 5))])[0]
    assert used.report.missed == "replica 1 has not said how an earlier round has ended"


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_late_word_before_a_leave_moves_weights_as_a_round(nesterov: bool) -> None:
    """A mean that comes apart from its round leaves slow weights and momentum where one that comes in it does."""
    settings = NolocoSettings(**PAPER | {"local_steps": 1, "outer_nesterov": nesterov})
    change, found = noise(LENGTH, seed=1), list[list[Tensor]]()
    for is_late in (False, True):
        world = World()
        replica, weights = replica_of(members_of(world, 0)), TorchWeights([noise(LENGTH, seed=2)])
        outer = OuterOptimizer(weights, None, replica.place, settings, 1, replica)
        replica.ledger.late |= {} if is_late else {0: change.clone()}
        run_all(world, [(replica.partners.members, partial(outer.run_round, 0))])  # type: ignore[union-attr]
        if is_late:
            replica.ledger.late[0] = change.clone()
            late = late_change(replica, LENGTH)
            assert late is not None
            outer.add_late(late)
        assert late_change(replica, LENGTH) is None
        assert outer.momentum is not None
        found.append([outer.slow_weights.clone(), outer.momentum.clone(), weights.read()])
    for in_round, later in zip(*found, strict=True):
        assert torch.allclose(in_round, later, atol=1e-6)


def test_a_round_in_doubt_leaves_the_mean_where_it_would_be() -> None:
    """Theorem 3 with a late word: the mean of the weights comes to what it is without the fault.

    The verdict of one round is lost for 30 s. Both replicas add the same updates in both runs, then rounds without
    updates follow, in which the momentum ends.
    """

    def run(is_lost: bool) -> tuple[Tensor, int]:
        def on_message(world: World, number: int, message: Message) -> Any:
            is_verdict = message.kind == "answer" and message.name == "round/2/verdict"
            if is_lost and is_verdict and world.now < 100.0:
                world.cut(message.sender, message.receiver, 12.0)
            return None

        world, in_doubt = World(on_message=on_message), list[bool]()
        members = [members_of(world, slot) for slot in range(2)]

        def train(own: Members) -> Tensor:
            replica, weights = replica_of(own), TorchWeights([torch.zeros(LENGTH)])
            settings = NolocoSettings(**PAPER | {"local_steps": 1, "deadline_seconds": DEADLINE})
            outer = OuterOptimizer(weights, None, replica.place, settings, 1, replica)
            for done in range(1, 40):
                if done < 9:
                    (part,) = weights.parts()
                    part += noise(LENGTH, seed=10 * done + own.slot)
                pause(own.mesh, 5.0)
                in_doubt.extend(report.exchange.in_doubt for report in outer.after_local_step(done))
            return outer.slow_weights.clone()

        found = run_all(world, [(own, partial(train, own)) for own in members])
        return mean_of(found), sum(in_doubt)

    (expected, no_doubts), (found, doubts) = run(False), run(True)
    assert (no_doubts, doubts) == (0, 1)
    assert torch.allclose(found, expected, atol=1e-4)
