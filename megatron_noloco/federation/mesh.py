"""Named pieces of data: each member offers pieces, and others fetch them.

    giver                                           taker
    mesh.offer("round/7/bucket/0", piece, to=taker)    piece = mesh.fetch(giver, "round/7/bucket/0")

A fetch of a piece that is not offered yet waits. A fetch may be repeated, and changes nothing at the giver. So
there is no order of messages to agree on, and what is lost is asked for again.

A *member* is one process: a slot, and an incarnation by which a restarted job is another member. Its *status* is
what it publishes to all (`statuses`). A `Carrier` moves statuses and pieces: over HTTPS (`https_carrier`), through
a folder or a bucket (`folder_carrier`), or in memory (tests). Everything else about pieces is here: what is
offered (`Offers`), what is awaited (`Fetch`), and the one rule on when to give up (`Patience`).

Rounds, states, the final mean and newcomers are blocking code above `offer`, `fetch`, `members`, `publish`.
"""

import itertools
import math
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future
from contextlib import ExitStack
from typing import TypeVar

from megatron_noloco.federation.statuses import Member as Member
from megatron_noloco.federation.statuses import PeerStatus, SignedStatus, StatusError, Statuses
from megatron_noloco.files import outside

Value = TypeVar("Value")
Blob = bytes | bytearray | memoryview

PATIENCE_SECONDS = 10.0  # without a byte
MOST_PIECE_BYTES = 2**26
BULK_BYTES = 2**16  # smaller pieces never wait for larger ones
MOST_NAME_CHARACTERS = 128  # so that the name of a file that says it has at most 255
MOST_WISHES = 256  # of a taker
_ANOTHERS, _WITHDRAWN = "the piece is another member's", "the piece was withdrawn"
_REMEMBERED = 512  # prefixes that were withdrawn
_MOST_WARNINGS = 1000  # others may cause them
_LOOK_SECONDS = 0.25


class LostError(ConnectionError):
    """A piece does not come. The message continues "replica K: "."""


class StalledError(LostError):
    """The giver is not there any more, or no byte has come for so long that none is expected."""


class RefusedError(LostError):
    """The giver does not offer the piece, and never will."""


class Piece:
    """A piece that this member offers. Nobody reads its memory after `Offers.withdraw`.

    Attributes:
        to: the member that fetches it; None: any member may.
    """

    def __init__(self, content: Blob, to: Member | None) -> None:
        self.to, self.size = to, len(content)
        self._content: memoryview | None = memoryview(content)
        self._lock = threading.Lock()

    def read(self, start: int = 0, stop: int | None = None) -> bytes:
        """Return a copy of a part. Raises RefusedError where the piece was withdrawn."""
        with self._lock:
            if self._content is None:
                raise RefusedError(_WITHDRAWN)
            return bytes(self._content[start:stop])

    def withdraw(self) -> None:
        with self._lock:
            self._content = None


class Offers:
    """The pieces that this member offers, and the wishes for pieces that it does not offer yet. Thread-safe.

    Args:
        wake: is called when there is a wish.
    """

    def __init__(self, wake: Callable[[], object]) -> None:
        self._lock, self._wake = threading.Lock(), wake
        self._pieces: dict[str, Piece] = {}
        self._wishes: dict[tuple[Member, str], Future[Piece]] = {}  # the longest wait first
        self._withdrawn: deque[str] = deque(maxlen=_REMEMBERED)

    def offer(self, name: str, piece: Piece) -> set[Member]:
        """Offer a piece; return who has waited for it."""
        with self._lock:
            self._pieces[name] = piece
            takers = [taker for taker, wished in self._wishes if wished == name]
            wishes = {taker: self._wishes.pop((taker, name)) for taker in takers}
        for taker, wish in wishes.items():
            _settle(wish, piece if piece.to in (None, taker) else RefusedError(_ANOTHERS))
        return {*wishes}

    def withdraw(self, prefix: str) -> None:
        """Remove the pieces whose names begin so, and refuse wishes for them, now and later.

        Nobody reads their memory from then on.
        """
        with self._lock:
            self._withdrawn.append(prefix)
            gone = [self._pieces.pop(name) for name in list(self._pieces) if name.startswith(prefix)]
            refused = [self._wishes.pop(one) for one in list(self._wishes) if one[1].startswith(prefix)]
        for piece in gone:
            piece.withdraw()
        for wish in refused:
            _settle(wish, RefusedError(_WITHDRAWN))

    def release(self, name: str) -> None:
        """Remove a piece that has arrived where it was to go."""
        with self._lock:
            piece = self._pieces.pop(name, None)
        if piece is not None:
            piece.withdraw()

    def wish(self, name: str, taker: Member) -> "Future[Piece]":
        """Return the piece once it is offered, or RefusedError; a future that is cancelled is forgotten.

        The earlier wish of a taker for the same piece is cancelled. Raises ValueError where it waits for too many.
        """
        wish, earlier = Future[Piece](), None
        found: Piece | RefusedError | None = None
        with self._lock:
            if (piece := self._pieces.get(name)) is not None:
                found = piece if piece.to in (None, taker) else RefusedError(_ANOTHERS)
            elif any(map(name.startswith, self._withdrawn)):
                found = RefusedError(_WITHDRAWN)
            elif sum(other == taker and wished != name for other, wished in self._wishes) >= MOST_WISHES:
                raise ValueError("too many wishes")
            else:
                earlier = self._wishes.get((taker, name))
                self._wishes[taker, name] = wish
                wish.add_done_callback(lambda _: self._forget(name, taker, wish))
        if earlier is not None:
            earlier.cancel()
        if found is None:
            self._wake()
        else:
            _settle(wish, found)
        return wish

    def _forget(self, name: str, taker: Member, wish: "Future[Piece]") -> None:
        with self._lock:
            if self._wishes.get((taker, name)) is wish:
                del self._wishes[taker, name]

    def forget(self, is_gone: Callable[[Member], bool]) -> None:
        """Forget the wishes of takers that are gone."""
        with self._lock:
            wishes = [self._wishes.pop(one) for one in list(self._wishes) if is_gone(one[0])]
        for wish in wishes:
            wish.cancel()

    def takers(self, prefix: str) -> list[tuple[Member, str]]:
        """Return who waits for pieces whose names begin so, the longest wait first."""
        with self._lock:
            return [one for one in self._wishes if one[1].startswith(prefix)]


def _settle(wish: "Future[Piece]", found: "Piece | RefusedError") -> None:
    if not wish.set_running_or_notify_cancel():
        return
    if isinstance(found, RefusedError):
        wish.set_exception(found)
    else:
        wish.set_result(found)


class Fetch:
    """A piece that was asked for.

    Attributes:
        outcome: what has come; None: nothing yet.
        carrier: that was asked last; None: none was yet.
        is_sent: whether the giver sends it unasked, so that a folder's carrier waits before it asks.
        is_large: whether it may wait for other large pieces of the giver; over HTTPS it passes beside the link.
        number: of no other fetch of this process.
    """

    _numbers = itertools.count(1)

    def __init__(self, giver: Member, name: str, is_sent: bool, is_large: bool) -> None:
        assert len(name) <= MOST_NAME_CHARACTERS
        self.giver, self.name, self.number = giver, name, next(self._numbers)
        self.is_sent, self.is_large = is_sent, is_large
        self.carrier: Carrier | None = None
        self.outcome: Blob | LostError | None = None


class Carrier(ABC):
    """Moves statuses and pieces between members. Its methods may be called from any thread, and do not block.

    Attributes:
        present: the other members that are there, as far as this carrier sees.
        reached: those of them with which pieces pass.
        failure: what has ended the work of this carrier, which is a bug; None: nothing has.
    """

    mesh: "Mesh"
    present: Set[Member] = frozenset()
    reached: Set[Member] = frozenset()
    failure: BaseException | None = None

    def see(self, present: Set[Member], reached: Set[Member]) -> None:
        """Note who is there; have what is awaited asked of who is reached by now."""
        if (present, reached) != (self.present, self.reached):
            self.present, self.reached = present, reached
            self.mesh.follow_members()

    def fail(self, error: BaseException) -> None:
        """Note a bug, which ends this job."""
        if self.failure is None:
            self.failure = error
            sys.stderr.write("the thread that exchanges with other replicas has failed\n")
            traceback.print_exception(error)
            self.mesh.wake()

    def start(self, mesh: "Mesh") -> None:
        """Begin to carry, for this mesh."""
        self.mesh = mesh

    @abstractmethod
    def publish(self) -> None:
        """Have all members get the own status, `mesh.statuses.own`; give those of others to `mesh.take`."""

    @abstractmethod
    def ask(self, fetch: Fetch) -> None:
        """Have `mesh.receive` or `mesh.refuse` called."""

    def forget(self, fetch: Fetch) -> None:  # noqa: B027
        """End what `ask` has begun, if it has: the fetch has an outcome."""

    @abstractmethod
    def send(self, to: Member, name: str, piece: Piece) -> None:
        """Bring a piece to a member that will ask for it, where that is of use."""

    @abstractmethod
    def close(self) -> None:
        """Say that this member has left, and end."""


class Patience:
    """The one rule on when an operation is given up: no byte has moved between the two for so many seconds.

    Args:
        begin_by: returns when the giver must have begun; None: its first piece is awaited as the others.
        end_by: returns when the whole must be over.
        absent_seconds: for which the giver may be away.
        why_not: says why no piece will ever come; "" while one may.

    Attributes:
        began: when the first piece has come; inf: none has.
        since: when the wait for a piece has begun.
    """

    def __init__(
        self,
        mesh: "Mesh",
        giver: Member,
        begin_by: Callable[[], float] | None = None,
        end_by: Callable[[], float] = lambda: math.inf,
        *,
        seconds: float = PATIENCE_SECONDS,
        absent_seconds: float = 0.0,
        why_not: Callable[[], str] = lambda: "",
    ) -> None:
        self._mesh, self.giver, self.seconds, self._absent_seconds = mesh, giver, seconds, absent_seconds
        self._begin_by, self._end_by, self._why_not = begin_by, end_by, why_not
        self.began = math.inf
        self.since = self._seen = mesh.clock()

    def until(self) -> float:
        """Return when to give up, on the clock of the mesh."""
        if not self._mesh.reaches(self.giver):
            return min(self._seen + self._absent_seconds, self._end_by())
        if self._begin_by is not None and self.began == math.inf:
            return min(self._begin_by(), self._end_by())
        moved = max(self.since, self._mesh.moved.get(self.giver.slot, -math.inf))
        return min(moved + self.seconds, self._end_by())

    def check(self) -> None:
        """Note whether the giver is there. Raise StalledError or RefusedError when it is time to give up."""
        if is_there := self._mesh.reaches(self.giver):
            self._seen = self._mesh.clock()
        if reason := self._why_not():
            raise RefusedError(reason)
        if self._mesh.clock() >= self.until() or not self._mesh.may_come(self.giver):
            raise StalledError("sends nothing" if is_there else "is not there any more")

    def wait(self, ready: Callable[[], object]) -> None:
        """Wait until a condition holds. Raises StalledError or RefusedError when it is time to give up."""
        self.since = self._mesh.clock()
        while not ready():
            self.check()
            stop = self.until()

            def is_over(stop: float = stop) -> bool:
                if is_ready := bool(ready()):
                    return is_ready
                self.check()
                return self.until() < stop

            self._mesh.wait(is_over, stop)


class Mesh:
    """The members, as one of them meets them. All methods may be called from any thread.

    Args:
        statuses: of this member, and of others.
        carriers: the first that reaches a member carries what is exchanged with it.
        tell: is called with lines for the user, each once.

    Attributes:
        moved: when bytes of pieces have come or gone last, by the slot of the other member, on `clock`.
        refusal: the first line on a job of another run; "" if there was none.
    """

    def __init__(
        self, statuses: Statuses, carriers: Sequence[Carrier], tell: Callable[[str], object]
    ) -> None:
        self.me, self.statuses = statuses.me, statuses
        self.offers, self.carriers = Offers(self.wake), carriers
        self.moved: dict[int, float] = {}
        self.refusal = ""
        self._fetches = dict[tuple[Member, str], Fetch]()
        self._changed, self._changes = threading.Condition(), 0
        self._tell, self._told = tell, set[str]()
        with ExitStack() as started:
            for carrier in carriers:
                carrier.start(self)
                started.callback(carrier.close)
            started.pop_all()

    # Statuses

    def publish(self, status: PeerStatus) -> None:
        """Have all members get this status."""
        self.statuses.sign(status)
        for carrier in self.carriers:
            carrier.publish()
        self.wake()

    def members(self) -> Mapping[Member, PeerStatus]:
        """Return the members that are there, with the last status of each; of a slot only the latest process."""
        there = set[Member]().union(*(carrier.present for carrier in self.carriers))
        return self._by_slot(lambda signed: signed.member in there and not signed.status.has_left)

    def known(self) -> Mapping[Member, PeerStatus]:
        """Return the members that are or were there, this member included, with the last status of each."""
        return self._by_slot(lambda signed: True)

    def _by_slot(self, is_shown: Callable[[SignedStatus], bool]) -> Mapping[Member, PeerStatus]:
        own = self.statuses.own
        found = {self.me.slot: (self.me, PeerStatus() if own is None else own.status)}
        for signed in filter(is_shown, self.statuses.newest()):
            found[signed.member.slot] = signed.member, signed.status
        return dict(found[slot] for slot in sorted(found))

    def reaches(self, member: Member) -> bool:
        """Return whether pieces pass between this member and another that is there."""
        return self._carrier_of(member) is not None

    def is_followed(self, member: Member) -> bool:
        """Return whether a later process has the slot of a member."""
        signed = self.statuses.of(member.slot)
        return signed is not None and signed.member > member

    def may_come(self, member: Member) -> bool:
        """Return whether another member may be there: it has not left, and no later process has its slot."""
        signed = self.statuses.of(member.slot)
        return signed is not None and signed.member == member and not signed.status.has_left

    def close(self) -> None:
        """Say that this member has left, and end."""
        for carrier in self.carriers:
            carrier.close()

    # Pieces

    def offer(self, name: str, content: Blob, to: Member | None = None) -> None:
        """Offer a piece, until `offers` withdraws or releases it; its memory must not change meanwhile.

        Args:
            to: who fetches it; None: any member may.
        """
        piece = Piece(content, to)
        takers = self.offers.offer(name, piece)
        if to is not None and to not in takers and (carrier := self._carrier_of(to)) is not None:
            carrier.send(to, name, piece)

    def begin(self, giver: Member, name: str, is_sent: bool = False, is_large: bool = False) -> Fetch:
        """Begin to fetch a piece; see `result`, and `Fetch`. A giver that is away is asked when it is back.

        Of a piece that is asked for already, return that fetch.
        """
        with self._changed:
            fetch = self._fetches.setdefault((giver, name), Fetch(giver, name, is_sent, is_large))
        self._ask(fetch)
        return fetch

    def _ask(self, fetch: Fetch) -> None:
        """Have the carrier that reaches the giver now ask for a piece."""
        carrier, asked = self._carrier_of(fetch.giver), fetch.carrier
        if carrier is not None and carrier is not asked:
            fetch.carrier = carrier
            carrier.ask(fetch)

    def result(self, fetch: Fetch, patience: Patience) -> Blob:
        """Wait for a piece. Raises StalledError, RefusedError."""
        try:
            patience.wait(lambda: fetch.outcome is not None)
        except BaseException:
            self.cancel(fetch)
            raise
        patience.began = min(patience.began, self.clock())
        assert fetch.outcome is not None
        if isinstance(fetch.outcome, LostError):
            raise fetch.outcome
        return fetch.outcome

    def fetch(self, giver: Member, name: str, seconds: float = PATIENCE_SECONDS) -> Blob:
        """Return a small piece. Raises StalledError, RefusedError."""
        until = self.clock() + seconds
        return self.result(
            self.begin(giver, name), Patience(self, giver, end_by=lambda: until, seconds=seconds)
        )

    def fetch_all(
        self, names: Iterable[str], window: int, patience: Patience, is_sent: bool = False
    ) -> Iterator[Blob]:
        """Yield large pieces in order, of which so many are asked for at a time. Raises as `result`."""
        left, under_way = iter(names), deque[Fetch]()

        def fill() -> None:
            under_way.extend(
                self.begin(patience.giver, name, is_sent, is_large=True)
                for name in itertools.islice(left, window - len(under_way))
            )

        try:
            fill()
            while under_way:
                blob = self.result(under_way[0], patience)
                under_way.popleft()
                fill()
                yield blob
        finally:
            for fetch in under_way:
                self.cancel(fetch)

    def cancel(self, fetch: Fetch) -> None:
        """Ask no more."""
        if fetch.outcome is None:
            self._end(fetch.giver, fetch.name, RefusedError("was cancelled"))

    # For carriers

    def take(self, signed: SignedStatus) -> bool:
        """Keep the status of another member if it is new; return whether it is. Raises ValueError."""
        try:
            is_new = self.statuses.take(signed)
        except StatusError as error:
            self.warn(str(error))
            raise
        if is_new:
            self.wake()
        return is_new

    def awaited(self, giver: Member) -> dict[int, Fetch]:
        """Return what is asked for of a member, by number, the earliest first."""
        with self._changed:
            return {fetch.number: fetch for fetch in self._fetches.values() if fetch.giver == giver}

    def receive(self, giver: Member, name: str, blob: Blob) -> None:
        """Take a piece that has come; one that nobody waits for is dropped."""
        self._end(giver, name, blob)

    def refuse(self, giver: Member, name: str, reason: str) -> None:
        """Learn that a piece never comes, and why."""
        self._end(giver, name, RefusedError(outside(reason)))

    def warn(self, line: str, is_refusal: bool = False) -> None:
        """Tell the user a line, which may quote others: once, and not too many.

        Args:
            is_refusal: whether it says why a job and this one refuse each other.
        """
        line = outside(line)
        with self._changed:
            if line in self._told or len(self._told) >= _MOST_WARNINGS:
                return
            self._told.add(line)
            if is_refusal and not self.refusal:
                self.refusal = line
        self._tell(line)

    def note_bytes(self, other: Member) -> None:
        """Note that bytes of a piece have come from a member, or gone to it."""
        self.moved[other.slot] = self.clock()

    def follow_members(self) -> None:
        """Ask for what is awaited over the carriers that reach its givers by now, and forget the wishes of takers
        that are gone; wake waiting threads.
        """
        self.offers.forget(lambda taker: not self.reaches(taker))
        with self._changed:
            awaited = list(self._fetches.values())
        for fetch in awaited:
            self._ask(fetch)
        self.wake()

    def wake(self) -> None:
        """Have waiting threads look again."""
        with self._changed:
            self._changes += 1
            self._changed.notify_all()

    # Time and threads, which a mesh in memory replaces

    def clock(self) -> float:
        return time.monotonic()

    def wait(self, ready: Callable[[], object], until: float = math.inf) -> bool:
        """Wait until a condition holds, which is looked at when anything has changed; return whether it does."""
        while True:
            changes = self._changes
            if ready():
                return True
            left = until - self.clock()
            if left <= 0:
                return False
            with self._changed:
                if changes == self._changes:
                    self._changed.wait(min(left, _LOOK_SECONDS))

    def spawn(self, function: Callable[[], Value], name: str) -> "Future[Value]":
        """Run a function in a thread of its own, as `in_thread` does."""
        future = in_thread(function, name)
        future.add_done_callback(lambda _: self.wake())
        return future

    def _carrier_of(self, member: Member) -> Carrier | None:
        return next((carrier for carrier in self.carriers if member in carrier.reached), None)

    def _end(self, giver: Member, name: str, outcome: Blob | LostError) -> None:
        with self._changed:
            fetch = self._fetches.pop((giver, name), None)
        if fetch is not None:
            fetch.outcome = outcome
            for carrier in self.carriers:
                carrier.forget(fetch)
            self.wake()


def in_thread(function: Callable[[], Value], name: str) -> "Future[Value]":
    """Run a function in a thread of its own, which never keeps the process from ending."""
    future: Future[Value] = Future()
    threading.Thread(target=_run, args=(function, future), name=name, daemon=True).start()
    return future


def _run(function: Callable[[], Value], future: "Future[Value]") -> None:
    try:
        found = function()
    except BaseException as error:  # raised where the future's result is asked for
        future.set_exception(error)
    else:
        future.set_result(found)
