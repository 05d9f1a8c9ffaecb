"""Statuses and pieces over HTTPS. Both sides of a connection show a certificate of the federation (`keys`).

| request | answer |
|---|---|
| GET /run/RUN/status | lines of JSON: all statuses, the own status first, and {"present": [MEMBER, ...]} |
| PUT /run/RUN/link | a link: lines of JSON and small pieces, both ways, without end (`https_links`) |
| PUT /run/RUN/stream | large pieces of a link, both ways, without end (`https_transfers`) |
| any with another RUN | 409, {"run": RUN}, and headers Noloco-Member, Noloco-Digests with what this job has |

| file | |
|---|---|
| `https_server` | sockets, who may connect |
| `https_links` | who is there |
| `https_transfers` | pieces |
| `https_client` | requests to others, the search for the first member |
| `https_answers` | requests of others |
"""

import asyncio
import errno
import socket
import ssl
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from functools import partial
from typing import Any

import aiohttp
from aiohttp import ClientResponse, ClientTimeout, StreamReader

from megatron_noloco.federation.https_answers import Answers
from megatron_noloco.federation.https_client import (
    CONNECTION_ERRORS,
    Client,
    RefusalError,
    Seeds,
    first_status,
    lines_of,
)
from megatron_noloco.federation.https_links import LEASE_SECONDS, Link, Links, Neighbour
from megatron_noloco.federation.https_server import WRITE_BYTES, Server
from megatron_noloco.federation.https_transfers import MALFORMED
from megatron_noloco.federation.mesh import PATIENCE_SECONDS, Carrier, Fetch, Member, Mesh, Piece

_CLOSE_SECONDS = 1.0
_CANCEL_SECONDS = 0.1
_IDLE_SECONDS = 60.0  # after which a stream ends
_TICK_SECONDS = 0.25
_MOST_REFUSED_HOSTS = 8
_EXPIRED = 10  # X509_V_ERR_CERT_HAS_EXPIRED of OpenSSL

_Task = asyncio.Task[None]


class HttpsCarrier(Carrier):
    """Carries between members that reach each other by HTTPS, in a thread of its own.

    Args:
        digests: of what all jobs of the run have alike.
        listener: where others connect; None: this member is hidden.
        seeds: addresses of members, HOST:PORT.
    """

    def __init__(
        self, digests: Mapping[str, str], listener: socket.socket | None, seeds: Sequence[str] = ()
    ) -> None:
        self._digests, self._listener, self._seeds = digests, listener, seeds
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="federation", daemon=True)
        self._is_open = threading.Event()
        self._tasks = set[_Task]()
        self._refused_hosts = set[str]()

    # Called from any thread

    def start(self, mesh: Mesh) -> None:
        super().start(mesh)
        self._links = Links(mesh, self.see)
        self._thread.start()
        self._is_open.wait()

    def publish(self) -> None:
        self._soon(self._publish)

    def ask(self, fetch: Fetch) -> None:
        self._soon(self._wish, fetch.giver)

    def forget(self, fetch: Fetch) -> None:
        self._soon(self._wish, fetch.giver)

    def send(self, to: Member, name: str, piece: Piece) -> None:
        self._soon(self._send, to, name, piece)

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
        answers = Answers(self._links, self._digests, self._hear, self._note_fault)
        self._server = Server(self.mesh.statuses.identity, answers.answer, self._warn_of_stranger)
        if self._listener is not None:
            self._spawn(self._server.accept(self._listener), self._fail)
        self._is_open.set()
        while True:
            self._links.refresh()
            for peer in self._links.peers.values():
                if self.mesh.statuses.own is not None and peer.is_due():  # a link begins with the own status
                    peer.dialling = self._spawn(self._dial(peer))
                self._open_streams(peer.link)
            await asyncio.sleep(_TICK_SECONDS)

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
        is_twice = "_call_connection_lost" in context["message"]  # asyncio may end a connection twice
        if isinstance(error, Exception) and not (isinstance(error, usual) or is_twice):
            self._note_fault(error)

    def _note_fault(self, error: Exception) -> None:
        """Note an error in what another member has asked for: it must not end this job."""
        where = traceback.extract_tb(error.__traceback__)[-1:]
        at = "".join(f" ({frame.name}, line {frame.lineno})" for frame in where)
        self.mesh.warn(f"a request could not be answered: {type(error).__name__}{at}; please report this")

    def _fail(self, error: Exception) -> None:
        self._is_open.set()
        if threading.main_thread().is_alive():  # else the interpreter ends, and lends no threads any more
            self.fail(error)

    async def _close(self) -> None:
        """Give the last status a second to arrive, then end everything."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_SECONDS):
                while not self._is_told():
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.05)  # what was written is sent
        self._server.close()
        while left := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in left:
                task.cancel()
            await asyncio.wait(
                left, timeout=_CANCEL_SECONDS
            )  # a time-out at the same moment hides a cancellation
        await self._client.close()
        if self._listener is not None:
            self._listener.close()

    def _is_told(self) -> bool:
        own, peers = self.mesh.statuses.own, self._links.peers.values()
        links = [peer.link for peer in peers if peer.link is not None and not peer.signed.status.has_left]
        return own is None or all(link.own is own for link in links)

    def _warn_of_stranger(self, host: str, error: ssl.SSLError) -> None:
        if host not in self._refused_hosts and len(self._refused_hosts) < _MOST_REFUSED_HOSTS:
            self._refused_hosts.add(host)
            why = "it shows no certificate of this federation, or is of megatron_noloco 0.4 or earlier"
            if getattr(error, "verify_code", None) == _EXPIRED:
                why = "the time of its member file is over"
            self.mesh.warn(f"refused a connection from {host}: {why}")

    # Members

    def _publish(self) -> None:
        self._links.publish()
        if self._seeds:
            self._spawn(Seeds(self._links, self._client, self._seeds).look())
            self._seeds = ()

    async def _dial(self, peer: Neighbour) -> None:
        """Open a link to a member, and hold it until it ends."""
        link, addresses = Link(True, asyncio.current_task()), peer.addresses
        try:
            await self._hold(link, peer.slot, addresses[peer.tries % len(addresses)])
        except RefusalError as error:
            self.mesh.warn(str(error), is_refusal=True)
        except (ValueError, *CONNECTION_ERRORS) as error:
            has_ended = getattr(error, "errno", None) == errno.ECONNREFUSED
            if has_ended or isinstance(error, aiohttp.ClientConnectorCertificateError):
                peer.refuse()
        finally:
            peer.dialling, link.task = None, None
            self._links.close(link)
            if link.peer is None:
                peer.put_off()

    async def _hold(self, link: Link, slot: int, address: str) -> None:
        async with (
            self._opened("link", slot, address, self._links.texts(link)) as answer,
            aclosing(lines_of(answer.content, LEASE_SECONDS)) as lines,
        ):
            signed = first_status(await anext(lines, {}), self.mesh.me)
            if signed.member.slot != slot:
                raise ConnectionRefusedError(errno.ECONNREFUSED, "another member answers")
            self._links.take(signed)
            peer = self._links.peer_of(signed.member)
            if peer is None or not self._links.open(peer, link):
                raise ConnectionError("there is a link by now")
            peer.address = address
            self._open_streams(link)
            await self._hear(link, lines, answer.content)

    @asynccontextmanager
    async def _opened(
        self, kind: str, slot: int, address: str, texts: AsyncIterator[bytes]
    ) -> AsyncIterator[ClientResponse]:
        """Open a link or a stream; return its answer."""
        quiet = ClientTimeout(total=None, sock_connect=PATIENCE_SECONDS)
        async with (
            asyncio.timeout(PATIENCE_SECONDS) as limit,
            self._client.request("PUT", address, slot, kind, data=texts, timeout=quiet) as answer,
        ):
            await self._client.check(answer)
            if answer.connection is None or (transport := answer.connection.transport) is None:
                raise ConnectionError("it has ended at once")
            transport.set_write_buffer_limits(WRITE_BYTES)
            limit.reschedule(None)
            yield answer

    async def _hear(self, link: Link, lines: AsyncIterator[Mapping[str, Any]], content: StreamReader) -> None:
        """Take the lines of a link, or of one of its streams, until it ends."""
        async for line in lines:
            link.heard = time.monotonic()
            try:
                if await link.transfers.hear(line, content):
                    if "wish" in line:
                        self._open_streams(link)
                    continue
                self._links.hear(link, line)
            except MALFORMED:
                raise ConnectionError("a line is malformed") from None

    # Pieces

    def _wish(self, giver: Member) -> None:
        """Have a member told what is asked for of it."""
        if (peer := self._links.peer_of(giver)) is not None and peer.link is not None:
            peer.link.wake.set()
            self._open_streams(peer.link)

    def _send(self, to: Member, name: str, piece: Piece) -> None:
        if (peer := self._links.peer_of(to)) is not None and peer.link is not None:
            peer.link.transfers.send(name, piece)

    def _open_streams(self, link: Link | None) -> None:
        """Open the streams that are of use; at each tick also those of a piece that was wished while one ended."""
        if link is None or not link.is_own or link.is_over:
            return
        for _ in range(link.transfers.streams() - len(link.streams)):
            task = self._spawn(self._stream(link))
            link.streams.add(task)
            task.add_done_callback(link.streams.discard)

    async def _stream(self, link: Link) -> None:
        """Carry large pieces of a link, until there was nothing to carry for long; an error ends the link."""
        peer, texts = link.peer, link.transfers.texts(lambda: link.is_over, _IDLE_SECONDS)
        assert peer is not None
        try:
            async with self._opened("stream", peer.slot, peer.address, texts) as answer:
                await self._hear(link, lines_of(answer.content, None), answer.content)
        except Exception as error:
            link.end()
            if not isinstance(error, CONNECTION_ERRORS):
                raise
