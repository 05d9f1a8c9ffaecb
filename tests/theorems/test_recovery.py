"""A state is recovered as a whole or not at all, whatever is lost meanwhile, by any number of takers."""

import json
from collections.abc import Callable, Collection, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_noloco.federation.gather import Gather
from megatron_noloco.federation.members import Members
from megatron_noloco.federation.mesh import Member
from megatron_noloco.federation.movement import alone
from megatron_noloco.federation.recovery import Offer, Recovery, States, _pieces, furthest
from megatron_noloco.federation.states import NotTakenError, State
from megatron_noloco.federation.statuses import FinalStatus
from tests.kit.fleet import noise
from tests.kit.layouts import MOST_RANKS, Layout, holdings_of, movements, scattered, size_of, two_layouts
from tests.kit.memory_mesh import Message, World
from tests.kit.worlds import members_of, pause, replica_of, run_all, take_part

LENGTH, BUCKET = 100, 20
REST = bytes(range(200))
FACTS = {"who": "a test"}
NAMES = ["fast_weights", "slow_weights"]
BYTES = 2 * 4 * LENGTH + len(REST)
PHASE = 2.0  # between two boundaries


def vector(name: str, done: int) -> Tensor:
    return noise(LENGTH, seed=len(name)) + done


class Kept:
    """The state of a job of one rank: vectors that follow from the local step."""

    def __init__(self, facts: Mapping[str, Any] = FACTS, fault: Exception | None = None) -> None:
        self.facts, self.fault = dict(facts), fault
        self.copied, self.used = list[int](), list[State]()

    def copy(self, done: int) -> State:
        if self.fault is not None:
            raise self.fault
        self.copied.append(done)
        return State(done, self.facts, {name: vector(name, done) for name in NAMES}, REST)

    def allocate(self, facts: Mapping[str, Any], names: Collection[str]) -> dict[str, Tensor]:
        if facts != FACTS:
            raise NotTakenError("its facts are others")
        return {name: torch.zeros(LENGTH) for name in names}

    def load(self, state: State) -> None:
        assert (state.facts, state.rest) == (FACTS, REST)
        for name in NAMES:
            assert torch.equal(state.vectors[name], vector(name, state.step))
        self.used.append(state)


def states_of(members: Members) -> States:
    states = States(members)
    states.movement = alone(LENGTH, bucket=BUCKET)
    return states


def gives(members: Members, kept: Kept, since: int, seconds: float = 300.0) -> States:
    """Train from a local step on."""
    states, done = states_of(members), since
    states.can_give(since)
    while members.mesh.clock() < seconds:
        if wanted := states.wanted(done):
            states.give(kept, done, wanted)
        pause(members.mesh, PHASE)
        done += 1
    return states


class Outcome(NamedTuple):
    """What a replica has recovered, and the lines about states that it has not."""

    taken: Recovery | None
    kept: Kept
    lines: list[str]
    ended: float


def takes(members: Members, least: int = 1, wait: float = 5.0) -> Outcome:
    kept, lines = Kept(), list[str]()
    pause(members.mesh, wait)
    taken = states_of(members).recover(kept, least, lines.append)
    lines = [line.removeprefix("the state of replica ") for line in lines]
    return Outcome(taken, kept, lines, members.mesh.clock())


def run_givers(
    world: World, givers: list[Callable[[Members], Any]], takers: int = 1, **options: Any
) -> list[Outcome]:
    members = [members_of(world, slot) for slot in range(len(givers) + takers)]
    bodies: list[Any] = [
        (own, lambda own=own, give=give: give(own)) for own, give in zip(members, givers, strict=False)
    ]
    bodies += [(own, lambda own=own: takes(own, **options)) for own in members[len(givers) :]]
    return run_all(world, bodies)[len(givers) :]


def trainer(since: int, kept: Kept | None = None) -> Callable[[Members], Any]:
    return lambda members: gives(members, kept or Kept(), since)


def test_the_furthest_gives_its_state() -> None:
    (found,) = run_givers(World(), [trainer(7), trainer(900), trainer(80)])
    assert found.taken is not None
    assert found.taken.slot == 1
    assert found.taken.bytes == BYTES
    assert [state.step for state in found.kept.used] == [found.taken.step]
    assert found.lines == []


def test_a_final_model_is_taken_before_other_states() -> None:
    """Another replica that is late as well has a state after as many local steps, or after more."""

    def has_final(members: Members) -> States:
        members.change(mean=FinalStatus(final="0.1/1"))
        return gives(members, Kept(), 7)

    (found,) = run_givers(World(), [trainer(900), has_final])
    assert found.taken is not None
    assert found.taken.slot == 1


def test_takers_that_ask_together_get_one_copy_each_in_turn() -> None:
    """The line takes 120 s for all six, twelve times the patience without a byte."""
    kept = Kept()
    found = run_givers(World(rate=6 * BYTES / 120.0), [trainer(7, kept)], takers=6)
    assert all(one.kept.used and not one.lines for one in found)
    assert len(kept.copied) == 1


@pytest.mark.parametrize("piece", ["offer", "0", "4"])
@pytest.mark.parametrize("seconds", [8.0, 40.0])
def test_a_cut_line_is_waited_for_and_nothing_starts_over(seconds: float, piece: str) -> None:
    kept, cuts = Kept(), list[int]()

    def on_message(world: World, number: int, message: Message) -> None:
        if message.kind == "answer" and message.name.endswith(f"/{piece}") and not cuts:
            cuts.append(number)
            world.cut(message.sender, message.receiver, seconds)

    (found,) = run_givers(World(on_message=on_message), [trainer(7, kept)])
    assert cuts
    assert found.kept.used
    assert found.lines == []
    assert len(kept.copied) == 1


@pytest.mark.parametrize(("fault", "seconds"), [("leaves", 15.0), ("is replaced", 30.0), ("is killed", 90.0)])
def test_a_giver_that_is_gone_holds_its_taker_a_minute(fault: str, seconds: float) -> None:
    """One that is killed may come back within a minute; one that leaves, or that was started again, does not."""
    faults = list[float]()

    def on_message(world: World, number: int, message: Message) -> None:
        if message.kind == "answer" and message.name.endswith("/4") and not faults:
            faults.append(world.now)
            if fault == "leaves":
                world.at(0.0, world.carriers[message.sender].close)
                return
            world.kill(message.sender)
            if fault == "is replaced":
                world.at(10.0, lambda: members_of(world, 0, incarnation=2))

    (found,) = run_givers(World(on_message=on_message), [trainer(900), trainer(7)])
    assert found.taken is not None
    assert found.taken.slot == 1
    assert found.ended < faults[0] + seconds


def test_a_restarted_taker_waits_for_no_earlier_copy() -> None:
    found = list[tuple[float, Outcome]]()

    def on_message(world: World, number: int, message: Message) -> None:
        if message.kind == "answer" and message.name.endswith("/4") and not world.dead:
            world.kill(message.receiver)
            world.at(12.0, lambda: begin_again(world))

    def begin_again(world: World) -> None:
        own, began = members_of(world, 1, incarnation=2), world.now
        world.spawn(own.mesh.me, lambda: found.append((began, takes(own))))

    run_givers(World(on_message=on_message), [trainer(7)])
    ((began, outcome),) = found
    assert outcome.kept.used
    assert outcome.ended < began + 15.0


@pytest.mark.parametrize("fault", ["lose", "kill giver", "kill taker"])
def test_a_fault_at_any_message_harms_no_other(fault: str) -> None:
    """Of two takers the second gets a state, from the second giver where the first is killed."""
    seen: list[Message] = []
    run_givers(
        World(on_message=lambda world, number, message: seen.append(message)), [trainer(900), trainer(7)], 2
    )
    assert len(seen) > 30
    for at in range(0, len(seen), 3):

        def on_message(world: World, number: int, message: Message, at: int = at) -> Any:
            if number == at:
                if fault == "lose":
                    return False
                world.kill(Member(0, 1) if fault == "kill giver" else Member(2, 1))
            return None

        found = run_givers(World(at, lease=3.0, on_message=on_message), [trainer(900), trainer(7)], 2)
        taken = [one for one in found if one is not None]
        assert len(taken) == (1 if fault == "kill taker" else 2)
        assert all(len(one.kept.used) == 1 for one in taken), (at, seen[at], found)


def offers(content: bytes) -> Callable[[Members], Any]:
    """A hostile member that says it is far ahead."""

    def body(members: Members) -> None:
        members.step = 5000
        members.change()
        members.mesh.offer(f"state/{Member(2, 1)}/offer", content)
        pause(members.mesh, 300.0)

    return body


def offer(**changes: Any) -> bytes:
    content = {"base": "0/", "step": 5000, "facts": FACTS, "vectors": NAMES, "rest": 200}
    return json.dumps(content | changes).encode()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "cannot give its state"),
        (b"\xff", "what it offers is no state"),
        (offer(rest=2**40), "what it offers is no state"),
        (offer(vectors=["weights"] * 65), "what it offers is no state"),
        (offer(step=2**60), "what it offers is no state"),
        (offer(base="../"), "what it offers is no state"),
        (offer(step=3), "it is at local step 3 by now"),
        (offer(facts={}, rest=0), "its facts are others"),
    ],
)
def test_a_hostile_offer_is_named_and_the_next_replica_asked(content: bytes, why: str) -> None:
    (found,) = run_givers(World(), [offers(content), trainer(900)], least=800)
    (line,) = found.lines
    assert line.startswith(f"0 was not taken over: {why}")
    assert found.taken is not None
    assert found.taken.slot == 1


def says_only(members: Members) -> None:
    """Say that it has a state, and give none."""
    members.step = 5000
    members.change()
    pause(members.mesh, 4000.0)


def trickles(members: Members) -> None:
    """Offer a state, of which bytes come all the time, and never a piece."""
    members.step = 5000
    members.change()
    members.mesh.offer(f"state/{Member(2, 1)}/offer", offer())
    carriers = members.mesh.world.carriers  # type: ignore[attr-defined]
    for _ in range(800):
        carriers[Member(2, 1)].mesh.note_bytes(members.mesh.me)
        pause(members.mesh, 5.0)


@pytest.mark.parametrize(
    ("giver", "least", "most"),
    [(says_only, 60.0, 70.0), (trickles, 120.0, 130.0)],
    ids=["silent", "trickles"],
)
def test_a_lying_giver_holds_no_newcomer_up(
    giver: Callable[[Members], Any], least: float, most: float
) -> None:
    (found,) = run_givers(World(), [giver, trainer(900)])
    assert found.taken is not None
    assert found.taken.slot == 1
    assert least < found.ended < most + PHASE + 5.0


def test_a_state_that_cannot_be_copied_stops_no_training(capfd: pytest.CaptureFixture[str]) -> None:
    (found,) = run_givers(World(), [trainer(9, Kept(fault=MemoryError("no memory"))), trainer(7)])
    assert found.lines == ["0 was not taken over: cannot give its state"]
    assert found.taken is not None
    assert "this rank's state cannot be given: MemoryError: no memory" in capfd.readouterr().err


def test_giver_in_a_round_with_the_taker_goes_on() -> None:
    """Else each waits for the other until the deadline of the round."""
    world = World()
    giver, taker = members_of(world, 0), members_of(world, 1)

    def trains() -> str:
        states_of(giver).can_give(7)
        round_ = take_part(replica_of(giver, deadline=600.0), torch.ones(LENGTH), 0)
        gives(giver, Kept(), 7)
        return round_.report.missed

    missed, found = run_all(world, [(giver, trains), (taker, lambda: takes(taker))])
    assert missed == "replica 1 has no part in this round"
    assert found.taken is not None
    assert found.ended < 60.0


def test_a_stopping_job_takes_no_state() -> None:
    world = World()
    giver, taker = members_of(world, 0), Members(world.join(1), members_of(World(), 9).status, lambda: True)
    _, found = run_all(world, [(giver, lambda: gives(giver, Kept(), 7, 20.0)), (taker, lambda: takes(taker))])
    assert found.taken is None
    assert found.lines == []


@settings(max_examples=20)
@given(two_layouts(), st.sampled_from((700, 10**6)))
def test_a_taker_of_any_layout_gets_the_vector(layouts: tuple[Layout, Layout], bucket: int) -> None:
    assume(all(layout.topology.replica_size <= MOST_RANKS for layout in layouts))
    replicas = [holdings_of(layout) for layout in layouts]
    length = max(holding.stop for holding in replicas[0])
    moved = [movements(holdings, [range(length)], bucket) for holdings in replicas]
    canonical = noise(length, seed=1)
    results = [torch.zeros(size_of(holding)) for holding in replicas[1]]
    given: list[Any] = [
        Gather(movement).whole(scattered(canonical, movement.own, range(length)), None)
        for movement in moved[0]
    ]
    got: list[Any] = [Gather(movement).whole(None, results[movement.rank]) for movement in moved[1]]
    world = World()
    giver, taker = members_of(world, 0), members_of(world, 1)
    to, pieces = taker.mesh.me, _pieces(b"", given[:1])
    offer = Offer("0/", 5, {}, ["slow_weights"], 0)
    bodies: list[Any] = [
        (giver, lambda: States(giver)._pass_on(giver, to, f"state/{to}/0/", pieces)),
        (taker, lambda: States(taker)._receive(giver.mesh.me, offer, got[:1])),
    ]
    assert run_all(world, bodies)[1] == b""
    for transfer in (*given, *got):
        transfer.wait()
    for holding, part in zip(replicas[1], results, strict=True):
        assert torch.equal(part, scattered(canonical, holding, range(length)))


@given(st.dictionaries(st.integers(0, 9), st.integers(0, 5)), st.integers(0, 9), st.integers(1, 5), st.data())
def test_the_furthest_is_asked_first_and_of_equals_the_next(
    steps: dict[int, int], own: int, least: int, data: st.DataObject
) -> None:
    given_up = data.draw(st.sets(st.sampled_from(sorted(steps) or [0])))
    found = furthest(steps, own, least, given_up)
    assert {*found} == {slot for slot, step in steps.items() if step >= least} - given_up
    for one, two in pairwise(found):
        assert (-steps[one], (one - own) % 10) < (-steps[two], (two - own) % 10)
