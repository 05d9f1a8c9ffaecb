"""What `federation.rendezvous`, `listen` and `advertise` accept, and what a job opens with them."""

import errno
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from megatron_noloco.errors import UserError
from megatron_noloco.federation import https_client
from megatron_noloco.federation import network as module
from megatron_noloco.federation.compatibility import RunIdentity
from megatron_noloco.federation.members import Members
from megatron_noloco.federation.membership import join_federation
from megatron_noloco.federation.network import (
    Network,
    listening,
    meeting_place,
    place_to_advertise,
    place_to_listen,
    seeds_in,
)
from megatron_noloco.federation.statuses import PeerStatus
from megatron_noloco.federation.store import Store
from megatron_noloco.job.world import _address_towards, reachable_address
from megatron_noloco.plans.topology import Place
from megatron_noloco.settings import FederationSettings, NolocoSettings
from tests.kit.golden import check, refusals
from tests.kit.ranks import federation_keys, free_port, key_file, until

RUN = 77
LOCAL = "127.0.0.1:0"
KEYS = federation_keys()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for others often, and wait for none when a network is opened."""
    monkeypatch.setattr(https_client, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(module, "_FIRST_SECONDS", 0.0)


def through(path: Path, listen: str | None = LOCAL) -> Network:
    """Return the network of a job that meets others in a folder."""
    return Network(RUN, {}, KEYS, folder=Store.of(f"file://{path}"), listen=listen)


@contextmanager
def replicas(*networks: Network) -> Iterator[list[Members]]:
    with ExitStack() as stack:
        yield [stack.enter_context(closing(one.open(slot))) for slot, one in enumerate(networks)]


def meet(one: Members, other: Members) -> None:
    """Have each of two replicas fetch a piece of the other."""
    for own, theirs in ((one, other), (other, one)):
        until(lambda own=own, theirs=theirs: own.mesh.reaches(theirs.mesh.me))
        theirs.mesh.offer("greeting", b"hello")
        assert own.mesh.fetch(theirs.mesh.me, "greeting") == b"hello"


# What the settings accept


# Rendezvous; listen; advertise and where the job listens
RENDEZVOUS = (
    "tcp://a:1,b",
    "tcp://a:0",
    "tcp://::1:1",
    "file://",
    "file://~nosuch/a",
    "/a/folder",
    "tcp://a:10,b:20",
)
LISTEN = ("tcp://*:65536", "tcp://*", "29500", "ipc:///tmp/x", "tcp://:::0", "tcp://[::]")
ADVERTISE = (
    ("tcp://example.org:0", "*:29500"), ("tcp://::1:29500", "*:29500"), ("tcp://example.org:29500", "*:0"),
)  # fmt: skip


def test_a_place_that_cannot_be_is_refused_in_one_line() -> None:
    """In tests/golden/network_lines.txt."""
    calls: dict[str, Callable[[], object]] = {
        **{text: lambda text=text: place_to_listen(None, meeting_place(text)[0]) for text in RENDEZVOUS},  # type: ignore[misc]
        **{f"listen {text}": lambda text=text: place_to_listen(text, ["a:1"]) for text in LISTEN},  # type: ignore[misc]
        **{f"advertise {' at '.join(two)}": lambda two=two: place_to_advertise(*two) for two in ADVERTISE},  # type: ignore[misc]
    }
    check("network_lines", refusals(calls, UserError))


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    seeds, folder = meeting_place("file://~/a")
    assert seeds == []
    assert folder is not None
    assert folder.url == f"file://{tmp_path}/a"


def test_a_job_listens_at_the_port_of_the_rendezvous() -> None:
    assert seeds_in("127.0.0.1:10, [::1]:10,localhost:10") == ["127.0.0.1:10", "[::1]:10", "localhost:10"]
    assert place_to_listen(None, ["a:10", "b:10"]) == "*:10"
    assert place_to_listen(None, []) == "*:0"
    assert place_to_listen("tcp://[::1]:5", ["a:10"]) == "[::1]:5"
    assert place_to_listen("off", ["a:10"]) is None


# The address of this host


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
    monkeypatch.setattr("megatron_noloco.job.world._address_towards", ways.__getitem__)
    monkeypatch.setattr("socket.getaddrinfo", lambda *_: [(None, None, None, None, ("127.0.1.1", 0))])
    assert reachable_address([*routes]) == expected


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_seed_may_have_either_kind_of_address(address: str) -> None:
    assert _address_towards(address) == address


def test_an_address_that_leads_further_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        (None, None, None, None, (address, 0))
        for address in ("127.0.1.1", "fe80::1", "169.254.7.8", "10.0.0.4")
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    monkeypatch.setattr("megatron_noloco.job.world._address_towards", lambda host: None)
    assert reachable_address() == "10.0.0.4"
    del found[3]
    assert reachable_address() == "169.254.7.8"


def test_a_name_that_is_too_long_for_python_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "a" * 64)
    assert reachable_address()


def test_a_job_announces_where_it_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_noloco.job.world._address_towards", {"first": "10.77.0.2"}.get)
    network = Network(RUN, {}, KEYS, ["first:29600"])
    for place, host in (("*", "10.77.0.2"), ("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")):
        with listening(place, 0) as listener:
            assert network._addresses(listener) == [f"{host}:{listener.getsockname()[1]}"]
            advertised = Network(RUN, {}, KEYS, ["first:29600"], advertise="example.org:5")
            assert advertised._addresses(listener) == ["example.org:5"]
    assert network._addresses(None) == []


def test_a_host_without_a_route_is_known_by_its_name(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megatron_noloco.job.world._address_towards", lambda host: None)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(None, None, None, None, ("127.0.1.1", 0))])
    assert reachable_address(["gone"]) == socket.gethostname()
    monkeypatch.undo()
    name, port = socket.gethostname(), free_port()
    monkeypatch.setattr(module, "_FIRST_SECONDS", 0.0)
    monkeypatch.setattr(module, "reachable_address", lambda hosts: name)
    for advertise in (None, f"{name}:{port}"):
        network = Network(
            RUN, {}, federation_keys(), ["127.0.0.1:1"], listen=f"*:{port}", advertise=advertise
        )
        with replicas(network) as (own,):
            assert own.status.addresses == [f"{name}:{port}"]
    (line,) = capfd.readouterr().err.splitlines()
    assert f"no address of this host is known, as it has no default route, so others look for {name}" in line
    assert "set federation.advertise" in line


# Ports and folders that cannot be used


@pytest.mark.parametrize("host", ["no-such-host.invalid", "192.0.2.1", "[2001:db8::1]"])
def test_an_address_of_another_host_is_refused_in_one_line(tmp_path: Path, host: str) -> None:
    with pytest.raises(UserError, match=r"cannot listen at .*; it must be an address of this host"):
        through(tmp_path, f"{host}:29511").open(0)


def test_a_port_that_is_taken_is_refused_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        line = (
            f"federation.listen: cannot listen at tcp://{place}: Address already in use; end the process that"
        )
        with pytest.raises(UserError, match=f"^{re.escape(line)}[^\n]*$"):
            Network(RUN, {}, KEYS, listen=place).open(0)


def test_port_held_by_this_process_is_refused(tmp_path: Path) -> None:
    """As in a notebook, where `attach` is called again."""
    network = through(tmp_path, f"127.0.0.1:{free_port()}")
    line = r"in use; .* this process, close\(\) what attach returned before, .* one torch.nn.ModuleDict$"
    for _ in range(2):
        with closing(network.open(0)), pytest.raises(UserError, match=line):
            network.open(0)


def test_port_of_a_killed_job_is_free_though_a_child_lives(tmp_path: Path) -> None:
    """As a worker that reads data, which the job has forked."""
    network, (reads, writes) = through(tmp_path, f"127.0.0.1:{free_port()}"), os.pipe()
    with closing(network.open(0)):
        child = os.fork()
        if child == 0:
            os.close(writes)
            os.read(reads, 1)
            os._exit(0)
    with closing(network.open(0)) as made:
        assert made.status.addresses == [network.listen]
    os.close(writes)
    os.waitpid(child, 0)


def test_a_folder_that_cannot_be_used_leaves_nothing() -> None:
    network, threads = through(Path("/proc/x"), f"127.0.0.1:{free_port()}"), threading.active_count()
    for _ in range(2):  # the port is free again
        with pytest.raises(UserError, match="rendezvous: cannot write in /proc/x: No such file"):
            network.open(0)
    until(lambda: threading.active_count() <= threads)


@pytest.mark.parametrize("listen", ["off", "tcp://127.0.0.1:0"])
@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_folder_that_may_not_be_written_is_one_line(
    listen: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = FederationSettings(
        rendezvous=f"file://{tmp_path}/run", key_file=key_file(tmp_path), listen=listen
    )
    monkeypatch.setattr(os, "makedirs", Mock(side_effect=OSError(number, os.strerror(number))))
    with pytest.raises(UserError, match=f"cannot write in {tmp_path}/run.*: {os.strerror(number)}"):
        join_federation(settings, NolocoSettings(local_steps=1), Place(0, None), RunIdentity({}))


# Replicas that meet


def test_replicas_of_a_folder_meet_over_ipv6(tmp_path: Path) -> None:
    with replicas(*[through(tmp_path, "[::1]:0")] * 2) as (one, other):
        assert all(members.status.addresses[0].startswith("[::1]:") for members in (one, other))
        meet(one, other)


def test_a_job_that_does_not_listen_meets_others_in_the_folder(tmp_path: Path) -> None:
    with replicas(*[through(tmp_path, listen=None)] * 2) as (one, other):
        meet(one, other)
        assert (one.status.addresses, one.status.hidden) == ([], False)


def test_what_is_awaited_comes_by_folder_when_https_is_gone(tmp_path: Path) -> None:
    with closing(through(tmp_path).open(0)) as one, closing(through(tmp_path).open(1)) as other:
        https, _ = other.mesh.carriers
        until(lambda: one.mesh.me in https.reached)
        fetch = other.mesh.begin(one.mesh.me, "piece")
        until(lambda: one.mesh.offers.takers("piece"))
        one.mesh.carriers[0].close()
        until(lambda: one.mesh.me not in https.reached)
        one.mesh.offer("piece", b"content")
        until(lambda: fetch.outcome)
        assert fetch.outcome == b"content"


@pytest.mark.parametrize("listen", ["[::1]:{}", "*:{}"])
def test_seeds_and_advertised_addresses_may_be_ipv6(listen: str) -> None:
    ports = free_port(), free_port()
    networks = [
        Network(
            RUN,
            {},
            federation_keys(),
            [f"[::1]:{ports[0]}"],
            None,
            listen.format(port),
            advertise=f"[::1]:{port}",
        )
        for port in ports
    ]
    with replicas(*networks) as (one, other):
        meet(one, other)
        assert one.present()[1].addresses == [f"[::1]:{ports[1]}"]


def test_one_seed_that_answers_is_enough(capfd: pytest.CaptureFixture[str]) -> None:
    """The own address among the seeds, under several names, is no other job."""
    port = free_port()
    own = [f"{host}:{port}" for host in ("127.0.0.1", "localhost", "[::1]", socket.gethostname())]
    first = Network(RUN, {}, KEYS, own, listen=f"*:{port}", advertise=f"localhost:{port}")
    second = Network(RUN, {}, KEYS, [f"127.0.0.1:{free_port()}", own[0]], listen=LOCAL)
    with replicas(first) as (one,):
        assert one.peers() == {}
        with closing(second.open(1)) as other:
            meet(one, other)
    assert "federation.rendezvous" not in capfd.readouterr().err


def test_jobs_of_one_run_that_differ_say_in_what(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As two jobs of the trainer do whose datasets differ, beside a job of another kind."""
    firsts = [
        PeerStatus(kind="a", digests={"data": "1", "model": "1"}),
        PeerStatus(kind="a", digests={"data": "2", "model": "1"}),
        PeerStatus(kind="b", digests={"data": "3"}),
    ]
    networks = [replace(through(tmp_path), first=first) for first in firsts]
    with replicas(*networks) as (one, other, third):
        until(lambda: one.mesh.refusal and other.mesh.refusal)
        assert one.mesh.refusal == "refused: replica 1 differs from replica 0 in data"
        assert other.mesh.refusal == "refused: replica 0 differs from replica 1 in data"
        until(lambda: {*third.present()} == {0, 1})
        assert (third.mesh.refusal, {*one.present()}) == ("", {2})
    assert capfd.readouterr().err.count("refused: replica 1 differs") == 1


@pytest.mark.parametrize("way", ["folder", "address"])
def test_a_restart_whose_clock_is_behind_is_the_later(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others would take it for a process that has ended."""
    ends = ExitStack()
    with ends:
        monkeypatch.setattr(module, "_FIRST_SECONDS", 5.0)
        stays, place = through(tmp_path), f"127.0.0.1:{free_port()}"
        comes = stays
        if way == "address":
            stays, comes = (
                Network(RUN, {}, KEYS, listen=place),
                Network(RUN, {}, KEYS, [place], listen=LOCAL),
            )
        other = ends.enter_context(closing(stays.open(1)))
        earlier = comes.open(0)
        until(lambda: 0 in other.present())
        earlier.close()
        until(lambda: 0 not in other.present())
        hour_ago = time.time_ns() - 3600 * 10**9
        monkeypatch.setattr("megatron_noloco.federation.network.time.time_ns", lambda: hour_ago)
        own = ends.enter_context(closing(comes.open(0)))
        assert own.mesh.me.incarnation == earlier.mesh.me.incarnation + 1
        until(lambda: 0 in other.present())
        own.check()
