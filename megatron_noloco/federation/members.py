"""This replica among the others: what each publishes, who fits, who comes and goes.

All know the status of all (`mesh.Mesh.publish`). From the same statuses all draw the same conclusions, without a
message: who may be whose partner, who is ahead, who waits at its end.

Of two processes of one slot the later process wins: the earlier ends with a line.
"""

import json
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from megatron_noloco.errors import UserError
from megatron_noloco.federation.compatibility import differences, refusal
from megatron_noloco.federation.mesh import Member, Mesh
from megatron_noloco.federation.statuses import KEPT_ROUNDS, LONGEST_ROW, MOST_ROWS, PeerStatus, Phase

NO_PART = "has no part in this round"
STOPPED = "a job was asked to stop"
WORD_SECONDS = 3.0  # for the last word on a round to arrive, before a replica leaves
_SOON_SECONDS = 5.0  # until rows and the step are published, if nothing else is before
_LOOK_SECONDS = 1.0
_LAST_SECONDS = 7 * 86_400.0  # of a member file
_MOST_IN_LINE = 8  # replicas
_VERBS = {  # of one replica, of several
    "come": ("has come", "have come"),
    "back": ("is back", "are back"),
    "left": ("has left", "have left"),
    "lost": ("is lost", "are lost"),
}


@dataclass(frozen=True)
class Peer:
    """Another replica, as this one sees it.

    Attributes:
        member: its latest process.
        present: whether it is there.
        reached: whether this replica can exchange with it.
    """

    member: Member
    status: PeerStatus
    present: bool
    reached: bool


class Members:
    """The other replicas, and what they are told of this one. On the leader; for all its threads.

    Args:
        status: the first of this replica: addresses, site, kind, digests.
        stopped: returns whether this job was asked to stop.

    Attributes:
        step: local steps of the state that this replica can give; published with the next change, or soon.
    """

    def __init__(self, mesh: Mesh, status: PeerStatus, stopped: Callable[[], bool] = lambda: False) -> None:
        self.mesh, self.slot, self.status = mesh, mesh.me.slot, status
        self.step = 0
        self._stopped, self._leaves_at = stopped, -float("inf")
        self._lock = threading.RLock()
        self._rows, self._published = deque[tuple[int, str]](maxlen=MOST_ROWS), 0.0
        self._row_number, self._has_rows = 0, False
        self._came = deque[tuple[int, str]](maxlen=256)
        self._taken = dict[int, tuple[Member, int]]()  # the last row of each slot
        self._attendance, self._closed = Attendance(), False
        self.change()

    # What this replica publishes

    def change(self, **changes: Any) -> None:
        """Publish a change of the status of this replica."""
        with self._lock:
            self.status = replace(self.status, **changes, step=self.step, rows=list(self._rows))
            self._has_rows = False
            self._published = self.mesh.clock()
            self.mesh.publish(self.status)

    def begin_round(self, number: int, partner: int | None) -> None:
        """Publish that a round has begun; None: this replica skips it."""
        with self._lock:
            partners, under_way = dict(self.status.partners), set(self.status.under_way)
            if partner is not None:
                partners[number] = partner
                under_way.add(number)
                for old in sorted(partners.keys() - under_way)[:-KEPT_ROUNDS]:
                    del partners[old]
            begun = max(self.status.begun, number)
            self.change(begun=begun, partners=partners, under_way=sorted(under_way))

    def end_round(self, number: int) -> None:
        """Publish that a round is over here."""
        with self._lock:
            self.change(under_way=[other for other in self.status.under_way if other != number])

    def go_on(self, begun: int, phase: Phase = "training", **changes: Any) -> None:
        """Publish that this replica has no part in rounds up to this, but for rounds under way."""
        self.change(begun=max(self.status.begun, begun), phase=phase, **changes)

    def publish_reached(self) -> None:
        """Publish with whom this replica can exchange, if that has changed."""
        reaches = [slot for slot, peer in self.peers().items() if peer.reached]
        if reaches != self.status.reaches:
            self.change(reaches=reaches)

    def publish_row(self, row: Mapping[str, Any]) -> None:
        """Publish a row of this replica's metrics within some seconds, unless it is too long.

        A row of a local step without a round is left out where rows wait already that were not published.
        """
        text = json.dumps(row)
        is_plain = row.get("kind") in ("step", "checkpoint") and "round/index" not in row
        with self._lock:
            if len(text) <= LONGEST_ROW and not (is_plain and self._has_rows):
                self._row_number, self._has_rows = self._row_number + 1, True
                self._rows.append((self._row_number, text))

    def close(self) -> None:
        """Say that this replica has left, and end, once the partners of its last rounds know how these ended."""
        if not self._closed:
            self._closed = True
            self.mesh.wait(lambda: not self._is_awaited(), self.mesh.clock() + WORD_SECONDS)
            self.go_on(self.status.begun, "left")
            self.mesh.close()

    def _is_awaited(self) -> bool:
        """Return whether a round is under way at a partner that is over here."""
        own = self.status
        over = {(number, slot) for number, slot in own.partners.items() if number not in own.under_way}
        return any(
            (number, slot) in over and status.partners.get(number) == self.slot
            for slot, status in self.present().items()
            for number in status.under_way
        )

    # What the others publish

    def peers(self) -> dict[int, Peer]:
        """Return the other replicas that are or were there and fit, by slot, in ascending order."""
        there, known = self.mesh.members(), self.mesh.known()
        found = dict[int, Peer]()
        for member, status in known.items():
            if member.slot != self.slot and self._may_exchange(member, status):
                self._keep_rows(member, status)
                present = member in there
                found[member.slot] = Peer(member, status, present, present and self.mesh.reaches(member))
        return found

    def present(self) -> dict[int, PeerStatus]:
        """Return the status of each other replica that is there, by slot, in ascending order."""
        return {slot: peer.status for slot, peer in self.peers().items() if peer.present}

    def peer(self, slot: int) -> Peer | None:
        """Return a replica, if it is or was there."""
        return self.peers().get(slot)

    def rows(self) -> list[tuple[int, str]]:
        """Return the rows of others that came since the last call, each with the slot of its replica."""
        with self._lock:
            found = list(self._came)
            self._came.clear()
        return found

    def _may_exchange(self, member: Member, status: PeerStatus) -> bool:
        """Return whether the two jobs may exchange; say in what they differ."""
        own = self.status
        names = differences(own.digests, status.digests) if status.kind == own.kind else ""
        if names:
            self.mesh.warn(refusal(member.slot, self.slot, names), is_refusal=True)
            return False
        if own.batch and status.batch and own.batch != status.batch:  # no number of a run shows it
            self.mesh.warn(
                f"replica {member.slot} has {status.batch} samples in a local step, this replica {own.batch}; in "
                "a mean both count the same"
            )
        return True

    def _keep_rows(self, member: Member, status: PeerStatus) -> None:
        """Keep the rows of another replica that are new; see `rows`."""
        with self._lock:
            last = self._taken.get(member.slot, (member, 0))
            for number, text in status.rows:
                if (member, number) > last:
                    last = self._taken[member.slot] = member, number
                    self._came.append((member.slot, text))

    # To stop, and to fail

    @property
    def is_leaving(self) -> bool:
        """Whether this job was asked to stop, and waits for nobody."""
        return self._stopped() and time.monotonic() > self._leaves_at

    def leave_in(self, seconds: float) -> None:
        """Take part in one more round for so long, although this job was asked to stop."""
        self._leaves_at = time.monotonic() + seconds

    @property
    def seconds_to_leave(self) -> float:
        """Seconds that a round may take before this job leaves; inf: `leave_in` has set no such time."""
        seconds = self._leaves_at - time.monotonic()
        return seconds if seconds > 0.0 else math.inf

    def why_stopped(self) -> str:
        """Return why no round goes on; "" while rounds do."""
        return STOPPED if self.is_leaving else ""

    def check(self) -> None:
        """Raise what ends this job: UserError where a later process has its slot, or its certificate has ended."""
        for carrier in self.mesh.carriers:
            if carrier.failure is not None:
                raise RuntimeError(
                    f"the thread that exchanges with other replicas has failed: {carrier.failure!r}; started "
                    "again, this job continues from its newest checkpoint"
                ) from carrier.failure
        if self.mesh.is_followed(self.mesh.me):  # also if that process is gone by now
            raise UserError(
                f"another process of replica {self.slot} has begun, and the others exchange with it: does another "
                "job have the same invitation, or --replica? This job ends; started again, it goes on from its "
                "newest checkpoint"
            )
        if time.time() > self.mesh.statuses.identity.ends:
            raise UserError(
                f"the member file of replica {self.slot} has ended, and the others exchange with it no more; ask "
                f"for a new invitation (`megatron-noloco invite CONFIG --slot {self.slot}`), and join with it"
            )

    def wait(self, condition: Callable[[], object], seconds: float) -> bool:
        """Wait until a condition holds; return False when time is up, or this job is to stop."""
        until = self.mesh.clock() + seconds

        def is_over() -> bool:
            self.check()
            return bool(condition()) or self.is_leaving

        self.mesh.wait(is_over, until)
        return bool(condition())

    # Lines

    def watch(self) -> None:
        """Write lines on who comes and leaves, and publish rows that are due, until `close`; in a thread."""
        while not self._closed:
            for line in self._attendance.changes(self.peers()):
                write_line(self.slot, line)
            has_news = self._has_rows or self.step != self.status.step
            if has_news and self.mesh.clock() > self._published + _SOON_SECONDS:
                self.change()
            self._warn_of_end()
            time.sleep(_LOOK_SECONDS)

    def _warn_of_end(self) -> None:
        """Warn for the last days of the member file: `check` ends this job with it."""
        ends = self.mesh.statuses.identity.ends
        if ends < time.time() + _LAST_SECONDS:
            date = datetime.fromtimestamp(ends, UTC)
            self.mesh.warn(
                f"the member file ends on {date:%Y-%m-%d %H:%M} UTC, and this job with it: ask for a new "
                f"invitation (`megatron-noloco invite CONFIG --slot {self.slot}`), and join with it"
            )


def write_line(slot: int, line: str) -> None:
    """Write a line of a replica to stderr, if it is still open."""
    with suppress(OSError, ValueError):
        sys.stderr.write(f"replica {slot}: {line}\n")


class Attendance:
    """What the user was told of the other replicas."""

    def __init__(self) -> None:
        self._told = dict[int, bool]()  # whether it is there, by slot

    def changes(self, peers: Mapping[int, Peer]) -> Iterator[str]:
        """Yield a line for each kind of change since the last call: many changes at once are one line."""
        changed: dict[str, list[int]] = {kind: [] for kind in _VERBS}
        for slot, peer in peers.items():
            was_there, has_left = self._told.get(slot, False), peer.status.has_left
            if peer.present and not has_left and not was_there:
                changed["back" if slot in self._told else "come"].append(slot)
            elif was_there and (has_left or not peer.present):
                changed["left" if has_left else "lost"].append(slot)
            else:
                continue
            self._told[slot] = not was_there
        replicas = 1 + sum(self._told.values())
        for kind, slots in changed.items():
            if slots:
                yield f"{_named(slots)} {_VERBS[kind][len(slots) > 1]} ({replicas} replica{'s' * (replicas > 1)})"


def _named(slots: Sequence[int]) -> str:
    more = f" and {len(slots) - _MOST_IN_LINE} more" if len(slots) > _MOST_IN_LINE else ""
    return f"replica{'s' * (len(slots) > 1)} {', '.join(map(str, slots[:_MOST_IN_LINE]))}{more}"
