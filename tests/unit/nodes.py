"""Replicas of a federation in one event loop, whose clock jumps to the next timer when nothing happens."""

import asyncio
import selectors
from collections.abc import Coroutine, Mapping
from typing import Any

from megatron_noloco.federation.messages import Address, Member
from megatron_noloco.federation.node import Carriers, Identity, Node
from megatron_noloco.federation.streams import Serve
from tests.unit.memory_streams import Faults, MemoryCarrier

MEMBER = Member(77)
_LATEST = 10_000.0  # seconds


class _JumpingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.now = 0.0
        loop = self

        class Jumping(selectors.SelectSelector):
            def select(self, timeout: float | None = None) -> Any:
                events = super().select(0)
                if not events and timeout:
                    loop.now += timeout
                    assert loop.now < _LATEST, _places(loop)
                return events

        super().__init__(Jumping())

    def time(self) -> float:
        return self.now


def _places(loop: asyncio.AbstractEventLoop) -> str:
    """Return where the tasks of a loop wait."""
    lines = []
    for task in asyncio.all_tasks(loop):
        awaited: Any = task.get_coro()
        while hasattr(awaited, "cr_frame") or hasattr(awaited, "ag_frame"):
            frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "ag_frame", None)
            lines.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
            awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "ag_await", None)
        lines.append("")
    return "\n".join(lines)


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine by a clock of its own."""
    with asyncio.Runner(loop_factory=_JumpingLoop) as runner:
        return runner.run(main)


class Nodes:
    """Makes nodes that share a network in memory. As a context: all are closed."""

    def __init__(self, faults: Faults = lambda number: (None, None)) -> None:
        self.places: dict[str, Serve] = {}
        self.nodes = list[Node]()
        self._faults = faults

    async def __aenter__(self) -> "Nodes":
        return self

    async def __aexit__(self, *_: object) -> None:
        for node in self.nodes:
            await node.close()
        failures = [node.failure for node in self.nodes if node.failure is not None]
        assert failures == []

    async def add(
        self,
        slot: int,
        known: Mapping[int, Address] | None = None,
        incarnation: int = 1,
        hidden: bool = False,
        member: Member = MEMBER,
    ) -> Node:
        """Start a replica that knows some addresses."""
        endpoint = f"tcp://memory:{1 + slot + 1000 * (incarnation - 1)}"
        address = Address("" if hidden else endpoint, incarnation)
        carrier = MemoryCarrier(self.places, endpoint, self._faults)
        node = Node(Identity(slot, address, member), Carriers(carrier))
        node.directory.merge(known or {})
        self.nodes.append(node)
        await node.start()
        return node


def address_of(slot: int, incarnation: int = 1) -> dict[int, Address]:
    """Return the address of a replica that `Nodes.add` starts."""
    return {slot: Address(f"tcp://memory:{1 + slot + 1000 * (incarnation - 1)}", incarnation)}


async def until(condition: Any, seconds: float = 60.0) -> None:
    """Wait for something that other tasks do."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.05)
