"""The mean over the replicas of a federation that come to their end: the same bits at each, or none yet.

The lowest slot of those that wait at their end proposes an attempt: a tree of the members, in its status, which
all get. Sums go up the tree, the mean comes down. A member that has the mean says so to its parent when its
children have it. So the root has the word of all, and its status says that the mean is final. Whoever uses the
mean says so
in its status, too: when the first member uses it all have it, and who has not heard of it sees it in the status of
any other.

A member that is lost, or whose sum must not be used, ends the attempt. The status of each member has whom it
missed or refused; the next tree goes around such pairs, and takes no sum of whom was refused. A list of the
members is in the proposal, so each counts once.
"""

import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from megatron_noloco.federation.catch_up import SILENT_SECONDS, most_are_final
from megatron_noloco.federation.gather import Gather, Leader, Transfer
from megatron_noloco.federation.members import LARGEST, FinalStatus, Members, Peer
from megatron_noloco.federation.mesh import LostError, Member, Patience, StalledError
from megatron_noloco.federation.passing import Passed, contents, pass_on
from megatron_noloco.federation.rounds import ImplausibleError, Replica, check_plausible
from megatron_noloco.job.activity import now
from megatron_noloco.job.agreement import computed_by_rank_0, gather_from_all_ranks
from megatron_noloco.outer.finite_mean import ExchangeReport, MeanPiece
from megatron_noloco.outer.payload import UnequalError
from megatron_noloco.outer.vectors import HOST, NOTHING, Ranges
from megatron_noloco.plans.grouping import Group

FINAL = 2**52  # the number of the exchange at the end
_PASSES = 1 << 21  # the first tag inside the replica, beyond those of rounds and states
_HAS_ALL = b"+"
_ANSWER_SECONDS = 3.0  # for a member that is not lost
_HEARSAY_SECONDS = 5.0  # for the word of a root that is gone to come from others
_AGAIN_SECONDS = 0.5  # before another attempt
_STILL_SECONDS = 30.0  # without progress of any member, for each level below
_TELL_SECONDS = 5.0  # between two statuses that show progress
_MOST_LEVELS = 100
_MOST_SECONDS = 3600.0  # in which an attempt waits because other members say that they make progress
_MOST_FAILURES = 3  # attempts
_LAST = LARGEST // 2  # numbers of attempts are below
_ROOT = -1


def tree(
    members: Sequence[int], missed: Set[frozenset[int]], leaves: Set[int] = frozenset()
) -> dict[int, int]:
    """Return the parent of each member, -1 for the root: a binomial tree in the order given, around missed pairs.

    Whom nobody reaches is not in it.

    Args:
        leaves: members that are no parents.
    """
    order = [slot for slot in members if slot not in leaves] + [slot for slot in members if slot in leaves]
    parents = {order[0]: _ROOT}
    left = list(range(1, len(order)))
    while left:
        for index in left:
            able = (
                slot
                for slot in (*_line(order, index), *parents)
                if slot in parents and slot not in leaves and frozenset((order[index], slot)) not in missed
            )
            if (parent := next(able, None)) is not None:
                parents[order[index]] = parent
        still = [index for index in left if order[index] not in parents]
        if still == left:  # nobody reaches them
            break
        left = still
    return parents


def _line(order: Sequence[int], index: int) -> Iterator[int]:
    """Yield the parent of a place in a binomial tree, the parent's parent, and so on."""
    while index:
        index &= index - 1
        yield order[index]


class _Step(NamedTuple):
    """What all ranks of this replica do next.

    Attributes:
        what: "begin": an attempt, with its own vector or nothing; "receive": gets a vector; "add": this vector is
            the sum of a child; "take": it is the mean of the parent; "divide": the sum is that of all; "send":
            gives its sum to the parent, or its mean to a child; "end": has its mean; "stop", "late": has its own
            vector instead.
        slots: that are in the sum or the mean.
    """

    what: Literal["begin", "receive", "add", "take", "divide", "send", "end", "stop", "late"]
    slots: Sequence[int] = ()


_Script = Generator[_Step, Any, None]


class FinalMean:
    """An exchange that yields the mean over the replicas at their end, in fp32. Holds three vectors.

    A collective of the replica: its leader sends and receives, each rank adds what it has. See
    `outer.exchange.AnyExchange`.

    Args:
        left_out: on the leader: why slots are not in the mean, by slot. Those that are there get it all the same.

    Attributes:
        report: `group` has the replicas in the mean, `missed` names others, and why they are not. The deviation is
            that of this rank's part from the mean.
        stopped: whether there is no mean, since this job is to stop.
        is_late: whether there is no mean, since the others have theirs without this replica.
    """

    rounding = None
    done = False  # before `finish`

    def __init__(self, replica: Replica, left_out: Mapping[int, str]) -> None:
        self._replica, leading = replica, replica.leading
        self._gather = Gather(replica.movement, _PASSES)
        self._leader = None if leading is None else _Leader(leading.members, left_out)
        self._vector, self.stopped, self.is_late = NOTHING, False, False
        self.report = ExchangeReport(())

    def begin(self, vector: Tensor, group: Group, number: int, what: str, exact: Ranges = ()) -> None:
        """Note what to average; `finish` does it. The arguments are those of `Exchange.begin`."""
        self._vector, self.report = vector.to(HOST), ExchangeReport(group)

    def progress(self, until: float = math.inf) -> Iterator[MeanPiece]:
        """Yield nothing: `finish` yields the mean."""
        return iter(())

    def finish(self) -> Iterator[MeanPiece]:
        """Yield the mean, in one piece. Where nothing else has come it is the vector itself."""
        own, included = self._replica.place.replica, set[int]()
        total, memory = self._vector, torch.zeros_like(self._vector)
        now.part("waiting for the other replicas in the final mean")
        step = self._next_step(None)
        while step is not None:
            answer: object = None
            gives, gets = total if step.what == "send" else None, memory if step.what == "receive" else None
            if step.what == "begin":
                total = self._vector.clone() if own in step.slots else torch.zeros_like(self._vector)
            elif step.what == "add":
                answer = self._is_sound(memory / len(step.slots))
                total += memory if answer else 0
            elif step.what == "take":
                # Also a replica that is left out, whoever said so, has weights near those of the others; or none.
                answer = self._is_sound(memory) if self._is_finite(self._vector) else self._is_finite(memory)
                total, memory, included = memory, total, {*step.slots}
            elif step.what == "divide":
                total, included = total / max(1, len(step.slots)), {*step.slots}
            elif step.what in ("stop", "late"):
                self.stopped, self.is_late = step.what == "stop", step.what == "late"
                total, included = self._vector.clone(), {own}
            if gives is None and gets is None:
                step = self._next_step(answer)
            else:
                transfer = self._gather.whole(gives, gets)
                step = self._next_step(transfer)
                transfer.wait()
        for start, stop in self._replica.movement.padding:
            total[start:stop] = self._vector[start:stop]
        self._complete(total, included or {own})
        yield MeanPiece(0, len(total), total)

    def _next_step(self, answer: object) -> _Step | None:
        """Go on with the answer to the last step; return the next on all ranks, or None at the end."""
        leader = self._leader
        return computed_by_rank_0(lambda: leader.next_step(answer) if leader else None)

    def _complete(self, mean: Tensor, included: Set[int]) -> None:
        """Complete the report."""
        report, left_out = self.report, dict[int, str]()
        if self._leader is not None:
            report.bytes_sent = 4 * self._replica.movement.length * self._leader.sent
            left_out = {
                **dict.fromkeys(self._leader.members, "was lost, or is not finite"),
                **self._leader.left_out,
            }
        report.missed = "; ".join(
            f"without replica {slot}, which {text}"
            for slot, text in sorted(left_out.items())
            if slot not in included
        )
        report.group = tuple(sorted(included))
        report.seconds = time.perf_counter() - report.started
        report.compared_elements = len(mean)
        report.squared_deviation = float((mean - self._vector).square().sum())

    def _is_finite(self, mean: Tensor) -> bool:
        """Return whether a mean has no number that is not finite. A collective of the replica."""
        return all(gather_from_all_ranks(bool(mean.isfinite().all())))

    def _is_sound(self, mean: Tensor) -> bool:
        """Return whether a mean is as near to this replica's weights as that of a round must be.

        A collective of the replica.
        """
        own = float((mean - self._vector).square().sum()), float(self._vector.square().sum())
        squared_distance, squared_norm = (
            sum(parts) for parts in zip(*gather_from_all_ranks(own), strict=True)
        )
        try:
            report = ExchangeReport((), squared_deviation=squared_distance / 2)
            check_plausible(math.sqrt(squared_norm), report)
        except ImplausibleError:
            return False
        return math.isfinite(squared_distance)


class _FailedError(Exception):
    """Ends an attempt: another member has failed in it, or does not answer."""


class _Attempt(NamedTuple):
    """A proposal.

    Attributes:
        root: that has proposed it.
        parents: by slot, for all members.
        members: by slot.
        left_out: slots that get the mean, and add nothing.
    """

    root: Member
    number: int
    members: Mapping[int, Member]
    parents: Mapping[int, int]
    left_out: Set[int]

    @property
    def base(self) -> str:
        return f"mean/{self.root}/{self.number}/"

    def children(self, slot: int) -> list[int]:
        return [child for child, parent in self.parents.items() if parent == slot]

    def depth(self, slot: int) -> int:
        """Return the levels below a slot."""
        return max((1 + self.depth(child) for child in self.children(slot)), default=0)

    def below(self, slot: int) -> list[int]:
        """Return the slots of a subtree that add to its sum."""
        found = [] if slot in self.left_out else [slot]
        return found + [one for child in self.children(slot) for one in self.below(child)]


class _Leader:
    """The attempts of this replica, on the leader.

    Attributes:
        left_out: why slots are not in the mean, by slot.
        members: slots of the attempt that has succeeded.
        sent: vectors.
    """

    def __init__(self, members: Members, left_out: Mapping[int, str]) -> None:
        self._members, self._mesh, self.left_out = members, members.mesh, dict(left_out)
        self.members: list[int] = []
        self.sent = 0
        self._last, self._missed = 0, set[frozenset[int]]()
        self._refused, self._dropped = set[int](), set[int]()
        self._tree = dict[int, int]()  # of the last proposal of this replica
        self._ended_attempts = Counter[int]()  # by slot
        self._hearsay_until = 0.0
        self._progress, self._seen, self._told, self._moves = 0.0, dict[int, int](), 0.0, 0
        self._script = self._run()

    def next_step(self, answer: object) -> _Step | None:
        """Go on with the answer to the last step."""
        try:
            return self._script.send(answer)
        except StopIteration:
            return None

    def _run(self) -> _Script:
        while True:
            attempt = self._next_attempt()
            if attempt is None:
                yield _Step("stop" if self._members.is_leaving else "late")
                return
            self._last, self._progress = attempt.number, self._mesh.clock()
            self._hearsay_until = self._progress + _MOST_SECONDS
            try:
                yield from self._try(attempt)
            except (_FailedError, LostError, UnequalError):
                self._publish(failed=attempt.number, because=sorted(self._failed_in(attempt)))
                self._mesh.wait(lambda: False, self._mesh.clock() + _AGAIN_SECONDS)
                self._blame(attempt)
                continue
            finally:
                self._mesh.withdraw(f"{attempt.base}sum/")
            self.members = list(attempt.members)
            self._publish(final=attempt.number)
            yield _Step("end")
            return

    def _failed_in(self, attempt: _Attempt) -> dict[int, set[int]]:
        """Return the others in which an attempt has failed, each with those that had failed before, as it says."""
        means = {slot: peer.status.mean for slot, peer in self._members.peers().items()}
        return {
            slot: {*mean.because}
            for slot, mean in means.items()
            if slot in attempt.members and mean.failed == attempt.number
        }

    def _blame(self, attempt: _Attempt) -> None:
        """Go on without a member that ends one attempt after the other, though nobody has failed before."""
        failed = self._failed_in(attempt)
        for slot, before in failed.items():
            if all(
                slot in failed.get(other, {slot}) for other in before
            ):  # none, or only whom it has made fail
                self._ended_attempts[slot] += 1
                if self._ended_attempts[slot] >= _MOST_FAILURES:
                    self._dropped.add(slot)

    def _publish(self, **changes: Any) -> None:
        missed = [sorted(pair) for pair in self._missed]
        found: dict[str, Any] = {
            "missed": missed,
            "refused": sorted(self._refused),
            "dropped": sorted(self._dropped),
        }
        self._told = self._mesh.clock()
        self._members.change(mean=replace(self._members.status.mean, **found, moved=self._moves, **changes))

    def _note_progress(self, attempt: _Attempt, peers: Mapping[int, Peer]) -> None:
        """Note whether bytes have moved, here or at others, and tell the others."""
        now, own = self._mesh.clock(), max(self._mesh.moved.values(), default=0.0)
        moved = {slot: peer.status.mean.moved for slot, peer in peers.items()}
        if own > self._progress:
            self._progress, self._moves = own, self._moves + 1
        is_news = any(moved[slot] != self._seen.get(slot) for slot in moved if slot in attempt.members)
        if is_news and now < self._hearsay_until:
            self._progress, self._seen = now, moved
        if self._moves != self._members.status.mean.moved and now > self._told + _TELL_SECONDS:
            self._publish()

    def _still(self, levels: int) -> float:
        """Return until when a member is waited for, on the clock of the mesh, that has so many levels below it."""
        return self._progress + (1 + levels) * _STILL_SECONDS

    # To agree on an attempt

    def _next_attempt(self) -> _Attempt | None:
        """Propose an attempt, or wait for the next; return None if this job is to stop, or others have their
        mean.
        """
        silent, since = -1, 0.0
        while not (self._members.is_leaving or self._is_late()):
            ended, now = self._ended(), self._mesh.clock()
            if min(ended) == self._members.slot:
                return self._propose(ended)
            if (attempt := self._proposed(ended)) is not None:
                return attempt
            if silent != min(ended):
                silent, since = min(ended), now
            elif now > since + SILENT_SECONDS:  # the others go on without it
                self._dropped.add(silent)
                self._publish()
            self._members.wait(self._is_news, 1.0)
        return None

    def _is_news(self) -> bool:
        ended = self._ended()
        return min(ended) == self._members.slot or self._proposed(ended) is not None or self._is_late()

    def _is_late(self) -> bool:
        """Return whether others have their mean, as most of those say that wait at their end."""
        return most_are_final(self._members.peers().values())

    def _ended(self) -> dict[int, Member]:
        """Return the members that wait at their end, this one included."""
        others = {
            slot: peer.member
            for slot, peer in self._members.peers().items()
            if peer.present and peer.status.phase == "ended" and not peer.status.mean.final
        }
        peers = self._members.peers()
        said = Counter(dropped for slot in others for dropped in {*peers[slot].status.mean.dropped})
        # Who is dropped takes the state of a replica that has the mean.
        dropped = self._dropped | {slot for slot, number in said.items() if 2 * number > len(others)}
        dropped |= self._said_of_children(lambda mean: mean.dropped)
        others = {slot: member for slot, member in others.items() if slot not in dropped}
        return others | {self._members.slot: self._mesh.me}

    def _propose(self, ended: Mapping[int, Member]) -> _Attempt:
        statuses = [peer.status.mean for peer in self._members.peers().values()]
        numbers = [number for mean in statuses for number in (mean.attempt, mean.failed) if number < _LAST]
        missed = self._said_missed() | self._missed | self._apart(ended)
        refused = self._said_of_children(lambda mean: mean.refused) | self._refused
        self.left_out |= dict.fromkeys(refused & ended.keys(), "sent numbers that must not be used")
        out = self.left_out.keys() & ended.keys()
        if out == ended.keys():  # nobody else is there, whoever said what
            out = out - {self._members.slot}
        order = [self._members.slot, *sorted(ended.keys() - {self._members.slot})]
        parents = tree(order, missed, out - {self._members.slot})
        order = [slot for slot in order if slot in parents]
        number = max([self._last, *numbers]) + 1
        self._publish(
            attempt=number,
            members=order,
            processes=_digest(ended[slot] for slot in order),
            parents=[parents[slot] for slot in order],
            left_out=sorted(out & parents.keys()),
        )
        self._tree = parents
        return _Attempt(self._mesh.me, number, {slot: ended[slot] for slot in order}, parents, out)

    def _said_missed(self) -> set[frozenset[int]]:
        """Return the pairs that one of their members has missed."""
        peers = self._members.peers().items()
        return {frozenset(pair) for slot, peer in peers for pair in peer.status.mean.missed if slot in pair}

    def _said_of_children(self, slots_in: Callable[[FinalStatus], list[int]]) -> set[int]:
        """Return the slots that a status names whose parent it is of, in the last tree of this replica."""
        means = {slot: peer.status.mean for slot, peer in self._members.peers().items()}
        return {
            child for slot, mean in means.items() for child in slots_in(mean) if self._tree.get(child) == slot
        }

    def _apart(self, ended: Mapping[int, Member]) -> set[frozenset[int]]:
        """Return the pairs of which neither side could exchange with the other when it came to its end."""
        peers = self._members.peers()
        reaches = {slot: {*peers[slot].status.reaches} for slot in ended if slot in peers}
        reaches[self._members.slot] = {slot for slot, peer in peers.items() if peer.reached}
        return {
            frozenset((one, two))
            for one, two in combinations(reaches, 2)
            if one not in reaches[two] and two not in reaches[one]
        }

    def _proposed(self, ended: Mapping[int, Member]) -> _Attempt | None:
        """Return an attempt of the lowest slot in which this replica has not taken part."""
        peer = self._members.peer(min(ended))
        if peer is None or peer.status.mean.attempt <= self._last:
            return None
        mean, known = peer.status.mean, {member.slot: member for member in self._mesh.known()}
        members = {slot: known[slot] for slot in mean.members if slot in known}
        parents = dict(zip(mean.members, mean.parents, strict=False))
        attempt = _Attempt(peer.member, mean.attempt, members, parents, {*mean.left_out})
        is_sound = (
            members.get(self._members.slot) == self._mesh.me
            and parents.get(peer.member.slot) == _ROOT
            and mean.processes == _digest(members.values())
            and len(parents) == len(mean.members) == len(_reached(attempt))
            and mean.attempt < _LAST
        )
        return attempt if is_sound else None

    # An attempt

    def _try(self, attempt: _Attempt) -> _Script:
        """Take part in an attempt, to its success. Raises _FailedError, LostError, UnequalError."""
        mesh, slot, base = self._mesh, self._members.slot, attempt.base
        stop = partial(self._why_over, attempt)
        yield _Step("begin", () if slot in attempt.left_out else (slot,))
        for child in attempt.children(slot):
            if not (below := attempt.below(child)):
                continue
            with self._naming(attempt, child):
                limit = partial(self._still, attempt.depth(child))
                passed = Passed(mesh, attempt.members[child], f"{base}sum/{child}/", stop, limit)
                passed.into(cast(Leader, (yield _Step("receive"))))
                passed.end()
            if not (yield _Step("add", below)):
                self._refused.add(child)
                raise _FailedError
        included, parent = attempt.below(attempt.root.slot), attempt.parents[slot]
        if parent == _ROOT:
            yield _Step("divide", included)
        else:
            above = attempt.members[parent]
            limit = partial(self._still, len(attempt.members))
            with self._naming(attempt, parent):
                if attempt.below(slot):
                    yield from self._send(above, f"{base}sum/{slot}/", stop, limit)
                passed = Passed(mesh, above, f"{base}mean/{slot}/", stop, limit)
                passed.into(cast(Leader, (yield _Step("receive"))))
                passed.end()
            if not (yield _Step("take", included)):
                raise _FailedError
        for child in attempt.children(slot):
            with self._naming(attempt, child):
                limit = partial(self._still, 0)
                yield from self._send(attempt.members[child], f"{base}mean/{child}/", stop, limit)
        for child in attempt.children(slot):
            with self._naming(attempt, child):
                fetch = mesh.begin(attempt.members[child], f"{base}done/{child}")
                limit = partial(self._still, 1 + attempt.depth(child))
                mesh.result(fetch, Patience(mesh, attempt.members[child], limit), stop)
        if parent != _ROOT:
            mesh.offer(f"{base}done/{slot}", _HAS_ALL)
            self._wait_for_word(attempt)

    def _send(
        self, taker: Member, base: str, stop: Callable[[], str], begin_by: Callable[[], float]
    ) -> _Script:
        transfer = cast(Transfer, (yield _Step("send")))
        pass_on(self._mesh, taker, base, contents(cast(Leader, transfer)), stop, begin_by)
        self.sent += 1

    def _wait_for_word(self, attempt: _Attempt) -> None:
        """Wait until the root has decided, or is gone and nobody has heard that it did. Raises _FailedError."""

        def is_over() -> bool:
            return self._is_final(attempt) or bool(self._why_over(attempt))

        self._mesh.wait(is_over)
        if not self._is_final(attempt):
            until = self._mesh.clock() + _HEARSAY_SECONDS
            if self._mesh.reaches(attempt.root) or not self._mesh.wait(
                lambda: self._is_final(attempt), until
            ):
                raise _FailedError

    def _is_final(self, attempt: _Attempt) -> bool:
        """Return whether the root has decided; where the root is gone, whether another has heard so."""
        root, peers = attempt.root.slot, self._members.peers()
        said = {slot for slot, peer in peers.items() if peer.status.mean.final == attempt.number}
        return root in said or (bool(said) and not self._mesh.reaches(attempt.root))

    def _why_over(self, attempt: _Attempt) -> str:
        """Return why an attempt is over; "" while it goes on."""
        peers = self._members.peers()
        self._note_progress(attempt, peers)
        if self._members.is_leaving:
            return "a job was asked to stop"
        for slot, member in attempt.members.items():
            if slot == self._members.slot:
                continue
            peer = peers.get(slot)
            if peer is None or peer.member != member or not peer.present or peer.status.phase == "left":
                return f"replica {slot} is lost"
            if peer.status.mean.failed == attempt.number:
                return f"replica {slot} has failed"
        root = peers.get(attempt.root.slot)
        if root is not None and root.status.mean.attempt > attempt.number:
            return "there is another attempt"
        return ""

    @contextmanager
    def _naming(self, attempt: _Attempt, slot: int) -> Iterator[None]:
        """Note why a member was given up with which something is exchanged.

        It does not answer; or it answers and stands still: others go on without its sum, or without it.
        """
        try:
            yield
        except StalledError:
            try:
                self._mesh.fetch(attempt.members[slot], "here", _ANSWER_SECONDS)
            except LostError:
                self._missed.add(frozenset((self._members.slot, slot)))
            else:
                (self._dropped if slot in attempt.left_out else self._refused).add(slot)
            raise


def _digest(members: Iterable[Member]) -> str:
    """Return what tells these processes from others of their slots, in a status that has no room for all."""
    return hashlib.sha256(" ".join(map(str, members)).encode()).hexdigest()


def _reached(attempt: _Attempt) -> set[int]:
    """Return the slots that hang below the root; a proposal may have a circle, or be too deep."""
    found, level = set[int](), {attempt.root.slot}
    for _ in range(_MOST_LEVELS):
        found |= level
        level = {child for slot in level for child in attempt.children(slot)} - found
    return found
