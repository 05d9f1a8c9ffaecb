"""The thread of a replica's leader, in which a `Node` runs while the replica computes."""

import asyncio
import atexit
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from megatron_noloco.errors import UserError
from megatron_noloco.federation.links import Link, PeerStatus
from megatron_noloco.federation.messages import LONGEST_ROW, Row
from megatron_noloco.federation.node import Node
from megatron_noloco.federation.rendezvous import Rendezvous

Value = TypeVar("Value")
_LOOK_SECONDS = 1.0  # between two looks for addresses
_SELDOM = (
    10  # every so many looks are taken although others are there, so that two halves find each other again
)
_CHANGES_SECONDS = 1.0  # between two lines on who comes and leaves
_WAIT_SECONDS = 0.02
_MOST_NAMED = 3  # seeds at which nobody answers
_VERBS = {  # of one replica, of several
    "come": ("has come", "have come"),
    "back": ("is back", "are back"),
    "left": ("has left", "have left"),
    "lost": ("is not heard any more", "are not heard any more"),
}
_MOST_IN_LINE = 8  # replicas


class ThreadFailedError(RuntimeError):
    """The thread has failed, for the reason that is the cause: nothing is sent or received any more."""


class NodeThread:
    """Runs a `Node` in a thread, from construction to `close`.

    Args:
        make: makes the node, in the thread.
        rendezvous: where other replicas are looked for.

    Attributes:
        node: its coroutines and changes are for `call` and `do`.
        arithmetic: the only other thread, for what takes long.
    """

    node: Node

    def __init__(self, make: Callable[[], Node], rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous
        self._loop = asyncio.new_event_loop()
        self.arithmetic = ThreadPoolExecutor(1, "noloco-arithmetic")
        self._thread = threading.Thread(target=self._run, name="federation", daemon=True)
        self._thread.start()

        async def begin() -> None:
            self.node = make()
            await self.node.start()
            self.node.spawn(self._look_around())
            self.node.spawn(self._note_changes())

        try:
            self.call(begin()).result()
        except BaseException:
            self._stop()
            raise
        atexit.register(self.close)

    def call(self, work: Coroutine[Any, Any, Value]) -> "Future[Value]":
        """Run a coroutine in the thread. From any thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def do(self, change: Callable[..., object], *arguments: Any) -> None:
        """Have the thread call a function, soon and in the order of these calls. From any thread."""
        self._loop.call_soon_threadsafe(change, *arguments)

    def check(self) -> None:
        """Raise what ends this job: UserError where a later process has its slot, else ThreadFailedError."""
        failure = self.node.failure
        if isinstance(failure, UserError):
            raise failure
        if failure is not None:
            raise ThreadFailedError(
                f"the thread that exchanges with other replicas has failed: {failure!r}; started again, this job "
                "continues from its newest checkpoint"
            ) from failure

    def seen(self) -> dict[int, PeerStatus]:
        """Return what is known of the other replicas, by slot. Raises as `check` does."""
        self.check()
        return self.node.seen()

    def wait(self, condition: Callable[[], object], seconds: float) -> bool:
        """Wait until a condition holds; returns False when time is up, or this job is to stop."""
        deadline = time.monotonic() + seconds
        while not condition():
            self.check()
            if self.node.is_leaving or time.monotonic() > deadline:
                return False
            time.sleep(_WAIT_SECONDS)
        return True

    def tell_row(self, text: str) -> None:
        """Send a row of this replica's metrics to the others, unless it is too long."""
        if len(text) <= LONGEST_ROW:
            self.do(self.node.say_to_all, Row(text))

    def rows(self) -> list[tuple[int, str]]:
        """Return the rows that came since the last call, each with the slot of its replica."""
        found = list[tuple[int, str]]()
        for slot, link in list(self.node.links.items()):
            while link.rows:
                found.append((slot, link.rows.popleft()))
        return found

    def close(self) -> None:
        """Leave the federation; see `Node.close`.

        Removes the address of a job that has met no other, such as after a refusal: others would look for it.
        """
        atexit.unregister(self.close)
        if self._thread.is_alive():
            self.call(self.node.close()).result()
            self._stop()
            if not self.node.links:
                self._rendezvous.withdraw(self.node.slot, self.node.directory.own)

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self.arithmetic.shutdown()

    def _run(self) -> None:
        self._loop.set_exception_handler(self._note)
        self._loop.run_forever()
        self._loop.close()

    def _note(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Keep the first failure of a task or a callback."""
        error = context.get("exception")
        if isinstance(error, Exception) and self.node.failure is None:
            self.node.failure = error
            sys.stderr.write(f"replica {self.node.slot}: the federation's thread has failed\n")
            traceback.print_exception(error)

    async def _note_changes(self) -> None:
        """Say who has come, left or was lost: many changes at once are one line."""
        attendance = Attendance()
        while True:
            await asyncio.sleep(_CHANGES_SECONDS)
            for line in attendance.changes(self.node.links):
                self.node.note(line)

    async def _look_around(self) -> None:
        """Look for other replicas, often while there are none. File systems and name servers may block."""
        node, looks = self.node, 0
        while True:
            alone, seldom = not node.present(), looks % _SELDOM == 0
            looks += 1
            if alone or seldom:
                try:
                    found = await asyncio.to_thread(self._rendezvous.look)
                    node.directory.merge(found.addresses)
                    for endpoint in found.endpoints:
                        node.spawn(node.dialling.visit(endpoint))
                    if found.missing:
                        raise OSError(found.missing)
                    if alone and looks % _SELDOM == 0:
                        await self._name_nobody()
                except OSError as error:  # known addresses stay in use
                    node.warn(f"federation.rendezvous: {error}")
            await asyncio.sleep(_LOOK_SECONDS)

    async def _name_nobody(self) -> None:
        """Say why there may be nobody."""
        node = self.node
        if line := await asyncio.to_thread(self._rendezvous.why_alone):
            node.warn(f"federation.rendezvous: {line}")
        if (reasons := list(node.dialling.unanswered.values())) and not node.dialling.has_answers:
            node.warn(
                f"federation.rendezvous: {'; '.join(reasons[:_MOST_NAMED])}; does a job listen there, and is the "
                "port open?"
            )


class Attendance:
    """What the user was told of the other replicas.

    A replica whose link is lost is there until it was silent for as long as ends a link (`Link.is_silent`).
    """

    def __init__(self) -> None:
        self._told = dict[int, bool]()  # whether it is there, by slot

    def changes(self, links: Mapping[int, Link]) -> Iterator[str]:
        """Yield a line for each kind of change since the last call; four at most."""
        changed: dict[str, list[int]] = {kind: [] for kind in _VERBS}
        for slot, link in sorted(links.items()):
            was_there, has_left = self._told.get(slot, False), link.seen.status.phase == "left"
            if link.seen.present and not has_left and not was_there:
                changed["back" if slot in self._told else "come"].append(slot)
            elif was_there and (has_left or link.is_silent):
                changed["left" if has_left else "lost"].append(slot)
            else:
                continue
            self._told[slot] = not was_there
        replicas = 1 + sum(self._told.values())
        for kind, slots in changed.items():
            if slots:
                yield f"{_named(slots)} {_VERBS[kind][len(slots) > 1]} ({replicas} replica{'s' * (replicas > 1)})"


def _named(slots: list[int]) -> str:
    more = f" and {len(slots) - _MOST_IN_LINE} more" if len(slots) > _MOST_IN_LINE else ""
    return f"replica{'s' * (len(slots) > 1)} {', '.join(map(str, slots[:_MOST_IN_LINE]))}{more}"
