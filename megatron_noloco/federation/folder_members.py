"""Who is there, by the signs of life in the folder of a run; see `folder_carrier`.

A sign of life is a new file every two seconds. Its name says of which member it is, and the number of the status
that the file has; so a status is read once. A member is there while its sign changes and its status is known. A
sign that never changes while this process looks may be of a process that died long ago.

No clock of another machine is read, and none of the folder: seconds are between two looks of this process.
"""

import base64
import hmac
import itertools
import json
import math
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import replace
from functools import partial
from queue import PriorityQueue
from typing import Any, NamedTuple

from megatron_noloco.federation.compatibility import differences
from megatron_noloco.federation.keys import Seal
from megatron_noloco.federation.mesh import Member, Mesh
from megatron_noloco.federation.statuses import MOST_SIGNED_BYTES, SignedStatus, object_in
from megatron_noloco.federation.store import Store
from megatron_noloco.settings import MOST_SLOTS

MOST_ADDED = 64  # bytes; more than a seal adds
LEFTOVER_SECONDS = 600.0
_WORKERS = 8
_MOST_RUNS = 20  # whose digests are read
_MOST_DIGESTS_BYTES = 2**16
_RUN = re.compile(r"[0-9a-f]{16}")
_EARLIER_VERSION = re.compile(r"rank_\d{5}_[0-9a-f]{16}\.json")
_SIGN = re.compile(r"(\d{1,4}\.\d{1,19})~(\d{1,12})~(\d{1,12})~([0-9a-f]{32})~([\w=-]{0,120})")
_MOST_SIGNS = 2 * MOST_SLOTS  # anybody may write some
_BEAT_SECONDS = 2.0
_SOON_SECONDS = 0.5  # a beat for a member that has just come
_LEASE_SECONDS = (12.0, 60.0)  # at least and at most
_BEATS_OF_LEASE = 4
_PAUSE_SECONDS = 2.0  # between two looks, more than planned: this process was stopped, or the folder was slow
_ALONE_SECONDS = 10.0


class RunFolder:
    """The folder of a run, as one process uses it: threads for files, lines on what goes wrong. Thread-safe.

    Args:
        rendezvous: the folder that has a folder for each run.
        fail: is told an exception of a thread, which is a bug.
    """

    def __init__(
        self,
        rendezvous: Store,
        mesh: Mesh,
        digests: Mapping[str, str],
        fail: Callable[[BaseException], object],
    ) -> None:
        self.run, self._fail = f"{mesh.statuses.run:016x}", fail
        self.store = rendezvous.below(self.run)
        self.url = rendezvous.url
        self._rendezvous, self._mesh, self._digests = rendezvous, mesh, digests
        self._tasks: PriorityQueue[tuple[int, int, Callable[[], object] | None]] = PriorityQueue()
        self._order = itertools.count()
        self._workers = list[threading.Thread]()

    def create(self) -> None:
        """Write what jobs of other runs learn of this run. Raises OSError for a folder that cannot be used."""
        self._rendezvous.create()
        self.store.create()
        content = {"incarnation": self._mesh.me.incarnation, "digests": dict(self._digests)}
        self.store.put("digests.json", json.dumps(content).encode())

    def why_alone(self) -> Iterator[str]:
        """Yield lines on why no other job of this run may be here. Raises OSError."""
        names = self._rendezvous.names()
        runs = [name for name in names if _RUN.fullmatch(name) and name != self.run]
        if runs:
            _, newest, digests = max(map(self._digests_of, random.sample(runs, min(len(runs), _MOST_RUNS))))
            why = "its job is of another version: install the same megatron_noloco for both"
            if that_differ := differences(self._digests, digests):
                why = f"its job differs from this one in {that_differ}"
            yield (
                f"no other job of this run is found, only {self.url}/{newest} of another run: {why}, or the "
                "folder is old"
            )
        if any(map(_EARLIER_VERSION.fullmatch, names)):
            yield (
                f"{self.url} has files of a job of megatron_noloco 0.4 or earlier: install the same version for "
                "all, or remove the files"
            )
        elif not runs:
            yield (
                f"no other job has come to {self.url} so far; if another was started, do both see the same folder?"
            )

    def _digests_of(self, run: str) -> tuple[int, str, dict[str, Any]]:
        """Return incarnation, name and digests of another run."""
        with suppress(Exception):  # anybody may have written the file
            found = object_in(self._rendezvous.get(f"{run}/digests.json", _MOST_DIGESTS_BYTES))
            return int(found["incarnation"]), run, dict(found["digests"])
        return -1, run, {}

    # Errors

    def say(self, problem: str | OSError) -> None:
        """Warn of a problem, without the name of the file, so that each kind is told once."""
        self._mesh.warn(re.sub(rf"/{self.run}(/[^:]*)?", "", str(problem)))

    def attempt(self, call: Callable[[], object]) -> bool:
        """Return whether a call works; warn if it raises OSError."""
        try:
            call()
        except OSError as error:
            self.say(error)
            return False
        return True

    # Threads

    def spawn(self, body: Callable[[], object]) -> threading.Thread:
        """Start a thread, which never keeps the process from ending: a call of a file system may hang."""
        thread = threading.Thread(target=self._guard, args=(body,), name="folder", daemon=True)
        thread.start()
        return thread

    def start_workers(self) -> None:
        self._workers = [self.spawn(self._work) for _ in range(_WORKERS)]

    def submit(self, task: Callable[[], object], is_bulk: bool = False) -> None:
        """Have a worker do a task; small tasks go first."""
        self._tasks.put((int(is_bulk), next(self._order), task))

    def finish(self, until: float) -> None:
        """Wait for what was submitted, until this time of `time.monotonic`."""
        for _ in self._workers:
            self._tasks.put((2, next(self._order), None))
        for thread in self._workers:
            thread.join(max(0.0, until - time.monotonic()))

    def _work(self) -> None:
        while (task := self._tasks.get()[2]) is not None:
            self._guard(task)

    def _guard(self, body: Callable[[], object]) -> None:
        try:
            body()
        except Exception as error:
            self._fail(error)


class _Sign(NamedTuple):
    """The latest sign of life of a member.

    Attributes:
        file: its name.
        number: of its status.
        signature: of the member and the beat, by the member; base64.
        changed: when it changed.
        lease: seconds for which it is good; 0.0 until it has changed.
    """

    file: str
    beat: int
    number: int
    signature: str
    changed: float = 0.0
    lease: float = 0.0


class FolderMembers:
    """The members in the folder of a run. One thread calls `tend`.

    Args:
        seal: of the folder key.
        look_seconds: between two looks at the signs.
        see: is told the other members that are there.
    """

    def __init__(
        self,
        mesh: Mesh,
        folder: RunFolder,
        seal: Seal,
        look_seconds: float,
        see: Callable[[Set[Member]], object],
    ) -> None:
        self._see = see
        self._mesh, self._me, self._statuses = mesh, str(mesh.me), mesh.statuses
        self._folder, self._seal = folder, seal
        self._alive = folder.store.below("alive")
        self._look_seconds = look_seconds
        self._lock = threading.RLock()
        self._signs, self._reading = dict[Member, _Sign](), set[Member]()
        self._own_signs, self._beat = list[str](), 0
        self._left_over = set[str]()  # at the last sweep
        self._has_strangers = False
        self._looked = now = time.monotonic()
        # When to write a sign, look at those of others, say why this job is alone, remove what is left over.
        self._beat_at, self._look_at = math.inf, 0.0
        self._alone_at, self._sweep_at = now + _ALONE_SECONDS, now + LEFTOVER_SECONDS
        self._make_folders()
        self._look()
        for member, sign in self._to_read():
            if member.slot == mesh.me.slot:
                self._read(member, sign)

    def publish(self) -> None:
        """Write the own status soon."""
        self._beat_at = 0.0

    def tend(self) -> float:
        """Do what is due; return when to call again."""
        attempt, submit = self._folder.attempt, self._folder.submit
        if time.monotonic() >= self._beat_at:
            attempt(self._write_sign)
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + self._look_seconds
            if not attempt(self._look) and time.monotonic() - self._looked > _LEASE_SECONDS[0]:
                with self._lock:  # nobody is reached; the next sign of each brings it back
                    self._signs = {member: sign._replace(lease=0.0) for member, sign in self._signs.items()}
            for member, sign in self._to_read():
                if member not in self._reading:
                    self._reading.add(member)
                    submit(partial(self._read, member, sign))
            self._judge()
        if time.monotonic() >= self._alone_at:
            self._alone_at = math.inf
            if len(self._mesh.members()) == 1:
                submit(lambda: attempt(self._say_alone))
        if time.monotonic() >= self._sweep_at:
            self._sweep_at = time.monotonic() + LEFTOVER_SECONDS
            submit(lambda: attempt(self._sweep))
        return min(self._beat_at, self._look_at)

    def leave(self) -> bool:
        """Write a last status; return whether nobody else is in the folder. Raises OSError."""
        own = self._statuses.own
        if own is not None and not own.status.has_left:
            self._statuses.sign(replace(own.status, phase="left"))
        self._write_sign()
        self._look()
        for member, sign in self._to_read():
            self._read(member, sign)
        return not (self._has_strangers or self._to_read()) and all(map(self._has_left, self._signs))

    def _has_left(self, member: Member) -> bool:
        """Return whether a member has left, or a later process of its slot; an earlier one of the own is over."""
        if member.slot == self._mesh.me.slot:
            return member < self._mesh.me
        signed = self._statuses.of(member.slot)
        return signed is not None and signed.status.has_left

    # The own sign

    def _make_folders(self) -> None:
        """Make the folders that are missing: others that leave remove all."""
        for name in ("alive", f"to/{self._me}"):
            self._folder.store.below(name).create()

    def _write_sign(self) -> None:
        self._beat_at = time.monotonic() + _BEAT_SECONDS
        if (own := self._statuses.own) is None:
            return
        self._make_folders()
        self._beat += 1
        texts = self._me, str(self._beat), str(own.number)
        text = self._text_of(self._me, self._beat)
        signature = base64.urlsafe_b64encode(self._statuses.identity.sign(text))
        file = "~".join([*texts, self._seal.mac("alive", self._folder.run, *texts), signature.decode()])
        self._alive.put(file, self._seal.close(file, own.line))
        self._own_signs.append(file)
        self._alive.remove(self._own_signs[:-2])  # the last but one may be read just now
        del self._own_signs[:-2]

    # Signs of others

    def _look(self) -> None:
        names = self._alive.names()
        with self._lock:
            late = time.monotonic() - self._looked - self._look_seconds
            self._looked += late + self._look_seconds
            shift = late if late > _PAUSE_SECONDS else 0.0  # nobody is lost because this process was stopped
            for member, sign in self._signs.items():
                self._signs[member] = sign._replace(changed=sign.changed + shift)
            for member, new in self._new_signs(names).items():
                lease = 0.0
                if (last := self._signs.get(member)) is not None:
                    least, most = _LEASE_SECONDS
                    lease = min(max(_BEATS_OF_LEASE * (self._looked - last.changed), least), most)
                elif self._statuses.own is not None:
                    self._beat_at = min(self._beat_at, self._looked + _SOON_SECONDS)
                self._signs[member] = new._replace(changed=self._looked, lease=lease)

    def _new_signs(self, names: list[str]) -> dict[Member, _Sign]:
        """Return the newest signs that are new. A beat never goes back, so no sign can be repeated."""
        new = dict[Member, _Sign]()
        for found in filter(None, map(_SIGN.fullmatch, names)):
            *texts, mac, signature = found.groups()
            member, beat = member_in(texts[0]), int(texts[1])
            if member is None or member == self._mesh.me:
                continue
            last = new.get(member) or self._signs.get(member)
            if last is not None and beat <= last.beat:
                continue
            if last is None and len(self._signs) + len(new) >= _MOST_SIGNS:
                continue
            sign = _Sign(found[0], beat, int(texts[2]), signature)
            if not hmac.compare_digest(mac, self._seal.mac("alive", self._folder.run, *texts)):
                self._has_strangers = True
            elif self._is_of(member, sign):
                new[member] = sign
        return new

    def _is_of(self, member: Member, sign: _Sign) -> bool:
        """Return whether a sign is of its member, as far as its certificate is known.

        All members have the key of the names, and so do those whose time is over.
        """
        identity, known = self._statuses.identity, self._statuses.of(member.slot)
        if known is None or known.member != member:
            return True
        try:
            signature = base64.urlsafe_b64decode(sign.signature)
            identity.check(known.certificate, member.slot, self._text_of(member, sign.beat), signature)
        except ValueError:
            return False
        return True

    def _text_of(self, member: Member | str, beat: int) -> bytes:
        return f"alive\n{self._folder.run}\n{member}\n{beat}".encode()

    def _to_read(self) -> list[tuple[Member, _Sign]]:
        """Return the members that have a newer status than the known one of their slot, with their signs."""
        with self._lock:
            return [one for one in self._signs.items() if self._statuses.lacks(one[0], one[1].number)]

    def _read(self, member: Member, sign: _Sign) -> None:
        """Read a status. What cannot be read is tried again at the next look, in a later sign."""
        try:
            sealed = self._alive.get(sign.file, MOST_SIGNED_BYTES + MOST_ADDED)
            signed = SignedStatus.parse(object_in(self._seal.open(sign.file, sealed)))
            if (signed.member, signed.number) == (member, sign.number):
                self._mesh.take(signed)
                with self._lock:
                    if not self._is_of(member, self._signs.get(member, sign)):
                        del self._signs[member]  # its own comes at the next look
        except (FileNotFoundError, ValueError):
            pass
        except OSError as error:
            self._folder.say(error)
        finally:
            self._reading.discard(member)
        self._judge()

    def _judge(self) -> None:
        """Say who is there, as far as the last look tells."""
        with self._lock:
            present = frozenset(
                member
                for member, sign in self._signs.items()
                if self._looked < sign.changed + sign.lease
                and (signed := self._statuses.of(member.slot)) is not None
                and signed.member == member
                and not signed.status.has_left
            )
            self._see(present)

    # What is left

    def _say_alone(self) -> None:
        if self._has_strangers:
            self._folder.say(
                f"{self._folder.url} has jobs of this run with another key, or old files of such jobs: all jobs "
                "need the same federation.key_file"
            )
            return
        for line in self._folder.why_alone():
            self._folder.say(line)

    def _sweep(self) -> None:
        """Remove what was left over at the last sweep already."""
        now = time.monotonic()

        def is_gone(member: Member | None) -> bool:
            sign = None if member is None else self._signs.get(member)
            is_other = member is not None and member != self._mesh.me
            return is_other and (sign is None or now > sign.changed + LEFTOVER_SECONDS)

        files = [
            f"{folder}/{name}"
            for folder in ("alive", "to")
            for name in self._folder.store.below(folder).names()
            if is_gone(member_in(name.partition("~")[0]))
        ]
        inbox = f"to/{self._me}"
        files += [f"{inbox}/{name}" for name in self._folder.store.below(inbox).names()]
        for file in self._left_over & set(files):
            with suppress(OSError):  # of a process of another user
                if member_in(file.removeprefix("to/")) is not None:
                    self._folder.store.below(file).remove_all()
                else:
                    self._folder.store.remove([file])
        self._left_over = set(files)


def member_in(name: str) -> Member | None:
    """Return the member of a name; None: it is no name of a member."""
    try:
        return Member.parse(name)
    except ValueError:
        return None
