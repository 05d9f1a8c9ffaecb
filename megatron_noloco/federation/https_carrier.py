"""Statuses and pieces over HTTPS. Both sides of a connection show a certificate of the federation (`keys`).

| request | answer |
|---|---|
| GET /run/RUN/status | lines of JSON, without end: the own status and its changes, and the lines below |
| GET /run/RUN/status?once | lines of JSON: all statuses, the own one first |
| GET /run/RUN/status?of=MEMBER,... | lines of JSON: the newest statuses of these members |
| PUT /run/RUN/status | takes the status of the asking member |
| GET /run/RUN/GIVER/TAKER/NAME | 200: the piece; 204: not yet, ask again; 410: never, and why |
| PUT /run/RUN/GIVER/TAKER/NAME | brings a piece, or why it never comes |
| GET /run/RUN/probe?bytes=N, PUT /run/RUN/probe | N random bytes; takes as many: for measuring the link |
| any with another RUN | 409, and what this job has: {"run": RUN, "member": NAME, "digests": {...}} |

Other lines of a status stream are {"seen": {MEMBER: [SECONDS, NUMBER]}}, every few seconds: who was seen how long
ago, and the number of its status; and {"wish": {NUMBER: NAME}}: the pieces that the answering member wants of the
asking one, which acts in this pair (`https_presence`).

| file | |
|---|---|
| `https_server` | sockets, who may connect, bodies |
| `https_presence` | who is there, who acts in a pair |
| `https_client` | requests to others, the search for the first member |
| `https_answers` | requests of others |
"""

import asyncio
import errno
import math
import random
import socket
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from functools import partial
from itertools import islice
from typing import Any
from urllib.parse import quote

import aiohttp

from megatron_noloco.federation.https_answers import REFUSED, Answers, is_name
from megatron_noloco.federation.https_client import (
    CONNECTION_ERRORS,
    RARE_RETRY_SECONDS,
    Client,
    OtherRunError,
    Seeds,
    first_status,
    pauses,
)
from megatron_noloco.federation.https_presence import TICK_SECONDS, Peer, Presence
from megatron_noloco.federation.https_server import BULK_BYTES, PieceBody, Server
from megatron_noloco.federation.mesh import Carrier, Fetch, Member, Mesh, Piece, RefusedError

_CLOSE_SECONDS = 1.0
_CANCEL_SECONDS = 0.1
_MOST_DIALS, _MOST_FAR_DIALS = 8, 4  # at a time, of members that are there, and that are absent
_RARE_SECONDS = 300.0  # a member that is absent for longer is dialled rarely
_MOST_WISHES = 256  # of a member
_MOST_REFUSED_HOSTS = 8
_MOST_FAULTS = 8

_Task = asyncio.Task[None]


class HttpsCarrier(Carrier):
    """Carries between members that reach each other by HTTPS, in a thread of its own.

    Args:
        digests: of what all jobs of the run have alike.
        listener: where others connect; None: this member is hidden.
        seeds: addresses of members, HOST:PORT.

    Attributes:
        faults: exceptions of single requests, which are bugs: each has ended what one other member asked for.
    """

    def __init__(
        self, digests: Mapping[str, str], listener: socket.socket | None, seeds: Sequence[str] = ()
    ) -> None:
        self._digests, self._listener, self._seeds = digests, listener, seeds
        self._failure: Exception | None = None
        self.faults: deque[BaseException] = deque(maxlen=_MOST_FAULTS)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="federation", daemon=True)
        self._is_open = threading.Event()
        self._tasks = set[_Task]()
        self._asks = dict[Fetch, _Task | None]()  # without a task: wishes, which the giver is told of
        self._sends = dict[tuple[Member, str], tuple[Piece, _Task | None]]()
        self._refresh_is_due = False
        self._refused_hosts = set[str]()
        self._dials, self._far_dials = asyncio.Semaphore(_MOST_DIALS), asyncio.Semaphore(_MOST_FAR_DIALS)

    # Called from any thread

    @property
    def failure(self) -> BaseException | None:
        return self._failure

    def start(self, mesh: Mesh) -> None:
        super().start(mesh)
        self._presence = Presence(mesh)
        self._thread.start()
        self._is_open.wait()

    def publish(self) -> None:
        self._soon(self._publish)

    def learn(self) -> None:
        self._soon(self._refresh_soon, True)

    def present(self) -> Collection[Member]:
        return self._presence.present

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
        self._spawn(self._work(), self._fail)
        self._loop.run_forever()
        self._loop.close()

    async def _work(self) -> None:
        self._client = Client(self.mesh.statuses, self._digests)
        answers = Answers(
            self._presence, self._digests, self._wishes_of, self._refresh_soon, self._note_fault
        )
        self._server = Server(self.mesh.statuses.identity, answers.answer, self._warn_of_stranger)
        if self._listener is not None:
            self._spawn(self._server.accept(self._listener), self._fail)
        self._is_open.set()
        while True:
            self._presence.clock.tick()
            self._refresh()
            await asyncio.sleep(TICK_SECONDS)

    def _spawn(
        self, work: Coroutine[Any, Any, None], fail: Callable[[Exception], None] | None = None
    ) -> _Task:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(partial(self._over, fail or self._note_fault))
        return task

    def _over(self, fail: Callable[[Exception], None], task: _Task) -> None:
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
        self.mesh.warn(f"a request could not be answered: {type(error).__name__}{at}; please report this")

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
        own, peers = self.mesh.statuses.own, self._presence.peers.values()
        linked = (peer for peer in peers if peer.is_followed or peer.stream is not None)
        return own is None or all(peer.told is own or peer.signed.has_left for peer in linked)

    def _warn_of_stranger(self, host: str) -> None:
        if host not in self._refused_hosts and len(self._refused_hosts) < _MOST_REFUSED_HOSTS:
            self._refused_hosts.add(host)
            self.mesh.warn(
                f"refused a connection from {host}: it has another key, or is of megatron_noloco 0.4 or earlier"
            )

    # Members

    def _publish(self) -> None:
        self._presence.publish()
        if self._seeds:
            seeds = Seeds(self._presence, self._client, self._seeds, self._spawn, self._refresh_soon)
            self._spawn(seeds.look())
            self._seeds = ()
        self._refresh_soon()

    def _refresh_soon(self, is_new: bool = False) -> None:
        if (is_new or self._presence.has_news) and not self._refresh_is_due:
            self._refresh_is_due = True
            self._loop.call_soon(self._refresh)

    def _refresh(self) -> None:
        """Begin what is possible now, and end what is another's."""
        self._refresh_is_due = False
        busy = [fetch.giver for fetch in self._asks] + [to for to, _ in self._sends]
        is_new = self._presence.refresh(busy)
        if self.mesh.statuses.own is not None:  # others ask for it
            self._follow_wanted(busy)
        for fetch in list(self._asks):
            self._begin_ask(fetch)
        for (to, name), (piece, _) in list(self._sends.items()):
            self._begin_send(to, name, piece)
        if is_new:
            self.mesh.wake()

    def _follow_wanted(self, busy: Collection[Member]) -> None:
        wanted = self._presence.wanted(busy)
        for peer in self._presence.peers.values():
            if peer.slot not in wanted:
                peer.stop_following()
            elif peer.following is None or peer.following.done():
                peer.following = self._spawn(self._follow(peer))

    async def _follow(self, peer: Peer) -> None:
        """Hold the status stream of a member, again and again."""
        pause, turn, ended = pauses(), 0, math.inf
        while addresses := peer.addresses:
            try:
                await self._hold(peer, addresses[turn % len(addresses)], is_again=ended < math.inf)
            except OtherRunError as error:
                self.mesh.warn(str(error))
                await asyncio.sleep(RARE_RETRY_SECONDS)
            except CONNECTION_ERRORS as error:
                if _is_refusal(error) and turn % len(addresses) == 0 and peer.stream is None:
                    self._presence.lose(peer, min(ended, self._presence.clock()))
            now = self._presence.clock()
            if peer.is_followed:  # an end is a hint: ask again at once
                peer.is_followed, pause, turn, ended = False, pauses(), 0, now
                continue
            peer.failing = min(peer.failing, now)
            turn += 1
            if turn % len(addresses) == 0:
                is_rare = now - max(peer.seen, peer.failing) > _RARE_SECONDS
                seconds = RARE_RETRY_SECONDS if is_rare else next(pause)
                await asyncio.sleep(seconds * random.uniform(0.8, 1.2))

    async def _hold(self, peer: Peer, address: str, is_again: bool) -> None:
        introducing: _Task | None = None
        try:
            async with (
                AsyncExitStack() as dialling,
                aclosing(self._client.lines(address, peer.slot, "status")) as lines,
            ):
                if not is_again:  # whether a member has ended must be known soon
                    is_near = self._presence.is_there(peer)
                    await dialling.enter_async_context(self._dials if is_near else self._far_dials)
                async for line in lines:
                    if introducing is None:
                        self._check_name(peer, line)
                        peer.address, peer.is_followed, peer.failing = address, True, math.inf
                        introducing = self._spawn(self._introduce(peer))
                        await dialling.aclose()
                    self._take_line(peer, line)
        finally:
            self._take_wishes(peer, {})
            if introducing is not None:
                introducing.cancel()

    def _check_name(self, peer: Peer, line: Mapping[str, Any]) -> None:
        """Check who answers; a later process of the slot is taken in the place of this one."""
        if first_status(line, self.mesh.me).member.slot != peer.slot:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "another member answers")

    def _take_line(self, peer: Peer, line: Mapping[str, Any]) -> None:
        if self._presence.peer_of(peer.member) is peer:
            self._presence.hear(peer)
        if isinstance(wishes := line.get("wish"), dict):
            self._take_wishes(peer, wishes)
        elif isinstance(seen := line.get("seen"), dict):
            was_asked = bool(peer.lacked)
            self._presence.take_sights(peer, seen)
            if peer.lacked and not was_asked:
                self._spawn(self._ask_for_lacked(peer))
        else:
            self._presence.take_line(line)
        self._refresh_soon()

    async def _ask_for_lacked(self, peer: Peer) -> None:
        """Get the statuses that a member has and this one lacks."""
        names = ",".join(map(str, peer.lacked))
        with suppress(*CONNECTION_ERRORS):
            async for line in self._client.lines(peer.address, peer.slot, f"status?of={names}"):
                self._presence.take_line(line)
        peer.lacked = []
        self._refresh_soon()

    async def _introduce(self, peer: Peer) -> None:
        """Bring the own status to a member that does not hold the own stream, and say that this member lives."""
        while True:
            peer.own_changed.clear()
            if peer.stream is None:
                with suppress(*CONNECTION_ERRORS):
                    peer.told = await self._client.introduce(peer.address, peer.slot)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._presence.pulse):
                    await peer.own_changed.wait()

    # Pieces: who acts in a pair asks and brings; the other waits, or wishes

    def _begin_ask(self, fetch: Fetch) -> None:
        if fetch.outcome is not None:
            return
        task, acts = self._asks.get(fetch), self._presence.acts(fetch.giver)
        if task is not None and not acts:
            task.cancel()
        if acts != (task is not None) or fetch not in self._asks:
            self._asks[fetch] = self._spawn(self._ask(fetch)) if acts else None
            self._tell_wishes(fetch.giver)

    def _end_ask(self, fetch: Fetch) -> None:
        if (task := self._asks.pop(fetch, None)) is not None:
            task.cancel()
        self._tell_wishes(fetch.giver)

    async def _ask(self, fetch: Fetch) -> None:
        """Ask for a piece until it comes."""
        pause, giver = pauses(), fetch.giver
        path = f"{giver}/{self.mesh.me}/{quote(fetch.name)}"
        while (peer := self._presence.peer_of(giver)) is not None and peer.addresses:
            try:
                found = await self._client.piece(
                    peer.addresses[0], peer.slot, path, lambda: self.mesh.note_bytes(giver)
                )
            except CONNECTION_ERRORS:
                await asyncio.sleep(next(pause))
                continue
            pause = pauses()
            if isinstance(found, str):
                self.mesh.refuse(giver, fetch.name, found)
                return
            if found is not None:
                self.mesh.receive(giver, fetch.name, found)
                return

    def _begin_send(self, to: Member, name: str, piece: Piece) -> None:
        earlier, task = self._sends.pop((to, name), (piece, None))
        peer, acts = self._presence.peer_of(to), self._presence.acts(to)
        if task is not None and not (acts and earlier is piece):
            task.cancel()
            task = None
        if peer is None or peer.signed.has_left or piece.is_withdrawn:
            return
        if acts and task is None:
            task = self._spawn(self._send(peer, name, piece))
        self._sends[to, name] = piece, task

    async def _send(self, peer: Peer, name: str, piece: Piece) -> None:
        with suppress(RefusedError):
            await self._bring(peer, name, piece)
        if self._sends.get((peer.member, name), (None, None))[0] is piece:
            del self._sends[peer.member, name]

    async def _bring(self, peer: Peer, name: str, found: Piece | RefusedError) -> None:
        """Bring a piece, or why it never comes, until the member has it.

        Raises RefusedError where the piece is withdrawn before.
        """
        for pause in pauses():
            with suppress(*CONNECTION_ERRORS):
                if not peer.addresses or await self._put(peer, name, found):
                    return
            if isinstance(found, Piece) and found.is_withdrawn:
                raise RefusedError("the piece was withdrawn")
            await asyncio.sleep(pause)

    async def _put(self, peer: Peer, name: str, found: Piece | RefusedError) -> bool:
        """Bring a piece once; return whether the member has it, or will never take it."""
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
            return answer.status in (200, 410)

    # Wishes

    def _tell_wishes(self, giver: Member) -> None:
        if (stream := self._presence.streams.get(giver.slot)) is not None:
            stream.wake.set()

    def _wishes_of(self, giver: Member) -> dict[str, str]:
        """Return what a member is to bring, and does not know."""
        wishes = [fetch for fetch, task in self._asks.items() if task is None and not fetch.is_sent]
        return {str(fetch.number): fetch.name for fetch in wishes if fetch.giver == giver}

    def _take_wishes(self, peer: Peer, wishes: Mapping[str, Any]) -> None:
        """Learn all that a member wants of this one, as long as its stream is open."""
        wishes = dict(islice(wishes.items(), _MOST_WISHES))
        for number in peer.granting.keys() - wishes.keys():
            peer.granting.pop(number).cancel()
        for number in wishes.keys() - peer.granting.keys():
            if is_name(wishes[number]):
                peer.granting[number] = self._spawn(self._grant(peer, wishes[number]))

    async def _grant(self, peer: Peer, name: str) -> None:
        try:
            piece = await asyncio.wrap_future(self.mesh.offers.wish(name, peer.member))
            await self._bring(peer, name, piece)
        except RefusedError as error:
            await self._bring(peer, name, error)


def _is_refusal(error: Exception) -> bool:
    """Return whether nobody of the dialled slot listens at an address."""
    refused = isinstance(error, OSError) and error.errno == errno.ECONNREFUSED
    return refused or isinstance(error, aiohttp.ClientConnectorCertificateError)
