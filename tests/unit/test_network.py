"""Replicas on ports of this host find each other, and say why where they do not."""

import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import pytest

from megatron_noloco.federation import network as network_module
from megatron_noloco.federation import node_thread, tcp
from megatron_noloco.federation.directory import split
from megatron_noloco.federation.keys import Keys
from megatron_noloco.federation.links import Link
from megatron_noloco.federation.messages import Member
from megatron_noloco.federation.network import Network, open_node
from megatron_noloco.federation.node_thread import NodeThread
from megatron_noloco.federation.rendezvous import Folder, Seeds
from megatron_noloco.federation.store import Store
from megatron_noloco.federation.streams import Stream
from megatron_noloco.job.join import reachable_address
from tests.harness import free_port, until

MEMBER = Member(77)
SECONDS = 60.0  # for what takes a second


@contextmanager
def replicas(*networks: Network) -> Iterator[list[NodeThread]]:
    with ExitStack() as stack:
        yield [stack.enter_context(closing(open_node(one, slot))) for slot, one in enumerate(networks)]


def folder(path: Path) -> Folder:
    return Folder(Store.of(f"file://{path}"), MEMBER.run)


async def echo(link: Link, stream: Stream) -> None:
    await stream.send(await stream.receive(5))


def talk(one: NodeThread, other: NodeThread) -> None:
    """Have a conversation that either of two replicas opens, when they have a link."""
    for own, their in ((one, other), (other, one)):
        until(lambda own=own, their=their: their.node.slot in own.node.present())
        their.node.serves["echo"] = echo

        async def ask(link: Link) -> bytes:
            async with link.open("echo") as stream:
                await stream.send(b"hello")
                return await stream.receive(5)

        assert own.call(ask(own.node.links[their.node.slot])).result(SECONDS) == b"hello"


# Addresses of IPv6


def test_replicas_of_a_folder_listen_at_ipv6(tmp_path: Path) -> None:
    with replicas(*[Network(folder(tmp_path), MEMBER, "tcp://[::1]:0")] * 2) as (one, other):
        assert all(thread.node.directory.own.endpoint.startswith("tcp://[::1]:") for thread in (one, other))
        talk(one, other)


@pytest.mark.parametrize("listen", ["tcp://[::1]:{}", "tcp://*:{}"])
def test_a_seed_and_what_a_replica_advertises_may_be_ipv6(listen: str) -> None:
    ports = free_port(), free_port()
    seeds = Seeds.of(f"[::1]:{ports[0]}")
    networks = [
        Network(seeds, MEMBER, listen.format(port), advertise=f"tcp://[::1]:{port}") for port in ports
    ]
    with replicas(*networks) as (one, other):
        talk(one, other)
        assert one.node.directory.addresses[1].endpoint == f"tcp://[::1]:{ports[1]}"


def test_a_refused_job_leaves_no_address(tmp_path: Path) -> None:
    with replicas(*[Network(folder(tmp_path), MEMBER, "tcp://127.0.0.1:0")] * 2) as (one, other):
        talk(one, other)
        differs = Network(folder(tmp_path), Member(MEMBER.run, {"model": "1"}), "tcp://127.0.0.1:0")
        with closing(open_node(differs, 2)) as refused:
            assert {*folder(tmp_path).look().addresses} == {0, 1, 2}
            until(lambda: refused.node.dialling.refusal)
        assert {*folder(tmp_path).look().addresses} == {0, 1}
    assert {*folder(tmp_path).look().addresses} == {0, 1}, "of jobs that have met others"


# Seeds


def visit(thread: NodeThread, seeds: Seeds) -> None:
    """Do what a replica without others does, at once."""
    for endpoint in seeds.look().endpoints:
        thread.call(thread.node.dialling.visit(endpoint)).result(SECONDS)
    thread.call(thread._name_nobody()).result(SECONDS)


def test_own_seed_addresses_are_not_dialled(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_thread, "_CHANGES_SECONDS", SECONDS)  # nothing is said of who comes
    port = free_port()
    seeds = Seeds.of(f"127.0.0.1:{port},localhost:{port},[::1]:{port},{socket.gethostname()}:{port}")
    with replicas(Network(seeds, MEMBER, f"tcp://*:{port}", advertise=f"tcp://localhost:{port}")) as (own,):
        visit(own, seeds)
        assert own.node.links == {}
        assert not own.node.dialling.has_answers
        with closing(open_node(Network(seeds, MEMBER, "tcp://127.0.0.1:0"), 1)) as other:
            talk(own, other)
            assert other.node.dialling.has_answers
    assert capfd.readouterr().err == ""


@contextmanager
def nobody(how: str) -> Iterator[str]:
    """Give a HOST:PORT at which nobody answers."""
    with ExitStack() as stack:
        backlog = 0 if how == "dropped" else 100
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=backlog))
        place = "{}:{}".format(*listener.getsockname())
        if how == "refused":
            listener.close()
        if how == "dropped":  # a full queue, whose host drops what comes
            for _ in range(4):
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(listener.getsockname())
        if how == "greets":
            threading.Thread(target=greet, args=(listener,), daemon=True).start()
        yield "no-such-host.invalid:1" if how == "unknown" else place


def greet(listener: socket.socket) -> None:
    """Answer with the first bytes alone, as where the packets of a handshake are lost."""
    greeted = []
    with suppress(OSError):
        while True:
            greeted.append(listener.accept()[0])
            greeted[-1].sendall(tcp._MAGIC + bytes([tcp.VERSION, True]))


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("refused", "nobody answers at tcp://{}: Connection refused"),
        (
            "dropped",
            "nobody answers at tcp://{}: no answer, nor a refusal: its host is off, or a firewall drops",
        ),
        ("silent", "tcp://{} accepts connections, and says nothing"),
        (
            "greets",
            "tcp://{} answers, and goes silent: is the MTU of the route smaller than that of the interface",
        ),
        ("unknown", "nobody answers at tcp://{}: Name or service not known"),
        ("no route", "nobody answers at tcp://{}: No route to host"),
    ],
)
def test_nobody_at_a_seed_is_named_with_the_reason(
    how: str, why: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_route(endpoint: str) -> socket.socket:
        raise OSError(errno.EHOSTUNREACH, os.strerror(errno.EHOSTUNREACH))

    monkeypatch.setattr(tcp, "_OPEN_SECONDS", 0.3)
    if how == "no route":
        monkeypatch.setattr(tcp, "_dialled", no_route)
    with nobody(how) as place:
        seeds = Seeds.of(place)
        keys = Keys.make(tmp_path / "key") if how == "greets" else None
        with replicas(Network(seeds, MEMBER, "tcp://127.0.0.1:0", keys)) as (own,):
            visit(own, seeds)
        (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"replica 0: federation.rendezvous: {why.format(place)}")
    assert line.endswith("; does a job listen there, and is the port open?")


def test_a_seed_that_answers_is_enough(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_thread, "_CHANGES_SECONDS", 0.01)
    lines, come = (
        list[str](),
        [f"replica {slot}: replica {1 - slot} has come (2 replicas)" for slot in (0, 1)],
    )
    first = Network(Seeds.of("127.0.0.1:1"), MEMBER, "tcp://127.0.0.1:0")
    with nobody("refused") as gone, replicas(first) as (one,):
        seeds = Seeds.of(f"{gone},{one.node.directory.own.endpoint.removeprefix('tcp://')}")
        with closing(open_node(Network(seeds, MEMBER, "tcp://127.0.0.1:0"), 1)) as own:
            talk(one, own)
            visit(own, seeds)
            until(lambda: lines.extend(capfd.readouterr().err.splitlines()) or len(lines) >= len(come))
            assert sorted(lines) == come


# Addresses of this host


def test_a_host_without_a_route_is_known_by_its_name(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megatron_noloco.job.join._address_towards", lambda host: None)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(None, None, None, None, ("127.0.1.1", 0))])
    assert reachable_address(["gone"]) == socket.gethostname()
    monkeypatch.undo()
    name = socket.gethostname()
    seeds = Seeds.of("127.0.0.1:1")
    monkeypatch.setattr(network_module, "reachable_address", lambda hosts: name)
    for advertise in (None, f"tcp://{name}:{(port := free_port())}"):
        network = Network(seeds, MEMBER, f"tcp://*:{port}", advertise=advertise)
        with replicas(network) as (own,):
            assert own.node.directory.own.endpoint == f"tcp://{name}:{port}"
    (line,) = capfd.readouterr().err.splitlines()
    assert f"no address of this host is known, as it has no default route, so others look for {name}" in line
    assert "set federation.advertise" in line


def test_a_name_that_is_too_long_for_python_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "a" * 64)
    assert reachable_address()


def test_link_local_addresses_are_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of a seed and of this host. Two machines with a cable between them may have no others."""
    monkeypatch.setattr(network_module, "reachable_address", lambda hosts: "169.254.7.8")
    network = Network(Seeds.of("169.254.7.7:9"), MEMBER, "tcp://*:0")
    with replicas(network) as (own,):
        assert split(own.node.directory.own.endpoint)[0] == "169.254.7.8"
    of_seed, of_own = capfd.readouterr().err.splitlines()
    why = "a link-local address, which leads there from the same cable or switch only"
    assert of_seed == f"replica 0: federation.rendezvous has 169.254.7.7, {why}"
    assert of_own.startswith(
        f"replica 0: others look for this job at 169.254.7.8, {why}; where they are elsewhere"
    )
    assert "set federation.advertise" in of_own


@pytest.mark.parametrize("host", ["fe80::1", "fe80::1%eth0"])
def test_link_local_addresses_of_ipv6_are_refused(host: str) -> None:
    """The name of the interface, which they need, is another one on each host."""
    place, seeds = f"[{host}]:9", Seeds.of("a:1")
    refused: dict[str, Callable[[], object]] = {
        "rendezvous": lambda: Seeds.of(place),
        "listen": lambda: Network(seeds, MEMBER, f"tcp://{place}"),
        "advertise": lambda: Network(seeds, MEMBER, "tcp://*:9", advertise=f"tcp://{place}"),
    }
    for field, make in refused.items():
        with pytest.raises(
            ValueError, match=f"federation.{field}: {host} is an IPv6 link-local address, which"
        ):
            make()


def test_an_address_that_leads_further_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        (None, None, None, None, (address, 0))
        for address in ("127.0.1.1", "fe80::1", "169.254.7.8", "10.0.0.4")
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    monkeypatch.setattr("megatron_noloco.job.join._address_towards", lambda host: None)
    assert reachable_address() == "10.0.0.4"
    del found[3]
    assert reachable_address() == "169.254.7.8"
