"""Replicas of a federation in one event loop, whose clock jumps to the next timer when nothing happens."""

import asyncio
import selectors
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from megatron_noloco.federation.dialling import Carriers
from megatron_noloco.federation.messages import Address, Member
from megatron_noloco.federation.node import Node
from megatron_noloco.federation.streams import Serve
from tests.unit.memory_streams import Faults, MemoryCarrier

MEMBER = Member(77)
_LATEST = 10_000.0  # seconds
Value = TypeVar("Value")


class _JumpingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.now = 0.0
        self.busy = 0  # threads that compute; meanwhile the clock stands still
        self.lock = threading.Lock()
        loop = self

        class Jumping(selectors.SelectSelector):
            def select(self, timeout: float | None = None) -> Any:
                is_busy = loop.busy > 0
                events = super().select(0.01 if is_busy and timeout != 0 else 0)
                if not events and timeout and not is_busy:
                    loop.now += timeout
                    assert loop.now < _LATEST, _places(loop)
                return events

        super().__init__(Jumping())

    def time(self) -> float:
        return self.now

    def run_in_executor(self, executor: Any, function: Any, *arguments: Any) -> "asyncio.Future[Any]":
        future = super().run_in_executor(executor, function, *arguments)
        if not isinstance(executor, Worker):  # which counts itself
            self.count(1)
            future.add_done_callback(lambda _: self.count(-1))
        return future

    def count(self, change: int) -> None:
        with self.lock:
            self.busy += change


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


class Worker(ThreadPoolExecutor):
    """Runs functions in a thread. The clock of the loop goes on only where they wait for a `NodeOfWorkers`."""

    def __init__(self) -> None:
        super().__init__(1)
        self._loop: Any = asyncio.get_running_loop()

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> "Future[Any]":
        self._loop.count(1)
        future = super().submit(function, *arguments, **options)
        # Begins when whoever waits for the future was told.
        after = super().submit(lambda: None)
        after.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._loop.count, -1))
        return future


class NodeOfWorkers:
    """Stands for the thread of a leader, for functions in a `Worker`: the loop is that of the test."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._loop: Any = asyncio.get_running_loop()

    def check(self) -> None:
        assert self.node.failure is None

    def do(self, change: Callable[..., object], *arguments: Any) -> None:
        self._loop.call_soon_threadsafe(change, *arguments)

    def call(self, work: Coroutine[Any, Any, Value]) -> "Future[Value]":
        """Run a coroutine, for whose result the caller waits at once."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        future.add_done_callback(lambda _: self._loop.count(1))
        self._loop.count(-1)
        return future

    def wait(self, condition: Callable[[], object], seconds: float) -> bool:
        """Wait as `NodeThread.wait` does."""

        async def wait() -> bool:
            try:
                await until(condition, seconds)
            except TimeoutError:
                return False
            return True

        return self.call(wait()).result()


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
        node = Node(slot, address, member, Carriers(carrier))
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
