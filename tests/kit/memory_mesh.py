"""Members inside one process: one thread runs at a time, in an order drawn from a seed, and the clock moves only
when all wait. Any message can be lost, late, or the last of its sender.
"""

import heapq
import itertools
import math
import random
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar

from megatron_noloco.federation.keys import Identity
from megatron_noloco.federation.members import write_line
from megatron_noloco.federation.mesh import Carrier, Fetch, Member, Mesh, Piece, RefusedError
from megatron_noloco.federation.statuses import PeerStatus, Statuses
from tests.kit.ranks import federation_keys

Value = TypeVar("Value")


class Killed(BaseException):
    """Ends the threads of a member."""


class Message(NamedTuple):
    """A message that is about to be sent. `kind`: "ask", "answer"."""

    kind: str
    sender: Member
    receiver: Member
    name: str


class _Waiting(NamedTuple):
    owner: Member
    ready: Callable[[], object]
    until: float
    go: threading.Semaphore


class World:
    """The members, their threads and their clock.

    Args:
        delay: seconds of a message, on average.
        rate: bytes per second of each sender; its messages are sent one after the other.
        lease: seconds after which an absent member is noticed.
        on_message: is called with the world, the number of each message, and the message before it is sent; may
            cut and kill, and may return seconds by which it is late, or False to lose it.
    """

    def __init__(
        self,
        seed: int = 0,
        delay: float = 0.05,
        rate: float = math.inf,
        lease: float = 10.0,
        on_message: Callable[["World", int, Message], Any] = lambda world, number, message: None,
    ) -> None:
        self.now, self.delay, self.rate, self.lease, self.on_message = 0.0, delay, rate, lease, on_message
        self.carriers: dict[Member, MemoryCarrier] = {}
        self.messages = itertools.count()
        self.dead: dict[Member, float] = {}
        self._random = random.Random(seed)
        self._events: list[tuple[float, float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self._waiting: list[_Waiting] = []
        self._control = threading.Semaphore(0)
        self._threads, self.failure = 0, None
        self._cuts: dict[frozenset[Member], tuple[float, float]] = {}
        self._free: dict[Member, float] = {}

    failure: BaseException | None
    running: Mesh  # of the member whose thread runs

    def join(self, slot: int, incarnation: int = 1, hidden: bool = False) -> "MemoryMesh":
        """Add a member. Two hidden members do not reach each other."""
        return MemoryMesh(Member(slot, incarnation), hidden, self)

    def cut(self, one: Member, other: Member, seconds: float = math.inf) -> None:
        """Lose all messages of a pair. Each still sees the other by way of a third member, if there is any."""
        self._cuts[frozenset((one, other))] = (self.now, self.now + seconds)
        if seconds < math.inf:
            self.at(seconds, lambda: [self.carriers[end].mesh.follow_members() for end in (one, other)])

    def kill(self, member: Member) -> None:
        self.dead.setdefault(member, self.now)

    def is_cut(self, one: Member, other: Member) -> bool:
        begun, ended = self._cuts.get(frozenset((one, other)), (0.0, 0.0))
        return begun <= self.now < ended

    def sees(self, one: Member, other: Member) -> bool:
        if other in self.dead:
            return self.now < self.dead[other] + self.lease
        thirds = self.carriers.keys() - self.dead.keys() - {one, other}
        return self.are_linked(one, other) or (
            any(not self.is_cut(one, third) and not self.is_cut(third, other) for third in thirds)
        )

    def are_linked(self, one: Member, other: Member) -> bool:
        """Return whether messages pass between two members, or did until the lease ago."""
        begun, _ = self._cuts.get(frozenset((one, other)), (math.inf, 0.0))
        return not self.is_cut(one, other) or self.now < begun + self.lease

    def send(
        self,
        message: Message,
        size: int,
        deliver: Callable[[], object],
        lost: Callable[[], object] = lambda: None,
    ) -> None:
        """Send a message, unless it is to be lost; `lost` is then called two seconds later."""
        late = self.on_message(self, next(self.messages), message)
        ends = message.sender, message.receiver
        if late is False or self.is_cut(*ends) or any(end in self.dead for end in ends):
            self.at(2.0, lost)
            return
        begin = max(self.now, self._free.get(message.sender, 0.0))
        meshes = [self.carriers[end].mesh for end in ends]
        for part in range(int(size / self.rate / 5.0)):  # bytes come all the time
            self.at(begin - self.now + 5.0 * part, lambda: self._note_bytes(meshes, ends))
        self._free[message.sender] = begin + size / self.rate
        seconds = begin - self.now + size / self.rate
        seconds += self.delay * self._random.uniform(0.5, 1.5) + (late or 0.0)
        self.at(seconds, lambda: lost() if message.receiver in self.dead or self.is_cut(*ends) else deliver())

    def _note_bytes(self, meshes: list[Mesh], ends: tuple[Member, Member]) -> None:
        meshes[0].note_bytes(ends[1])
        meshes[1].note_bytes(ends[0])

    def at(self, seconds: float, event: Callable[[], object]) -> None:
        heapq.heappush(self._events, (self.now + seconds, self._random.random(), next(self._numbers), event))

    def spawn(self, owner: Member, function: Callable[[], Value]) -> "Future[Value]":
        """Run a function as a thread of a member; `run` runs them all."""
        future: Future[Value] = Future()
        first = _Waiting(owner, lambda: True, math.inf, threading.Semaphore(0))

        def body() -> None:
            first.go.acquire()
            try:
                if owner in self.dead:
                    raise Killed
                found = function()
            except BaseException as error:
                future.set_exception(error)
                if not isinstance(error, Killed):
                    self.failure = self.failure or error
            else:
                future.set_result(found)
            self._threads -= 1
            self._control.release()

        self._threads += 1
        self._waiting.append(first)
        threading.Thread(target=body, daemon=True).start()
        return future

    def wait(self, owner: Member, ready: Callable[[], object], until: float) -> None:
        """Let others run, until it is ready or the time has come."""
        waiting = _Waiting(owner, ready, until, threading.Semaphore(0))
        self._waiting.append(waiting)
        self._control.release()
        waiting.go.acquire()
        if owner in self.dead:
            raise Killed

    def run(self) -> None:
        """Run until all threads have ended."""
        while self._threads:
            if self.failure is not None:
                raise self.failure
            able = [one for one in self._waiting if self._is_able(one)]
            due = bool(self._events) and self._events[0][0] <= self.now
            if able and not (due and self._random.random() < 0.5):
                chosen = self._random.choice(able)
                self._waiting = [one for one in self._waiting if one is not chosen]
                self.running = self.carriers[chosen.owner].mesh
                chosen.go.release()
                self._control.acquire()
            elif due:
                heapq.heappop(self._events)[-1]()
            else:
                self.now = min(self._times())
                assert self.now < 1e9, "all wait for ever"

    def _is_able(self, one: _Waiting) -> bool:
        """Return whether a thread can go on; one whose condition raises does, and raises it itself."""
        try:
            return one.until <= self.now or one.owner in self.dead or bool(one.ready())
        except Exception:
            return True

    def _times(self) -> list[float]:
        """Return when something may happen next."""
        times = [one.until for one in self._waiting] + [event[0] for event in self._events[:1]]
        ends = [end for begun, ended in self._cuts.values() for end in (begun + self.lease, ended)]
        ends += [end + self.lease for end in self.dead.values()]
        return [time for time in times if time > self.now] + [end for end in ends if end > self.now]


class MemoryCarrier(Carrier):
    """The carrier of a member of a World."""

    def __init__(self, world: World, hidden: bool) -> None:
        self.hidden, self._world = hidden, world

    def start(self, mesh: Mesh) -> None:
        super().start(mesh)
        for other in self._world.carriers.values():
            if other.mesh.statuses.own is not None:
                mesh.take(other.mesh.statuses.own)
        self._world.carriers[mesh.me] = self

    def publish(self) -> None:
        for other in self._world.carriers.values():
            if self.mesh.statuses.own is not None:
                other.mesh.take(self.mesh.statuses.own)

    @property
    def present(self) -> set[Member]:  # type: ignore[override]
        me, others = self.mesh.me, self._world.carriers
        return {other for other in others if other != me and self._world.sees(me, other)}

    @property
    def reached(self) -> set[Member]:  # type: ignore[override]
        world = self._world
        return {
            member
            for member in self.present & self.mesh.members().keys()
            if not (self.hidden and world.carriers[member].hidden) and world.are_linked(self.mesh.me, member)
        }

    def ask(self, fetch: Fetch) -> None:
        world, me, giver, name = self._world, self.mesh.me, fetch.giver, fetch.name
        other, answers, wishes = world.carriers.get(giver), list[bool](), list[Future[Piece]]()

        def wish() -> None:
            while wishes:
                wishes.pop().cancel()
            assert other is not None
            if answers:  # it is on its way
                return
            wishes.append(other.mesh.offers.wish(name, me))
            wishes[0].add_done_callback(answer)

        def answer(found: Future[Piece]) -> None:
            if found.cancelled():
                return

            def deliver() -> None:
                try:
                    content = found.result().read()  # a piece that is withdrawn meanwhile does not come
                except RefusedError as refusal:
                    self.mesh.refuse(giver, name, str(refusal))
                    return
                if fetch.outcome is None:
                    self.mesh.note_bytes(giver)
                    self.mesh.receive(giver, name, content)

            answers.append(True)
            size = 0 if found.exception() else found.result().size
            world.send(Message("answer", giver, me, name), size, deliver, answers.clear)

        def ask() -> None:
            if fetch.outcome is None and other is not None:
                world.at(5.0, ask)
            is_known = any(not wish.done() for wish in wishes)
            if fetch.outcome is None and other is not None and not (is_known or answers):
                world.send(Message("ask", me, giver, name), 0, wish)

        ask()

    def send(self, to: Member, name: str, piece: Piece) -> None:
        """Do nothing."""

    def close(self) -> None:
        own = self.mesh.statuses.own
        self.mesh.publish(replace(PeerStatus() if own is None else own.status, phase="left"))


@cache
def _identity(slot: int) -> Identity:
    return federation_keys().identity(slot)


class MemoryMesh(Mesh):
    """The mesh of a member of a World; used by threads that `spawn` has made."""

    def __init__(self, me: Member, hidden: bool, world: World) -> None:
        self.world = world
        statuses, carrier = Statuses(1, me, _identity(me.slot)), MemoryCarrier(world, hidden)
        super().__init__(statuses, [carrier], partial(write_line, me.slot))
        self.publish(PeerStatus())

    def clock(self) -> float:
        return self.world.now

    def wait(self, ready: Callable[[], object], until: float = math.inf) -> bool:
        if not ready():
            self.world.wait(self.me, ready, until)
        return bool(ready())

    def wake(self) -> None:
        """Do nothing: the world looks at all that wait."""

    def spawn(self, function: Callable[[], Value], name: str) -> "Future[Value]":
        return self.world.spawn(self.me, function)
