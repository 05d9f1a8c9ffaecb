"""Statuses and pieces over HTTPS. Both sides of a connection show a certificate of the federation (`keys`).

| request | answer |
|---|---|
| GET /run/RUN/status | lines of JSON: all statuses, then changes; with "?once" only the first |
| PUT /run/RUN/status | takes the status of the asking member |
| GET /run/RUN/GIVER/TAKER/NAME | 200: the piece; 204: not yet, ask again; 410: never, and why |
| PUT /run/RUN/GIVER/TAKER/NAME | brings a piece |
| GET /run/RUN/probe?bytes=N, PUT /run/RUN/probe | N random bytes; takes as many: for measuring the link |
| any with another RUN | 409, and what this job has: {"run": RUN, "member": NAME, "digests": {...}} |

Other lines of a status stream are {"seen": {MEMBER: seconds}}, every few seconds: who was seen how long ago; and
{"wish": [NAME], "number": N}: the pieces that the answering member wants of the asking one, and cannot ask for.

| file | |
|---|---|
| `https_server` | sockets, who may connect, bodies |
| `https_answers` | requests of others |
| `https_client` | requests to others, the search for the first member |
| `https_presence` | who is there, who acts in a pair |
"""

import asyncio
import errno
import json
import math
import random
import socket
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any
from urllib.parse import quote

import aiohttp

from megatron_noloco.federation.https_answers import (
    MOST_WISHES,
    REFUSED,
    WISH,
    Answers,
    Wishes,
    is_name,
)
from megatron_noloco.federation.https_client import (
    CONNECTION_ERRORS,
    RARE_RETRY_SECONDS,
    Client,
    Job,
    OtherRunError,
    OwnAddressError,
    Seeds,
    lines_of,
    read_small,
)
from megatron_noloco.federation.https_presence import TICK_SECONDS, Peer, Presence
from megatron_noloco.federation.https_server import BULK_BYTES, PieceBody, Server, receive
from megatron_noloco.federation.keys import Identity
from megatron_noloco.federation.mesh import (
    MOST_PIECE_BYTES,
    Answer,
    Carrier,
    Fetch,
    Member,
    Mesh,
    Piece,
    RefusedError,
    Status,
)
from megatron_noloco.federation.statuses import MOST_STATUS_BYTES, SignedStatus
from megatron_noloco.files import outside

_RESERVED_BYTES = 2**12  # of a status, for what this carrier adds
_CLOSE_SECONDS = 1.0
_CANCEL_SECONDS = 0.1
_DIALLED_SECONDS = 1.0
_MOST_DIALS, _MOST_FAR_DIALS = 8, 4  # at a time, of members that are there, and that are absent
_FIRST_RETRY, _LAST_RETRY = 0.2, 2.0
_RARE_SECONDS = 300.0  # a member that is absent for longer is dialled rarely
_MOST_REFUSED_HOSTS = 8
_MOST_FAULTS = 8


class _Grant:
    """A piece that another member wishes to be brought.

    Attributes:
        number: of the last line of wishes that names it.
    """

    answer: Answer

    def __init__(self, number: int) -> None:
        self.number = number


class HttpsCarrier(Carrier):
    """Carries between members that reach each other by HTTPS, in a thread of its own.

    Args:
        run: number of the run.
        digests: of what all jobs of the run have alike.
        identity: of this process; None: nothing is encrypted, and each member is taken at its word.
        listener: where others connect; None: this member is hidden.
        addresses_to_try: returns addresses of members, HOST:PORT; may block, may raise OSError.
        warn: writes a line for the user.

    Attributes:
        faults: exceptions of single requests, which are bugs: each has ended what one other member asked for.
    """

    def __init__(
        self,
        run: int,
        digests: Mapping[str, str],
        identity: Identity | None,
        listener: socket.socket | None,
        addresses_to_try: Callable[[], Sequence[str]],
        warn: Callable[[str], object],
    ) -> None:
        self._run, self._digests, self._identity = run, digests, identity
        self._listener, self._addresses_to_try, self._warn_user = listener, addresses_to_try, warn
        self._failure: Exception | None = None
        self.faults: deque[BaseException] = deque(maxlen=_MOST_FAULTS)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="federation", daemon=True)
        self._is_open = threading.Event()
        self._tasks = set[asyncio.Task[None]]()
        self._wishes = Wishes()
        self._sends = dict[tuple[Member, str], tuple[Piece, asyncio.Task[None] | None]]()
        self._grants = dict[tuple[Member, str], _Grant]()
        self._refresh_is_due = False
        self._refused_hosts = set[str]()
        self._dials, self._far_dials = asyncio.Semaphore(_MOST_DIALS), asyncio.Semaphore(_MOST_FAR_DIALS)

    # Called from any thread

    @property
    def failure(self) -> BaseException | None:
        return self._failure

    def start(self, mesh: Mesh) -> None:
        super().start(mesh)
        self._presence = Presence(self._run, mesh.me, self._identity)
        self._job = Job(
            self._run, self._digests, self._identity, mesh, self._presence, self._warn_user, self._spawn
        )
        self._thread.start()
        self._is_open.wait()

    def publish(self, status: Status) -> None:
        if len(json.dumps(status)) > MOST_STATUS_BYTES - _RESERVED_BYTES:
            raise ValueError("the status is too long")
        self._soon(self._publish, dict(status))

    def members(self) -> Mapping[Member, Status]:
        return self._presence.present

    def known(self) -> Mapping[Member, Status]:
        return self._presence.known

    def reaches(self, member: Member) -> bool:
        return member in self._presence.reachable

    def ask(self, fetch: Fetch) -> None:
        fetch.when_over.append(lambda: self._soon(self._end_ask, fetch))
        self._soon(self._begin_ask, fetch)

    def send(self, to: Member, name: str, piece: Piece) -> None:
        self._soon(self._begin_send, to, name, piece)

    def close(self) -> None:
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
            self._soon(self._loop.stop)
            self._thread.join()

    def _soon(self, function: Callable[..., object], *arguments: Any) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(function, *arguments)

    # The thread

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.set_exception_handler(self._note)
        executor = ThreadPoolExecutor(4, "federation-look")
        self._loop.set_default_executor(executor)
        self._spawn(self._work(), self._fail)
        self._loop.run_forever()
        executor.shutdown(wait=False, cancel_futures=True)
        self._loop.close()

    async def _work(self) -> None:
        self._client = Client(self._job)
        answers = Answers(self._job, self._wishes, self._refresh_soon, self._note_fault)
        self._server = Server(self._identity, answers.answer, self._warn_of_stranger)
        if self._listener is not None:
            self._spawn(self._server.accept(self._listener), self._fail)
        self._is_open.set()
        while True:
            self._presence.clock.tick()
            self._presence.publish_lists()
            self._refresh()
            await asyncio.sleep(TICK_SECONDS)

    def _spawn(
        self, work: Coroutine[Any, Any, None], fail: Callable[[Exception], None] | None = None
    ) -> "asyncio.Task[None]":
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(partial(self._over, fail or self._note_fault))
        return task

    def _over(self, fail: Callable[[Exception], None], task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            fail(error)

    def _note(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        usual = (*CONNECTION_ERRORS, asyncio.InvalidStateError)  # of what comes with a cancellation
        if isinstance(error, Exception) and not isinstance(error, usual):
            self._note_fault(error)

    def _note_fault(self, error: Exception) -> None:
        """Note an error in what another member has asked for: it must not end this job."""
        self.faults.append(error)
        where = traceback.extract_tb(error.__traceback__)[-1:]
        at = "".join(f" ({frame.name}, line {frame.lineno})" for frame in where)
        self._job.warn(f"a request could not be answered: {type(error).__name__}{at}; please report this")

    def _fail(self, error: Exception) -> None:
        is_ending = not threading.main_thread().is_alive()  # the interpreter lends no threads any more
        self._is_open.set()
        if self._failure is None and not is_ending:
            self._failure = error
            sys.stderr.write("the thread that exchanges with other replicas has failed\n")
            traceback.print_exception(error)
            self.mesh.wake()

    async def _close(self) -> None:
        """Give the last status, and pieces under way, a second to arrive, then end everything."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_SECONDS):
                while not self._is_told() or any(task is not None for _, task in self._sends.values()):
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.05)  # what was written is sent
        own = asyncio.current_task()
        self._server.close()
        while left := asyncio.all_tasks() - {own}:
            for task in left:
                task.cancel()
            await asyncio.wait(
                left, timeout=_CANCEL_SECONDS
            )  # a time-out at the same moment hides a cancellation
        await self._client.close()
        if self._listener is not None:
            self._listener.close()

    def _is_told(self) -> bool:
        own, peers = self._presence.statuses.own, self._presence.peers.values()
        linked = (peer for peer in peers if peer.is_followed or peer.stream is not None)
        return own is None or all(peer.told is own or peer.has_left for peer in linked)

    def _warn_of_stranger(self, host: str) -> None:
        if host not in self._refused_hosts and len(self._refused_hosts) < _MOST_REFUSED_HOSTS:
            self._refused_hosts.add(host)
            self._job.warn(
                f"refused a connection from {host}: it has another key, or is of megatron_noloco 0.4 or earlier"
            )

    # Members

    def _publish(self, status: Status) -> None:
        is_first = self._presence.statuses.own is None
        self._presence.publish(status)
        if is_first:
            self._spawn(Seeds(self._job, self._client, self._addresses_to_try, self._refresh_soon).look())
        self._refresh_soon()

    def _refresh_soon(self) -> None:
        if self._presence.has_news and not self._refresh_is_due:
            self._refresh_is_due = True
            self._loop.call_soon(self._refresh)

    def _refresh(self) -> None:
        """Begin what is possible now."""
        self._refresh_is_due = False
        is_new = self._presence.refresh()
        if self._presence.statuses.own is not None:  # others ask for it
            self._follow_wanted()
        for fetch, task in list(self._wishes.tasks.items()):
            if task is None:
                self._begin_ask(fetch)
        for (to, name), (piece, task) in list(self._sends.items()):
            if task is None:
                self._begin_send(to, name, piece)
        if is_new:
            for taker in {taker for taker, _ in self._grants} - self._presence.present.keys():
                self._drop_wishes(taker)
            self.mesh.wake()

    def _follow_wanted(self) -> None:
        busy = [fetch.giver for fetch in self._wishes.tasks] + [to for to, _ in self._sends]
        wanted = self._presence.wanted(busy)
        for peer in self._presence.peers.values():
            if peer.slot not in wanted:
                peer.stop_following()
            elif peer.following is None or peer.following.done():
                peer.following = self._spawn(self._follow(peer))

    async def _follow(self, peer: Peer) -> None:
        """Hold the status stream of a member, again and again."""
        pause, turn, ended = _FIRST_RETRY, 0, math.inf
        while addresses := peer.addresses:
            try:
                await self._hold(peer, addresses[turn % len(addresses)], is_again=ended < math.inf)
            except OtherRunError:
                await asyncio.sleep(RARE_RETRY_SECONDS)
            except CONNECTION_ERRORS as error:
                if _is_refusal(error) and turn % len(addresses) == 0:
                    self._presence.lose(peer, min(ended, self._presence.clock()))
            now = self._presence.clock()
            if peer.is_followed:  # an end is a hint: ask again at once
                peer.is_followed, pause, turn, ended = False, _FIRST_RETRY, 0, now
                continue
            peer.failing = now if peer.failing is None else peer.failing
            turn += 1
            if turn % len(addresses) == 0:
                await asyncio.sleep(pause * random.uniform(0.8, 1.2))
                is_rare = now - max(peer.seen, peer.failing) > _RARE_SECONDS
                pause = min(2 * pause, RARE_RETRY_SECONDS if is_rare else _LAST_RETRY)

    async def _hold(self, peer: Peer, address: str, is_again: bool) -> None:
        introducing: asyncio.Task[None] | None = None
        try:
            async with AsyncExitStack() as dialling:
                if not is_again:  # whether a member has ended must be known soon
                    is_near = self._presence.is_there(peer)
                    await dialling.enter_async_context(self._dials if is_near else self._far_dials)
                async with self._client.request("GET", address, peer.slot, "status") as answer:
                    await self._client.check(answer)
                    async for line in lines_of(answer.content):
                        if introducing is None:
                            self._check_name(peer, line)
                            peer.address, peer.is_followed, peer.failing = address, True, None
                            introducing = self._spawn(self._introduce(peer))
                            await dialling.aclose()
                        self._take_line(peer, line)
        finally:
            if introducing is not None:
                introducing.cancel()

    def _check_name(self, peer: Peer, line: Mapping[str, Any]) -> None:
        """Check who answers; a later process of the slot is taken in the place of this one."""
        try:
            member = SignedStatus.parse(line).member
        except ValueError:
            raise ConnectionError("the first line is no status") from None
        if member == self.mesh.me:
            raise OwnAddressError
        if member.slot != peer.slot:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "another member answers")

    def _take_line(self, peer: Peer, line: Mapping[str, Any]) -> None:
        if self._presence.peer_of(peer.member) is peer:
            self._presence.hear(peer)
        if isinstance(wishes := line.get("wish"), list):
            names = list(dict.fromkeys(name for name in wishes[:MOST_WISHES] if is_name(name)))
            number = line.get("number")
            self._take_wishes(peer, names, number if isinstance(number, int) else 0)
        else:
            self._presence.take_line(line)
        self._refresh_soon()

    async def _introduce(self, peer: Peer) -> None:
        """Bring the own status to a member that does not hold the own stream, and say that this member lives."""
        if self._presence.is_dialled_by(peer):
            await asyncio.sleep(_DIALLED_SECONDS)  # the other member opens a stream
        while True:
            peer.own_changed.clear()
            if peer.stream is None:
                with suppress(*CONNECTION_ERRORS):
                    peer.told = await self._client.introduce(peer.address, peer.slot)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._presence.pulse):
                    await peer.own_changed.wait()

    # Pieces

    def _begin_ask(self, fetch: Fetch) -> None:
        if fetch.outcome is not None:
            return
        tasks, peer = self._wishes.tasks, self._presence.peer_of(fetch.giver)
        tasks[fetch] = None
        if peer is None:
            return
        if self._presence.can_dial(peer) and (self._presence.is_active(peer) or not fetch.is_sent):
            tasks[fetch] = self._spawn(self._pull(fetch, peer))
        elif peer.stream is not None:
            peer.stream.wake.set()

    def _end_ask(self, fetch: Fetch) -> None:
        task, peer = self._wishes.tasks.pop(fetch, None), self._presence.peer_of(fetch.giver)
        if task is not None:
            task.cancel()
        elif peer is not None and peer.stream is not None:
            peer.stream.wake.set()

    async def _pull(self, fetch: Fetch, peer: Peer) -> None:
        """Ask for a piece until it comes."""
        pause, path = _FIRST_RETRY, f"{fetch.giver}/{self.mesh.me}/{quote(fetch.name)}"
        while fetch.outcome is None and self._presence.can_dial(peer):
            try:
                address = peer.addresses[0]
                async with self._client.request("GET", address, peer.slot, path, "pieces") as answer:
                    if answer.status == 200:
                        size = answer.content_length
                        if size is None or size > MOST_PIECE_BYTES:
                            raise ConnectionError("too large a piece")
                        blob = await receive(answer.content, size, lambda: self.mesh.note_bytes(fetch.giver))
                        self.mesh.receive(fetch.giver, fetch.name, blob)
                        return
                    if answer.status == 410:
                        reason = (await read_small(answer.content)).decode(errors="replace")
                        self.mesh.refuse(fetch, RefusedError(outside(reason)))
                        return
                    if answer.status == 204:
                        pause = _FIRST_RETRY
                        continue
            except CONNECTION_ERRORS:
                pass
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LAST_RETRY)
        if fetch in self._wishes.tasks:  # it becomes a wish
            self._wishes.tasks[fetch] = None
            self._begin_ask(fetch)

    def _begin_send(self, to: Member, name: str, piece: Piece) -> None:
        peer = self._presence.peer_of(to)
        if peer is None or peer.has_left or piece.is_withdrawn:
            self._sends.pop((to, name), None)
        elif self._presence.is_active(peer) and to in self._presence.present:
            self._sends[to, name] = piece, self._spawn(self._send(peer, name, piece))
        else:
            self._sends[to, name] = piece, None

    async def _send(self, peer: Peer, name: str, piece: Piece) -> None:
        is_over = True
        with suppress(RefusedError):
            is_over = await self._bring(peer, name, piece) is not None
        if self._sends.get((peer.member, name), (None, None))[0] is piece:
            self._sends[peer.member, name] = piece, None  # until the member is there again
            if is_over:
                del self._sends[peer.member, name]

    async def _bring(
        self,
        peer: Peer,
        name: str,
        found: Piece | RefusedError,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> int | None:
        """Bring a piece to a member, until it has it; return the number of its last wishes before that.

        Returns None where the member is absent, or wants it no more. Raises RefusedError where the piece is
        withdrawn before.
        """
        pause = _FIRST_RETRY
        while peer.addresses and peer.member in self._presence.present and is_wanted():
            try:
                number = await self._put(peer, name, found)
                if number is not None:
                    return number
            except CONNECTION_ERRORS:
                if isinstance(found, Piece):
                    found.read(0, 0)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LAST_RETRY)
        return None

    async def _put(self, peer: Peer, name: str, found: Piece | RefusedError) -> int | None:
        """Bring a piece once; None: in vain. Raises RefusedError where it was withdrawn."""
        options: dict[str, Any] = {}
        is_bulk = isinstance(found, Piece) and found.size > BULK_BYTES
        if isinstance(found, RefusedError):
            options["headers"] = {REFUSED: quote(str(found))}
        elif is_bulk:
            options["data"] = PieceBody(found, lambda: self.mesh.note_bytes(peer.member))
        else:
            options["data"] = found.read()
        path = f"{self.mesh.me}/{peer.member}/{quote(name)}"
        use = "bulk" if is_bulk else "small"
        async with self._client.request("PUT", peer.addresses[0], peer.slot, path, use, **options) as answer:
            number = answer.headers.get(WISH, "0")
            is_over = answer.status in (200, 410) and number.isascii() and number.isdecimal()
            return int(number[:20]) if is_over else None

    # Wishes of members that cannot dial this one

    def _take_wishes(self, peer: Peer, names: Sequence[str], number: int) -> None:
        """Note all that a member wants of this one, and cannot ask for."""
        self._drop_wishes(peer.member, names)
        for name in names:
            if (grant := self._grants.get((peer.member, name))) is not None:
                grant.number = number
            else:
                self._wish(peer, name, number)

    def _drop_wishes(self, taker: Member, kept: Collection[str] = ()) -> None:
        for member, name in list(self._grants):
            if member == taker and name not in kept:
                self.mesh.offers.unwish(name, member, self._grants.pop((member, name)).answer)

    def _wish(self, peer: Peer, name: str, number: int) -> None:
        grant = self._grants[peer.member, name] = _Grant(number)

        def answer(found: Piece | RefusedError) -> None:
            self._soon(self._begin_grant, peer, name, grant, found)

        grant.answer = answer
        self.mesh.offers.wish(name, peer.member, answer)

    def _begin_grant(self, peer: Peer, name: str, grant: _Grant, found: Piece | RefusedError) -> None:
        if self._grants.get((peer.member, name)) is not grant:
            return
        if peer.granting < MOST_WISHES:
            self._spawn(self._grant(peer, name, grant, found))
        else:
            del self._grants[peer.member, name]

    async def _grant(self, peer: Peer, name: str, grant: _Grant, found: Piece | RefusedError) -> None:
        def is_wanted() -> bool:
            return self._grants.get((peer.member, name)) is grant

        peer.granting += 1
        try:
            number = await self._bring(peer, name, found, is_wanted)
        except RefusedError as error:
            number = await self._bring(peer, name, error, is_wanted)
        finally:
            peer.granting -= 1
        if is_wanted():
            del self._grants[peer.member, name]
            if number is not None and grant.number > number:  # it has asked anew since it had the piece
                self._wish(peer, name, grant.number)


def _is_refusal(error: Exception) -> bool:
    """Return whether nobody of the dialled slot listens at an address."""
    refused = isinstance(error, OSError) and error.errno == errno.ECONNREFUSED
    return refused or isinstance(error, aiohttp.ClientConnectorCertificateError)
