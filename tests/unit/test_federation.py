"""Frames, deadlines, keys; and what a rank of a federation does with what it did not ask for."""

import io
import os
import random
import socket
import time
from contextlib import redirect_stderr, suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import zmq

from megatron_noloco.federation.counterpart import Standing
from megatron_noloco.federation.frames import LARGEST, SIZE, Frame, Kind, checksum_of, read
from megatron_noloco.federation.keys import Keys
from megatron_noloco.federation.network import FederationTransport, Patience
from megatron_noloco.federation.rendezvous import Address
from megatron_noloco.outer import Channel, Exchange, group_mean
from megatron_noloco.outer.messages import tag_of
from megatron_noloco.plans.topology import Place
from megatron_noloco.transport.interface import Flight, Message
from tests.unit.federated import RUN, SECONDS, ask_to_stop, committed_with, connected, swap, transport, until
from tools import bench_pairing

# Frames, deadlines, keys


def test_a_frame_is_read_as_it_was_packed() -> None:
    frame = Frame(Kind.DATA, 2**60, 3, 9, 4, 5, 2**45, 7, 8, 9, 2, 2**32 - 1)
    assert len(frame.pack()) == SIZE
    assert read(frame.pack()) == frame
    assert read(frame._replace(number=LARGEST).pack()) is not None
    assert read(frame._replace(number=LARGEST + 1).pack()) is None
    assert read(frame._replace(dtype=99).pack()) is None


def test_a_damaged_frame_is_none() -> None:
    sound = Frame(Kind.WANT, 1, 2, 3, 4).pack()
    assert read(sound[:-1]) is None
    assert read(sound + b"\0") is None
    for place in range(SIZE):
        damaged = bytearray(sound)
        damaged[place] ^= 0x10
        assert read(bytes(damaged)) is None, place


@pytest.mark.parametrize("length", [0, 1, 4095, 4096, 4097, 100_003])
def test_checksum_notices_every_changed_word(length: int) -> None:
    data = np.random.default_rng(length).integers(0, 256, length, dtype=np.uint8)
    expected = checksum_of(data)
    assert checksum_of(data.copy()) == expected
    for place in range(0, length, max(1, length // 50)):
        changed = data.copy()
        changed[place] ^= 1
        assert checksum_of(changed) != expected
    assert checksum_of(np.append(data, np.uint8(0))) != expected


def test_a_deadline_follows_past_waits() -> None:
    patience = Patience(shortest_seconds=2.0, longest_seconds=100.0)
    assert patience.deadline_seconds([5.0, 6.0, 5.0]) == 100.0, "too few"
    assert patience.deadline_seconds([5.0, 6.0, 5.0, 7.0]) == 5.5 + 8 * 0.5
    assert patience.deadline_seconds([0.1] * 32) == 2.0
    assert patience.deadline_seconds([99.9] * 32) == 99.9
    assert Patience(10.0, 1.0).deadline_seconds([0.1] * 32) == 1.0, "the longest counts"


def test_keys_are_written_once_and_for_the_owner_only(tmp_path: Path) -> None:
    made = Keys.make(tmp_path / "key")
    assert Keys.read(tmp_path / "key") == made
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        Keys.make(tmp_path / "key")


@pytest.mark.parametrize(
    "content", ["", "{}", '{"public": 1, "secret": 2}', '{"public": "a", "secret": "b"}']
)
def test_a_file_without_a_key_is_refused_in_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "key").write_text(content)
    with pytest.raises(ValueError, match="holds no key; `megatron-noloco keys FILE` makes one"):
        Keys.read(tmp_path / "key")
    with pytest.raises(ValueError, match=r"federation.key_file: .*: No such file"):
        Keys.read(tmp_path / "other")


# Who is refused


def test_only_ranks_with_the_key_connect(tmp_path: Path) -> None:
    """The others are refused in one line on both sides."""
    keys, wrong = Keys.make(tmp_path / "key"), Keys.make(tmp_path / "wrong")
    with (
        redirect_stderr(io.StringIO()) as output,
        transport(tmp_path, 0, 4, keys=keys) as first,
        transport(tmp_path, 1, 4, keys=keys) as second,
        transport(tmp_path, 2, 4, keys=wrong) as third,
        transport(tmp_path, 3, 4) as fourth,
    ):
        assert first.wait_for(1, SECONDS)
        assert second.wait_for(1, SECONDS)
        swap(first, second, tag=1)
        assert [one.present() for one in (first, second, third, fourth)] == [[1], [0], [], []]
        until(
            lambda: {line[:7] for line in output.getvalue().splitlines()} == {f"rank {i}:" for i in range(4)}
        )
        assert all("both need the same key file" in line for line in output.getvalue().splitlines())


def test_a_connection_that_is_closed_early_is_not_reported_as_a_wrong_key(tmp_path: Path) -> None:
    """Neither by the side that listens nor by the one that connects."""
    with (
        redirect_stderr(io.StringIO()) as output,
        transport(tmp_path, 0) as first,
        socket.create_server(("127.0.0.1", 0)) as stranger,
    ):
        stranger.setblocking(False)
        host, port = first.service.endpoint.removeprefix("tcp://").split(":")
        first.service.learn({1: Address(f"tcp://127.0.0.1:{stranger.getsockname()[1]}", epoch=1)})

        def reported() -> set[str]:
            return {line.partition(": the other side closed")[0] for line in output.getvalue().splitlines()}

        def both_have_reported() -> bool:
            """Begin a handshake on both sides, and close it; again with the next look, if ZeroMQ was late."""
            with suppress(OSError), socket.create_connection((host, int(port)), timeout=1) as visitor:
                visitor.recv(64)
            with suppress(OSError), stranger.accept()[0] as visited:
                visited.settimeout(1)
                visited.recv(64)
            return len(reported()) >= 2

        until(both_have_reported)
        joined = f"rank 0: tcp://127.0.0.1:{stranger.getsockname()[1]} cannot be joined"
        assert reported() == {"rank 0: a connection to this rank failed", joined}


def test_a_second_connection_is_used_when_the_first_is_lost(tmp_path: Path) -> None:
    """Rank 1 has opened the first, rank 0 the second, over which nothing was sent; rank 1 cannot connect again."""
    with connected(tmp_path) as (first, second):
        services = first.service, second.service

        def dial() -> None:
            services[0]._dialled[1] = services[0]._links.dial(services[1].endpoint)

        def hang_up() -> None:
            services[1].protocol.directory.addresses.pop(0)
            services[1]._hang_up(0)

        services[0].do(dial)
        until(lambda: 1 in services[0]._dialled and services[0]._dialled[1].up)
        second._closing.set()  # it looks for no addresses
        second._looking.join()
        services[1].do(hang_up)
        until(lambda: services[0].protocol.counterparts[1].outbox.link is services[0]._dialled.get(1))
        until(lambda: bool(first.present() and second.present()))
        swap(first, second, tag=1)


def garbage(draw: random.Random, sound: list[bytes], victim_epoch: int) -> list[bytes]:
    """A message that no counterpart would send."""
    noise = draw.randbytes(draw.randrange(300))
    checksum = checksum_of(np.frombuffer(noise, np.uint8))
    epoch = time.time_ns()

    def frame(kind: Kind, *parts: bytes, epoch: int = epoch, **fields: int) -> list[bytes]:
        return [Frame(kind, RUN, 1, 0, epoch, victim_epoch, **fields).pack(), *parts]

    match draw.randrange(9):
        case 0:
            return [noise]
        case 1:  # cut short
            return [draw.choice(sound)[: draw.randrange(SIZE)]]
        case 2:  # altered
            altered = bytearray(draw.choice(sound))
            altered[draw.randrange(SIZE)] ^= 1 << draw.randrange(8)
            return [bytes(altered)]
        case 3:
            return [Frame(Kind.HELLO, RUN + 1, 1, 0, epoch, tag=LARGEST).pack()]
        case 4:
            sender, receiver = draw.choice([(draw.randrange(2, 1 << 32), 0), (1, draw.randrange(1, 1 << 31))])
            return [Frame(Kind.HELLO, RUN, sender, receiver, epoch).pack()]
        case 5:  # without, or with too many parts
            kind = draw.choice(list(Kind))
            return frame(kind, *([] if kind in (Kind.DATA, Kind.ADDRESSES, Kind.OFFER) else [noise]))
        case 6:  # of a process that has ended
            return frame(Kind.HELLO, epoch=1, tag=LARGEST)
        case 7:  # invalid addresses, or another number of bytes than the header says
            choices = [(Kind.ADDRESSES, len(noise)), (Kind.ADDRESSES, LARGEST), (Kind.OFFER, LARGEST)]
            kind, length = draw.choice(choices)
            return frame(kind, noise or b"x", number=1, length=length, checksum=checksum)
        case _:  # for a ticket that was not given to this sender, or that is too long
            fields = {"tag": 5, "number": draw.randrange(3), "length": draw.choice([4, 40, LARGEST])}
            return frame(Kind.DATA, noise, epoch=draw.choice([1, epoch]), dtype=7, **fields)


@pytest.mark.parametrize(
    ("seed", "connections"), [(0, 300), (1, 300), pytest.param(2, 10_000, marks=pytest.mark.slow)]
)
def test_garbage_is_dropped_and_changes_nothing(tmp_path: Path, seed: int, connections: int) -> None:
    """10,000 messages beside connections; the receive that is posted meanwhile gets what its partner sends."""
    draw = random.Random(seed)
    with connected(tmp_path) as (victim, partner), zmq.Context() as context:
        buffer = torch.zeros(10)
        flight = victim.post([], [Message(1, buffer)], tag=5)
        protocol, process = victim.service.protocol, psutil.Process()
        sound = [Frame(kind, RUN, 1, 0, 3, 4, 5, 6, 7, 8).pack() for kind in Kind]
        with context.socket(zmq.DEALER) as attacker:
            attacker.linger = 0
            attacker.connect(victim.service.endpoint)
            host, port = victim.service.endpoint.removeprefix("tcp://").split(":")
            before = 0
            for count in range(1, 10_001):
                attacker.send_multipart(garbage(draw, sound, protocol.member.epoch))
                if count % (10_000 // connections) == 0:
                    with socket.create_connection((host, int(port))) as plain:
                        plain.sendall(os.urandom(draw.randrange(1, 200)))
                if count == 2000:
                    until(lambda: protocol.dropped.total() >= 2000)
                    before = process.memory_info().rss
            # ZeroMQ makes messages even of some bytes on plain connections.
            until(lambda: protocol.dropped.total() >= 10_000)
        assert process.memory_info().rss - before < 20e6
        assert flight.arrived() == []
        assert not buffer.any()
        assert victim.present() == [1]
        partner.post([Message(0, torch.full((10,), 3.0))], [], tag=5)
        flight.finish(SECONDS)
        assert (buffer == 3.0).all()
        swap(victim, partner, tag=6)


def test_wants_of_a_partner_are_bounded(tmp_path: Path) -> None:
    with connected(tmp_path) as (first, second):
        flights = [second.post([], [Message(0, torch.zeros(1))], tag=1) for _ in range(1030)]
        until(lambda: first.service.protocol.dropped["too many wants"] == 6)
        assert first.service.protocol.counterparts[1].wants_waiting() == 1024
        assert flights[0].arrived() == []


# What is under way, and which counterparts can be a partner


def receive(transport: FederationTransport, number: int) -> Flight:
    """Post the receive of an exchange with rank 1."""
    return transport.post([], [Message(1, torch.zeros(5))], tag_of(number, 0))


def send(transport: FederationTransport, number: int) -> None:
    transport.post([Message(0, torch.ones(5))], [], tag_of(number, 0))


def test_a_partner_that_goes_fails_only_what_is_under_way_with_it(tmp_path: Path) -> None:
    with connected(tmp_path, 2, slots=3) as (first, second):
        with transport(tmp_path, 2, 3) as third:
            until(lambda: first.present() == [1, 2] and third.present() == [0, 1])
            buffers = torch.zeros(1000), torch.zeros(1000)
            lost = first.post([], [Message(third.rank, buffers[0])], tag=1)
            kept = first.post([], [Message(second.rank, buffers[1])], tag=1)
        with pytest.raises(ConnectionError, match="rank 2 has gone"):
            lost.finish(SECONDS)
        second.post([Message(0, torch.full((1000,), 3.0))], [], tag=1)
        kept.finish(SECONDS)
        assert (buffers[1] == 3.0).all()
        with transport(tmp_path, 2, 3) as third:  # and back
            until(lambda: third.present() == [0, 1] and first.present() == [1, 2])
            swap(first, third, tag=2)


def test_what_is_void_on_one_side_fails_on_the_other(tmp_path: Path) -> None:
    with connected(tmp_path) as (first, second):
        old, later = receive(first, 3), receive(first, 4)
        second.partners.begin(3, 0)
        second.partners.end(3)
        with pytest.raises(ConnectionError, match="rank 1 has no part in this exchange"):
            old.finish(SECONDS)
        assert later.arrived() == []
        send(second, 4)
        later.finish(SECONDS)


def test_nobody_waits_for_a_rank_that_has_another_partner(tmp_path: Path) -> None:
    """Not even while an exchange that began earlier is still under way."""
    with connected(tmp_path, 2, slots=3) as (first, second):
        flights = [receive(first, number) for number in range(3)]
        second.partners.begin(0, 2)
        with pytest.raises(ConnectionError, match="has no part"):
            flights[0].finish(SECONDS)
        assert first.partners.standing(0, 1) == (Standing.BUSY, "is not free")
        second.partners.begin(1, 0)
        until(lambda: first.partners.standing(1, 1) == (Standing.WAITING, ""))
        second.partners.begin(2, None)
        until(lambda: first.begun() == {1: 2})
        assert first.partners.standing(1, 1) == (Standing.WAITING, "")
        send(second, 1)
        flights[1].finish(SECONDS)
        second.partners.end(1)
        with pytest.raises(ConnectionError, match="has no part"):
            flights[2].finish(SECONDS)


def test_a_rank_that_leaves_exchanges_out_completes_those_under_way(tmp_path: Path) -> None:
    with connected(tmp_path) as (first, second):
        under_way, left_out = receive(first, 1), receive(first, 3)
        second.partners.begin(1, 0)
        second.partners.leave_out(3)
        until(lambda: first.begun() == {1: 3})
        assert first.partners.standing(1, 1) == (Standing.WAITING, "")
        send(second, 1)
        under_way.finish(SECONDS)
        second.partners.end(1)
        with pytest.raises(ConnectionError, match="has no part"):
            left_out.finish(SECONDS)
        assert first.partners.standing(3, 1) == (Standing.BUSY, "is not free")


def test_a_partner_that_withdraws_leaves_no_doubt(tmp_path: Path) -> None:
    """It has sent its vector, but ends the exchange without saying that it has ours."""
    with connected(tmp_path) as (first, second):
        theirs = Exchange(second, Place(1, 2), Channel.SLABS, SECONDS)
        committed = committed_with(first, lambda *_: 1, 100)
        second.partners.begin(4, 0)
        until(lambda: first.begun() == {1: 4})
        committed.begin(torch.zeros(100), (0, 1), 4, "a test")
        group_mean(theirs, torch.ones(100), (0, 1), 4, "a test", out=torch.empty(100))
        second.partners.end(4)
        ((_, _, mean),) = committed.finish()
        assert not mean.any()
        assert committed.report.missed == "replica 1 has no part in this exchange"
        assert not committed.report.in_doubt


def test_a_round_of_a_job_that_is_to_stop_is_skipped_on_both_sides(tmp_path: Path) -> None:
    """Its partner has begun the round, and sends nothing."""
    with connected(tmp_path) as (first, second):
        committed = committed_with(first, lambda *_: 1, 100)
        second.partners.begin(4, 0)
        committed.begin(torch.zeros(100), (0, 1), 4, "a test")
        waits = second.post([], [Message(0, torch.zeros(7))], tag_of(4, Channel.COMMITS))
        ask_to_stop(first)
        list(committed.finish())
        assert committed.report.missed == "replica 1 is not waited for: this job was asked to stop"
        with pytest.raises(ConnectionError, match="has no part"):
            waits.finish(SECONDS)
        assert not committed.report.in_doubt


def test_a_job_that_is_to_stop_waits_for_nobody_at_its_start(tmp_path: Path) -> None:
    with transport(tmp_path, 0) as first:
        ask_to_stop(first)
        assert first.wait_for(1, SECONDS)


def test_empty_slots_cost_no_rounds() -> None:
    """Two of four replicas, not in lockstep, exchange in every round, also where both planned slots are empty."""
    case = bench_pairing.Case(slots=4, empty=0.5, rounds=12, phase_seconds=0.01, sigma=0.5)
    measured = bench_pairing.measure(case)
    assert measured["used"] == 1.0
    assert measured["used with the plan's partners alone"] < 1.0


def test_standing_of_a_counterpart(tmp_path: Path) -> None:
    with transport(tmp_path, 0) as first:

        def reason(number: int) -> str:
            return first.partners.standing(number, 1)[1]

        assert reason(0) == "is not there"
        with transport(tmp_path, 1) as second:
            assert first.wait_for(1, SECONDS)
            assert first.partners.standing(0, 1) == (Standing.FREE, "")
            assert reason(3) == "is behind", "it may be starting"
            second.partners.begin(1, 0)
            until(lambda: first.begun() == {1: 1})
            assert first.partners.standing(1, 1) == (Standing.WAITING, "")
            assert first.partners.standing(5, 1) == (Standing.FREE, "")
            assert reason(6) == "is behind"
            first.partners.avoid(1, 1, "missed its last deadline")
            assert reason(2) == "missed its last deadline"
            second.partners.begin(2, 0)
            until(lambda: first.begun() == {1: 2})
            assert reason(2) == ""
            second.partners.end(1)
            second.partners.end(2)
            until(lambda: reason(2) == "is not free")
            assert reason(1) == "is ahead"
        until(lambda: reason(3) == "is not there")
