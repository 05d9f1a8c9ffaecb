"""What a replica publishes of itself, and what it makes of what others publish."""

import json
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_noloco.errors import UserError
from megatron_noloco.federation.members import Attendance, Members, Peer
from megatron_noloco.federation.membership import Membership
from megatron_noloco.federation.mesh import Member
from megatron_noloco.federation.statuses import (
    LARGEST,
    LONGEST_ROW,
    MOST_STATUS_BYTES,
    FinalStatus,
    PeerStatus,
)
from megatron_noloco.plans.topology import Place
from megatron_noloco.settings import MOST_FRAGMENTS, MOST_SLOTS, FederationSettings, NolocoSettings
from tests.kit.memory_mesh import Message, World
from tests.kit.worlds import Used, members_of, pause, replica_of, run_all, take_part, vectors

# Who comes and goes

_STATES = {"there": (True, "training"), "lost": (False, "training"), "left": (False, "left")}


def peer(state: str) -> Any:
    present, phase = _STATES[state]
    return Peer(Member(1, 1), PeerStatus(phase=phase), present, present)  # type: ignore[arg-type]


@given(st.lists(st.dictionaries(st.integers(1, 8), st.sampled_from([*_STATES]))))
def test_lines_say_who_is_there_and_each_change_once(looks: list[dict[int, str]]) -> None:
    attendance, peers, there = Attendance(), dict[int, Peer](), set[int]()
    for changes in looks:
        peers |= {slot: peer(state) for slot, state in changes.items()}
        for line in attendance.changes(peers):
            who, verb, more = line.partition(" ha")[0], line, line.rpartition("(")[2]
            slots = {int(word.strip(",")) for word in who.split() if word.strip(",").isdecimal()}
            comes = "come" in verb or "back" in verb
            assert slots.isdisjoint(there) if comes else slots <= there
            there ^= slots
            assert more == f"{1 + len(found(peers))} replica{'s' * bool(found(peers))})"
        assert there == found(peers)
        assert [*attendance.changes(peers)] == []


def found(peers: dict[int, Peer]) -> set[int]:
    return {slot for slot, one in peers.items() if one.present}


def test_many_at_once_are_one_line() -> None:
    peers = dict.fromkeys(range(1, 201), peer("there"))
    (line,) = Attendance().changes(peers)
    assert line == "replicas 1, 2, 3, 4, 5, 6, 7, 8 and 192 more have come (201 replicas)"


# Rows of metrics


def test_a_plain_row_gives_way_to_rows_that_wait() -> None:
    one = members_of(World(), 0)
    for number in range(40):
        one.publish_row({"kind": "step" if number % 20 else "evaluation", "number": number})
    one.publish_row({"kind": "step", "round/index": 1, "number": 40})
    one.change()
    assert [json.loads(text)["number"] for _, text in one.mesh.statuses.own.status.rows] == [0, 20, 40]
    one.publish_row({"kind": "step", "number": 41})
    one.change()
    assert [number for number, _ in one.mesh.statuses.own.status.rows] == [1, 2, 3, 4]


def test_a_status_has_room_for_rows_and_thousands_of_members() -> None:
    """A status that is too long would end the job."""
    world = World()
    one, other = members_of(world, 0), members_of(world, 1)
    row = {"kind": "evaluation", "text": '"' * (LONGEST_ROW // 2 - 20)}
    for _ in range(4):
        one.publish_row(row)
    one.publish_row({"kind": "evaluation", "text": "x" * LONGEST_ROW})
    one.change()
    other.present()
    assert [(slot, json.loads(text)) for slot, text in other.rows()] == [(0, row)] * 4
    assert other.rows() == []
    one.publish_row(row)
    slots = list(range(2000))
    one.change(reaches=slots, mean=FinalStatus(members=slots, parents=slots, attempt=1))
    assert other.present()[0].mean.attempt == 1
    assert len(one.mesh.statuses.own.text) < MOST_STATUS_BYTES - 2**12


# Others


def nested(depth: int) -> list[Any]:
    return [nested(depth - 1)] if depth else []


def send_raw(one: Members, other: Members, **fields: Any) -> None:
    """Have a status come to one replica that the other has signed with these fields."""
    statuses = other.mesh.statuses
    assert statuses.own is not None
    text = json.dumps({**json.loads(statuses.own.text), **fields})
    signed = replace(statuses.own, number=statuses.own.number + 1, text=text)
    one.mesh.take(replace(signed, signature=statuses.identity.sign(signed.signed_text(statuses.run))))


@pytest.mark.parametrize(
    "field",
    [{"begun": "1"}, {"phase": "asleep"}, {"begun": -2}, {"partners": [1]}, {"deep": nested(500)}],
    ids=["a text", "unknown", "too small", "a list", "too deep"],
)
def test_a_malformed_status_is_dropped(field: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    world = World()
    one, other = members_of(world, 0), members_of(world, 1)
    for _ in range(2):
        with pytest.raises(ValueError):
            send_raw(one, other, **field)
    assert one.present() == {1: PeerStatus()}, "the one before"
    assert capfd.readouterr().err == "replica 0: the status of replica 1 is malformed\n"


def test_jobs_whose_batches_differ_name_both(capfd: pytest.CaptureFixture[str]) -> None:
    """As after an invitation of another day. They exchange all the same."""
    world = World()
    one, other = members_of(world, 0, batch=8), members_of(world, 1, batch=16)
    members_of(world, 2)  # a training loop of its own does not tell its batch
    for _ in range(2):
        assert {*one.present()} == {1, 2}
        other.change()
    told = (
        "replica 0: replica 1 has 16 samples in a local step, this replica 8; in a mean both count the same\n"
    )
    assert capfd.readouterr().err == told


def test_an_unknown_field_of_a_status_is_left_alone() -> None:
    """So that a later version may have more."""
    world = World()
    one, other = members_of(world, 0), members_of(world, 1)
    send_raw(one, other, step=7, direct=[1], weather="fine")
    assert one.present() == {1: PeerStatus(step=7)}


def test_the_later_process_of_a_slot_wins() -> None:
    world = World()
    earlier, other = members_of(world, 0), members_of(world, 1)
    earlier.check()
    later = members_of(world, 0, incarnation=2)
    with pytest.raises(
        UserError, match=r"another process of replica 0 has begun.* same invitation, or --replica"
    ):
        earlier.check()
    later.check()
    assert other.peers()[0].member == Member(0, 2)


def test_a_process_that_others_take_for_an_earlier_one_ends() -> None:
    """The later one came and went while this one was stopped; or the clock was ahead when it began."""
    world = World(lease=1.0)
    own, later = members_of(world, 0, incarnation=1), members_of(world, 0, incarnation=2)
    world.kill(later.mesh.me)
    run_all(world, [(own, lambda: pause(own.mesh, 5.0))])
    assert later.mesh.me not in own.mesh.members()
    with pytest.raises(UserError, match="another process of replica 0 has begun"):
        own.check()


def test_a_job_ends_when_its_certificate_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    own = members_of(World(), 3)
    own.check()
    monkeypatch.setattr(own.mesh.statuses.identity, "ends", time.time() - 1)
    with pytest.raises(
        UserError, match=r"member file of replica 3 has ended.*`megatron-noloco invite CONFIG --slot 3`"
    ):
        own.check()


def test_end_of_member_file_is_said_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = members_of(World(), 3)
    for days in (8, 6, 6):
        monkeypatch.setattr(own.mesh.statuses.identity, "ends", 86_400 * (time.time() // 86_400 + days))
        own._warn_of_end()
    assert capsys.readouterr().err.count("replica 3: the member file ends on") == 1


def test_two_hidden_members_see_and_do_not_reach_each_other() -> None:
    world = World()
    one, other, third = (members_of(world, slot, hidden=slot < 2) for slot in range(3))
    assert [(peer.present, peer.reached) for peer in one.peers().values()] == [(True, False), (True, True)]
    for members in (one, other, third):
        partners = replica_of(members).partners
        assert partners is not None
        assert partners.candidates(0)[0].hidden == {0, 1}


# To start


@pytest.mark.parametrize(("hidden", "seconds"), [(False, 3.0), (True, 0.0)])
def test_a_job_starts_when_it_reaches_whom_it_sees(
    hidden: bool, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or its first rounds would leave out a partner that waits for it; two hidden jobs never reach each other."""
    world = World()
    one, other = (members_of(world, slot, hidden=hidden) for slot in range(2))
    linked = list[bool]()
    monkeypatch.setattr(one.mesh, "reaches", lambda member: bool(linked))
    start = Membership(one, Place(0, None), NolocoSettings(), FederationSettings(start_with=2))

    def link() -> None:
        pause(other.mesh, 3.0)
        linked.append(True)
        pause(other.mesh, 10.0)

    def begin() -> float:
        assert start.wait_for_start(0)
        return one.mesh.clock()

    assert run_all(world, [(other, link), (one, begin)])[1] == pytest.approx(seconds, abs=0.5)


def test_a_job_says_for_how_long_it_waits_at_the_start(capfd: pytest.CaptureFixture[str]) -> None:
    world = World()
    one = members_of(world, 0)
    start = Membership(one, Place(0, None), NolocoSettings(), FederationSettings(start_with=2))
    assert run_all(world, [(one, lambda: start.wait_for_start(0))]) == [False]
    line = "replica 0: waits 600 s at most until federation.start_with = 2 replicas are there\n"
    assert capfd.readouterr().err.count(line) == 1


# To leave


@pytest.mark.parametrize("is_stopped", [False, True])
@pytest.mark.parametrize("payload", ["fp32", "int8"])
def test_who_leaves_after_a_round_leaves_nobody_in_doubt(payload: str, is_stopped: bool) -> None:
    """The word of the replica that decides is under way when it ends, also where the other is to stop."""
    is_told = list[bool]()

    def on_message(world: World, number: int, message: Message) -> float | None:
        is_told.extend([is_stopped] * (message.kind == "answer" and message.name.endswith("done")))
        return 1.0 if message.kind == "answer" and message.name.endswith("verdict") else None

    world = World(on_message=on_message)
    members = [members_of(world, slot) for slot in range(2)]
    members[1]._stopped = lambda: any(is_told)

    def body(slot: int) -> Used:
        used = take_part(replica_of(members[slot], payload=payload), vectors()[slot], 0)
        members[slot].close()
        return used

    bodies = [(one, lambda slot=one.slot: body(slot)) for one in members]
    assert all(used.counts for used in run_all(world, bodies))
    assert world.now < 5.0


def test_hundreds_of_rounds_may_be_under_way() -> None:
    """As many as a federation may have fragments; none of their verdicts is forgotten before its round is over."""
    one, other = (members_of(World(), slot) for slot in range(2))
    numbers = [*range(LARGEST - MOST_FRAGMENTS + 1, LARGEST + 1)]
    one.change(partners=dict.fromkeys(numbers[:-3], MOST_SLOTS - 1), under_way=numbers[:-3])
    for number in numbers[-3:]:
        one.begin_round(number, MOST_SLOTS - 1)
    one.end_round(numbers[7])
    assert one.mesh.statuses.own is not None
    other.mesh.take(one.mesh.statuses.own)
    found = other.mesh.known()[one.mesh.me]
    assert found.under_way == numbers[:7] + numbers[8:]
    assert [*found.partners] == numbers


def test_who_leaves_waits_for_no_partner_that_it_never_met() -> None:
    world = World()
    one, other = members_of(world, 0), members_of(world, 1)

    def waits() -> None:
        other.begin_round(0, 0)
        pause(other.mesh, 30.0)

    def leaves() -> float:
        pause(one.mesh, 1.0)
        one.close()
        return one.mesh.clock()

    _, left_at = run_all(world, [(other, waits), (one, leaves)])
    assert left_at == pytest.approx(1.0)
    assert other.peers()[0].status.phase == "left"
    assert other.present() == {}
