"""How ranks of a federation come to know each other: a folder, or any one member."""

import errno
import io
import json
import os
import re
import socket
import threading
from collections.abc import Mapping
from contextlib import closing, redirect_stderr
from pathlib import Path
from unittest.mock import Mock

import pytest

from megatron_noloco.errors import UserError
from megatron_noloco.federation import network as module
from megatron_noloco.federation.compatibility import RunIdentity
from megatron_noloco.federation.directory import Directory, endpoint_of, split
from megatron_noloco.federation.membership import join_federation
from megatron_noloco.federation.messages import LARGEST, Address, Member
from megatron_noloco.federation.network import Network, _announced, listening, open_node
from megatron_noloco.federation.rendezvous import Folder, Seeds, reachable, rendezvous_of
from megatron_noloco.federation.store import Store
from megatron_noloco.job.join import _address_towards, reachable_address
from megatron_noloco.plans.topology import Place
from megatron_noloco.settings import FederationSettings, NolocoSettings
from tests.harness import free_port

RUN = 77
MEMBER = Member(RUN)
LOCAL = "tcp://127.0.0.1:0"


def folder_at(path: Path, run: int = RUN, digests: Mapping[str, str] | None = None) -> Folder:
    return Folder(Store.of(f"file://{path}"), run, digests or {})


# A folder


def test_a_shared_folder_gives_what_others_published(tmp_path: Path) -> None:
    mine, theirs = folder_at(tmp_path / "there", 1), folder_at(tmp_path / "there", 1)
    mine.publish(0, Address("tcp://a:1", 10))
    theirs.publish(1, Address("tcp://b:2", 11))
    of_another_run = folder_at(tmp_path / "there", run=2)
    of_another_run.publish(1, Address("tcp://c:3", 12))
    of_another_run.publish(2, Address("tcp://c:4", 12))
    (tmp_path / "there" / "rank_00007_0000000000000001.json").write_text("{")
    valid = json.dumps({"endpoint": "e", "incarnation": 1})
    (tmp_path / "there" / "rank_x_0000000000000001.json").write_text(valid)
    assert mine.look() == ({0: Address("tcp://a:1", 10), 1: Address("tcp://b:2", 11)}, (), "")
    theirs.publish(1, Address("tcp://b:5", 12, "a-site"))
    assert mine.look().addresses[1] == Address("tcp://b:5", 12, "a-site")
    mine.withdraw(0, Address("tcp://a:1", 10))
    theirs.withdraw(1, Address("tcp://b:2", 11))  # not that of a later process
    assert {*mine.look().addresses} == {1}


def test_one_file_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    folder = folder_at(tmp_path, 1)
    for number, content in enumerate(("[" * 100_000, '{"endpoint": "", "incarnation": 1e999}', "[]", "null")):
        (tmp_path / f"rank_0001{number}_0000000000000001.json").write_text(content)
    (tmp_path / "rank_00002_0000000000000001.json").mkdir()
    folder.publish(3, Address("tcp://a:1", 10))
    found = folder.look()
    assert found.missing.endswith("rank_00002_0000000000000001.json: Is a directory")
    assert found.addresses == {3: Address("tcp://a:1", 10)}


@pytest.mark.parametrize(
    "content",
    ["{}", '{"version": 7, "alike": {}}', '{"version": 8, "alike": [', '{"version": 8, "alike": 3}', "3"],
)
def test_a_file_of_another_version_in_the_folder_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "rank_00001_0000000000000009.json").write_text(content)
    assert "its job speaks another version of the protocol" in folder_at(tmp_path, RUN).why_alone()


def test_a_folder_that_cannot_be_written_is_named() -> None:
    line = "federation.rendezvous: cannot write in /proc/x: No such file or directory"
    with pytest.raises(OSError, match=f"^{line}$"):
        folder_at(Path("/proc/x"), 1).publish(0, Address("tcp://a:1", 1))


@pytest.mark.parametrize("listen", ["off", LOCAL])
@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_folder_that_may_not_be_written_is_one_line(
    listen: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = FederationSettings(rendezvous=f"file://{tmp_path}/run", encryption="none", listen=listen)
    monkeypatch.setattr(os, "makedirs", Mock(side_effect=OSError(number, os.strerror(number))))
    with pytest.raises(UserError, match=f"cannot write in {tmp_path}/run.*: {os.strerror(number)}"):
        join_federation(settings, NolocoSettings(local_steps=1), Place(0, None), RunIdentity({}))


# Seeds


def test_all_seeds_are_to_be_asked() -> None:
    found, endpoints, missing = Seeds.of("127.0.0.1:10, [::1]:30,localhost:20").look()
    assert (found, missing) == ({}, "")
    assert endpoints == ["tcp://127.0.0.1:10", "tcp://[::1]:30", "tcp://localhost:20"]


def test_two_runs_in_one_folder_both_say_in_what_they_differ(tmp_path: Path) -> None:
    folders = [folder_at(tmp_path, RUN + slot, {"tokenizer": str(slot), "model": "1"}) for slot in range(2)]
    for slot, folder in enumerate(folders):
        folder.publish(slot, Address("tcp://a:1", 10))
    for slot, folder in enumerate(folders):
        assert re.fullmatch(
            rf"no other job of this run is found, only .*/rank_0000{1 - slot}_\w+\.json of another run: its job "
            "differs from this one in tokenizer, or the file is old",
            folder.why_alone(),
        )


def test_a_job_alone_in_a_folder_asks_whether_it_is_right(tmp_path: Path) -> None:
    """It may be a mistyped path, or a disk that is not mounted: the folder was made then."""
    folder = folder_at(tmp_path / "mistyped")
    folder.publish(0, Address("tcp://a:1", 10))
    assert f"no other job has come to file://{tmp_path}/mistyped so far" in folder.why_alone()
    folder.publish(1, Address("tcp://a:2", 10))
    assert folder.why_alone() == ""


# Where a rank listens, and what is refused


def test_where_a_rank_listens_and_is_reached() -> None:
    assert Seeds.of("a:10,b:10").listen == "tcp://*:10"
    for everywhere in ("tcp://0.0.0.0:5", "tcp://[::]:5"):
        assert reachable(everywhere, lambda: "here") == "tcp://here:5"
        assert reachable(everywhere, lambda: "fe80::1") == "tcp://[fe80::1]:5"
    for somewhere in ("tcp://10.0.0.1:5", "tcp://[::1]:5", "tcp://here:5"):
        assert reachable(somewhere, lambda: "elsewhere") == somewhere == endpoint_of(*split(somewhere))


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


def test_job_announces_its_route_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_noloco.job.join._address_towards", {"first": "10.77.0.2"}.get)
    with listening("*", 0) as listener:
        announced = _announced(Network(Seeds.of("first:29600"), MEMBER), listener)
        assert announced == f"tcp://10.77.0.2:{listener.getsockname()[1]}"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("tcp://a:1,b", 'federation.rendezvous: "b" is not HOST:PORT'),
        ("tcp://a:0", 'federation.rendezvous: "a:0" is not HOST:PORT'),
        ("tcp://::1:1", 'federation.rendezvous: "::1:1" is not .* an IPv6 address in []'),
        ("file://", 'federation.rendezvous: "file://" is neither'),
        ("file://~nosuch/a", 'federation.rendezvous: "file://~nosuch/a": Could not determine home directory'),
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
    rendezvous = rendezvous_of("file://~/a", RUN, {})
    assert isinstance(rendezvous, Folder)
    assert rendezvous.store.url == f"file://{tmp_path}/a"


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
        Network(Seeds.of("a:1"), MEMBER, listen, advertise=advertise)


@pytest.mark.parametrize(
    "listen", ["tcp://*:65536", "tcp://*", "29500", "ipc:///tmp/x", "tcp://:::0", "tcp://[::]"]
)
def test_where_no_rank_can_listen_is_refused(listen: str) -> None:
    with pytest.raises(ValueError, match=r'^federation.listen: ".*" is not "tcp://HOST:PORT", with .*$'):
        Network(Seeds.of("a:1"), MEMBER, listen)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "192.0.2.1", "[2001:db8::1]"])
def test_an_address_of_another_host_is_refused_in_one_line(tmp_path: Path, host: str) -> None:
    network = Network(folder_at(tmp_path, RUN), MEMBER, f"tcp://{host}:29511")
    with pytest.raises(ValueError, match=r"cannot listen at .*; it must be an address of this host"):
        open_node(network, 0)


@pytest.mark.parametrize(
    ("known", "remedy"),
    [
        ("", "port 0 takes any that is free"),
        (
            "rendezvous",
            'if another job of this federation has it, set federation.listen to "tcp://*:0"; else end the process '
            "that has it, or give federation.rendezvous of all jobs another port",
        ),
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
        rendezvous = Seeds.of(f"a:1,{place}") if known == "rendezvous" else folder_at(tmp_path, RUN)
        advertise = "tcp://a:1" if known == "advertise" else None
        network = Network(rendezvous, MEMBER, f"tcp://{place}", advertise=advertise)
        line = f"federation.listen: cannot listen at tcp://{place}: Address already in use; {remedy}"
        with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
            open_node(network, 0)


def test_port_held_by_this_process_is_refused(tmp_path: Path) -> None:
    """As in a notebook, where `attach` is called again."""
    network = Network(folder_at(tmp_path, RUN), MEMBER, f"tcp://127.0.0.1:{free_port()}")
    for _ in range(2):
        with closing(open_node(network, 0)):
            line = (
                r"in use, by this process: close\(\) what attach returned before; .* one torch.nn.ModuleDict$"
            )
            with pytest.raises(ValueError, match=line):
                open_node(network, 0)


def test_port_of_killed_job_is_waited_for(tmp_path: Path) -> None:
    with redirect_stderr(io.StringIO()) as output, socket.create_server(("127.0.0.1", 0)) as taken:
        network = Network(folder_at(tmp_path, RUN), MEMBER, f"tcp://127.0.0.1:{taken.getsockname()[1]}")
        threading.Timer(0.5, taken.close).start()
        with closing(open_node(network, 0)) as made:
            assert made.node.directory.own.endpoint == network.listen
    assert re.fullmatch(r"replica 0: .*: Address already in use.*; trying for 20 s\n", output.getvalue())


def test_unwritable_address_leaves_nothing() -> None:
    network = Network(folder_at(Path("/proc/x"), RUN), MEMBER, f"tcp://127.0.0.1:{free_port()}")
    for _ in range(2):  # the port is free again
        with pytest.raises(OSError, match="cannot write in /proc/x"):
            open_node(network, 0)
    assert "federation" not in {thread.name for thread in threading.enumerate()}


# The directory


def directory(addresses: Mapping[int, Address] | None = None) -> Directory:
    made = Directory(0, Address("tcp://own:1", incarnation=1))
    made.merge(addresses or {})
    return made


def test_the_address_of_the_latest_process_is_kept() -> None:
    own = directory({1: Address("tcp://a:1", 5)})
    own.merge({1: Address("tcp://b:1", 5)})
    own.merge({1: Address("tcp://c:1", 4)})
    assert own.addresses[1] == Address("tcp://a:1", 5)
    own.merge({1: Address("tcp://b:1", 6)})
    assert own.addresses[1] == Address("tcp://b:1", 6)


def test_a_process_that_is_refused_is_left_out() -> None:
    first, second = Address("tcp://a:1", 5), Address("tcp://a:1", 6)
    own, others = directory({1: first}), directory()
    for other, incarnation in ((1, 5), (1, 4), (0, 1)):
        own.refuse(other, incarnation)
        assert own.since(0) == {0: own.own}
        assert own.checksum == others.checksum
    own.refuse(1, 5)
    own.merge({1: first})
    assert own.addresses.keys() == {0}
    own.accept(1, first)
    assert own.addresses[1] == first
    own.refuse(1, 5)
    own.merge({1: second})
    assert own.addresses[1] == second


@pytest.mark.parametrize(
    "endpoint", ["tcp://a:0", "ipc:///tmp/x", "tcp://a;tcp://b:1", "tcp://-a:1", "tcp://::1:1"]
)
def test_an_invalid_address_is_refused(endpoint: str) -> None:
    assert directory({1: Address(endpoint, 1), 2: Address("tcp://[::1]:1", 1)}).addresses.keys() == {0, 2}


@pytest.mark.parametrize(
    ("endpoint", "incarnation"), [("tcp://a:1", 0), ("tcp://a:1", LARGEST + 1), ("a" * 256, 1)]
)
def test_no_address_has_such_a_field(endpoint: str, incarnation: int) -> None:
    with pytest.raises(ValueError):
        Address(endpoint, incarnation)
