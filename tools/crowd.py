"""Idle replicas of a federation, by their number: processor, memory, and what a change of an address costs.

    python -m tools.crowd --replicas 16 64 128

All replicas are in this process, in one event loop, over TCP of the loopback interface with TLS. Its clock jumps
to the next timer when nothing happens, so the share of a core is that of replicas on machines of their own. Each
link needs two files: `ulimit -n` limits the replicas. With --in-memory links have no sockets and no TLS, so there
may be more. Prints one JSON object for each number: the share of a core and the bytes of memory for each replica,
and the statuses that it sends in a second; and the messages with addresses, hellos included, when a replica joins,
when another leaves, and when that one comes back at another address, with the seconds until all have links again.
"""

import asyncio
import gc
import json
import random
import selectors
import socket
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from megatron_noloco.federation.directory import Directory
from megatron_noloco.federation.keys import Keys
from megatron_noloco.federation.links import Link
from megatron_noloco.federation.messages import Address, Member, Status
from megatron_noloco.federation.node import Carriers, Node
from megatron_noloco.federation.streams import Carrier, Serve
from megatron_noloco.federation.tcp import TcpCarrier
from tests.unit.memory_streams import MemoryCarrier
from tools.options import command_line

_GRAIN_SECONDS = 0.001  # the clock jumps when nothing happens for so long
_SETTLE_SECONDS, _IDLE_SECONDS = 20.0, 10.0


class _Jumping(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        events = super().select(min(timeout, _GRAIN_SECONDS) if timeout else 0)
        self.now += timeout if timeout and not events else 0
        return events


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


class _Counted(Directory):
    told = 0

    def merge(self, addresses: Mapping[int, Address]) -> None:
        _Counted.told += 1
        super().merge(addresses)


class _CountedNode(Node):
    statuses = 0

    def status(self, link: Link) -> Status:
        _CountedNode.statuses += 1
        return super().status(link)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", required=True)
    parser.add_argument("--in-memory", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        keys = Keys.make(Path(folder) / "key")
        for replicas in options.replicas:
            with asyncio.Runner(loop_factory=_Loop) as runner:
                print(json.dumps(runner.run(Crowd(keys, options.in_memory).measure(replicas))), flush=True)


class Crowd:
    """Replicas, of which the first knows no other, and the others the first."""

    def __init__(self, keys: Keys, in_memory: bool) -> None:
        self.nodes: dict[int, Node] = {}
        self._keys = keys
        self._places: dict[str, Serve] | None = {} if in_memory else None

    async def measure(self, replicas: int) -> dict[str, Any]:
        gc.collect()
        before, loop = psutil.Process().memory_info().rss, asyncio.get_running_loop()
        for slot in range(replicas):
            await self._start(slot, 1)
            await asyncio.sleep(random.uniform(0, 0.5))  # else all tick at once
        await self._until_linked()
        gc.collect()
        gc.freeze()  # or each collection would visit the objects of all replicas
        await asyncio.sleep(_SETTLE_SECONDS)
        found: dict[str, Any] = {
            "replicas": replicas,
            "bytes": (psutil.Process().memory_info().rss - before) // replicas,
        }
        _CountedNode.statuses, started, busy = 0, loop.time(), time.process_time()
        await asyncio.sleep(_IDLE_SECONDS)
        replica_seconds = (loop.time() - started) * replicas
        found["share_of_a_core"] = round((time.process_time() - busy) / replica_seconds, 5)
        found["statuses_per_second"] = round(_CountedNode.statuses / replica_seconds, 1)
        leaves = replicas - 1
        found["joins"] = await self._change(self._start(replicas, 1))
        found["leaves"] = await self._change(self.nodes.pop(leaves).close())
        found["comes back"] = await self._change(self._start(leaves, 2))
        for node in self.nodes.values():
            assert node.failure is None, node.failure
            await node.close()
        return found

    async def _change(self, change: Any) -> dict[str, float]:
        _Counted.told, started = 0, asyncio.get_running_loop().time()
        await change
        await self._until_linked()
        seconds = asyncio.get_running_loop().time() - started
        while len({node.directory.checksum for node in self.nodes.values()}) > 1:
            await asyncio.sleep(0.1)
        await asyncio.sleep(_IDLE_SECONDS)
        return {"messages": _Counted.told, "seconds": round(seconds, 1)}

    async def _start(self, slot: int, incarnation: int) -> None:
        if self._places is None:
            listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
            endpoint = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
            carrier: Carrier = TcpCarrier(self._keys, listener)
        else:
            endpoint = f"tcp://127.0.0.1:{1024 + slot + 10000 * incarnation}"
            carrier = MemoryCarrier(self._places, endpoint)
        address = Address(endpoint, incarnation)
        node = _CountedNode(slot, address, Member(1), Carriers(carrier))
        node.directory = _Counted(slot, address)
        node.directory.merge({} if slot == 0 else {0: self.nodes[0].directory.own})
        self.nodes[slot] = node
        await node.start()

    async def _until_linked(self) -> None:
        def is_linked() -> bool:
            return all(len(node.present()) == len(self.nodes) - 1 for node in self.nodes.values())

        while not is_linked():
            await asyncio.sleep(0.1)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
