"""Members on loopback: statuses, pieces both ways, who is there, strangers, and what is left over."""

import asyncio
import json
import math
import os
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from megatron_noloco.federation import (
    https_answers,
    https_carrier,
    https_client,
    https_links,
    https_server,
    mesh,
)
from megatron_noloco.federation.https_answers import Answers
from megatron_noloco.federation.https_carrier import HttpsCarrier
from megatron_noloco.federation.https_transfers import Transfers, is_name
from megatron_noloco.federation.keys import Identity, Keys, host_name
from megatron_noloco.federation.mesh import Member, Mesh, StalledError
from megatron_noloco.federation.statuses import PeerStatus, SignedStatus, Statuses
from megatron_noloco.federation.visit import visit
from megatron_noloco.settings import MOST_SLOTS
from tests.kit.ranks import federation_keys, free_port, until

RUN = 0x1234
LONG = 30.0  # seconds that a loaded machine may need
KEYS = federation_keys()


class Someone:
    """A member with its mesh."""

    def __init__(
        self,
        identity: Identity,
        slot: int,
        seeds: Sequence[str] = (),
        listens: bool = True,
        run: int = RUN,
        digests: dict[str, str] | None = None,
        port: int = 0,
        address: str = "",
    ) -> None:
        listener = socket.create_server(("127.0.0.1", port)) if listens else None
        self.address = address or (f"127.0.0.1:{listener.getsockname()[1]}" if listener else "")
        self.lines: list[str] = []
        self.carrier = HttpsCarrier(digests or {}, listener, seeds)
        self.me = Member(slot, time.time_ns())
        self.mesh = Mesh(Statuses(run, self.me, identity), [self.carrier], self.lines.append)
        self.publish()

    def publish(self, **status: Any) -> None:
        self.mesh.publish(PeerStatus(addresses=[self.address] if self.address else [], **status))

    def result(self, fetch: mesh.Fetch, seconds: float = LONG) -> mesh.Blob:
        return self.mesh.result(fetch, mesh.Patience(self.mesh, fetch.giver, seconds=seconds))

    def close(self) -> None:
        self.publish(phase="left")
        self.mesh.close()
        assert self.carrier.failure is None
        assert not [line for line in self.lines if "please report" in line]

    def sees(self, *others: "Someone | Member") -> bool:
        members = {other.me if isinstance(other, Someone) else other for other in others}
        return set(self.mesh.members()) == members | {self.me}


class World:
    """Members that end with the test."""

    def __init__(self) -> None:
        self.members = list[Someone]()

    def add(self, slot: int, seeds: Sequence[Someone] = (), **options: Any) -> Someone:
        someone = Someone(KEYS.identity(slot), slot, [seed.address for seed in seeds], **options)
        self.members.append(someone)
        return someone

    def end_without_a_word(self, someone: Someone) -> None:
        """Close what a member has open, as when its process is killed: it does not say that it leaves."""
        self.members.remove(someone)
        someone.mesh.close()

    def meet(self) -> None:
        for someone in self.members:
            others = [other for other in self.members if other is not someone]
            until(lambda someone=someone, others=others: someone.sees(*others))  # type: ignore[misc]


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    for someone in reversed(made.members):
        someone.close()


def exchange(giver: Someone, taker: Someone, name: str, size: int = 100, is_large: bool = False) -> None:
    content = os.urandom(size)
    giver.mesh.offer(name, content, to=taker.me)
    fetch = taker.mesh.begin(giver.me, name, is_large=is_large)
    assert taker.result(fetch) == content
    giver.mesh.offers.withdraw(name)


def exchange_all(one: Someone, other: Someone) -> None:
    """Exchange a small and a large piece, both ways."""
    for number, (giver, taker) in enumerate([(one, other), (other, one)]):
        exchange(giver, taker, f"small/{number}")
        exchange(giver, taker, f"large/{number}", 2**22 + 1, is_large=True)


@pytest.mark.parametrize("slots", [(0, 1), (1, 0)])
@pytest.mark.parametrize("listens", [True, False])
def test_pieces_pass_both_ways(world: World, slots: tuple[int, int], listens: bool) -> None:
    one = world.add(slots[0])
    other = world.add(slots[1], [one], listens=listens)
    world.meet()
    exchange_all(one, other)


@pytest.mark.parametrize("slot", [0, 2])
def test_a_member_that_advertises_a_wrong_address_dials(world: World, slot: int) -> None:
    """As behind a router: the other one fails to dial it, and it opens the link."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        wrong = f"127.0.0.1:{closed.getsockname()[1]}"
    one = world.add(1)
    other = world.add(slot, [one], address=wrong)
    world.meet()
    missed = list[float]()
    end = time.monotonic() + 6.0
    while time.monotonic() < end:
        missed += [time.monotonic()] * (not one.sees(other))
        time.sleep(0.02)
    assert not missed, "its address refuses, and it is there"
    exchange_all(one, other)


def test_connections_are_kept_from_piece_to_piece(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new one has a handshake, and is slow at first."""
    opened = list[socket.socket]()

    def count(info: Any) -> socket.socket:
        opened.append(https_server.open_socket(info))
        return opened[-1]

    monkeypatch.setattr(https_client, "open_socket", count)
    one = world.add(0)
    other = world.add(1, [one])
    world.meet()
    for number in range(8):
        for giver, taker in ((one, other), (other, one)):
            exchange(giver, taker, f"small/{number}")
            exchange(giver, taker, f"large/{number}", 2**20, is_large=True)
        if number == 0:
            first = len(opened)
    assert len(opened) == first


def test_streams_that_were_idle_end_and_open_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(https_carrier, "_IDLE_SECONDS", 0.2)
    one = world.add(0)
    other = world.add(1, [one])
    world.meet()
    for number in range(3):
        exchange(one, other, f"one/{number}", 2**22, is_large=True)
        exchange(other, one, f"other/{number}", 2**22, is_large=True)
        links = [a.carrier._links.peers[b.me.slot].link for a, b in ((one, other), (other, one))]
        until(lambda links=links: not any(link.streams for link in links))  # type: ignore[misc]
        assert not any(link.is_over for link in links)


def test_a_piece_that_is_wished_while_an_idle_stream_ends_comes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(https_carrier, "_IDLE_SECONDS", 0.2)
    one = world.add(0)
    other = world.add(1, [one])
    world.meet()
    one.mesh.offer("late", content := os.urandom(2**20))
    texts, fetches = Transfers.texts, list[mesh.Fetch]()

    async def wishes(
        transfers: Transfers, is_over: Callable[[], bool], idle_seconds: float | None = None
    ) -> AsyncIterator[bytes]:
        async for text in texts(transfers, is_over, idle_seconds):
            yield text
        if idle_seconds is not None and not fetches:
            fetches.append(other.mesh.begin(one.me, "late", is_large=True))

    monkeypatch.setattr(Transfers, "texts", wishes)
    exchange(one, other, "piece", 2**20, is_large=True)
    until(lambda: fetches)
    assert other.result(fetches[0]) == content


def test_streams_end_with_their_link_whatever_the_other_does(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = world.add(0)
    other = world.add(1, [one])
    world.meet()
    texts = Transfers.texts

    async def keeps(
        transfers: Transfers, is_over: Callable[[], bool], idle_seconds: float | None = None
    ) -> AsyncIterator[bytes]:
        async for text in texts(transfers, is_over, idle_seconds):
            yield text
        if idle_seconds is None:
            await asyncio.Event().wait()

    monkeypatch.setattr(Transfers, "texts", keeps)
    exchange(one, other, "piece", 2**20, is_large=True)
    theirs, link = one.carrier._links.peers[1].link, other.carrier._links.peers[0].link
    streams = {*link.streams}
    one.carrier._soon(theirs.end)
    assert streams
    until(lambda: all(stream.done() for stream in streams))


def test_a_piece_that_has_come_is_sent_once(world: World) -> None:
    """Small ones are sent before they are wished, if the taker is known."""
    one = world.add(0)
    other = world.add(1, [one])
    world.meet()
    until(lambda: one.carrier._links.peers[1].link)
    one.mesh.offer("word", b"content", to=other.me)
    transfers = other.carrier._links.peers[0].link.transfers
    until(lambda: "word" in transfers._unwished)
    assert other.mesh.fetch(one.me, "word") == b"content"
    assert not transfers._unwished
    assert not transfers._told


@pytest.mark.parametrize("giver_dials", [True, False])
def test_a_piece_offered_while_its_taker_is_away_comes_later(
    giver_dials: bool, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = world.add(0)
    second = world.add(1, [first])
    world.meet()
    giver, taker = (second, first) if giver_dials else (first, second)
    fetch = taker.mesh.begin(giver.me, "piece")
    with monkeypatch.context() as away:
        away.setattr(giver.carrier, "reached", frozenset())
        giver.mesh.offer("piece", b"content", to=taker.me)
    assert taker.mesh.result(fetch, mesh.Patience(taker.mesh, giver.me)) == b"content"


# Members that end without a word


@contextmanager
def process(folder: Path, slot: int, seed: Someone, listens: bool = True) -> Iterator[Any]:
    """Run a member in a process of its own, until the block ends."""
    (folder / "member").write_text(KEYS.member_file(slot, time.time() + 3600))
    arguments = map(str, [folder / "member", slot, seed.address, int(listens)])
    command = [sys.executable, "-m", "tests.parts.test_https_carrier", *arguments]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
    try:
        assert started.stdout is not None
        started.member = Member.parse(started.stdout.readline().strip())  # type: ignore[attr-defined]
        yield started
    finally:
        started.kill()
        started.wait()
        for pipe in (started.stdin, started.stdout):
            assert pipe is not None
            pipe.close()


def _main(key: str, slot: str, seed: str, listens: str) -> None:
    someone = Someone(Keys.read(Path(key)).identity(int(slot)), int(slot), [seed], bool(int(listens)))
    sys.stdout.write(f"{someone.me}\n")
    sys.stdout.flush()
    for line in sys.stdin:
        giver, name = line.split()
        someone.mesh.begin(Member.parse(giver), name, is_large=True)


@pytest.mark.parametrize("listens", [True, False])
def test_a_killed_member_is_absent_long_before_the_lease(
    world: World, tmp_path: Path, listens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member that had links to it, and has left, does not keep it there."""
    one = world.add(0)
    other = world.add(1, [one])
    leaves = world.add(3, [one])
    monkeypatch.setattr(https_links, "LEASE_SECONDS", 1000.0)
    with process(tmp_path, 2, one, listens) as killed:
        until(lambda: one.sees(other, leaves, killed.member) and other.sees(one, leaves, killed.member))
        until(
            lambda: all(killed.member in someone.carrier._links.peers[3].linked for someone in (one, other))
        )
        until(lambda: all(someone.carrier._links.peers[2].link for someone in (one, other)))
        world.members.remove(leaves)
        leaves.close()
        killed.kill()
        for someone in (one, other):
            until(lambda someone=someone: killed.member not in someone.mesh.members())  # type: ignore[misc]
        assert one.sees(other)
        assert killed.member in one.mesh.known()


def test_a_peer_killed_during_a_transfer_leaves_no_noise(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = world.add(0)
    with process(tmp_path, 2, first) as killed:
        one = world.add(1, [first])  # so it brings pieces
        until(lambda: one.sees(first, killed.member) and one.mesh.reaches(killed.member))
        for number in range(8):
            one.mesh.offer(f"piece/{number}", bytes(2**25), to=killed.member)
            killed.stdin.write(f"{one.me} piece/{number}\n")
        killed.stdin.flush()
        until(lambda: killed.member.slot in one.mesh.moved)
        killed.kill()
        until(lambda: one.sees(first))
    one.mesh.offers.withdraw("piece/")
    assert not [record for record in caplog.records if record.name == "asyncio"]
    assert one.carrier.failure is None


def test_writes_end_when_a_connection_is_cut(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """asyncio writes a line of its own to stderr for each write to a connection that is lost."""
    one = world.add(0)
    rogue = Rogue(world, 3)
    one.mesh.offer("large", bytes(2**25))
    for is_large in (False, True):
        for _ in range(3):
            with rogue.link(one) as (opened, _), rogue.stream(one) as stream:
                rogue.write(opened, json.dumps({"wish": {"1": ["large", is_large]}}).encode())
                cut = stream if is_large else opened
                cut.recv(2**16)
                cut.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # with a reset
                cut.close()
                time.sleep(0.2)
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


def test_writes_end_when_who_was_dialled_cuts(world: World, caplog: pytest.LogCaptureFixture) -> None:
    one = world.add(0)
    other = world.add(1, [one])
    world.meet()
    other.mesh.offer("large", bytes(2**26))

    def cut() -> None:
        for connection in [*one.carrier._server.connections]:
            connection.transport.abort()

    for is_large in (False, True):
        for _ in range(3):
            until(lambda: one.mesh.reaches(other.me))
            fetch = one.mesh.begin(other.me, "large", is_large=is_large)
            one.mesh.moved.clear()
            until(lambda: one.mesh.moved or fetch.outcome)  # noqa: B023
            one.carrier._soon(cut)
            time.sleep(0.2)
            one.mesh.cancel(fetch)
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


def test_a_stopped_member_is_absent_after_the_lease_and_back(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(https_links, "LEASE_SECONDS", 6.0)
    one = world.add(0)
    other = world.add(1, [one])
    with process(tmp_path, 2, one) as stopped:
        until(lambda: one.sees(other, stopped.member) and other.sees(one, stopped.member))
        stopped.send_signal(signal.SIGSTOP)
        time.sleep(1)
        assert stopped.member in one.mesh.members()
        until(lambda: one.sees(other) and other.sees(one))
        stopped.send_signal(signal.SIGCONT)
        until(lambda: one.sees(other, stopped.member) and other.sees(one, stopped.member))


@pytest.mark.parametrize("slot", [2, 3])
def test_a_later_process_at_an_address_is_not_the_earlier(world: World, slot: int) -> None:
    """Of the same slot, which it replaces, or of another."""
    one = world.add(0)
    first = world.add(2, [one], port=(port := free_port()))
    until(lambda: one.sees(first))
    world.end_without_a_word(first)
    later = world.add(slot, [one], port=port)
    until(lambda: one.sees(later))
    assert (first.me in one.mesh.known()) == (slot != 2)
    with pytest.raises(StalledError):
        one.mesh.fetch(first.me, "piece", LONG)


def test_two_hidden_members_see_and_do_not_reach_each_other(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who sees whom is told in its turn, also while statuses change quickly."""
    monkeypatch.setattr(https_links, "LEASE_SECONDS", 3.0)
    monkeypatch.setattr(https_links, "PULSE_SECONDS", 0.5)
    one = world.add(0)
    hidden, other = (world.add(slot, [one], listens=False) for slot in (1, 2))
    world.meet()
    for number in range(60):
        one.publish(step=number)
        other.publish(step=number)
        time.sleep(0.1)
        assert hidden.sees(one, other)
    until(lambda: hidden.mesh.members()[other.me].step == 59)
    assert hidden.mesh.reaches(one.me)
    assert not hidden.mesh.reaches(other.me)
    with pytest.raises(StalledError):
        hidden.mesh.fetch(other.me, "piece")


def test_an_absent_member_has_no_wishes(world: World) -> None:
    one = world.add(0)
    other = world.add(2, [one])
    world.meet()
    other.mesh.begin(one.me, "a")
    until(lambda: len(one.mesh.offers.takers("")) == 1)
    world.end_without_a_word(other)
    until(lambda: other.me not in one.mesh.members())
    until(lambda: not one.mesh.offers.takers(""))


@pytest.mark.parametrize("listens", [True, False])
def test_who_wishes_over_a_link_is_reached(
    listens: bool, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its wish could be forgotten, as that of a member that is away, when another carrier looks."""
    wish, are_reached = mesh.Offers.wish, list[bool]()

    def look(offers: mesh.Offers, name: str, taker: Member) -> "Future[mesh.Piece]":
        are_reached.append(one.mesh.reaches(taker))
        return wish(offers, name, taker)

    with monkeypatch.context() as patch:
        patch.setattr(https_carrier, "_TICK_SECONDS", 1000.0)
        one = world.add(0)
        time.sleep(0.5)
    monkeypatch.setattr(mesh.Offers, "wish", look)
    other = world.add(1, [one], listens=listens)
    until(lambda: one.me in other.mesh.known())
    fetch = other.mesh.begin(one.me, "a")
    until(lambda: are_reached)
    assert are_reached == [True]
    other.mesh.cancel(fetch)


def test_a_suspended_process_loses_nobody(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(https_links, "LEASE_SECONDS", 5.0)
    one = world.add(0)
    other = world.add(1, [one])
    world.meet()
    missed = list[int]()
    one.carrier._soon(time.sleep, 7)
    end = time.monotonic() + 9
    while time.monotonic() < end:
        missed += [1] * (other.me not in one.mesh.members())
        time.sleep(0.02)
    assert not missed


class Router:
    """Forwards a port; it can forget what is open, as a NAT does: nothing comes over these connections again."""

    def __init__(self, port: int) -> None:
        self._port, self._server = port, socket.create_server(("127.0.0.1", 0))
        self._opened = list[socket.socket]()
        self._forgotten = set[socket.socket]()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._server.getsockname()[1]}"

    def forget(self) -> None:
        self._forgotten |= {*self._opened}

    def close(self) -> None:
        for opened in (self._server, *self._opened):
            with suppress(OSError):
                opened.shutdown(socket.SHUT_RDWR)
            opened.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                outer, _ = self._server.accept()
                inner = socket.create_connection(("127.0.0.1", self._port))
                self._opened += outer, inner
                for ends in ((outer, inner), (inner, outer)):
                    threading.Thread(target=self._pump, args=ends, daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while (content := source.recv(2**16)) or source not in self._forgotten:
                if source not in self._forgotten:
                    target.sendall(content) if content else target.shutdown(socket.SHUT_WR)
                if not content:
                    return


def test_connections_that_a_router_forgot_are_left_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request over one of them would wait ten seconds for its answer."""
    monkeypatch.setattr(https_links, "PULSE_SECONDS", 0.3)
    monkeypatch.setattr(https_carrier, "LEASE_SECONDS", 2.0)
    router = Router(port := free_port())
    one = world.add(0, port=port, address=router.address)
    hidden = Someone(KEYS.identity(1), 1, [router.address], listens=False)
    world.members.append(hidden)
    world.meet()
    asked = [hidden.mesh.begin(one.me, f"piece/{number}") for number in range(8)]
    until(lambda: len(one.mesh.offers.takers("piece/")) == len(asked))
    for number, fetch in enumerate(asked):
        one.mesh.offer(f"piece/{number}", b"content")
        assert hidden.result(fetch) == b"content"
    router.forget()
    one.mesh.offer("later", b"content")
    fetch = hidden.mesh.begin(one.me, "later")
    until(lambda: fetch.outcome)
    assert fetch.outcome == b"content"
    router.close()


def test_after_15_restarts_of_a_peer_nothing_is_left(world: World) -> None:
    def counts() -> tuple[int, int, int]:
        tasks = sum(not task.done() for task in one.carrier._tasks)
        return len(os.listdir("/proc/self/fd")), threading.active_count(), tasks

    one = world.add(0)
    before: tuple[int, int, int] | None = None
    for number in range(15):  # each third is hidden, each fifth ends without a word
        peer = world.add(1, [one], listens=number % 3 > 0)
        until(lambda peer=peer: one.sees(peer) and peer.sees(one))  # type: ignore[misc]
        exchange(one, peer, "piece", 2**17)
        exchange(peer, one, "piece", 2**17)
        if number % 5:
            world.members.remove(peer)
            peer.close()
        else:
            world.end_without_a_word(peer)
        until(lambda: one.sees())
        if before is None:
            before = counts()
    until(lambda: all(now <= then for now, then in zip(counts(), before, strict=True)))
    assert len(one.mesh.known()) == 2


def test_a_forked_child_holds_no_socket_of_the_federation(world: World) -> None:
    one = world.add(0)
    world.add(1, [one])
    world.meet()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        found = [
            os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if _is_open(name)
        ]
        inet = {line.split()[9] for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]}
        os.write(write, json.dumps([name for name in found if name[8:-1] in inet]).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        assert answer.read() == "[]"
    os.waitpid(child, 0)
    exchange(one, world.members[1], "piece")


def _is_open(name: str) -> bool:
    return os.path.islink(f"/proc/self/fd/{name}")


# Others


def test_jobs_of_other_runs_say_in_what_they_differ(world: World) -> None:
    one = world.add(0, digests={"model.layers": "1", "seed": "2"})
    other = world.add(5, [one], run=RUN + 1, digests={"model.layers": "3", "seed": "2"})
    until(lambda: one.lines and other.lines)
    assert one.lines == ["refused: replica 5 differs from replica 0 in model.layers"]
    assert other.lines == ["refused: replica 0 differs from replica 5 in model.layers"]
    assert one.sees()
    assert other.sees()


def test_a_clock_that_is_days_ahead_is_named_on_both_sides(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = world.add(0)
    later = time.time_ns() + 3 * 86_400 * 10**9
    with monkeypatch.context() as clock:
        clock.setattr("time.time_ns", lambda: later)
        other = world.add(1, [one])
    until(lambda: one.lines and other.lines)
    line = "replica 1 was started more than a day after this machine's time, by its own clock; nothing is"
    assert one.lines[0].startswith(line)
    assert other.lines[0].startswith(f"{one.address} refuses this replica: {line}")
    assert one.sees()


def test_a_process_without_the_key_is_refused_with_a_line(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_noloco.federation.https_client.PATIENCE_SECONDS", 0.5)
    one = world.add(0)
    stranger = Someone(Keys.make(tmp_path / "other").identity(1), 1, [one.address])
    host, port = one.address.split(":")
    with socket.create_connection((host, int(port))) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
        until(lambda: one.lines)
    assert one.lines == [
        "refused a connection from 127.0.0.1: it shows no certificate of this federation, or is of "
        "megatron_noloco 0.4 or earlier"
    ]
    try:
        until(lambda: stranger.lines)
        assert stranger.lines == [
            f"federation.rendezvous: the process at {one.address} is another program, has another key, or is of "
            "megatron_noloco 0.4 or earlier; does a job listen there, and is the port open?"
        ]
        assert one.sees()
    finally:
        stranger.close()


def test_a_member_file_whose_time_is_over_is_named(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = world.add(0)
    (path := tmp_path / "member").write_text(KEYS.member_file(1, time.time() - 60))
    with monkeypatch.context() as clock:
        clock.setattr("megatron_noloco.federation.keys.time.time", lambda: 0.0)
        late = Keys.read(path).identity(1)
    host, port = one.address.split(":")
    with (
        socket.create_connection((host, int(port))) as plain,
        late.client.wrap_socket(plain, server_hostname=host_name(0)) as connection,
        suppress(ssl.SSLError, ConnectionError),
    ):
        connection.recv(1)
    until(lambda: one.lines)
    assert one.lines == ["refused a connection from 127.0.0.1: the time of its member file is over"]


def test_why_nobody_answers_is_said_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_noloco.federation.https_client.PATIENCE_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        seed = f"127.0.0.1:{closed.getsockname()[1]}"
    alone = Someone(KEYS.identity(0), 0, [seed, "no-such-host.invalid:1"])
    try:
        until(lambda: any(seed in line and "its name is unknown" in line for line in alone.lines))
        assert any(f"nobody answers at {seed}: Connection refused" in line for line in alone.lines)
        assert len(alone.lines) == len(set(alone.lines))
    finally:
        alone.close()


def test_a_seed_to_which_there_is_a_link_is_asked_no_more(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its member gives another address: the answer has the statuses of all."""
    monkeypatch.setattr("megatron_noloco.federation.https_client._LOOK_SECONDS", 0.02)
    one = world.add(0)
    other = Someone(KEYS.identity(1), 1, [one.address.replace("127.0.0.1", "localhost")])
    world.members.append(other)
    world.meet()
    until(lambda: other.carrier._links.peers[0].link)
    time.sleep(0.5)  # what was asked before is answered
    monkeypatch.setattr(Answers, "_tell", Mock(side_effect=ZeroDivisionError))
    time.sleep(1.0)
    assert not one.lines


def test_a_newcomer_gets_in_among_silent_strangers(world: World) -> None:
    one = world.add(0)
    host, port = one.address.split(":")
    strangers = []
    try:
        for _ in range(2000):
            strangers.append(socket.create_connection((host, int(port))))
        newcomer = world.add(1, [one])
        until(lambda: one.sees(newcomer) and newcomer.sees(one))
        until(lambda: len(one.carrier._server.connections) < 300)
    finally:
        for stranger in strangers:
            stranger.close()
    exchange(one, newcomer, "piece")


def test_a_hidden_member_dials_again_after_failures(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    one = world.add(0)
    hidden = world.add(1, [one], listens=False)
    world.meet()
    hold, failures = HttpsCarrier._hold, [TimeoutError(), ConnectionRefusedError(), ConnectionResetError()]

    async def fails(carrier: HttpsCarrier, *arguments: Any) -> None:
        if failures:
            raise failures.pop()
        await hold(carrier, *arguments)

    monkeypatch.setattr(HttpsCarrier, "_hold", fails)
    link = hidden.carrier._links.peers[0].link
    assert link is not None
    hidden.carrier._soon(link.end)
    until(lambda: not failures)
    world.meet()
    exchange(one, hidden, "piece")
    exchange(hidden, one, "piece")


def test_a_dial_that_was_cancelled_before_it_began_is_made_again() -> None:
    async def body() -> None:
        text = json.dumps({"addresses": ["127.0.0.1:1"]})
        peer = https_links.Neighbour(SignedStatus(Member(1, 1), 1, text, b"", b""), math.inf, 0.0)
        assert peer.is_due()
        peer.dialling = asyncio.create_task(asyncio.sleep(0))
        assert not peer.is_due()
        peer.dialling.cancel()
        await asyncio.wait([peer.dialling])
        assert peer.is_due()

    asyncio.run(body())


# Members that misbehave


class Rogue:
    """A member of the federation that speaks HTTP by hand."""

    def __init__(self, world: World, slot: int) -> None:
        self.identity, self.me = KEYS.identity(slot), Member(slot, time.time_ns())
        self.statuses = Statuses(RUN, self.me, self.identity)

    def connect(self, victim: Someone) -> socket.socket:
        host, port = victim.address.split(":")
        opened = socket.create_connection((host, int(port)), 10)
        return self.identity.client.wrap_socket(opened, server_hostname=host_name(victim.me.slot))

    def request(self, victim: Someone, method: str, path: str, body: bytes = b"", **headers: str) -> bytes:
        """Return the first line of the answer."""
        opened = self.connect(victim)
        with opened:
            opened.sendall(self.head(method, path, **{"Content_Length": str(len(body))} | headers))
            with suppress(OSError):
                opened.sendall(body)
            with suppress(OSError):
                return opened.recv(2**12).partition(b"\r\n")[0]
        return b""

    def head(self, method: str, path: str, **headers: str) -> bytes:
        named = {"Host": "x"} | {name.replace("_", "-"): value for name, value in headers.items()}
        lines = [f"{name}: {value}" for name, value in named.items()]
        return "\r\n".join([f"{method} /run/{RUN:016x}/{path} HTTP/1.1", *lines, "", ""]).encode()

    @contextmanager
    def link(self, victim: Someone, **status: Any) -> Iterator[tuple[socket.socket, Any]]:
        """Open a link; yield what to write to, and what to read from, of which the head was read."""
        self.statuses.sign(PeerStatus(**status))
        assert self.statuses.own is not None
        with self.connect(victim) as opened, opened.makefile("rb") as reads:
            opened.sendall(self.head("PUT", "link", Transfer_Encoding="chunked"))
            self.write(opened, self.statuses.own.line.rstrip())
            self.answer = reads.readline()
            yield opened, reads

    def write(self, opened: socket.socket, text: bytes) -> None:
        opened.sendall(b"%x\r\n%s\n\r\n" % (len(text) + 1, text))

    @contextmanager
    def stream(self, victim: Someone) -> Iterator[socket.socket]:
        """Open a stream of a link that is there."""
        with self.connect(victim) as opened:
            opened.sendall(self.head("PUT", "stream", Transfer_Encoding="chunked"))
            self.write(opened, b"{}")
            self.answer = opened.recv(2**12)
            yield opened

    def introduce(self, victim: Someone, **status: Any) -> bytes:
        """Open a link for a moment; return the first line of the answer."""
        with self.link(victim, **status):
            return self.answer


def test_large_statuses_and_pieces_are_refused_unread(world: World) -> None:
    one = world.add(0)
    rogue = Rogue(world, 3)
    with rogue.connect(one) as opened, suppress(OSError):
        opened.sendall(rogue.head("PUT", "link", Transfer_Encoding="chunked"))
        for _ in range(100):
            rogue.write(opened, bytes(10**5))
        assert not opened.recv(2**12)
    with rogue.link(one) as (opened, reads):
        until(lambda: one.mesh.reaches(rogue.me))
        fetch = one.mesh.begin(rogue.me, "name")
        part = {"piece": fetch.number, "size": 2**26 + 1, "at": 0}
        rogue.write(opened, json.dumps(part).encode())
        while reads.readline():  # the link ends
            pass
    with rogue.link(one) as (opened, reads):
        while b'"wish"' not in reads.readline():
            pass
        not_wished = {"piece": fetch.number + 1, "size": 2**20 + 7, "at": 2**20}
        for part in (not_wished, {"piece": fetch.number, "size": 7, "at": 0}):
            rogue.write(opened, json.dumps(part).encode() + b"\n%d23456" % (part is not not_wished))
        until(lambda: fetch.outcome)
    assert fetch.outcome == b"123456\n"


def test_a_member_speaks_for_itself_only(world: World) -> None:
    one = world.add(0)
    other = world.add(1, [one])
    world.meet()
    rogue = Rogue(world, 3)
    with rogue.stream(one):
        assert b"403" in rogue.answer  # it has opened no link
    one.mesh.offer("another's", b"content", to=other.me)
    with rogue.link(one) as (opened, reads), rogue.stream(one):
        assert b"200" in rogue.answer
        rogue.write(opened, json.dumps({"wish": {"1": ["another's", False]}}).encode())
        while b'"refused":1,' not in reads.readline():
            pass
    later = Rogue(world, 3)
    later.introduce(one)
    assert b"410" in rogue.introduce(one)
    liar = Rogue(world, 4)
    liar.statuses = later.statuses
    assert b"400" in liar.introduce(one)


@pytest.mark.parametrize(
    "line",
    [
        {"linked": {"x": True}},
        {"linked": {f"0.{10**400}": True}},
        {"known": {"x": [1, 1]}},
        {"known": {"1": 7}},
        {"known": {"1": [[], None]}},
        {"wish": {"1": ["a"]}},
        {"wish": {"1": ["\n", True]}},
        {"wish": {str(number): ["a", True] for number in range(257)}},
        {"unwish": [[]]},
        {"piece": 1},
        {"piece": "a", "size": 5, "at": 3},
        {"piece": 1, "size": math.inf, "at": 0},
        {"refused": [], "why": ""},
        {"piece": "a", "size": 2**16 + 1, "at": 0},
    ],
)
def test_a_malformed_line_ends_its_link_only(world: World, line: Any) -> None:
    one = world.add(0)
    other = world.add(1, [one])
    world.meet()
    rogue = Rogue(world, 3)
    with rogue.link(one) as (opened, reads):
        until(lambda: rogue.me in one.mesh.members())
        rogue.write(opened, json.dumps(line).encode())
        while reads.readline():
            pass
    until(lambda: one.sees(other) and other.sees(one))


def test_a_fault_in_a_request_ends_no_job(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    one = world.add(0)
    other = world.add(1, [one])
    world.meet()
    grant = Mock(side_effect=[ZeroDivisionError, None])
    with monkeypatch.context() as patch:
        patch.setattr(Transfers, "_grant", grant)
        fetch = other.mesh.begin(one.me, "piece")
        until(lambda: grant.call_count == 2)  # on the next link
    (line,) = one.lines
    assert line.startswith("a request could not be answered: ZeroDivisionError")
    one.lines.clear()
    assert one.sees(other)
    other.mesh.cancel(fetch)


@pytest.mark.parametrize("name", ["\ud800", "a\nb", "", "x" * 129, 7])
def test_names_of_pieces_are_printable(name: Any) -> None:
    assert not is_name(name)


def test_who_was_a_member_is_none_when_its_certificate_has_ended(world: World) -> None:
    one = world.add(0)
    rogue = Rogue(world, 3)
    rogue.introduce(one)
    until(lambda: rogue.me in one.mesh.known())
    peer = one.carrier._links.peers[3]
    assert not peer.has_ended
    peer.ends = time.time() - 1
    assert peer.has_ended


def test_garbage_ends_one_connection_only(world: World) -> None:
    one = world.add(0)
    rogue = Rogue(world, 3)
    for garbage in (
        b"\0" * 100,
        b"GET / HTTP/1.1\r\n\r\n",
        b"PUT " + b"x" * 2**16,
        rogue.head("POST", "status"),
    ):
        with rogue.connect(one) as opened, suppress(OSError):
            opened.sendall(garbage)
            opened.recv(2**10)
    with rogue.connect(one) as opened:
        opened.sendall(rogue.head("GET", "status").replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert b"505" in opened.recv(100)
    for path in ("a", "a/b/c", "status/x"):
        assert rogue.request(one, "GET", path)[9:12] in (b"400", b"403", b"404")
    peer = world.add(1, [one])
    world.meet()
    exchange(one, peer, "piece")
    exchange(peer, one, "piece")


def test_floods_of_wishes_and_connections_are_limited(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(https_server, "_MOST_OF_A_SLOT", 40)
    one = world.add(0)
    other = world.add(1, [one])
    world.meet()
    rogue = Rogue(world, 3)
    rogue.introduce(one)
    opened = [rogue.connect(one) for _ in range(80)]
    time.sleep(0.5)
    assert sum(connection.slot == 3 for connection in one.carrier._server.connections) <= 40
    for connection in opened:
        connection.close()
    wishes = {str(number): [f"name/{number}", False] for number in range(256)}
    with rogue.link(one) as (link, reads):
        rogue.write(link, json.dumps({"wish": wishes}).encode())
        until(lambda: len(one.mesh.offers.takers("")) == 256)
        rogue.write(link, json.dumps({"wish": {"256": ["one more", False]}}).encode())
        while reads.readline():  # the link ends
            pass
    until(lambda: not one.mesh.offers.takers(""))
    exchange(one, other, "piece")
    exchange(other, one, "piece")


def test_a_taker_that_stops_reading_is_dropped(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(https_answers, "PATIENCE_SECONDS", 1.0)
    one = world.add(0)
    other = world.add(1, [one])
    world.meet()
    rogue = Rogue(world, 3)
    one.mesh.offer("large", bytes(2**25))
    with rogue.link(one) as (opened, _), rogue.stream(one):
        wishes = {"1": ["large", True], "2": ["large", False]}
        rogue.write(opened, json.dumps({"wish": wishes}).encode())
        assert other.mesh.fetch(one.me, "large", LONG) == bytes(2**25)
        until(lambda: not any(connection.slot == 3 for connection in one.carrier._server.connections))


def test_wishes_that_are_taken_back_leave_nothing(world: World) -> None:
    one = world.add(0)
    one.mesh.offer("large", bytes(2**20))
    lines = [{"wish": {"1": ["large", True]}}, *[{}] * 9, {"unwish": [1]}] * 100
    rogue = Rogue(world, 3)
    with rogue.link(one) as (opened, _):
        lines.append({"wish": {"2": ["absent", True]}})
        rogue.write(opened, b"\n".join(json.dumps(line).encode() for line in lines))
        until(lambda: one.mesh.offers.takers("absent"))
        link = one.carrier._links.peers[3].link
        assert link is not None
        assert not link.transfers._large


def test_a_part_does_not_come_on_two_streams_at_once(world: World) -> None:
    """The one that is late would change a piece that has been taken, and checked."""
    one = world.add(0)
    rogue = Rogue(world, 3)
    with rogue.link(one) as (_, reads), rogue.stream(one) as late, rogue.stream(one) as stream:
        until(lambda: one.mesh.reaches(rogue.me))
        fetch = one.mesh.begin(rogue.me, "name", is_large=True)
        while b'"wish"' not in reads.readline():
            pass
        part = {"piece": fetch.number, "size": 2**16 + 1}
        first, last = (json.dumps(part | {"at": at}).encode() + b"\n" for at in (0, 2**16))
        rogue.write(late, first + bytes(100))
        link = one.carrier._links.peers[3].link
        assert link is not None
        until(lambda: link.transfers._coming)
        rogue.write(stream, first + bytes(2**16) + last)
        while reads.readline():  # the link ends
            pass
    assert fetch.outcome is None


def test_what_has_come_or_was_refused_is_not_wished_again() -> None:
    """Also before the thread of the links has heard that it is over."""
    taker = Mesh(Mock(), [], Mock())
    for name in ("a", "b"):
        taker.begin(Member(1, 1), name)
    transfers = Transfers(taker, Member(1, 1), Mock())
    (wish,) = transfers.lines()
    came, refused = json.loads(wish)["wish"]
    asyncio.run(transfers.hear({"piece": int(came), "size": 0, "at": 0}, Mock()))
    asyncio.run(transfers.hear({"refused": int(refused), "why": ""}, Mock()))
    assert not [*transfers.lines()]


def test_a_taker_that_has_a_piece_may_wish_for_another() -> None:
    """It has its last part before the giver looks for what is to be sent next."""

    async def body() -> None:
        offers = mesh.Offers(Mock())
        offers.offer("a", mesh.Piece(b"content", None))
        transfers = Transfers(Mock(offers=offers, awaited=Mock(return_value={})), Member(1, 1), Mock())
        wishes = {str(number): [f"{number}", False] for number in range(1, mesh.MOST_WISHES)}
        await transfers.hear({"wish": {"0": ["a", False]} | wishes}, Mock())
        await asyncio.sleep(0.1)
        (part,) = transfers.lines()
        assert b"content" in part
        await transfers.hear({"wish": {"1000": ["b", False]}}, Mock())

    asyncio.run(body())


# Visitors


def test_a_visitor_reads_statuses(world: World) -> None:
    one = world.add(0)
    other = world.add(1, [one])
    world.meet()
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = f"127.0.0.1:{closed.getsockname()[1]}"
    statuses, present = visit(KEYS.identity(MOST_SLOTS), RUN, [nobody, one.address])
    assert {*statuses} == present == {one.me, other.me}
    with pytest.raises(ValueError, match=f"nobody answers at {nobody}: Connection refused"):
        visit(KEYS.identity(MOST_SLOTS), RUN, [nobody])
    with pytest.raises(ValueError, match="is of another run"):
        visit(KEYS.identity(MOST_SLOTS), RUN + 1, [one.address])
    assert one.sees(other)


if __name__ == "__main__":
    _main(*sys.argv[1:])
