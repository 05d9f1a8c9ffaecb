"""Connections of strangers to the port of a replica: what they cost it, and whether others still get in.

    python -m tools.faults strangers --connections 10000

The replica is a process of its own, with a partner in this one. Strangers of each kind in `KINDS` come, 200 at a
time. Each stays until the replica ends its connection, or for twenty seconds. Meanwhile a row of metrics goes to
the replica and back over the link of the partner, again and again. Then another replica joins.

Reports what the replica holds before, after a first tenth of the strangers, and after all; how many connections it
has ended; seconds until the new replica is linked; and the longest way of a row there and back.
"""

import argparse
import asyncio
import json
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

from megatron_noloco.federation import tcp
from megatron_noloco.federation.keys import Keys
from megatron_noloco.federation.node_thread import NodeThread
from megatron_noloco.federation.tcp import TcpCarrier
from tools.federated import echoing, open_replica, timing_rows, wait_for_all
from tools.processes import held

GREETING = tcp._MAGIC + bytes([tcp.VERSION, 1])
_AT_ONCE = 200
_STAY_SECONDS = 20.0
_SETTLE_SECONDS = 15.0  # in which the replica ends what is left


def _bytes(content: bytes) -> Callable[[str, Keys, Keys], Any]:
    """Return a kind that sends bytes."""

    async def send(endpoint: str, keys: Keys, others: Keys) -> None:
        async with _connected(endpoint) as (reader, writer):
            writer.write(content)
            while await reader.read(1000):
                pass

    return send


async def _drip(endpoint: str, keys: Keys, others: Keys) -> None:
    async with _connected(endpoint) as (_, writer):
        for byte in GREETING + _client_hello():
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.2)


async def _reset(endpoint: str, keys: Keys, others: Keys) -> None:
    async with _connected(endpoint) as (_, writer):
        writer.write(GREETING)
        opened = writer.get_extra_info("socket")
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _stream(of_member: bool, *contents: bytes) -> Callable[[str, Keys, Keys], Any]:
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


async def _other_key(endpoint: str, keys: Keys, others: Keys) -> None:
    others.dials.verify_mode = ssl.CERT_NONE
    carrier = TcpCarrier(Keys(others.dials, others.admits, keys.fingerprint))
    try:
        async with await carrier.dial(endpoint) as stream:
            await stream.receive(1)
    finally:
        await carrier.close()


def _client_hello() -> bytes:
    """Return the first bytes that a client of TLS sends."""
    out = ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), out, server_hostname="a")
    with suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return out.read()


@asynccontextmanager
async def _connected(endpoint: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(endpoint.rpartition(":")[2]))
    try:
        yield reader, writer
    finally:
        writer.close()


KINDS: dict[str, Callable[[str, Keys, Keys], Any]] = {
    "silent": _bytes(b""),
    "garbage": _bytes(b"GET / HTTP/1.1\r\n\r\n" * 100),
    "half a greeting": _bytes(GREETING[:3]),
    "an old version": _bytes(GREETING[:4] + bytes([tcp.VERSION - 1, 1])),
    "a greeting": _bytes(GREETING),
    "garbage for TLS": _bytes(GREETING + b"\x16\x03\x01\xff\xff" + bytes(70_000)),
    "half a handshake": _bytes(GREETING + _client_hello()[:100]),
    "no end of a handshake": _bytes(GREETING + _client_hello()),
    "slow": _drip,
    "reset": _reset,
    "without a certificate": _stream(False),
    "a huge secret": _stream(False, b"\xff\xff\xff\xff", bytes(100_000)),
    "another key": _other_key,
    "a silent member": _stream(True),
    "a huge message": _stream(True, b"\xff\xff\xff\xff", bytes(100_000)),
    "no message": _stream(True, b"\0\0\0\2{}"),
}
"""What strangers do at an endpoint, with the keys of the federation or with others; by a name."""


async def come(endpoint: str, keys: Keys, others: Keys, connections: int) -> int:
    """Let so many strangers come; return how many connections the other side has ended."""
    room, ended, kinds = asyncio.Semaphore(_AT_ONCE), 0, list(KINDS.values())

    async def one(number: int) -> None:
        nonlocal ended
        async with room:
            try:
                async with asyncio.timeout(_STAY_SECONDS):
                    await kinds[number % len(kinds)](endpoint, keys, others)
                ended += 1
            except TimeoutError:
                pass
            except OSError:
                ended += 1

    await asyncio.gather(*map(one, range(connections)))
    return ended


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--listener", type=Path, help="(of the tool itself) the folder")


def run(options: argparse.Namespace) -> dict[str, Any] | None:
    """Let the strangers come; as the listener, be the replica."""
    if options.listener:
        _listen(options.listener)
        return None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        keys, others = Keys.make(folder / "key"), Keys.make(folder / "other")
        command = [sys.executable, "-m", "tools.faults", "strangers", "--listener", name]
        pipe = subprocess.PIPE
        with (
            subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as listener,
            closing(open_replica(1, folder / "rendezvous", keys=keys)) as partner,
        ):
            return _measure(listener, partner, folder, keys, others, options.connections)


def _measure(
    listener: Any, partner: NodeThread, folder: Path, keys: Keys, others: Keys, connections: int
) -> dict[str, Any]:
    def ask() -> dict[str, int]:
        listener.stdin.write("?\n")
        listener.stdin.flush()
        return json.loads(listener.stdout.readline())

    wait_for_all(partner, 2)
    endpoint = partner.node.directory.addresses[0].endpoint
    with timing_rows(partner) as ways:
        report: dict[str, Any] = {"connections": connections, "before": ask()}
        report["ended"] = asyncio.run(come(endpoint, keys, others, connections // 10))
        time.sleep(_SETTLE_SECONDS)
        report["after a tenth"] = ask()
        report["ended"] += asyncio.run(come(endpoint, keys, others, connections - connections // 10))
        started = time.monotonic()
        with closing(open_replica(2, folder / "rendezvous", keys=keys)) as joined:
            wait_for_all(joined, 3)
            report["seconds to join"] = round(time.monotonic() - started, 2)
        time.sleep(_SETTLE_SECONDS)
        report["after all"] = ask()
    report["seconds of a row"] = round(max(ways), 2)
    listener.stdin.close()
    report["lines"] = len(listener.stderr.read().splitlines())
    return report


def _listen(folder: Path) -> None:
    """Be the replica: say what it holds, for each line of the input."""
    with (
        closing(open_replica(0, folder / "rendezvous", keys=Keys.read(folder / "key"))) as thread,
        echoing(thread),
    ):

        async def tasks() -> int:
            return len(asyncio.all_tasks())

        for _ in sys.stdin:
            others = {"tasks": thread.call(tasks()).result(), "links": len(thread.node.links)}
            print(json.dumps(held() | others), flush=True)
