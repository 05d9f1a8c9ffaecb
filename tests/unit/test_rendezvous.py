"""How ranks of a federation come to know each other: a folder, or any one member."""

import io
import json
import re
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing, redirect_stderr
from dataclasses import replace
from functools import partial
from operator import add
from pathlib import Path

import pytest
from megatron_noloco.federation.control import LARGEST, Address

from megatron_noloco.federation import network as module
from megatron_noloco.federation import peers
from megatron_noloco.federation.compatibility import Alike
from megatron_noloco.federation.keys import Keys
from megatron_noloco.federation.membership import network_of
from megatron_noloco.federation.network import FederationTransport, Network
from megatron_noloco.federation.rendezvous import (
    Directory,
    Found,
    Seeds,
    SharedFolder,
    endpoint_of,
    numeric,
    reachable,
    rendezvous_of,
    split,
)
from megatron_noloco.job.join import _address_towards, reachable_address
from megatron_noloco.plans.topology import Place
from megatron_noloco.settings import FederationSettings, NolocoSettings
from tests.harness import free_port
from tests.unit.federated import LOCAL, PATIENCE, RUN, connected, learn, opened, swap, transport, until

# A folder


def test_a_shared_folder_gives_what_others_published(tmp_path: Path) -> None:
    mine, theirs = SharedFolder(tmp_path / "there", 1), SharedFolder(tmp_path / "there", 1)
    mine.publish(0, Address("tcp://a:1", 10))
    theirs.publish(1, Address("tcp://b:2", 11))
    of_another_run = SharedFolder(tmp_path / "there", run=2)
    of_another_run.publish(1, Address("tcp://c:3", 12))
    of_another_run.publish(2, Address("tcp://c:4", 12))
    (tmp_path / "there" / "rank_00007_0000000000000001.json").write_text("{")
    valid = json.dumps({"endpoint": "e", "epoch": 1})
    (tmp_path / "there" / "rank_x_0000000000000001.json").write_text(valid)
    assert mine.look() == ({0: Address("tcp://a:1", 10), 1: Address("tcp://b:2", 11)}, (), "")
    theirs.publish(1, Address("tcp://b:5", 12, "a-site"))
    assert mine.look().addresses[1] == Address("tcp://b:5", 12, "a-site")


def test_one_file_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    folder = SharedFolder(tmp_path, 1)
    for number, content in enumerate(("[" * 100_000, '{"endpoint": "", "epoch": 1e999}', "[]", "null")):
        (tmp_path / f"rank_0001{number}_0000000000000001.json").write_text(content)
    (tmp_path / "rank_00002_0000000000000001.json").mkdir()
    folder.publish(3, Address("tcp://a:1", 10))
    found = folder.look()
    assert found.missing.endswith("rank_00002_0000000000000001.json: Is a directory")
    assert found.addresses == {3: Address("tcp://a:1", 10)}


def test_a_file_that_cannot_be_read_is_named_after_the_others_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_noloco.federation.network._LOOK_SECONDS", 0.05)
    (tmp_path / f"rank_00002_{RUN:016x}.json").mkdir()
    with redirect_stderr(io.StringIO()) as output, connected(tmp_path, slots=3):
        until(lambda: "rank_00002" in output.getvalue())


def test_a_rank_that_is_not_alone_looks_seldom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_noloco.federation.network._LOOK_SECONDS", 0.01)
    looks, turns = list[None](), list[None]()

    def look(folder: SharedFolder) -> Found:
        looks.append(None)
        return read(folder)

    read = SharedFolder.look
    monkeypatch.setattr(SharedFolder, "look", look)
    monkeypatch.setattr(FederationTransport, "_look_up_names", lambda *_, again: turns.append(None))
    with connected(tmp_path):
        before, first = len(looks), len(turns)
        until(lambda: len(turns) >= first + 100)
        assert 5 <= len(looks) - before <= 20


@pytest.mark.parametrize(
    "content",
    ["{}", '{"version": 7, "alike": {}}', '{"version": 8, "alike": [', '{"version": 8, "alike": 3}', "3"],
)
def test_a_file_of_another_version_in_the_folder_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "rank_00001_0000000000000009.json").write_text(content)
    assert "its job speaks another version of the protocol" in SharedFolder(tmp_path, RUN).other_runs()


def test_a_folder_that_cannot_be_written_is_named() -> None:
    line = "federation.rendezvous: cannot write in /proc/x: No such file or directory"
    with pytest.raises(OSError, match=f"^{line}$"):
        SharedFolder(Path("/proc/x"), 1).publish(0, Address("tcp://a:1", 1))


# Seeds


def test_all_seeds_are_to_be_asked() -> None:
    found, endpoints, missing = Seeds.of("127.0.0.1:10, [::1]:30,localhost:20").look()
    assert (found, missing) == ({}, "")
    assert set(endpoints) - {"tcp://[::1]:20"} == {
        "tcp://127.0.0.1:10",
        "tcp://[::1]:30",
        "tcp://127.0.0.1:20",
    }


@pytest.mark.parametrize("name", ["no-such-host.invalid", "a" * 64])
def test_a_seed_that_has_no_address_does_not_stop_the_others(name: str) -> None:
    _, endpoints, missing = Seeds.of(f"{name}:10,127.0.0.1:20").look()
    assert missing.startswith(f"{name}: ")
    assert endpoints == ["tcp://127.0.0.1:20"]


def test_jobs_of_two_runs_at_one_seed_both_say_in_what_they_differ() -> None:
    seed = f"127.0.0.1:{free_port()}"
    lines = [f"replica {slot} is refused: its job differs from this one in tokenizer" for slot in (1, 0)]
    networks = [
        Network(Seeds.of(seed), run, listen, digests={"tokenizer": str(run), "model": "1"})
        for run, listen in ((RUN, f"tcp://{seed}"), (RUN + 1, LOCAL))
    ]
    with redirect_stderr(io.StringIO()) as output, opened(*networks) as (first, second):
        for rank, line in enumerate(lines):
            until(lambda line=f"replica {rank}: {line}\n": line in output.getvalue())  # type: ignore[misc]
        assert (first.refusal, second.refusal) == ("", lines[1])  # the first one has asked itself


def test_a_seed_at_which_nobody_answers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """But not by the first job, which answers itself."""
    monkeypatch.setattr("megatron_noloco.federation.network._LOOK_SECONDS", 0.01)
    seed, other = (f"127.0.0.1:{free_port()}" for _ in range(2))
    with redirect_stderr(io.StringIO()) as output, ExitStack() as stack:
        member(stack, Place(0, 2), seed, f"tcp://{seed}")
        member(stack, Place(1, 2), other)
        line = f"replica 1: nobody answers at tcp://{other} (federation.rendezvous): does a job listen there"
        until(lambda: line in output.getvalue())
    assert "replica 0:" not in output.getvalue()


def test_jobs_of_two_runs_in_one_folder_both_say_in_what_they_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_noloco.federation.network._LOOK_SECONDS", 0.01)
    found = f"no other job of this run is found, only {tmp_path}/rank_"
    differs = "of another run: its job differs from this one in tokenizer, or the file is old"
    with redirect_stderr(io.StringIO()) as output, ExitStack() as stack:
        for slot, run in enumerate((RUN, RUN + 1)):
            assert slot or SharedFolder(tmp_path, RUN).other_runs() == ""
            digests = {"tokenizer": str(run), "model": "1"}
            network = Network(SharedFolder(tmp_path, run, digests), run, LOCAL, digests=digests)
            stack.enter_context(closing(FederationTransport(Place(slot, 2), network, PATIENCE)))
        for rank in range(2):
            line = re.compile(
                rf"replica {rank}: federation.rendezvous: {found}0000{1 - rank}_\w+\.json {differs}\n"
            )
            until(lambda line=line: line.search(output.getvalue()))  # type: ignore[misc]


# Where a rank listens, and what is refused


def test_where_a_rank_listens_and_is_reached() -> None:
    assert Seeds.of("a:10,b:10").listen == "tcp://*:10"
    for everywhere in ("tcp://0.0.0.0:5", "tcp://[::]:5"):
        assert reachable(everywhere, lambda: "here") == "tcp://here:5"
        assert reachable(everywhere, lambda: "fe80::1") == "tcp://[fe80::1]:5"
    for somewhere in ("tcp://10.0.0.1:5", "tcp://[::1]:5", "tcp://here:5"):
        assert reachable(somewhere, lambda: "elsewhere") == somewhere == endpoint_of(*split(somewhere))
    assert [len(numeric(f"tcp://{host}:5")) for host in ("10.0.0.1", "[::1]", "localhost", "a" * 64)] == [
        1,
        1,
        0,
        0,
    ]


@pytest.mark.parametrize(
    ("routes", "expected"),
    [
        ({"first": "10.77.0.2"}, "10.77.0.2"),
        ({"first": "127.0.0.1"}, "first"),  # it is this host, by a name that the others know
        ({"first": "127.0.0.1", "second": "10.77.0.1"}, "10.77.0.1"),
        ({"gone": None, "10.77.0.9": "10.77.0.1"}, "10.77.0.1"),
        ({"localhost": "127.0.0.1", "127.0.0.1": "127.0.0.1", "gone": None}, "10.0.2.15"),
        ({}, "10.0.2.15"),
    ],
)
def test_the_address_of_a_host_is_that_of_its_way_to_the_seeds(
    routes: dict[str, str | None], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that of its default route, which may be the same on each host."""
    ways = routes | {"10.255.255.255": "10.0.2.15"}
    monkeypatch.setattr("megatron_noloco.job.join._address_towards", ways.__getitem__)
    monkeypatch.setattr("socket.getaddrinfo", lambda *_: [(None, None, None, None, ("127.0.1.1", 0))])
    assert reachable_address([*routes]) == expected


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_seed_may_have_either_kind_of_address(address: str) -> None:
    assert _address_towards(address) == address


def test_a_job_announces_its_address_on_the_way_to_its_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_noloco.job.join._address_towards", {"first": "10.77.0.2"}.get)
    federation = FederationSettings(rendezvous="tcp://first:29600", encryption="none")
    assert network_of(federation, NolocoSettings(), Alike({})).host() == "10.77.0.2"


def test_a_host_without_a_default_route_says_by_which_name_it_is_looked_for(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    network = Network(SharedFolder(tmp_path, RUN), RUN, "tcp://*:0", host=socket.gethostname)
    FederationTransport(Place(0, 2), network, PATIENCE).close()
    FederationTransport(Place(0, 2), replace(network, host=lambda: "10.0.0.1"), PATIENCE).close()
    (line,) = capfd.readouterr().err.splitlines()
    assert (
        f"so others look for {socket.gethostname()}: where they do not know that name, set federation.adv"
        in line
    )


def test_a_rank_that_meets_itself_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another host announces the same address and the same port."""
    monkeypatch.setattr(peers, "_BACK_SECONDS", 0.0)
    with redirect_stderr(io.StringIO()) as output, transport(tmp_path, 0) as own:
        learn(own, {1: Address(own.address.endpoint, 5)})
        line = (
            f"replica 0: replica 1 announces this host's address, {own.address.endpoint}, and this replica itself "
            "answers there: if it is on another host, set federation.advertise"
        )
        until(lambda: line in output.getvalue())


def test_a_rank_that_is_alone_names_those_with_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those that were there before."""
    monkeypatch.setattr("megatron_noloco.federation.network._LOOK_SECONDS", 0.02)
    with redirect_stderr(io.StringIO()) as output, transport(tmp_path, 0, 4) as own:
        learn(own, {1: Address("tcp://127.0.0.1:1", 5), 2: Address("tcp://127.0.0.2:1", 5)})
        with transport(tmp_path, 3, 4):
            until(lambda: own.present() == [3])
        until(
            lambda: (
                "replica 1 announces this host's address, tcp://127.0.0.1:1, and does not"
                in output.getvalue()
            )
        )
    assert output.getvalue().count("announces this host's address") == 1


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("tcp://a:1,b", 'federation.rendezvous: "b" is not HOST:PORT'),
        ("tcp://a:0", 'federation.rendezvous: "a:0" is not HOST:PORT'),
        ("tcp://::1:1", 'federation.rendezvous: "::1:1" is not .* an IPv6 address in []'),
        ("file://", 'federation.rendezvous: "file://" is neither'),
        ("file://~nosuch/a", 'federation.rendezvous: "file://~nosuch/a": there is no home folder of'),
        ("/a/folder", 'federation.rendezvous: "/a/folder" is neither'),
        ("tcp://a:10,b:20", "federation.listen is missing: .* have the ports [10, 20], so"),
    ],
)
def test_a_rendezvous_is_refused_in_one_line(text: str, problem: str) -> None:
    with pytest.raises(ValueError) as refused:
        _ = rendezvous_of(text, RUN, {}).listen
    assert re.match(re.escape(problem).replace(r"\.\*", ".*"), str(refused.value))
    assert "\n" not in str(refused.value)


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert rendezvous_of("file://~/a", RUN, {}) == SharedFolder(tmp_path / "a", RUN)


@pytest.mark.parametrize(
    ("advertise", "listen", "problem"),
    [
        ("tcp://example.org:0", "tcp://*:29500", '"tcp://example.org:0" is not "tcp://HOST:PORT"'),
        ("tcp://::1:29500", "tcp://*:29500", "an IPv6 address in []"),
        ("tcp://example.org:29500", "tcp://*:0", "must lead to a known port, but this replica listens at"),
    ],
)
def test_an_address_to_advertise_is_refused_in_one_line(advertise: str, listen: str, problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        Network(Seeds.of("a:1"), RUN, listen, advertise=advertise)


@pytest.mark.parametrize(
    "listen",
    ["tcp://*:65536", "tcp://*", "29500", "ipc:///tmp/x", "tcp://:::0", "tcp://[::]"],
)
def test_where_no_rank_can_listen_is_refused(listen: str) -> None:
    with pytest.raises(ValueError, match=r'^federation.listen: ".*" is not "tcp://HOST:PORT", with .*$'):
        Network(Seeds.of("a:1"), RUN, listen)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "192.0.2.1", "[2001:db8::1]"])
def test_an_address_of_another_host_is_refused_in_one_line(tmp_path: Path, host: str) -> None:
    network = Network(SharedFolder(tmp_path, RUN), RUN, f"tcp://{host}:29511")
    with pytest.raises(ValueError, match=r"cannot listen at .*; it must be an address of this host"):
        FederationTransport(Place(0, 2), network, PATIENCE)


@pytest.mark.parametrize(
    ("known", "remedy"),
    [
        ("", "port 0 takes any that is free"),
        ("rendezvous", "end the process that has it, or give federation.rendezvous of all jobs another port"),
        (
            "advertise",
            "end the process that has it, or choose another port, which federation.advertise leads to",
        ),
    ],
)
def test_a_port_that_is_taken_is_refused_in_one_line(
    known: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a remedy that is good where others know this replica by its port, too."""
    monkeypatch.setattr(module, "_PORT_SECONDS", 0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        rendezvous = Seeds.of(f"a:1,{place}") if known == "rendezvous" else SharedFolder(tmp_path, RUN)
        advertise = "tcp://a:1" if known == "advertise" else None
        network = Network(rendezvous, RUN, f"tcp://{place}", advertise=advertise)
        line = f"federation.listen: cannot listen at tcp://{place}: Address already in use; {remedy}"
        with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
            FederationTransport(Place(0, 2), network, PATIENCE)


def test_a_port_that_this_process_holds_is_refused_at_once_with_the_remedy(tmp_path: Path) -> None:
    """As in a notebook, where `attach` is called again."""
    network = Network(SharedFolder(tmp_path, RUN), RUN, f"tcp://127.0.0.1:{free_port()}")
    for _ in range(2):
        with closing(FederationTransport(Place(0, 2), network, PATIENCE)):
            line = (
                r"in use, by this process: close\(\) what attach returned before; for two models, .* its own$"
            )
            with pytest.raises(ValueError, match=line):
                FederationTransport(Place(0, 2), network, PATIENCE)


def test_a_port_that_a_killed_job_holds_for_some_seconds_is_waited_for(tmp_path: Path) -> None:
    with redirect_stderr(io.StringIO()) as output, socket.create_server(("127.0.0.1", 0)) as taken:
        network = Network(SharedFolder(tmp_path, RUN), RUN, f"tcp://127.0.0.1:{taken.getsockname()[1]}")
        threading.Timer(0.5, taken.close).start()
        with closing(FederationTransport(Place(0, 2), network, PATIENCE)) as made:
            assert made.address.endpoint == network.listen
    assert re.fullmatch(r"replica 0: .*: Address already in use.*; trying for 20 s\n", output.getvalue())


def test_a_rank_whose_address_cannot_be_written_leaves_nothing_behind() -> None:
    network = Network(SharedFolder(Path("/proc/x"), RUN), RUN, f"tcp://127.0.0.1:{free_port()}")
    for _ in range(2):  # the port is free again
        with pytest.raises(OSError, match="cannot write in /proc/x"):
            FederationTransport(Place(0, 2), network, PATIENCE)
    assert "federation" not in {thread.name for thread in threading.enumerate()}


# The directory


def directory(addresses: Mapping[int, Address] | None = None) -> Directory:
    made = Directory(0, 8, Address("tcp://own:1", epoch=1))
    made.merge(addresses or {})
    return made


def test_the_address_of_the_latest_process_is_kept() -> None:
    own = directory({1: Address("tcp://a:1", 5)})
    own.merge({1: Address("tcp://b:1", 5)})
    own.merge({1: Address("tcp://c:1", 4)})
    assert own.addresses[1] == Address("tcp://a:1", 5)
    own.merge({1: Address("tcp://b:1", 6)})
    assert own.addresses[1] == Address("tcp://b:1", 6)


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://a:0",
        "ipc:///tmp/x",
        "tcp://a;tcp://b:1",
        "tcp://-a:1",
        "tcp://::1:1",
    ],
)
def test_an_invalid_address_is_refused(endpoint: str) -> None:
    assert directory({1: Address(endpoint, 1), 2: Address("tcp://[::1]:1", 1)}).addresses.keys() == {0, 2}


@pytest.mark.parametrize(
    ("endpoint", "epoch"), [("tcp://a:1", 0), ("tcp://a:1", LARGEST + 1), ("a" * 256, 1)]
)
def test_no_address_has_such_a_field(endpoint: str, epoch: int) -> None:
    with pytest.raises(ValueError):
        Address(endpoint, epoch)


def test_slots_that_this_job_does_not_have_are_left_out() -> None:
    some = {7: Address("tcp://a:1", 1), 8: Address("tcp://b:1", 1), -1: Address("tcp://b:1", 1)}
    assert directory(some).addresses.keys() == {0, 7}


# Together


def member(
    stack: ExitStack, place: Place, seeds: str, listen: str = LOCAL, keys: Keys | None = None
) -> FederationTransport:
    network = Network(Seeds.of(seeds), RUN, listen, keys)
    return stack.enter_context(closing(FederationTransport(place, network, PATIENCE)))


def seed_of(transport: FederationTransport) -> str:
    return transport.address.endpoint.removeprefix("tcp://")


def test_any_one_member_is_enough(tmp_path: Path) -> None:
    """Also when the first has gone, and when it comes back elsewhere."""
    seed, keys = f"127.0.0.1:{free_port()}", Keys.make(tmp_path / "key")
    with ExitStack() as stack:
        first = member(stack, Place(0, 5), seed, f"tcp://{seed}", keys)
        second, third = (member(stack, Place(slot, 5), seed, keys=keys) for slot in (1, 2))
        until(lambda: [one.present() for one in (first, second, third)] == [[1, 2], [0, 2], [0, 1]])
        first.close()
        fourth = member(stack, Place(3, 5), seed_of(third), keys=keys)
        until(lambda: [one.present() for one in (second, third, fourth)] == [[2, 3], [1, 3], [1, 2]])
        again = member(stack, Place(0, 5), seed_of(fourth), keys=keys)
        until(lambda: all(len(one.present()) == 3 for one in (second, third, fourth, again)))
        swap(again, second, tag=1)


@pytest.mark.parametrize("listen", ["tcp://[::1]:{}", "tcp://*:{}"])
def test_replicas_meet_over_ipv6(tmp_path: Path, listen: str) -> None:
    """Also one that listens everywhere, for both kinds of addresses."""
    port, keys = free_port(), Keys.make(tmp_path / "key")
    with ExitStack() as stack:
        first = member(stack, Place(0, 3), f"[::1]:{port}", listen.format(port), keys)
        second = member(stack, Place(1, 3), f"[::1]:{port}", "tcp://[::1]:0", keys)
        until(lambda: first.present() == [1] and second.present() == [0])
        assert second.address.endpoint.startswith("tcp://[::1]:")
        swap(first, second, tag=1)
        if "*" in listen:
            third = member(stack, Place(2, 3), f"127.0.0.1:{port}", keys=keys)
            until(lambda: third.present() == [0, 1])


def test_members_are_reached_where_they_advertise(tmp_path: Path) -> None:
    """At an address other than the one at which they listen, as behind a router."""
    keys, port = Keys.make(tmp_path / "key"), free_port()
    folder, outside = SharedFolder(tmp_path / "folder", RUN), f"tcp://127.0.0.2:{port}"
    networks = [
        Network(folder, RUN, f"tcp://0.0.0.0:{port}", keys, host=lambda: "127.0.0.1", advertise=outside),
        Network(folder, RUN, LOCAL, keys),
    ]
    with opened(*networks) as (first, second):
        assert first.address.endpoint == outside
        until(lambda: (first.present(), second.present()) == ([1], [0]))
        session = second.service.peers.others[0].session
        assert session is not None
        assert session.control.endpoint == outside
        swap(first, second, tag=1)


def test_a_host_is_looked_up_where_that_holds_up_no_message_and_again_when_it_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only one of the two can connect to the other."""
    known, threads = {"host.invalid": "127.0.0.2"}, set[str]()

    def look_up(host: str, port: int, **options: int) -> list[object]:
        if host in known:
            if options["flags"]:
                raise OSError
            threads.add(threading.current_thread().name)
        return found(known.get(host, host), port, **options)

    found = socket.getaddrinfo
    monkeypatch.setattr("socket.getaddrinfo", look_up)
    monkeypatch.setattr("megatron_noloco.federation.network._LOOK_SECONDS", 0.05)
    folder, port = SharedFolder(tmp_path, RUN), free_port()
    networks = [
        Network(folder, RUN, f"tcp://127.0.0.1:{port}", advertise=f"tcp://host.invalid:{port}"),
        Network(folder, RUN, None),
    ]
    with opened(*networks) as (first, second):
        until(lambda: second.service.peers.found != {})
        known["host.invalid"] = "127.0.0.1"
        until(lambda: (first.present(), second.present()) == ([1], [0]))
        swap(first, second, tag=1)
    assert threads == {"rendezvous"}


def test_replicas_that_are_asked_for_addresses_and_never_answer_leave_nothing_behind(tmp_path: Path) -> None:
    with transport(tmp_path, 0) as one, socket.create_server(("127.0.0.1", 0)) as silent:
        for _ in range(9):
            one.service.do(one.service.peers.ask_for_addresses, endpoint_of(*silent.getsockname()))
        until(lambda: len(one.service._wires._all) == 9)
        for wire in list(one.service._wires._all):
            wire.deadline = 0.0
        until(lambda: not one.service._wires._all)


def test_the_same_replica_twice_is_reported_by_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_BACK_SECONDS", 0.3)
    with (
        redirect_stderr(io.StringIO()) as output,
        connected(tmp_path) as (first, _),
        transport(tmp_path, 0) as again,
    ):
        until(lambda: again.present() == [1])
        for there, counts in ((again, "it"), (first, "this process")):
            at = f"replica 0: another process of this replica is at {there.address.endpoint}, and the others"
            line = f"{at} exchange with {counts}: does another job have the same --replica?"
            until(lambda line=line: line in output.getvalue())  # type: ignore[misc]
        assert again.present() == [1]
        assert first.present() == []


def test_a_replica_that_nobody_can_ask_takes_its_slot_back_when_another_process_of_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "_BACK_SECONDS", 0.3)
    monkeypatch.setattr(peers, "_RIVAL_SECONDS", 0.5)
    hidden = Network(SharedFolder(tmp_path, RUN), RUN, None)
    with (
        redirect_stderr(io.StringIO()),
        transport(tmp_path, 1) as other,
        opened(hidden, slots=2) as (first,),
    ):
        until(lambda: first.present() == [1])
        with opened(hidden, slots=2) as (again,):
            until(lambda: again.present() == [1])
        until(lambda: (first.present(), other.present()) == ([1], [0]))
        swap(first, other, tag=1)


@pytest.mark.parametrize("folder", [True, False])
def test_a_clock_that_was_ahead_locks_no_later_process_out(
    folder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    rendezvous = SharedFolder(tmp_path, RUN) if folder else Seeds.of(seeds[0])
    network, other = (Network(rendezvous, RUN, f"tcp://{seed}") for seed in seeds)
    with redirect_stderr(io.StringIO()) as output, opened(network, slots=2) as (stays,):
        for ahead_ns in (3600 * 10**9, 0, 0):
            monkeypatch.setattr("time.time_ns", partial(add, time.time_ns(), ahead_ns))
            with opened(other, slot=1) as (one,):
                until(lambda one=one: (stays.present(), one.present()) == ([1], [0]))  # type: ignore[misc]
                swap(stays, one, tag=1)
            monkeypatch.undo()
            until(lambda: stays.present() == [])
    assert "another process" not in output.getvalue()
