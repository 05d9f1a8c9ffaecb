"""Deadlines, keys; who is refused; and which replica can be the partner."""

import io
import random
import socket
import ssl
import time
from collections import deque
from contextlib import redirect_stderr, suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from megatron_noloco.federation.control import VERSION, Address, State, Stream, packed
from megatron_noloco.federation.session import checksum_of

from megatron_noloco.federation.keys import Keys
from megatron_noloco.federation.network import FederationTransport
from megatron_noloco.federation.partners import FederationPartners, Patience, Standing
from megatron_noloco.federation.rendezvous import split
from megatron_noloco.outer import Channel, Exchange, group_mean
from megatron_noloco.outer.messages import tag_of
from megatron_noloco.plans.topology import Place
from megatron_noloco.transport.interface import Flight, Message
from tests.unit.federated import RUN, SECONDS, ask_to_stop, committed_with, connected, swap, transport, until
from tests.unit.test_session import hello
from tools import bench_pairing

# Deadlines, keys


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


def test_partners_at_another_site_are_waited_for_by_what_took_so_long_there(tmp_path: Path) -> None:
    """Else most exchanges, which are inside the site, would make a deadline that none across can meet."""
    with (
        transport(tmp_path, 0, 3, site="a") as first,
        transport(tmp_path, 1, 3, site="a"),
        transport(tmp_path, 2, 3, site="b") as third,
    ):
        for one in (first, third):
            assert one.wait_for(2, SECONDS)
            assert one.partners.sites() == {0: "a", 1: "a", 2: "b"}
        partners, deadlines = FederationPartners(first.service, Patience(1.0, 100.0)), []
        for seconds, partner in ((11.0, 1), (13.0, 2)):
            for _ in range(8):
                partners.record(seconds, partner)
        for number, partner in enumerate((1, 2, 1, None)):
            partners.begin(number, partner)
            deadlines.append(partners.deadline_seconds)
    assert deadlines == [11.0, 13.0, 11.0, 11.0]


def test_partners_over_a_link_that_has_become_slower_are_waited_for_again(tmp_path: Path) -> None:
    with connected(tmp_path) as (one, _):
        partners = FederationPartners(one.service, Patience(5.0, 600.0))
        for _ in range(32):
            partners.record(0.0, 1)
        missed = 0
        for _ in range(60):
            if partners.deadline_seconds < 30.0:
                partners.missed(1)
                missed += 1
            else:
                partners.record(30.0, 1)
        assert missed == 3, "at 5, 10 and 20 seconds"
        assert partners.deadline_seconds < 60.0


def test_keys_are_written_once_and_for_the_owner_only(tmp_path: Path) -> None:
    Keys.make(tmp_path / "key")
    written = (tmp_path / "key").read_bytes()
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        Keys.make(tmp_path / "key")
    assert (tmp_path / "key").read_bytes() == written


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "holds no key"),
        ("{}", "holds no key"),
        ("-----BEGIN CERTIFICATE-----\n", "holds no key"),
        ('{"public": "a", "secret": "b"}', "is a key of an earlier version"),
    ],
)
def test_a_file_without_a_key_is_refused_in_one_line(tmp_path: Path, content: str, why: str) -> None:
    (tmp_path / "key").write_text(content)
    with pytest.raises(ValueError, match=f"{why}; `megatron-noloco keys FILE` makes a new one"):
        Keys.read(tmp_path / "key")
    with pytest.raises(ValueError, match=r"federation.key_file: .*: No such file"):
        Keys.read(tmp_path / "other")


def test_half_a_key_is_none(tmp_path: Path) -> None:
    """Neither what only others may know nor what only the owner does."""
    Keys.make(tmp_path / "key")
    private, certificate = (tmp_path / "key").read_text().split("-----BEGIN CERT")
    for half in (private, "-----BEGIN CERT" + certificate):
        (tmp_path / "half").write_text(half)
        with pytest.raises(ValueError, match="holds no key"):
            Keys.read(tmp_path / "half")


# Who is refused


def test_only_replicas_with_the_key_connect(tmp_path: Path) -> None:
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
            lambda: (
                {line[:10] for line in output.getvalue().splitlines()} == {f"replica {i}:" for i in range(4)}
            )
        )
        assert all("both need the same key file" in line for line in output.getvalue().splitlines())


def test_one_that_has_another_key_is_refused_though_it_trusts_anybody(tmp_path: Path) -> None:
    keys, context = Keys.make(tmp_path / "key"), Keys.make(tmp_path / "wrong").dials
    context.verify_mode = ssl.CERT_NONE
    with (
        redirect_stderr(io.StringIO()),
        transport(tmp_path, 0, keys=keys) as first,
        socket.create_connection(split(first.address.endpoint)) as stranger,
    ):
        stranger.sendall(b"nlco" + bytes([VERSION, 1]))
        assert len(stranger.recv(6)) == 6
        with pytest.raises(ssl.SSLError, match="alert"):
            context.wrap_socket(stranger).recv(1)


@pytest.mark.parametrize("encrypts", [False, True])
def test_a_connection_that_is_closed_early_is_not_reported_as_a_wrong_key(
    tmp_path: Path, encrypts: bool
) -> None:
    """Neither by the side that listens nor by the one that connects; before or in the handshake of TLS."""
    keys = Keys.make(tmp_path / "key") if encrypts else None
    greeting = b"nlco" + bytes([VERSION, 1]) if encrypts else b""
    with (
        redirect_stderr(io.StringIO()) as output,
        transport(tmp_path, 1, keys=keys) as one,
        socket.create_server(("127.0.0.1", 0)) as stranger,
    ):
        endpoint = f"tcp://127.0.0.1:{stranger.getsockname()[1]}"
        one.service.do(one.service.peers.directory.merge, {0: Address(endpoint, epoch=1)})
        with socket.create_connection(split(one.address.endpoint)) as visitor:
            visitor.sendall(greeting)
            visitor.recv(64)
        stranger.settimeout(SECONDS)
        with stranger.accept()[0] as visited:
            visited.sendall(greeting)
            visited.recv(64)
            if encrypts:
                visited.recv(4096)  # what begins the handshake
                time.sleep(0.1)  # until the other side waits for the answer
        closed = "the other side closed the connection at once: it has ended, or is no replica"
        expected = {
            f"replica 1: {endpoint} cannot be joined: {closed}",
            f"replica 1: a connection to this replica failed: {closed}",
        }
        until(lambda: set(output.getvalue().splitlines()) == expected)


def hostile(draw: random.Random, member: bool, encrypted: int = 0) -> bytes:
    """What no replica would send: to a stranger's eye, or after a greeting that is right."""
    noise = draw.randbytes(draw.randrange(200))
    if not member:
        return draw.choice([b"", noise, b"nlco", b"nlco" + bytes([VERSION + 1, 0]), b"\xff" + bytes(9)])
    said = draw.choice(
        [
            noise,
            b"\xff\xff\xff\xff" + noise,
            packed(State(draw.randrange(2**60), draw.randrange(2**60))),
            packed(Stream("no session")),
            packed(hello(1, 1)),  # of a process that has ended
            packed(hello(draw.randrange(2, 2**40), time.time_ns())),
            packed(hello(1, 1, run=RUN + 1)),
            packed(hello(0, draw.randrange(1, 2**40), question=True)),
            packed(hello(1, 1))[: draw.randrange(40)],
        ]
    )
    return b"nlco" + bytes([VERSION, encrypted]) + said + noise


def attack(draw: random.Random, place: tuple[str, int], member: bool, keys: Keys | None) -> socket.socket:
    """Return a connection over which hostile bytes were sent: with the key, inside TLS or in its place."""
    stranger = socket.create_connection(place, timeout=SECONDS)
    with suppress(OSError):
        data = hostile(draw, member, encrypted=keys is not None)
        if keys is not None:
            stranger.sendall(data[:6])
            stranger.recv(6)
            data = data[6:]
            if draw.random() < 0.9:
                stranger = keys.dials.wrap_socket(stranger)
                if draw.random() < 0.1:  # what is no record of TLS
                    stranger = socket.socket(fileno=stranger.detach())
        stranger.sendall(data)
    return stranger


@pytest.mark.parametrize(
    ("member", "key", "count"),
    [
        pytest.param(False, False, 10_000, id="strangers"),
        pytest.param(True, False, 10_000, id="members"),
        pytest.param(True, True, 500, id="members with the key"),
        pytest.param(True, True, 10_000, id="many members with the key", marks=pytest.mark.slow),
    ],
)
def test_thousands_of_hostile_connections_stop_nothing(
    tmp_path: Path, member: bool, key: bool, count: int
) -> None:
    """Neither those that say nothing and stay nor those that say what they want."""
    draw, process = random.Random(1), psutil.Process()
    keys = Keys.make(tmp_path / "key") if key else None
    with redirect_stderr(io.StringIO()), connected(tmp_path, keys=keys) as (victim, partner):
        buffer = torch.zeros(10)
        flight = victim.post([], [Message(1, buffer)], tag=5)
        place, stay = split(victim.address.endpoint), deque[socket.socket]()
        threads, files, before = process.num_threads(), process.num_fds(), 0
        for number in range(count):
            stay.append(attack(draw, place, member, keys))
            if len(stay) > 300:
                stay.popleft().close()
            if number == count // 2:
                before = process.memory_info().rss
        assert process.memory_info().rss - before < 10e6
        assert process.num_threads() <= threads
        assert process.num_fds() - files < 300 + 100, "of which 300 are ours"
        assert flight.arrived() == []
        assert not buffer.any()
        assert victim.present() == [1]
        partner.post([Message(0, torch.full((10,), 3.0))], [], tag=5)
        flight.finish(100 * SECONDS)  # since it was posted
        assert (buffer == 3.0).all()
        swap(victim, partner, tag=6)
        for one in stay:
            one.close()


# What is under way, and which replica can be the partner


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
        with pytest.raises(ConnectionError, match=r"rank 2 (has gone|is not connected)"):
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
            first.partners.missed(1)
            assert reason(2) == "missed its last deadline"
            second.partners.begin(2, 0)
            until(lambda: first.begun() == {1: 2})
            assert reason(2) == ""
            second.partners.end(1)
            second.partners.end(2)
            until(lambda: reason(2) == "is not free")
            assert reason(1) == "is ahead"
        until(lambda: reason(3) == "is not there")
