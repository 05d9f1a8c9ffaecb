"""Processes that connect to the port of a replica and are no members cost it nothing, and keep nobody out."""

import asyncio
import os
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from megatron_noloco.federation import tcp
from megatron_noloco.federation.keys import Keys
from megatron_noloco.federation.links import Link
from megatron_noloco.federation.messages import Address
from megatron_noloco.federation.node import Carriers, Node
from megatron_noloco.federation.streams import Stream
from megatron_noloco.federation.tcp import TcpCarrier
from tests.unit.nodes import MEMBER, until

GREETING = tcp._MAGIC + bytes([tcp.VERSION, 1])
AT_ONCE, STAY_SECONDS = 200, 20.0  # strangers, each until the replica ends its connection


def send_bytes(content: bytes) -> Callable[[str, Keys, Keys], Any]:
    """Return a kind that sends bytes."""

    async def send(endpoint: str, keys: Keys, others: Keys) -> None:
        async with connected(endpoint) as (reader, writer):
            writer.write(content)
            while await reader.read(1000):
                pass

    return send


async def drip(endpoint: str, keys: Keys, others: Keys) -> None:
    async with connected(endpoint) as (_, writer):
        for byte in GREETING + client_hello():
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.2)


async def reset(endpoint: str, keys: Keys, others: Keys) -> None:
    async with connected(endpoint) as (_, writer):
        writer.write(GREETING)
        opened = writer.get_extra_info("socket")
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def begin_stream(of_member: bool, *contents: bytes) -> Callable[[str, Keys, Keys], Any]:
    """Return a kind that begins a stream, sends bytes, and waits."""

    async def send(endpoint: str, keys: Keys, others: Keys) -> None:
        carrier = TcpCarrier(keys if of_member else Keys.of_newcomer(keys.fingerprint))
        try:
            async with await carrier.dial(endpoint) as stream:
                await stream.send(*contents)
                await stream.receive(1)
        finally:
            await carrier.close()

    return send


async def other_key(endpoint: str, keys: Keys, others: Keys) -> None:
    others.dials.verify_mode = ssl.CERT_NONE
    carrier = TcpCarrier(Keys(others.dials, others.admits, keys.fingerprint))
    try:
        async with await carrier.dial(endpoint) as stream:
            await stream.receive(1)
    finally:
        await carrier.close()


def client_hello() -> bytes:
    """Return the first bytes that a client of TLS sends."""
    out = ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), out, server_hostname="a")
    with suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return out.read()


@asynccontextmanager
async def connected(endpoint: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(endpoint.rpartition(":")[2]))
    try:
        yield reader, writer
    finally:
        writer.close()


KINDS: dict[str, Callable[[str, Keys, Keys], Any]] = {
    "silent": send_bytes(b""),
    "garbage": send_bytes(b"GET / HTTP/1.1\r\n\r\n" * 100),
    "half a greeting": send_bytes(GREETING[:3]),
    "an old version": send_bytes(GREETING[:4] + bytes([tcp.VERSION - 1, 1])),
    "a greeting": send_bytes(GREETING),
    "garbage for TLS": send_bytes(GREETING + b"\x16\x03\x01\xff\xff" + bytes(70_000)),
    "half a handshake": send_bytes(GREETING + client_hello()[:100]),
    "no end of a handshake": send_bytes(GREETING + client_hello()),
    "slow": drip,
    "reset": reset,
    "without a certificate": begin_stream(False),
    "a huge secret": begin_stream(False, b"\xff\xff\xff\xff", bytes(100_000)),
    "another key": other_key,
    "a silent member": begin_stream(True),
    "a huge message": begin_stream(True, b"\xff\xff\xff\xff", bytes(100_000)),
    "no message": begin_stream(True, b"\0\0\0\2{}"),
}
"""What strangers do at an endpoint, with the keys of the federation or with others; by a name."""


async def come(endpoint: str, keys: Keys, others: Keys, connections: int) -> int:
    """Let so many strangers come; return how many connections the other side has ended."""
    room, ended, kinds = asyncio.Semaphore(AT_ONCE), 0, list(KINDS.values())

    async def one(number: int) -> None:
        nonlocal ended
        async with room:
            try:
                async with asyncio.timeout(STAY_SECONDS):
                    await kinds[number % len(kinds)](endpoint, keys, others)
                ended += 1
            except TimeoutError:
                pass
            except OSError:
                ended += 1

    await asyncio.gather(*map(one, range(connections)))
    return ended


CONNECTIONS = 10 * len(KINDS)


async def start(slot: int, keys: Keys, known: Node | None = None) -> Node:
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    address = Address(f"tcp://127.0.0.1:{listener.getsockname()[1]}", 1)
    node = Node(slot, address, MEMBER, Carriers(TcpCarrier(keys, listener)))
    if known is not None:
        node.directory.merge({known.slot: known.directory.own})
    await node.start()
    return node


def test_nothing_grows_a_link_lives_on_and_a_new_replica_gets_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tcp, "_OPEN_SECONDS", 1.0)
    monkeypatch.setattr(tcp, "_MOST_STRANGERS", 16)
    keys, others = Keys.make(tmp_path / "key"), Keys.make(tmp_path / "other")
    most = 0

    async def echo(link: Link, stream: Stream) -> None:
        await stream.send(await stream.receive(1))

    async def main() -> None:
        nonlocal most
        node = await start(0, keys)
        node.serves["echo"] = echo
        partner = await start(1, keys, node)
        carrier = node._carriers.network
        assert isinstance(carrier, TcpCarrier)

        async def talk() -> None:
            nonlocal most
            while True:
                async with partner.links[0].open("echo") as stream:
                    await stream.send(b"?")
                    assert await stream.receive(1) == b"?"
                most = max(most, len(carrier._visits))
                await asyncio.sleep(0.01)

        def held() -> tuple[int, int, int]:
            return len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd")), len(carrier._connections)

        await until(lambda: 0 in partner.present() and 1 in node.present())
        talking = asyncio.create_task(talk())
        await asyncio.sleep(1.0)
        before = held()
        ended = await come(node.directory.own.endpoint, keys, others, CONNECTIONS)
        assert ended == CONNECTIONS
        assert not talking.done()
        await until(lambda: all(now <= then for now, then in zip(held(), before, strict=True)))
        joined = await start(2, keys, node)
        await until(lambda: len(node.present()) == 2)
        assert not talking.done()
        talking.cancel()
        for one in (joined, partner, node):
            await one.close()
            assert one.failure is None

    asyncio.run(main())
    assert most <= 16 + 20, "the partner's connections are no strangers"
    assert len(capsys.readouterr().err.splitlines()) < 10
