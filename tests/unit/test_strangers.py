"""Processes that connect to the port of a replica and are no members cost it nothing, and keep nobody out."""

import asyncio
import os
import socket
from pathlib import Path

import pytest

from megatron_noloco.federation import tcp
from megatron_noloco.federation.keys import Keys
from megatron_noloco.federation.links import Link
from megatron_noloco.federation.messages import Address
from megatron_noloco.federation.node import Carriers, Identity, Node
from megatron_noloco.federation.streams import Stream
from megatron_noloco.federation.tcp import TcpCarrier
from tests.unit.nodes import MEMBER, until
from tools.faults.strangers import KINDS, come

CONNECTIONS = 10 * len(KINDS)


async def start(slot: int, keys: Keys, known: Node | None = None) -> Node:
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    address = Address(f"tcp://127.0.0.1:{listener.getsockname()[1]}", 1)
    node = Node(Identity(slot, address, MEMBER), Carriers(TcpCarrier(keys, listener)))
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
