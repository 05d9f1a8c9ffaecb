"""State from another job: a rank that starts takes that of a rank that trains, out of its memory.

    taker: ASK, to all           giver: OFFER, the step that it can give
    taker: ASK, to one of them   giver: OFFER, what the parts are; then the parts, as any messages (WANT, DATA)

A job that trains gives its state at the next boundary between two local steps: it copies the state, and trains on
while the copy is sent. A job that does not train yet gives its newest checkpoint. Each rank takes from the rank at
its own place of the other replica.
"""

import itertools
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_noloco.federation.frames import DTYPE_CODES, HANDOVER_TAG, Send
from megatron_noloco.federation.network import FederationTransport
from megatron_noloco.federation.service import ServiceFailedError
from megatron_noloco.job.activity import line_of
from megatron_noloco.transport.interface import ExchangeTimeoutError, Message, RankLostError

_LOOK_SECONDS = 0.02
_ANSWER_SECONDS = 10.0  # for the step that a rank can give, and for one that was lost to come back
_SILENCE_SECONDS = 60.0  # after which a giver is given up
_MOST_WAITING = 8  # answers to one rank; further questions are dropped
_FRESH_SECONDS = 10.0  # in which a copy is given to another rank that asks, too


class Snapshot(NamedTuple):
    """The state of a rank: what a taker needs to know before it asks for the parts, and the parts, uint8."""

    description: bytes
    parts: Sequence[np.ndarray]


class Saved(Protocol):
    """What a rank has on its disk. Called in a thread of its own, because a disk may take long to answer."""

    def step(self) -> int:
        """Return the step that it can give; 0: none. Raises OSError."""
        ...

    def read(self) -> Snapshot | None:
        """Return it; None: there is nothing. Raises OSError."""
        ...


class Handover:
    """Gives this rank's state to the counterparts that ask for it, and takes theirs.

    Attributes:
        place: of this rank.
        saved: what it gives while it does not train; None: nothing.
    """

    def __init__(self, transport: FederationTransport) -> None:
        self.place = transport.place
        self.saved: Saved | None = None
        self._transport = transport
        self._protocol = transport.service.protocol
        self._tags = itertools.count(HANDOVER_TAG)
        self._thread = ThreadPoolExecutor(1, "handover")
        self._lock = threading.Lock()  # for the attributes that follow
        self._closed = False
        self._done = -1  # local steps, while this job trains
        self._wanted: dict[int, int] = {}  # tag of the ASK, by rank
        self._waiting: Counter[int] = Counter()  # answers that the thread has not begun, by rank
        self._copied = float("-inf")  # when
        self._copy: Callable[[], Snapshot] | None = None
        self._protocol.when_asked = self._asked

    # To give

    def wanted(self, done: int) -> bool:
        """Return whether ranks wait for the present state. Call it between two local steps, `done` so far."""
        with self._lock:
            self._done = done
            if time.monotonic() - self._copied > _FRESH_SECONDS:
                self._copy = None
            return bool(self._wanted)

    def give(self, copy: Callable[[], Callable[[], Snapshot]]) -> bool:
        """Give the present state to the ranks that wait for it; return whether it could be copied.

        All ranks of the replica call it between the same two local steps, where it is `wanted` of one of them.

        Args:
            copy: copies the state, and returns what makes a snapshot of the copy, in another thread.
        """
        try:
            made: Callable[[], Snapshot] | None = _once(copy())
        except Exception as error:  # the training goes on, and the ranks that ask are answered
            made = None
            self._complain(f"this rank's state cannot be given: {type(error).__name__}: {line_of(error)}")
        with self._lock:
            self._copy, self._copied = made, time.monotonic()
            wanted, self._wanted = self._wanted, {}
            for rank, tag in wanted.items():
                self._submit(rank, tag, made)
        return made is not None

    def ended(self) -> None:
        """Give what is on disk from now on: the local steps are over, and there is no boundary between two."""
        with self._lock:
            self._done, self._copy = -1, None
            wanted, self._wanted = self._wanted, {}
        for rank, tag in wanted.items():
            self._asked(rank, tag, chosen=True)

    def close(self) -> None:
        """Give nothing more; ranks that wait for the next boundary between two steps are told so."""
        with self._lock:
            self._closed, self._copy = True, None
            wanted, self._wanted = self._wanted, {}
        self._thread.shutdown(wait=False, cancel_futures=True)
        for rank, tag in wanted.items():
            with suppress(ServiceFailedError):  # then the connection is lost, which answers as well
                self._transport.service.do(self._protocol.offer, rank, tag, b"", [])

    def _asked(self, rank: int, tag: int, chosen: bool) -> None:
        """Have an ASK answered; called by the thread of the service."""
        with self._lock:
            trains, fresh = self._done >= 0, time.monotonic() - self._copied < _FRESH_SECONDS
            if self._closed:
                self._protocol.offer(rank, tag, b"", [])
            elif trains and not chosen:
                self._protocol.offer(rank, tag, _describe(self._done), [])
            elif trains and not fresh:
                self._wanted[rank] = tag
            else:
                made = self._saved_step if not chosen else self._copy if trains else self._read
                self._submit(rank, tag, made)

    def _submit(self, rank: int, tag: int, made: Callable[[], Snapshot | None] | None) -> None:
        """Have an ASK answered by the thread; needs the lock. One that asks for ever is answered now and then."""
        if self._waiting[rank] < _MOST_WAITING:
            self._waiting[rank] += 1
            self._thread.submit(self._answer, rank, tag, made)

    def _saved_step(self) -> Snapshot:
        return Snapshot(_describe(self.saved.step() if self.saved else 0), [])

    def _read(self) -> Snapshot | None:
        return self.saved.read() if self.saved else None

    def _answer(self, rank: int, tag: int, made: Callable[[], Snapshot | None] | None) -> None:
        description, sends = b"", list[Send]()
        with self._lock:
            self._waiting[rank] -= 1
        try:
            snapshot = made() if made is not None else None
            if snapshot is not None and len(snapshot.description) <= self._transport.chunk_bytes:
                description = snapshot.description
                sends = [_send_of(part, tag, self._transport.chunk_bytes) for part in snapshot.parts]
        except Exception as error:  # the rank that asks is answered, whatever it is
            self._complain(f"state cannot be given to rank {rank}: {type(error).__name__}: {line_of(error)}")
        self._transport.service.do(self._protocol.offer, rank, tag, description, sends)

    def _complain(self, line: str) -> None:
        sys.stderr.write(f"rank {self._transport.rank}: {line}\n")

    # To take

    def steps(self, seconds: float = _ANSWER_SECONDS) -> dict[int, int]:
        """Ask all counterparts that are connected which step they can give; returns it by rank, if it is above 0.

        A counterpart that does not answer in time counts as one that has nothing; so do all where this job is to
        stop.
        """
        tag, deadline = next(self._tags), time.monotonic() + seconds
        asked: set[int] = set()
        while time.monotonic() < deadline:
            present = set(self._transport.present())
            for rank in present - asked:
                self._transport.service.do(self._protocol.ask, rank, tag)
            asked |= present
            if all(self._offered(rank, tag) is not None for rank in present):
                break
            if self._transport.partners.stopped():
                return {}
            time.sleep(_LOOK_SECONDS)
        steps = {rank: _step_in(self._offered(rank, tag) or b"") for rank in asked}
        return {rank: step for rank, step in steps.items() if step > 0}

    def ask(self, rank: int, seconds: float) -> tuple[int, bytes]:
        """Ask a counterpart for its state; return a tag for `take`, and the description.

        Raises RankLostError when it is lost or has none to give, ExchangeTimeoutError after so many seconds.
        """
        tag, deadline = next(self._tags), time.monotonic() + seconds
        self._transport.service.do(self._protocol.ask, rank, tag, True)
        while (description := self._offered(rank, tag)) is None:
            if rank not in self._transport.present():
                raise RankLostError(rank, "has gone")
            if self._transport.partners.stopped():
                raise RankLostError(rank, "is not waited for: this job was asked to stop")
            if time.monotonic() > deadline:
                raise ExchangeTimeoutError(rank, tag, seconds)
            time.sleep(_LOOK_SECONDS)
        if not description:
            raise RankLostError(rank, "has no state to give")
        return tag, description

    def take(self, rank: int, tag: int, buffers: Sequence[Tensor]) -> None:
        """Fill the buffers, uint8 and as long as the parts, with what a counterpart has offered under the tag.

        Raises RankLostError when it is lost, ExchangeTimeoutError when nothing has come for a minute.
        """
        flight = self._transport.post([], [Message(rank, buffer) for buffer in buffers], tag)
        came = time.monotonic()
        while not flight.done():
            if flight.arrived():
                came = time.monotonic()
            elif time.monotonic() - came > _SILENCE_SECONDS:
                raise ExchangeTimeoutError(rank, tag, _SILENCE_SECONDS)
            else:
                time.sleep(_LOOK_SECONDS)

    def wait_for(self, rank: int) -> None:
        """Wait until a counterpart is connected, ten seconds at most, or this job is to stop."""
        deadline, transport = time.monotonic() + _ANSWER_SECONDS, self._transport
        while rank not in transport.present() and time.monotonic() < deadline:
            if transport.partners.stopped():
                return
            time.sleep(_LOOK_SECONDS)

    def _offered(self, rank: int, tag: int) -> bytes | None:
        """Return the description that a counterpart has sent under this tag; None: no answer yet."""
        offer = self._protocol.counterparts[rank].offer
        return offer[1] if offer is not None and offer[0] == tag else None


def _once(make: Callable[[], Snapshot]) -> Callable[[], Snapshot]:
    """Return a function that makes a snapshot when it is first called; used by one thread."""
    made: list[Snapshot] = []

    def make_once() -> Snapshot:
        if not made:
            made.append(make())
        return made[0]

    return make_once


def _describe(step: int) -> bytes:
    return json.dumps({"step": step}).encode()


def _step_in(description: bytes) -> int:
    try:
        step = json.loads(description)["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return 0
    return step if type(step) is int else 0


def _send_of(part: np.ndarray, tag: int, chunk_bytes: int) -> Send:
    def chunks() -> Iterator[np.ndarray]:
        return (part[start : start + chunk_bytes] for start in range(0, max(1, len(part)), chunk_bytes))

    return Send(tag, len(part), DTYPE_CODES[torch.uint8], chunks, lambda failure: None)
