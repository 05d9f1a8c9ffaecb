"""What one replica does with all that another may say; the other one is made by hand."""

import io
import ssl
import time
from contextlib import redirect_stderr
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron_noloco.federation.control import (
    LARGEST,
    VERSION,
    Address,
    Ask,
    Go,
    Got,
    Hello,
    Known,
    Member,
    Offer,
    RefusedError,
    Row,
    Said,
    State,
    Stream,
    Want,
    heard,
    packed,
    unpacked,
)
from megatron_noloco.federation.exchanges import LEFT, WithdrawnError
from megatron_noloco.federation.peers import Peers
from megatron_noloco.federation.session import _CHUNK, HANDOVER_TAG, Receive, Send, checksum_of
from megatron_noloco.federation.wires import Wire

from megatron_noloco.federation import peers
from megatron_noloco.federation.compatibility import Alike, digests_of, run_number
from megatron_noloco.federation.rendezvous import numeric
from megatron_noloco.transport.chunks import ReportedTransfers, cut
from megatron_noloco.transport.interface import EXCHANGE_TAGS, Message, RankLostError
from tests.unit.pipes import End, Sockets, visit

RUN, OWN, THEIRS, TAG, CHUNK = 5, 10, 20, 4, 8
GREETING = b"nlco" + bytes([VERSION, 0])


class Hand:
    """A process made by hand, on the other side of a connection."""

    def __init__(self, victim: "Replica") -> None:
        self.victim, self.end = victim, End(self)
        self.far = visit(self.end, victim)
        self.read = 0

    def write(self, data: bytes) -> None:
        self.far.arrived += data
        self.far.wire.touch()
        self.victim.sockets.advance()

    def say(self, *said: Said) -> None:
        for one in said:
            self.write(packed(one))

    def bytes(self) -> bytes:
        """All that has come since the last call."""
        found = bytearray()
        while self.far.under_way:
            found += self.far.under_way
            self.far.under_way.clear()
            self.far.wire.touch()
            self.victim.sockets.advance()
        return bytes(found)

    def heard(self) -> list[Said]:
        """The messages that have come since the last call."""
        found, rest = list[Said](), self.bytes().removeprefix(GREETING)
        while rest:
            length = int.from_bytes(rest[:4], "big")
            found.append(unpacked(rest[4 : 4 + length], *Said.__args__))
            rest = rest[4 + length :]
        return found

    @property
    def open(self) -> bool:
        return not self.far.wire.error and not self.far.finished


class Replica:
    """Slot 0 of three, whose connections are in memory."""

    def __init__(self, slot: int = 0, slots: int = 3, epoch: int = OWN, **member: Any) -> None:
        who = Member(slot, slots, **{"run": RUN, **member})
        self.peers = Peers(who, Address(f"tcp://10.0.0.{slot}:1", epoch))
        self.sockets = self.peers.wires = Sockets(self, lambda _: None, [])
        self.reports = list[RankLostError | None]()

    def tick(self, times: int = 1) -> None:
        for _ in range(times):
            self.peers.tick()
            self.sockets.advance()

    def receive(self, chunks: int = 2, tag: int = TAG) -> tuple[torch.Tensor, ReportedTransfers]:
        """Post a receive from slot 1."""
        buffer = torch.zeros(chunks * CHUNK, dtype=torch.uint8)
        pieces = cut([message := Message(1, buffer)], CHUNK)
        transfers = ReportedTransfers(pieces, tag)
        self.peers.exchanges.post([], [Receive(tag, message, pieces, transfers)])
        self.sockets.advance()
        return buffer, transfers

    def send(self, tag: int = TAG, length: int = CHUNK) -> None:
        """Post a message to slot 1; its end is in `reports`."""
        message = Message(1, torch.full((length,), 9, dtype=torch.uint8))
        self.peers.exchanges.post([Send(tag, message, CHUNK, self.reports.append)], [])
        self.sockets.advance()


def hello(slot: int = 1, epoch: int = THEIRS, run: int = RUN, **more: Any) -> Hello:
    address = Address(f"tcp://10.0.0.{slot}:1", epoch)
    return Hello(Member(slot, 3, run), address, **{"others": {}, **more})


def connected(
    replica: Replica, epoch: int = THEIRS, name: str = "a name", slot: int = 1
) -> tuple[Hand, Hand]:
    """Another slot, connected to a replica: its connections for small messages and for bulk data."""
    control = Hand(replica)
    control.write(GREETING)
    control.say(hello(slot, epoch), Go(name), State())
    bulk = Hand(replica)
    bulk.write(GREETING)
    bulk.say(Stream(name))
    assert bulk.heard() == [Stream(name)]
    return control, bulk


def chunk(number: int, index: int, **changes: int) -> bytes:
    """A chunk of what was asked for, with some fields that are wrong."""
    data = np.full(CHUNK, index + 1, np.uint8)
    right = {"number": number, "offset": index * CHUNK, "length": CHUNK, "checksum": checksum_of(data)}
    return _CHUNK.pack(*(right | changes).values()) + data.tobytes()


def why(transfers: ReportedTransfers) -> str:
    with pytest.raises(RankLostError) as error:
        transfers.completed()
    return str(error.value)


# Bulk data


def test_chunks_are_taken_to_their_places_and_confirmed() -> None:
    replica = Replica()
    control, bulk = connected(replica)
    buffer, transfers = replica.receive()
    (want,) = [said for said in control.heard() if isinstance(said, Want)]
    assert (want.tag, want.length, want.dtype) == (TAG, 2 * CHUNK, "uint8")
    for index in (1, 0):  # several connections keep no order
        bulk.write(chunk(want.number, index))
    assert len(transfers.completed()) == 2
    assert buffer.tolist() == [1] * CHUNK + [2] * CHUNK
    assert control.heard() == [Got(want.number)]


@pytest.mark.parametrize("wrong", [{"offset": 1}, {"offset": 2 * CHUNK}, {"length": CHUNK - 1}], ids=str)
def test_a_chunk_that_nobody_waits_for_ends_the_session(wrong: dict[str, int]) -> None:
    replica = Replica()
    control, bulk = connected(replica)
    buffer, transfers = replica.receive()
    bulk.write(chunk(0, 1, **wrong))
    assert not buffer.any()
    assert why(transfers) == "rank 1 has gone: the connection was lost"
    assert not control.open


def test_a_chunk_that_was_damaged_fails_its_message_and_no_other() -> None:
    replica = Replica()
    _, bulk = connected(replica)
    (_, damaged), (buffer, sound) = replica.receive(), replica.receive()
    bulk.write(chunk(0, 0, checksum=7) + chunk(1, 0) + chunk(1, 1))
    assert "damaged on its way" in why(damaged)
    assert len(sound.completed()) == 2
    assert buffer.all()


@pytest.mark.parametrize("before", range(0, CHUNK, 3))
def test_memory_that_was_given_up_gets_nothing_any_more(before: int) -> None:
    """Not even the rest of a chunk that has begun to arrive; what follows it arrives."""
    replica = Replica()
    _, bulk = connected(replica)
    buffer, _ = replica.receive()
    whole = chunk(0, 0)
    bulk.write(whole[: _CHUNK.size + before])
    replica.peers.exchanges.begin(0, None)
    assert replica.peers.others[1].session is not None
    later, transfers = replica.receive(tag=EXCHANGE_TAGS)
    bulk.write(whole[_CHUNK.size + before :] + chunk(0, 1) + chunk(1, 0) + chunk(1, 1))
    assert buffer.tolist() == [1] * before + [0] * (2 * CHUNK - before)
    assert len(transfers.completed()) == 2
    assert later.all()


def test_what_both_have_posted_is_sent_and_ends_when_it_is_confirmed() -> None:
    replica = Replica()
    control, bulk = connected(replica)
    replica.send()
    control.say(Want(7, TAG, CHUNK, "uint8"))
    data = np.full(CHUNK, 9, np.uint8)
    assert bulk.bytes() == _CHUNK.pack(7, 0, CHUNK, checksum_of(data)) + data.tobytes()
    assert replica.reports == []
    control.say(Got(7), Got(7), Got(8))
    assert replica.reports == [None]


def test_messages_of_other_lengths_do_not_match() -> None:
    replica = Replica()
    control, bulk = connected(replica)
    replica.send()
    control.say(Want(7, TAG, CHUNK + 1, "uint8"))
    assert "expects 9 bytes where 8 are sent" in str(replica.reports)
    assert bulk.bytes() == b""


def test_what_another_wants_is_bounded() -> None:
    replica = Replica()
    control, _ = connected(replica)
    control.say(*(Want(number, TAG, 1, "uint8") for number in range(1024)))
    assert control.open
    control.say(Want(1024, TAG, 1, "uint8"))
    assert not control.open


def test_one_that_reads_nothing_costs_no_memory() -> None:
    replica = Replica()
    control, _ = connected(replica)
    for number in range(5000):
        control.say(Ask(number))
    assert not control.open


# Exchanges


def test_what_is_wanted_for_an_exchange_that_is_over_is_void() -> None:
    replica = Replica()
    control, _ = connected(replica)
    replica.peers.exchanges.leave_out(0)
    control.say(Want(1, EXCHANGE_TAGS - 1, 1, "uint8"), Want(2, EXCHANGE_TAGS, 1, "uint8"))
    session = replica.peers.others[1].session
    assert session is not None
    assert list(session.wants) == [EXCHANGE_TAGS]


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (State(0, 1), "rank 1 has no part in this exchange"),
        (State(0, 1, 0), "rank 1 has used the mean, and this replica missed its token"),
        (State(0), None),
    ],
)
def test_what_another_has_ended_fails_here(state: State, expected: str | None) -> None:
    replica = Replica()
    control, _ = connected(replica)
    _, transfers = replica.receive()
    _, later = replica.receive(tag=EXCHANGE_TAGS)
    control.say(state)
    assert later.completed() == []
    if expected is None:
        assert transfers.completed() == []
    else:
        with pytest.raises(RankLostError, match=expected) as error:
            transfers.completed()
        assert isinstance(error.value, WithdrawnError) == ("no part" in expected)


def test_the_state_comes_after_what_it_declares_void() -> None:
    replica = Replica()
    control, _ = connected(replica)
    control.heard()
    replica.peers.exchanges.begin(0, 1)
    replica.receive()
    replica.peers.exchanges.end(0)
    replica.sockets.advance()
    assert [type(said) for said in control.heard()] == [Want, State, State]


# States that are handed over


def test_parts_of_a_state_end_with_the_next_question_and_with_training() -> None:
    replica = Replica()
    control, _ = connected(replica)
    replica.send(HANDOVER_TAG)
    assert "has asked again" in str(replica.reports.pop()), "nobody has asked"
    for tag, ends, expected in (
        (HANDOVER_TAG, Ask(HANDOVER_TAG + 1), "has asked again"),
        (HANDOVER_TAG + 1, State(0), "trains"),
    ):
        control.say(Ask(tag))
        replica.send(tag)
        replica.peers.exchanges.begin(9, None)  # makes none void
        assert replica.reports == []
        control.say(ends)
        assert expected in str(replica.reports.pop())


def test_a_replica_that_takes_over_is_waited_for_by_nobody_until_it_trains() -> None:
    replica = Replica()
    control, _ = connected(replica)
    replica.peers.exchanges.begin(0, 1)
    _, transfers = replica.receive()
    control.say(State(takes_over=True))
    for under_way in (transfers, replica.receive()[1]):
        assert why(under_way) == "rank 1 takes over a state"
    assert replica.peers.others[1].seen.state.takes_over
    control.say(State(1))
    assert not replica.peers.others[1].seen.state.takes_over


def test_a_replica_tells_all_that_it_takes_over_before_it_asks() -> None:
    """The giver may wait for a third replica, which must not wait for this one."""
    replica = Replica()
    giver, third = connected(replica)[0], connected(replica, slot=2)[0]
    for control in (giver, third):
        control.heard()
    replica.peers.exchanges.ask(1, HANDOVER_TAG)
    replica.sockets.advance()
    waits = State(takes_over=True)
    assert giver.heard() == [Ask(HANDOVER_TAG), waits]
    assert third.heard() == [waits]
    replica.peers.exchanges.leave_out(4)
    replica.sockets.advance()
    assert third.heard() == [State(4, 5)]


def test_a_question_is_answered_at_once_only_where_there_is_no_state_to_give() -> None:
    replica, offer = Replica(), Offer(4, 20, {"rate": float("inf")}, ["fast_weights"], 7)
    control, _ = connected(replica)
    control.heard()
    control.say(offer, Ask(4))
    assert replica.peers.others[1].offer == offer
    assert control.heard() == [Offer(4)]
    replica.peers.exchanges.give(20)
    control.say(Ask(5), Ask(6))
    for answer in (Offer(5), offer):
        replica.peers.exchanges.offer(1, answer)
    assert control.heard() == [], "these are not for the last question"
    replica.peers.exchanges.give(0)
    replica.sockets.advance()
    assert control.heard() == [Offer(6)]


# Who is there


def test_the_newest_rows_of_another_are_kept_until_they_are_read() -> None:
    replica = Replica()
    hand, _ = connected(replica)
    hand.say(*(Row(f"{number}") for number in range(100)))
    assert list(replica.peers.others[1].rows) == [f"{number}" for number in range(36, 100)]
    replica.peers.exchanges.tell_row("own")
    replica.sockets.advance()
    assert Row("own") in hand.heard()


def test_nothing_is_waited_for_from_a_replica_that_has_fallen_silent() -> None:
    """It may be stopped, or a wall may have swallowed its connection. Twice as long once it has come back."""
    replica = Replica()
    for longest, name in ((20, "first"), (42, "second")):
        connected(replica, name=name)
        _, transfers = replica.receive()
        replica.tick(longest)
        assert transfers.completed() == []
        replica.tick()
        assert why(transfers) == "rank 1 has fallen silent"


def test_a_job_that_is_to_stop_waits_for_nobody() -> None:
    replica = Replica()
    connected(replica)
    _, transfers = replica.receive()
    replica.peers.stopped = lambda: True
    replica.tick()  # a round that is almost over may end
    assert transfers.completed() == []
    replica.tick()
    assert why(transfers) == "rank 1 is not waited for: this job was asked to stop"


def test_a_job_that_leaves_waits_for_its_last_partner_a_while() -> None:
    """Also where it was asked to stop long before, in a step that took long."""
    replica = Replica()
    connected(replica)
    replica.peers.stopped = lambda: True
    replica.tick(5)
    replica.peers.leaves_at = time.monotonic() + 60
    _, transfers = replica.receive()
    replica.tick(5)
    assert transfers.completed() == []
    replica.peers.leaves_at = time.monotonic()
    replica.tick(2)
    assert why(transfers) == "rank 1 is not waited for: this job was asked to stop"


class Handshake(End):
    """A connection that is encrypted once this side has read the last message of the handshake."""

    done = False

    def send(self, data: memoryview) -> int:
        if not self.done:
            raise ssl.SSLWantReadError
        return super().send(data)

    def recv_into(self, place: memoryview) -> int:
        self.done = True
        raise ssl.SSLWantReadError


def test_what_waited_for_the_handshake_is_sent_when_reading_has_ended_it() -> None:
    """The other side may say nothing before."""
    end = Handshake(None)
    wire = Wire(Sockets(None, lambda _: None, []), end)  # type: ignore[arg-type]
    wire.write(b"hello")
    wire.advance()
    assert end.under_way == b"hello"


def test_the_end_of_either_connection_voids_everything() -> None:
    for lost in range(2):
        replica = Replica()
        both = connected(replica)
        _, transfers = replica.receive()
        replica.send()
        both[lost].far.noticed = True
        both[lost].write(b"")
        assert why(transfers) == str(replica.reports[0]) == "rank 1 has gone: the connection was lost"
        assert not any(one.open for one in both)
        assert not replica.peers.others[1].seen.connected
        assert "is not connected" in why(replica.receive()[1])


def test_a_later_process_replaces_an_earlier_one_and_not_the_other_way_round() -> None:
    replica = Replica()
    old, _ = connected(replica)
    old.say(Ask(HANDOVER_TAG))
    _, transfers = replica.receive(tag=EXCHANGE_TAGS)
    connected(replica, THEIRS + 1, "new")
    assert why(transfers) == "rank 1 was started anew"
    assert not replica.peers.others[1].seen.state.takes_over
    assert not old.open
    late = Hand(replica)
    late.write(GREETING)
    late.say(hello(epoch=THEIRS), Go("late"))
    (answer,) = late.heard()
    assert isinstance(answer, Hello)
    assert answer.others[1].epoch == THEIRS + 1, "so it knows, and claims its slot"
    assert not late.open


def test_a_process_that_claims_its_slot_begins_nothing_under_its_earlier_epoch() -> None:
    replica = Replica()
    hand = Hand(replica)
    hand.write(GREETING)
    hand.say(hello())
    replica.peers.directory.merge({0: Address("tcp://10.9.9.9:2", 2**40)})
    with redirect_stderr(io.StringIO()):
        replica.tick()
    hand.say(Go("a name"))
    assert replica.peers.others[1].session is None
    assert not hand.open


def test_addresses_are_told_again_with_a_new_connection_and_when_they_change() -> None:
    replica = Replica()
    for name in ("one", "two"):
        control, _ = connected(replica, name=name)
        replica.tick(2)
        assert [type(said) for said in control.heard()].count(Known) == 1
    control.say(Known({2: Address("tcp://10.0.0.2:1", 1)}))
    replica.tick()
    (known,) = [said for said in control.heard() if isinstance(said, Known)]
    assert known.others[2].endpoint == "tcp://10.0.0.2:1"


def test_a_process_counts_as_later_than_one_that_has_ended_but_not_than_one_that_runs() -> None:
    """Of two that run each becomes the later one once, so the one that is later first stays it. Both say so."""
    second = 2**30
    replica, claimed = Replica(), 5 * second + 1 + OWN
    connected(replica)
    _, transfers = replica.receive()
    with redirect_stderr(io.StringIO()) as output:
        for later, claims, said in ((5 * second, True, False), (6 * second, False, True)):
            replica.peers.directory.merge({0: Address("tcp://10.9.9.9:2", later)})
            replica.tick()
            assert replica.peers.directory.own.epoch == claimed
            assert (replica.peers.directory.rival is None) == claims
            assert ("the others exchange with it: does another job" in output.getvalue()) == said
        replica.tick()
        assert replica.peers.directory.rival is None, "nobody answers at its address: it has ended"
        answered = Replica()
        answered.peers.directory.merge({0: Address("tcp://10.9.9.9:2", OWN + 1)})
        answered.tick()
        assert "the others exchange with this process: does another job" in output.getvalue()
    assert why(transfers) == "rank 1 took this process for an earlier one"


@pytest.mark.parametrize("endpoint", ["", "tcp://host.invalid:2"])
def test_a_later_process_that_is_nowhere_or_has_a_name_is_outlived(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it has claimed the slot once more, as this one has."""
    monkeypatch.setattr(peers, "_RIVAL_SECONDS", 0.0)
    replica = Replica()
    with redirect_stderr(io.StringIO()):
        for later in (5 * 2**30, 6 * 2**30):
            replica.peers.directory.merge({0: Address(endpoint, later)})
            replica.tick()
        assert replica.peers.names() == ([endpoint] if endpoint else [])
        replica.peers.found[endpoint] = numeric("tcp://10.9.9.9:2")
        replica.tick(3)
    assert replica.peers.directory.rival is None


def test_no_process_is_later_than_the_last_number() -> None:
    replica = Replica()
    replica.peers.directory.merge({0: Address("tcp://10.9.9.9:2", LARGEST)})
    replica.tick()
    assert replica.peers.directory.own.epoch == OWN


@pytest.mark.parametrize("slot", [0, 3])
def test_an_address_that_does_not_answer_is_named_once(monkeypatch: pytest.MonkeyPatch, slot: int) -> None:
    """By both sides. Not that of a replica that has left."""
    monkeypatch.setattr(peers, "_UNANSWERED_SECONDS", -1.0)
    monkeypatch.setattr(peers, "_BACK_SECONDS", -1.0)
    replica = Replica(1, slots=4)
    with redirect_stderr(io.StringIO()) as output:
        left, _ = connected(replica, slot=2)
        left.say(State(LEFT))
        left.far.noticed = True
        left.far.wire.touch()
        replica.sockets.advance()
        replica.peers.directory.merge({slot: Address(f"tcp://10.0.0.{slot}:1", THEIRS)})
        replica.tick(5)
    where = f"tcp://10.0.0.{slot}:1 of replica {slot}"
    line = f"replica 1: nobody answers at {where}: is its job there, and that port open to this host?\n"
    assert output.getvalue() == line


# Who is refused


class Between:
    """Two replicas, the second of which connects to the first."""

    def __init__(self, *replicas: Replica) -> None:
        self.output, self.ends = io.StringIO(), list[End]()
        first, second = replicas
        second.sockets = second.peers.wires = Sockets(second, lambda _: first, self.ends)
        first.alive = second.alive = True
        with redirect_stderr(self.output):
            second.peers.directory.merge({first.peers.member.slot: Address("tcp://10.0.0.0:1", OWN)})
            second.tick()
            self.deliver()

    def deliver(self) -> None:
        while waiting := [end for end in self.ends if end.under_way]:
            for end in waiting:
                end.other.arrived += end.under_way
                end.under_way.clear()
                for one in (end, end.other):
                    one.wire.touch()
                    one.process.sockets.advance()


def test_two_jobs_that_differ_both_say_in_what() -> None:
    alike = [{"model": {"num_layers": layers, "hidden_size": 8}, "seed": 1} for layers in (2, 3)]
    replicas = [
        Replica(slot, run=run_number(values), digests=digests_of(values)) for slot, values in enumerate(alike)
    ]
    between = Between(*replicas)
    assert sorted(between.output.getvalue().splitlines()) == [
        f"replica {slot}: replica {1 - slot} is refused: its job differs from this one in model.num_layers"
        for slot in range(2)
    ]
    assert replicas[0].peers.directory.addresses.keys() == {0}, "it learns nothing else"


@pytest.mark.parametrize(("kinds", "named"), [(("train", "train"), "tokenizer"), (("train", "attach"), "")])
def test_what_one_kind_of_job_knows_is_compared_by_jobs_of_this_kind(
    kinds: tuple[str, str], named: str
) -> None:
    replicas = []
    for slot, kind in enumerate(kinds):
        alike = Alike({"seed": 1}, kind, {"tokenizer": f"of {slot}", f"of {kind}": slot})
        run = run_number(alike.shared)
        replicas.append(Replica(slot, run=run, digests=alike.digests, kind=kind))
    between = Between(*replicas)
    names = named and f"of train, {named}"
    line = "replica {}: replica {} is refused: its job differs from this one in " + names
    assert sorted(between.output.getvalue().splitlines()) == [
        line.format(slot, 1 - slot) for slot in range(2) if named
    ]
    assert (replicas[1].peers.others[0].session is None) == bool(named)


def test_two_jobs_with_other_numbers_of_slots_both_say_so() -> None:
    between = Between(Replica(0, slots=3), Replica(5, slots=6))
    assert sorted(between.output.getvalue().splitlines()) == [
        "replica 0: replica 5 is not exchanged with: its job has more slots; give this one as many",
        "replica 5: replica 0 is not exchanged with: its job has fewer slots; give it as many",
    ]


def test_two_replicas_that_fit_have_a_session() -> None:
    replicas = Replica(0), Replica(2)
    between = Between(*replicas)
    replicas[1].tick()
    between.deliver()
    names = [replica.peers.others[2 - slot].session for slot, replica in zip((0, 2), replicas, strict=True)]
    assert names[0] is not None
    assert names[1] is not None
    assert names[0].name == names[1].name
    assert between.output.getvalue() == ""


@pytest.mark.parametrize(
    ("greeting", "line"),
    [
        (
            b"nlco" + bytes([VERSION + 1, 0]),
            f"version {VERSION + 1} of the protocol, this job version {VERSION}",
        ),
        (b"nlco" + bytes([VERSION - 3, 99]), f"version {VERSION - 3} of the protocol"),
        (b"\xff" + bytes(8) + b"\x7f", "version 7 of the protocol"),  # ZeroMQ's
        (b"nlco" + bytes([VERSION, 1]), "only one of the two sides encrypts; both need the same key file"),
        (b"GET / HTTP/1.1\r\n", "the other side is no replica"),
    ],
)
def test_what_another_protocol_says_first_is_named(greeting: bytes, line: str) -> None:
    """It is sent the first bytes of this one, which are alike in all versions from 8 on."""
    with redirect_stderr(io.StringIO()) as output:
        hand = Hand(Replica())
        hand.write(greeting)
    assert "replica 0: a connection to this replica failed: " in output.getvalue()
    assert line in output.getvalue()
    assert hand.bytes() == GREETING
    assert not hand.open


SOUND = [
    Hello(Member(1, 3, RUN, {"a": "b"}), Address("tcp://10.0.0.1:1", 2), {2: Address("", 3)}, question=True),
    *(Go("n"), Stream("n"), State(0, 1, 3), Want(1, 2, 3, "int8"), Got(1), Ask(1), Offer(1, 2, {}, ["a"], 1)),
    Row("{}"),
    Known({1: Address("", 1)}),
]


def read(data: bytes) -> Said:
    """Read a message as a connection does."""
    script, rest = heard(*Said.__args__), io.BytesIO(data)
    try:
        place = next(script)
        while True:
            if rest.readinto(place) < len(place):
                raise RefusedError("cut short")
            place = next(script)
    except StopIteration as end:
        return end.value


@pytest.mark.parametrize("said", SOUND, ids=lambda said: said.kind)
def test_a_message_is_read_as_it_was_sent_and_no_other_type_is_taken_for_a_field(said: Said) -> None:
    assert read(packed(said)) == said
    text = packed(said)[4:]
    for old, new in ((b":1", b':"1"'), (b":1", b":1.5"), (b":1", b":-1"), (b":1", b":9223372036854775808"),
                     (b"{", b'{"more":1,'), (b'"kind"', b'"kinds"'), (b"true", b"1")):  # fmt: skip
        if old in text:
            changed = text.replace(old, new, 1)
            with pytest.raises(RefusedError):
                read(len(changed).to_bytes(4, "big") + changed)


@given(st.binary(max_size=60))
def test_garbage_is_no_message(noise: bytes) -> None:
    with pytest.raises(RefusedError):
        read(len(noise).to_bytes(4, "big") + noise)


def test_a_message_is_not_longer_than_the_longest_that_there_is() -> None:
    with pytest.raises(RefusedError, match="more than"):
        read(b"\xff\xff\xff\xff" + b" " * 100)


def test_lines_that_others_cause_end() -> None:
    with redirect_stderr(io.StringIO()) as output:
        replica = Replica()
        for number in range(2000):
            replica.peers.warn(f"line {number}")
    assert output.getvalue().count("line") < 2000
