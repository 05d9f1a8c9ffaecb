"""Carries statuses and pieces between members that share nothing but a folder, or a bucket of an object store.

Below the rendezvous is a folder for each run:

| file | |
|---|---|
| digests.json | what all jobs of the run have alike; jobs of other runs read it, and name what differs |
| alive/MEMBER~BEAT~NUMBER~MAC | a sign of life, and the signed status of this NUMBER; new every two seconds |
| to/MEMBER/q~TAKER~NAME | a wish of TAKER for a piece of MEMBER |
| to/MEMBER/p~NUMBER | a piece for MEMBER, or the reason why it never comes |

One list shows who is there, and one list what has come. So a member at rest makes the same number of requests
however many others there are.

Signs and statuses are sealed with the folder key, which all members have. Wishes and pieces are sealed with a key
that giver and taker alone can compute; the NUMBER of a piece follows from this key, run, giver, taker and name.
So the owner of the folder can remove files, and cannot read them, forge them, or pass a piece for another piece.
Neither can a third member.

A piece that is sent lies in the taker's folder before the taker asks for it. The taker removes what it has read.
What nobody has read is removed after ten minutes or more, by any other member if its taker is gone.

Nobody sees progress while a file is being written. So a folder that takes longer than `mesh.PATIENCE_SECONDS` for
one piece is too slow for a round.
"""

import base64
import math
import re
import threading
import time
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from megatron_noloco.errors import UserError
from megatron_noloco.federation.folder_members import (
    MOST_ADDED,
    FolderMembers,
    RunFolder,
    Seal,
    member_in,
)
from megatron_noloco.federation.mesh import (
    BULK_BYTES,
    MOST_PIECE_BYTES,
    Carrier,
    Fetch,
    Member,
    Mesh,
    Piece,
    RefusedError,
)
from megatron_noloco.federation.store import Store

_WISH = re.compile(r"q~(\d{1,4}\.\d{1,19})~([A-Za-z0-9_-]+)")
_PIECE, _REASON = b"p", b"r"  # the first byte of a file that is taken
_MOST_REASON_BYTES = 2**10
_AGAIN_SECONDS = 1.0  # until a file that could not be used is tried again
_EARLY_SECONDS = 2.0  # for a piece that is sent to come, until its giver is asked for it
_REPEAT_SECONDS = 8.0  # until a wish that has no answer is written again
_LEAVE_SECONDS = 5.0  # for files under way, and then to leave


class _Pace(NamedTuple):
    """Seconds between two looks: after something has come, then up to these."""

    least: float
    awaiting: float
    resting: float


_FOLDER_PACE = _Pace(least=0.01, awaiting=0.1, resting=0.5)
_BUCKET_PACE = _Pace(least=0.2, awaiting=1.0, resting=2.0)


@dataclass
class _Watch:
    """A piece that this member waits for.

    Attributes:
        wish_at: when to write a wish.
        read_at: from when to read the file, if it is there.
    """

    fetch: Fetch
    seal: Seal
    wish_at: float
    read_at: float = 0.0


class FolderCarrier(Carrier):
    """Carries through a folder.

    Args:
        store: the rendezvous folder.
        digests: see `compatibility.digests_of`.
    """

    def __init__(self, store: Store, digests: Mapping[str, str]) -> None:
        self._store, self._digests = store, digests
        self._pace = _FOLDER_PACE if store.is_local else _BUCKET_PACE
        self._seals = dict[Member, Seal]()
        self._lock, self._stir, self._closing = threading.RLock(), threading.Event(), threading.Event()
        self._watches = dict[str, _Watch]()  # by file
        self._writing = set[tuple[Member, str]]()
        self._unneeded = set[str]()  # files of the own inbox

    def start(self, mesh: Mesh) -> None:
        """See `Carrier`. Raises UserError for a folder that cannot be used."""
        super().start(mesh)
        self._identity, self._me = mesh.statuses.identity, str(mesh.me)
        self._folder = RunFolder(self._store, mesh, self._digests, self.fail)
        self._seal = Seal(self._identity.folder_key)
        self._inbox = self._folder.store.below(f"to/{self._me}")
        try:
            self._folder.create()
            self._members = FolderMembers(
                mesh, self._folder, self._seal, self._pace.resting, lambda there: self.see(there, there)
            )
        except OSError as error:
            raise UserError(
                f"federation.rendezvous: {error}; each job must be able to list, read and write there"
            ) from None
        self._folder.start_workers()
        self._thread = self._folder.spawn(self._live)

    def publish(self) -> None:
        self._members.publish()
        self._stir.set()

    def ask(self, fetch: Fetch) -> None:
        if (seal := self._seal_with(fetch.giver)) is None:
            return
        file = self._file_of(seal, fetch.giver, self.mesh.me, fetch.name)
        with self._lock:
            self._watches[file] = _Watch(fetch, seal, time.monotonic() + _EARLY_SECONDS * fetch.is_sent)
        if fetch.outcome is not None:
            self.forget(fetch)
        self._stir.set()

    def forget(self, fetch: Fetch) -> None:
        with self._lock:
            self._watches = {file: watch for file, watch in self._watches.items() if watch.fetch is not fetch}

    def send(self, to: Member, name: str, piece: Piece) -> None:
        self._give(to, name, piece)

    def close(self) -> None:
        """Say that this member has left, and end. A folder that does not answer is left after seconds."""
        if self._closing.is_set():
            return
        self._folder.finish(time.monotonic() + _LEAVE_SECONDS)
        self._closing.set()
        self._stir.set()
        self._folder.spawn(self._leave).join(_LEAVE_SECONDS)

    def _leave(self) -> None:
        """Remove what this process has in the folder; the last one removes all."""
        self._thread.join()
        with suppress(OSError):
            is_last = self._members.leave()
            (self._folder.store if is_last else self._inbox).remove_all()

    # What has come

    def _live(self) -> None:
        look_at, pause = 0.0, self._pace.least
        while not self._closing.is_set():
            due = min(self._members.tend(), self._write_wishes())
            if (began := time.monotonic()) >= look_at:
                most = self._pace.awaiting if self._watches else self._pace.resting
                pause = self._pace.least if self._look() else min(1.3 * pause, most)
                look_at = time.monotonic() + max(pause, 2 * (time.monotonic() - began))
            if self._stir.wait(max(0.0, min(look_at, due) - time.monotonic())):
                self._stir.clear()
                pause = self._pace.least
                look_at = min(look_at, time.monotonic() + pause)

    def _look(self) -> bool:
        """Have workers read what has come; return whether there is anything."""
        self._remove_unneeded()
        names = list[str]()
        self._folder.attempt(lambda: names.extend(self._inbox.names()))
        with self._lock:
            files = [name for name in names if name not in self._unneeded]
            awaited = ((file, self._watches[file]) for file in files if file in self._watches)
            come = {file: watch for file, watch in awaited if watch.read_at <= time.monotonic()}
            for watch in come.values():
                watch.read_at = watch.wish_at = math.inf
        for file, watch in come.items():
            self._folder.submit(partial(self._take, file, watch))
        heard = [file for file in files if self._hear(file)]
        return bool(come or heard)

    def _remove_unneeded(self) -> None:
        files = list(self._unneeded)
        if self._folder.attempt(lambda: self._inbox.remove(files)):
            self._unneeded.difference_update(files)

    def _take(self, file: str, watch: _Watch) -> None:
        """Receive a piece, or the reason why it never comes."""
        try:
            sealed = self._inbox.get(file, MOST_PIECE_BYTES + MOST_ADDED)
            content = memoryview(watch.seal.open(file, sealed))
        except (OSError, ValueError) as error:  # ValueError: is not from whom it claims
            if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
                self._folder.say(error)
            watch.read_at = watch.wish_at = time.monotonic() + _AGAIN_SECONDS
            self._stir.set()
            return
        self._unneeded.add(file)
        giver, name = watch.fetch.giver, watch.fetch.name
        self.mesh.note_bytes(giver)
        if content[:1] == _PIECE:
            self.mesh.receive(giver, name, content[1:])
        else:
            self.mesh.refuse(giver, name, bytes(content[1:]).decode(errors="replace"))

    # Wishes

    def _write_wishes(self) -> float:
        """Write the wishes that are due; return when the next one is."""
        now = time.monotonic()
        with self._lock:
            due = [watch for watch in self._watches.values() if watch.wish_at <= now]
            for watch in due:
                watch.wish_at = now + _REPEAT_SECONDS
            next_at = min((watch.wish_at for watch in self._watches.values()), default=math.inf)
        if due:  # the file of an earlier fetch has the name of the answer
            self._remove_unneeded()
        for watch in due:
            self._folder.submit(partial(self._write_wish, watch))
        return next_at

    def _write_wish(self, watch: _Watch) -> None:
        giver, name = watch.fetch.giver, watch.fetch.name
        sealed = watch.seal.close(self._place_of_wish(giver, self.mesh.me), name.encode())
        wish = f"q~{self._me}~{base64.urlsafe_b64encode(sealed).decode().rstrip('=')}"
        try:
            self._folder.store.put(f"to/{giver}/{wish}", b"-")
        except FileNotFoundError:  # the giver has left
            pass
        except OSError as error:
            self._folder.say(error)
            watch.wish_at = time.monotonic() + _AGAIN_SECONDS
            self._stir.set()

    def _hear(self, file: str) -> bool:
        """Take a wish of another member; return whether the file is one."""
        found = _WISH.fullmatch(file)
        taker = member_in(found[1]) if found else None
        if not found or taker is None or taker not in self.reached or not (seal := self._seal_with(taker)):
            return False
        self._unneeded.add(file)
        try:
            sealed = base64.urlsafe_b64decode(found[2] + "=" * (-len(found[2]) % 4))
            name = seal.open(self._place_of_wish(self.mesh.me, taker), sealed).decode()
            wish = self.mesh.offers.wish(name, taker)
        except ValueError:  # is not from whom it claims, or wishes too much
            return False
        wish.add_done_callback(partial(self._answer, taker, name))
        return True

    def _answer(self, taker: Member, name: str, wish: "Future[Piece]") -> None:
        try:
            self._give(taker, name, wish.result())
        except RefusedError as error:
            self._folder.submit(partial(self._write, taker, name, _reason(error)))
        except CancelledError:
            pass

    # Pieces for others

    def _give(self, taker: Member, name: str, piece: Piece) -> None:
        """Have a piece written, unless it is about to be: it was sent, and is asked for."""
        with self._lock:
            if (taker, name) in self._writing:
                return
            self._writing.add((taker, name))

        def write() -> None:
            try:
                content = _PIECE + piece.read()
            except RefusedError as error:  # it was withdrawn, and may be waited for
                content = _reason(error)
            try:
                self._write(taker, name, content)
            finally:
                self._writing.discard((taker, name))

        self._folder.submit(write, piece.size > BULK_BYTES)

    def _write(self, taker: Member, name: str, content: bytes) -> None:
        if (seal := self._seal_with(taker)) is None:
            return
        file = self._file_of(seal, self.mesh.me, taker, name)
        try:
            self._folder.store.put(f"to/{taker}/{file}", seal.close(file, content))
            self.mesh.note_bytes(taker)
        except FileNotFoundError:  # the taker has left
            pass
        except OSError as error:  # the taker asks again
            self._folder.say(error)

    # Names

    def _seal_with(self, member: Member) -> Seal | None:
        """Return what seals the files between this member and another; None: a later process has its slot."""
        with self._lock:
            if member not in self._seals:
                self._seals = {other: seal for other, seal in self._seals.items() if other in self.reached}
                signed = self.mesh.statuses.of(member.slot)
                if signed is None or signed.member != member:
                    return None
                self._seals[member] = Seal(self._identity.pair_key(signed.certificate))
            return self._seals[member]

    def _file_of(self, seal: Seal, giver: Member, taker: Member, name: str) -> str:
        return f"p~{seal.mac('piece', self._folder.run, str(giver), str(taker), name)}"

    def _place_of_wish(self, giver: Member, taker: Member) -> str:
        return f"{self._folder.run}\n{giver}\n{taker}\nwish"


def _reason(error: RefusedError) -> bytes:
    """Return the content of a file that says why a piece never comes."""
    return _REASON + str(error).encode()[:_MOST_REASON_BYTES]
