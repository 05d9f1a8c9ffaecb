"""How ranks of a federation come to know each other: a folder, or any one member."""

import io
import json
import re
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, redirect_stderr, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_noloco.federation import service
from megatron_noloco.federation.frames import LARGEST, Member
from megatron_noloco.federation.keys import Keys
from megatron_noloco.federation.rendezvous import (
    Address,
    Directory,
    Seeds,
    SharedFolder,
    is_endpoint,
    listen_at,
    reachable,
    rendezvous_of,
)
from megatron_noloco.federation.transport import FederationTransport, Network
from megatron_noloco.plans.topology import Place
from tests.harness import free_port
from tests.unit.federated import LOCAL, PATIENCE, RUN, SECONDS, swap, transport, until


def test_a_folder_that_cannot_be_written_is_named() -> None:
    line = "federation.rendezvous: cannot write in /proc/x: No such file or directory"
    with pytest.raises(OSError, match=f"^{line}$"):
        SharedFolder(Path("/proc/x"), 1).publish(0, Address("tcp://a:1", 1))


class Asked:
    """A door that remembers."""

    def __init__(self) -> None:
        self.known: dict[int, Address] = {}
        self.asked: list[str] = []

    def learn(self, addresses: Mapping[int, Address]) -> None:
        self.known = dict(addresses)

    def ask(self, endpoint: str) -> None:
        self.asked.append(endpoint)


# A folder


def test_a_shared_folder_gives_what_others_published(tmp_path: Path) -> None:
    mine, theirs, door = SharedFolder(tmp_path / "there", 1), SharedFolder(tmp_path / "there", 1), Asked()
    mine.publish(0, Address("tcp://a:1", 10))
    theirs.publish(1, Address("tcp://b:2", 11))
    of_another_run = SharedFolder(tmp_path / "there", run=2)
    of_another_run.publish(1, Address("tcp://c:3", 12))
    of_another_run.publish(2, Address("tcp://c:4", 12))
    (tmp_path / "there" / "rank_00007_0000000000000001.json").write_text("{")
    (tmp_path / "there" / "rank_x_0000000000000001.json").write_text(
        json.dumps({"endpoint": "e", "epoch": 1})
    )
    mine.look(door, alone=True)
    assert door.known == {0: Address("tcp://a:1", 10), 1: Address("tcp://b:2", 11)}
    theirs.publish(1, Address("tcp://b:5", 12))
    mine.look(door, alone=True)
    assert door.known[1] == Address("tcp://b:5", 12)


# Seeds


def test_all_seeds_are_asked_by_who_is_alone_and_seldom_by_others() -> None:
    seeds, door = Seeds.of("127.0.0.1:10, localhost:20"), Asked()
    seeds.look(door, alone=True)
    assert door.asked == ["tcp://127.0.0.1:10", "tcp://127.0.0.1:20"]
    for _ in range(20):
        seeds.look(door, alone=False)
    assert len(door.asked) == 2 + 2 * 2


def test_ranks_listen_at_the_port_of_all_seeds() -> None:
    assert Seeds.of("a:10,b:10").listen == "tcp://*:10"
    with pytest.raises(ValueError, match=r"^federation.listen is missing: .* have the ports \[10, 20\]"):
        _ = Seeds.of("a:10,b:20").listen


def test_a_seed_that_has_no_address_does_not_stop_the_others() -> None:
    seeds, door = Seeds.of("no-such-host.invalid:10,127.0.0.1:20"), Asked()
    with pytest.raises(OSError, match=r"^no-such-host.invalid: "):
        seeds.look(door, alone=True)
    assert door.asked == ["tcp://127.0.0.1:20"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("tcp://a:1,b", '"b" is not HOST:PORT'),
        ("tcp://a:1,b:99999", '"b:99999" is not HOST:PORT'),
        ("tcp://a:0", '"a:0" is not HOST:PORT'),
        ("file://", "is neither"),
        ("/a/folder", "is neither"),
    ],
)
def test_rendezvous_is_refused_in_one_line(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as caught:
        rendezvous_of(text, RUN)
    assert str(caught.value).startswith("federation.rendezvous: ")
    assert "\n" not in str(caught.value)


# Where a rank listens


def test_who_listens_everywhere_is_reached_at_its_host() -> None:
    assert reachable("tcp://0.0.0.0:5", lambda: "here") == "tcp://here:5"
    assert reachable("tcp://10.0.0.1:5", lambda: "here") == "tcp://10.0.0.1:5"


def test_the_ranks_of_a_replica_listen_at_ports_that_follow() -> None:
    assert [listen_at("tcp://*:500", rank) for rank in range(2)] == ["tcp://*:500", "tcp://*:501"]
    assert [listen_at("tcp://*:0", rank) for rank in range(2)] == ["tcp://*:0", "tcp://*:0"]


def test_a_port_that_is_taken_is_refused_in_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        network = Network(SharedFolder(tmp_path, RUN), RUN, f"tcp://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(ValueError, match=r"federation.listen: cannot listen at tcp://127.0.0.1:\d+: "):
            FederationTransport(Place(0, 2), network, PATIENCE)


# What ranks tell each other


def directory(ranks: int = 8) -> Directory:
    return Directory(Member(0, RUN, 1, ranks))


def test_a_directory_is_unpacked_as_it_was_packed() -> None:
    own = directory()
    own.merge({5: Address("tcp://b.example:65535", LARGEST), 0: Address("tcp://10.0.0.1:1", 7)})
    assert own.unpack(own.pack()) == own.addresses
    assert directory().unpack(b"") == {}
    assert len(own.pack()) <= own.longest


def test_the_address_of_the_latest_process_is_kept() -> None:
    own = directory()
    own.merge({1: Address("tcp://a:1", 5)})
    own.merge({1: Address("tcp://b:1", 5)})
    own.merge({1: Address("tcp://c:1", 4)})
    assert own.addresses == {1: Address("tcp://a:1", 5)}
    assert own.version == 1
    own.merge({1: Address("tcp://b:1", 6)})
    assert own.addresses == {1: Address("tcp://b:1", 6)}


UNSOUND = {
    8: Address("tcp://a:1", 1),  # no such rank
    1: Address("tcp://a:0", 1),
    2: Address("tcp://a:65536", 1),
    3: Address("ipc:///tmp/x", 1),
    4: Address("tcp://a:1", 0),
    5: Address("tcp://a;tcp://b:1", 1),
    6: Address("tcp://" + "a" * 300 + ":1", 1),
}


@pytest.mark.parametrize("rank", UNSOUND)
def test_what_can_be_no_address_is_refused(rank: int) -> None:
    own, larger = directory(), directory()
    own.merge({rank: UNSOUND[rank]})
    assert own.addresses == {}
    larger.addresses[rank] = Address(UNSOUND[rank].endpoint[-255:], UNSOUND[rank].epoch)
    assert own.unpack(larger.pack()) is None


@given(st.binary(max_size=200))
def test_garbage_is_no_directory(noise: bytes) -> None:
    """Or, hardly ever, one that holds sound addresses only."""
    found = directory().unpack(noise)
    assert found is None or all(rank < 8 and is_endpoint(found[rank].endpoint) for rank in found)


def test_a_directory_cut_short_or_out_of_order_is_refused() -> None:
    own = directory()
    own.merge({rank: Address(f"tcp://a:{rank + 1}", 5) for rank in range(2)})
    packed = own.pack()
    half = len(packed) // 2
    assert all(own.unpack(packed[:stop]) is None for stop in range(1, len(packed)) if stop != half)
    assert own.unpack(packed[half:] + packed[:half]) is None
    assert own.unpack(packed[:half] * 2) is None


# Together


def member(place: Place, seeds: str, listen: str = LOCAL, keys: Keys | None = None) -> FederationTransport:
    return FederationTransport(place, Network(Seeds.of(seeds), RUN, listen, keys), PATIENCE)


def seed_of(transport: FederationTransport) -> str:
    return transport.address.endpoint.removeprefix("tcp://")


def test_any_one_member_is_enough(tmp_path: Path) -> None:
    """Also when the first has gone, and when it comes back elsewhere."""
    first_seed = f"127.0.0.1:{free_port()}"
    keys = Keys.make(tmp_path / "key")
    with ExitStack() as stack:
        first = stack.enter_context(closing(member(Place(0, 5), first_seed, f"tcp://{first_seed}", keys)))
        second, third = (
            stack.enter_context(closing(member(Place(slot, 5), first_seed, keys=keys))) for slot in (1, 2)
        )
        until(lambda: [one.present() for one in (first, second, third)] == [[1, 2], [0, 2], [0, 1]])
        first.close()
        fourth = stack.enter_context(closing(member(Place(3, 5), seed_of(third), keys=keys)))
        until(lambda: [one.present() for one in (second, third, fourth)] == [[2, 3], [1, 3], [1, 2]])
        again = stack.enter_context(closing(member(Place(0, 5), seed_of(fourth), keys=keys)))
        until(lambda: all(len(one.present()) == 3 for one in (second, third, fourth, again)))
        swap(again, second, tag=1)


def test_a_seed_need_not_be_at_the_same_place_of_its_replica() -> None:
    """Each replica has two ranks, and the seed is the first of one."""
    with ExitStack() as stack:
        seed = f"127.0.0.1:{free_port()}"
        ranks = [
            stack.enter_context(
                closing(
                    member(
                        Place(rank // 2, 3, rank=rank, ranks_per_replica=2),
                        seed,
                        f"tcp://{seed}" if rank == 0 else LOCAL,
                    )
                )
            )
            for rank in range(6)
        ]
        for slot in range(3):  # as the ranks of a job do
            of_slot = ranks[2 * slot : 2 * slot + 2]
            for one in of_slot:
                one.service.learn({other.rank: other.address for other in of_slot})
        until(lambda: [one.present() for one in ranks] == [[2, 4], [3, 5], [0, 4], [1, 5], [0, 2], [1, 3]])
        until(lambda: all(len(one.service.protocol.directory.addresses) == 6 for one in ranks))


@contextmanager
def passed_on(port: int) -> Iterator[int]:
    """A port from which a router passes connections on to another one; the router's port."""

    def passes(come: socket.socket, on: socket.socket) -> None:
        with suppress(OSError):
            while data := come.recv(65536):
                on.sendall(data)
        for one in (come, on):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        with suppress(OSError):
            while True:
                outside, _ = router.accept()
                inside = socket.create_connection(("127.0.0.1", port))
                sockets.extend((outside, inside))
                for way in ((outside, inside), (inside, outside)):
                    threads.append(threading.Thread(target=passes, args=way))
                    threads[-1].start()

    sockets: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as router:
        threads = [threading.Thread(target=accept)]
        threads[0].start()
        try:
            yield router.getsockname()[1]
        finally:
            for one in (router, *sockets):
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
                one.close()
            for thread in threads:
                thread.join(SECONDS)


def test_members_behind_a_router_are_reached_where_they_say(tmp_path: Path) -> None:
    keys = Keys.make(tmp_path / "key")
    inside = free_port()
    with passed_on(inside) as outside, ExitStack() as stack:
        networks = [
            Network(SharedFolder(tmp_path / "folder", RUN), RUN, f"tcp://127.0.0.1:{inside}", keys,
                    advertise=f"tcp://127.0.0.1:{outside}"),
            Network(SharedFolder(tmp_path / "folder", RUN), RUN, LOCAL, keys),
        ]  # fmt: skip
        first, second = (
            stack.enter_context(closing(FederationTransport(Place(slot, 2), network, PATIENCE)))
            for slot, network in enumerate(networks)
        )
        assert first.address.endpoint == f"tcp://127.0.0.1:{outside}" != first.service.endpoint
        until(lambda: (first.present(), second.present()) == ([1], [0]))
        assert second.service._connections[0].endpoint == first.address.endpoint
        swap(first, second, tag=1)


@pytest.mark.parametrize(
    ("advertise", "listen", "problem"),
    [
        ("example.org:29500", "tcp://*:29500", '"example.org:29500" is not "tcp://HOST:PORT"'),
        ("tcp://example.org:0", "tcp://*:29500", '"tcp://example.org:0" is not "tcp://HOST:PORT"'),
        (
            "tcp://example.org:29500",
            "tcp://*:0",
            "must lead to a known port, but this replica listens at any",
        ),
    ],
)
def test_an_address_to_advertise_is_refused_in_one_line(advertise: str, listen: str, problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        Network(Seeds.of("a:1"), RUN, listen, advertise=advertise)


def test_who_asks_and_is_gone_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even when very many do."""
    monkeypatch.setattr(service, "_ANNOUNCEMENT_SECONDS", 0.5)
    with transport(tmp_path, 0) as one:
        for port in range(1, 201):
            one.service.ask(f"tcp://127.0.0.1:{port}")
        until(lambda: 0 < len(one.service._announcements) <= 64)
        until(lambda: one.service._announcements == {})


def test_the_same_replica_twice_is_told_to_the_one_that_no_longer_counts(tmp_path: Path) -> None:
    with (
        redirect_stderr(io.StringIO()) as said,
        transport(tmp_path, 0) as first,
        transport(tmp_path, 1) as second,
    ):
        until(lambda: first.present() == [1] and second.present() == [0])
        with transport(tmp_path, 0) as again:
            until(lambda: again.present() == [1])
            told = f"rank 0: another process of this rank, at {again.address.endpoint}, counts for the others"
            until(lambda: any(line.startswith(told) for line in said.getvalue().splitlines()))


def test_who_has_another_key_is_told_by_the_seed_and_by_itself(tmp_path: Path) -> None:
    seed = f"127.0.0.1:{free_port()}"
    keys, wrong = (Keys.make(tmp_path / name) for name in ("key", "wrong"))
    with (
        redirect_stderr(io.StringIO()) as said,
        closing(member(Place(0, 2), seed, f"tcp://{seed}", keys)) as first,
        closing(member(Place(1, 2), seed, keys=wrong)) as second,
    ):

        def both_have_told() -> bool:
            ranks = {line.partition(": ")[0] for line in said.getvalue().splitlines()}
            return ranks == {"rank 0", "rank 1"}

        until(both_have_told)
        assert not first.wait_for(1, 0.5)
        assert second.present() == []
    told = said.getvalue().splitlines()
    assert all(line.endswith("both need the same key file, or encryption none") for line in told)
    assert any(line.startswith("rank 0: a connection to this rank failed: ") for line in told)
    assert any(line.startswith(f"rank 1: tcp://{seed} cannot be joined: ") for line in told)
