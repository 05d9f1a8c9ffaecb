"""The mean over the replicas of a federation that come to their end: the same bits at each, or none yet.

The lowest slot of those that wait at their end, the *root*, proposes an attempt: a tree of the members, in its
status. In each bucket of the vector

    sums go up the tree         each member adds its own vector
    the mean comes down         the root divides, all hand on the same bytes

A member that has the whole mean says "done" to its parent when its children have said so. So the root has the
word of all, and its status says that the mean is final. Whoever uses the mean says so in its status, too: when the
first member uses it all have it, and who has not heard of it sees it in the status of any other.

Each member says in its status whom it reaches, and who has sent numbers that must not be used, or nothing
(`refused`). When a member of the tree is refused or lost, the root proposes another attempt. Its tree goes around
the pairs that do not reach each other, or of which one refuses the other. A slot that two members refuse, or the
root, is not in it, nor a slot that refuses many. A root goes on with less than half of those at their end only
after five minutes: it may be cut off from the rest, which goes on without it. Whoever is not in the mean takes the
model of a replica that has it (`recovery`). A list of the members is in the proposal, so each counts once.
"""

import hashlib
import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from megatron_noloco.federation.catch_up import has_come, most_are_final
from megatron_noloco.federation.codes import bytes_of, fill
from megatron_noloco.federation.gather import Gather, Leader
from megatron_noloco.federation.members import Members, Peer
from megatron_noloco.federation.mesh import Blob, LostError, Member, Patience, StalledError
from megatron_noloco.federation.rounds import Replica, is_plausible, late_change
from megatron_noloco.job.activity import now
from megatron_noloco.job.agreement import computed_by_rank_0, gather_from_all_ranks
from megatron_noloco.outer.finite_mean import ExchangeReport, MeanPiece
from megatron_noloco.outer.payload import UnequalError
from megatron_noloco.outer.vectors import HOST, NOTHING, Ranges
from megatron_noloco.plans.grouping import Group

FINAL = 2**52  # the number of the exchange at the end
_FIRST_TAG = 1 << 21  # inside the replica, beyond those of rounds and states
_BUCKET = 2**18  # elements: so bytes of a slow link deep in the tree are seen above in time
_AHEAD = 16  # buckets of sums before their mean
_HAS_ALL = b"+"
_HEARSAY_SECONDS = 5.0  # for the word of a root that is gone to come from others
_AGAIN_SECONDS = 0.5  # before another attempt
_SILENT_SECONDS = 60.0  # for the root to propose an attempt
_ALONE_SECONDS = 300.0  # before the root goes on with less than half of those at their end
_STILL_SECONDS = 30.0  # without a byte, for each level of the tree between
_MOST_LEVELS = 100
_MOST_ATTEMPTS = 20  # of a root
_MOST_REFUSED = 3  # by a member
_ROOT = -1


def tree(members: Sequence[int], apart: Set[frozenset[int]]) -> dict[int, int]:
    """Return the parent of each member, -1 for the root: a binomial tree in the order given, around pairs apart.

    Whom nobody reaches is not in it.
    """
    parents = {members[0]: _ROOT}
    left = list(range(1, len(members)))
    while left:
        for index in left:
            able = (
                slot
                for slot in (*_line(members, index), *parents)
                if slot in parents and frozenset((members[index], slot)) not in apart
            )
            if (parent := next(able, None)) is not None:
                parents[members[index]] = parent
        still = [index for index in left if members[index] not in parents]
        if still == left:  # nobody reaches them
            break
        left = still
    return parents


def _line(order: Sequence[int], index: int) -> Iterator[int]:
    """Yield the parent of a place in a binomial tree, the parent's parent, and so on."""
    while index:
        index &= index - 1
        yield order[index]


class FinalMean:
    """An exchange that yields the mean over the replicas at their end, in fp32. Holds two vectors.

    A collective of the replica: its leader adds, sends and receives. See `outer.exchange.AnyExchange`.

    Args:
        left_out: on the leader: why slots are not in the mean, by slot.

    Attributes:
        report: `group` has the replicas in the mean, `missed` names others, and why they are not. The deviation is
            that of this rank's part from the mean.
        stopped: whether there is no mean, since this job is to stop.
        is_late: whether there is no mean, since the others have theirs without this replica.
    """

    done = False  # before `finish`

    def __init__(self, replica: Replica, left_out: Mapping[int, str]) -> None:
        self._replica, partners = replica, replica.partners
        movement = replica.movement
        self._gather = Gather(replace(movement, bucket=min(movement.bucket, _BUCKET)), _FIRST_TAG)
        self._leader = None if partners is None else _Leader(partners.members, left_out)
        self._vector, self.stopped, self.is_late = NOTHING, False, False
        self.report = ExchangeReport(())

    def begin(
        self,
        vector: Tensor,
        group: Group,
        number: int,
        what: str,
        exact: Ranges = (),
        rounding: Tensor | None = None,
    ) -> None:
        """Note what to average; `finish` does it. The arguments are those of `Exchange.begin`."""
        self._vector, self.report = vector.to(HOST), ExchangeReport(group)
        if (late := late_change(self._replica, len(vector))) is not None:
            self._vector += late

    def progress(self, until: float = math.inf) -> Iterator[MeanPiece]:
        """Yield nothing: `finish` yields the mean."""
        return iter(())

    def finish(self) -> Iterator[MeanPiece]:
        """Yield the mean, in one piece. Where nothing else has come it is the vector itself."""
        replica, leader, mean = self._replica, self._leader, torch.zeros_like(self._vector)
        given = replica.movement.own.between(0, replica.movement.length, given=True)
        parts = [self._vector[block.own : block.own + block.size] for block in given]
        squared_norm = sum(gather_from_all_ranks(sum(float(part.square().sum()) for part in parts)))
        now.part("waiting for the other replicas in the final mean")
        included = list[int]()
        while not included and computed_by_rank_0(lambda: leader is not None and leader.finds_attempt()):
            transfer = self._gather.whole(self._vector, mean)
            included = computed_by_rank_0(
                lambda: leader.attempt(cast(Leader, transfer), squared_norm) if leader else []  # noqa: B023
            )
            transfer.wait()
        if not included:
            self.stopped = computed_by_rank_0(lambda: leader is not None and leader.is_leaving)
            self.is_late, mean, included = not self.stopped, self._vector.clone(), [replica.place.replica]
        for start, stop in replica.movement.padding:
            mean[start:stop] = self._vector[start:stop]
        self._complete(mean, {*included})
        yield MeanPiece(0, len(mean), mean)

    def _complete(self, mean: Tensor, included: Set[int]) -> None:
        """Complete the report."""
        report, left_out = self.report, dict[int, str]()
        if self._leader is not None:
            report.bytes_sent, left_out = self._leader.bytes_sent, self._leader.why_not
        report.missed = "; ".join(
            f"without replica {slot}, which {text}"
            for slot, text in sorted(left_out.items())
            if slot not in included
        )
        report.group = tuple(sorted(included))
        report.seconds = time.perf_counter() - report.started
        report.compared_elements = len(mean)
        report.squared_deviation = float((mean - self._vector).square().sum())


class _FailedError(Exception):
    """Ends an attempt."""


class _Attempt(NamedTuple):
    """A proposal.

    Attributes:
        root: that has proposed it.
        members: by slot.
        parents: by slot, for all members.
    """

    root: Member
    number: int
    members: Mapping[int, Member]
    parents: Mapping[int, int]

    def __str__(self) -> str:
        return f"{self.root}/{self.number}"

    @property
    def base(self) -> str:
        return f"mean/{self}/"

    def children(self, slot: int) -> list[int]:
        return [child for child, parent in self.parents.items() if parent == slot]

    def depth(self, slot: int) -> int:
        """Return the levels below a slot."""
        return max((1 + self.depth(child) for child in self.children(slot)), default=0)

    def level(self, slot: int) -> int:
        """Return the levels above a slot."""
        return 0 if self.parents[slot] == _ROOT else 1 + self.level(self.parents[slot])

    def is_tree(self) -> bool:
        """Return whether all hang below the root; a proposal may have a circle, or be too deep."""
        found, level = set[int](), {self.root.slot}
        for _ in range(_MOST_LEVELS):
            found |= level
            level = {child for slot in level for child in self.children(slot)} - found
        return self.parents.get(self.root.slot) == _ROOT and found == self.parents.keys()


class _Leader:
    """The attempts of this replica, on the leader."""

    def __init__(self, members: Members, left_out: Mapping[int, str]) -> None:
        self._members, self._mesh = members, members.mesh
        self._left_out, self._met = left_out, set[int]()
        self._tried = defaultdict[Member, list[int]](list)  # the attempts of each root
        self._attempt: _Attempt
        self.bytes_sent = 0

    @property
    def why_not(self) -> dict[int, str]:
        """Why each slot is not in the mean that is not in it."""
        return {
            **dict.fromkeys(self._met, "was lost, or sent numbers that must not be used"),
            **self._left_out,
        }

    @property
    def is_leaving(self) -> bool:
        return self._members.is_leaving

    # To agree on an attempt

    def finds_attempt(self) -> bool:
        """Propose an attempt, or wait for the next; return False if this job is to stop, or the others have their
        mean.
        """
        root, since = -1, 0.0
        while not (self.is_leaving or self._is_late()):
            ended, at = self._ended(), self._mesh.clock()
            if root != min(ended):
                root, since = min(ended), at
            is_root, seconds = root == self._members.slot, at - since
            attempt = self._propose(ended, seconds) if is_root else self._proposed(root)
            if attempt is not None:
                self._attempt = attempt
                self._tried[attempt.root].append(attempt.number)
                return True
            if not is_root and (seconds > _SILENT_SECONDS or len(self._tried[ended[root]]) >= _MOST_ATTEMPTS):
                self._refuse(root)
            self._members.publish_reached()
            self._members.wait(lambda: self._proposed(min(self._ended())) or self._is_late(), 1.0)
        return False

    def _is_late(self) -> bool:
        return most_are_final(self._members.peers().values())

    def _ended(self) -> dict[int, Member]:
        """Return the members at their end that may be in the mean, this one included, the root first."""
        peers = self._members.peers()
        ended = {slot: peer for slot, peer in peers.items() if has_come(peer)}
        refused = self._members.status.mean.refused
        refusals = Counter(slot for peer in ended.values() for slot in {*peer.status.mean.refused})
        refusals.update(refused)
        self._met |= ended.keys()
        found = {
            slot: peer.member
            for slot, peer in ended.items()
            if not peer.status.mean.final
            and slot not in self._left_out
            and slot not in refused
            and refusals[slot] < 2
            and len({*peer.status.mean.refused}) <= _MOST_REFUSED
        }
        return dict(sorted({**found, self._members.slot: self._mesh.me}.items()))

    def _propose(self, ended: Mapping[int, Member], seconds: float) -> _Attempt | None:
        """Propose an attempt; None while members may still come that nobody reaches, or that are the majority.

        Args:
            seconds: since this replica is the root.
        """
        parents = tree(list(ended), self._apart(ended))
        came = {slot for slot, peer in self._members.peers().items() if has_come(peer)}
        present = (came - self._left_out.keys()) | {self._members.slot}
        is_majority = 2 * len(parents) + (min(present) in parents) > len(present)
        all_seconds = _SILENT_SECONDS if len(parents) < len(ended) else 0.0
        if seconds < (all_seconds if is_majority else _ALONE_SECONDS):
            return None
        number = 1 + self._members.status.mean.attempt
        self._publish(
            attempt=number,
            members=list(parents),
            processes=_digest(ended[slot] for slot in parents),
            parents=list(parents.values()),
        )
        return _Attempt(self._mesh.me, number, {slot: ended[slot] for slot in parents}, parents)

    def _apart(self, slots: Iterable[int]) -> set[frozenset[int]]:
        """Return the pairs that are not to exchange: one does not reach the other, or refuses it."""
        peers = self._members.peers()
        reaches = {slot: {*peers[slot].status.reaches} for slot in slots if slot in peers}
        reaches[self._members.slot] = {slot for slot, peer in peers.items() if peer.reached}
        return self._refusals(peers) | {
            frozenset((one, two))
            for one, two in combinations(reaches, 2)
            if one not in reaches[two] or two not in reaches[one]
        }

    def _refusals(self, peers: Mapping[int, Peer]) -> set[frozenset[int]]:
        """Return the pairs of which one refuses the other."""
        statuses = {slot: peer.status for slot, peer in peers.items()}
        statuses[self._members.slot] = self._members.status
        return {frozenset((slot, other)) for slot, one in statuses.items() for other in one.mean.refused}

    def _proposed(self, root: int) -> _Attempt | None:
        """Return an attempt of a root in which this replica has not taken part."""
        peer = self._members.peer(root)
        if peer is None or len(self._tried[peer.member]) >= _MOST_ATTEMPTS:
            return None
        mean, known = peer.status.mean, {member.slot: member for member in self._mesh.known()}
        members = {slot: known[slot] for slot in mean.members if slot in known}
        parents = dict(zip(mean.members, mean.parents, strict=False))
        attempt = _Attempt(peer.member, mean.attempt, members, parents)
        is_sound = (
            mean.attempt > max(self._tried[peer.member], default=0)
            and members.get(self._members.slot) == self._mesh.me
            and mean.processes == _digest(members.values())
            and len(parents) == len(mean.members)
            and attempt.is_tree()
        )
        return attempt if is_sound else None

    def _publish(self, **changes: Any) -> None:
        mean = replace(self._members.status.mean, **changes)
        if mean != self._members.status.mean:
            self._members.change(mean=mean)

    def _refuse(self, slot: int) -> None:
        self._publish(refused=sorted({*self._members.status.mean.refused, slot}))

    # An attempt

    def attempt(self, transfer: Leader, squared_norm: float) -> list[int]:
        """Take part in the attempt that was found; return the slots in the mean, none where the attempt fails.

        Args:
            squared_norm: of the vector of this replica.
        """
        attempt, mesh, slot = self._attempt, self._mesh, self._members.slot
        try:
            self._average(transfer, squared_norm)
            for child in attempt.children(slot):
                with self._naming(child):
                    fetch = mesh.begin(attempt.members[child], f"{attempt.base}done/{child}")
                    mesh.result(fetch, self._patience(child))
            if slot == attempt.root.slot and self._why_over():
                raise _FailedError
            if slot != attempt.root.slot:
                mesh.offer(f"{attempt.base}done/{slot}", _HAS_ALL, attempt.members[attempt.parents[slot]])
                self._wait_for_word()
            self._publish(final=str(attempt))
        except (_FailedError, LostError, UnequalError):
            mesh.wait(lambda: False, mesh.clock() + _AGAIN_SECONDS)
            return []
        finally:
            mesh.withdraw(attempt.base)
        return list(attempt.members)

    def _average(self, transfer: Leader, squared_norm: float) -> None:
        """Pass the sums up and the mean down. Raises _FailedError, LostError, UnequalError.

        A member sends `_AHEAD` buckets of its sum before it waits for the mean of the first, so that a tree is as
        fast as its slowest link. Whoever sends bucket t of its sum has the mean of bucket t - _AHEAD - 1.
        """
        attempt, slot, buckets = self._attempt, self._members.slot, transfer.buckets
        parent, children = attempt.parents[slot], attempt.children(slot)
        ahead = 0 if parent == _ROOT else _AHEAD
        sums = {child: self._pieces(child, f"sum/{child}/", len(buckets)) for child in children}
        means = iter(()) if parent == _ROOT else self._pieces(parent, f"mean/{slot}/", len(buckets))
        below = {child: self._below(child) for child in children}
        distances, own, totals = Counter[int](), deque[Tensor](), deque[Tensor]()

        def check(other: int, mean: Tensor, vector: Tensor) -> None:
            distances[other] += float((mean - vector).square().sum())  # type: ignore[assignment]
            if not is_plausible(distances[other], squared_norm):
                self._refuse(other)
                raise _FailedError

        for at in range(len(buckets) + ahead):
            if at < len(buckets):
                own.append(transfer.content(at))
                totals.append(own[-1].clone() if children else own[-1])
                for child in children:
                    theirs = torch.empty_like(totals[-1])
                    with self._naming(child):
                        fill([theirs], next(sums[child]))
                    check(child, theirs / below[child], own[-1])
                    totals[-1] += theirs
                    self._mesh.release(f"{attempt.base}mean/{child}/{at - _AHEAD - 1}")
                if parent != _ROOT:
                    self._offer(f"sum/{slot}/{at}", totals[-1], parent)
            if at >= ahead:
                result, total, vector = transfer.result(at - ahead), totals.popleft(), own.popleft()
                if parent == _ROOT:
                    torch.div(total, len(attempt.members), out=result)
                else:
                    with self._naming(parent):
                        fill([result], next(means))
                    check(parent, result, vector)
                    self._mesh.release(f"{attempt.base}sum/{slot}/{at - ahead}")
                transfer.hand_out(at - ahead, result)
                for child in children:
                    self._offer(f"mean/{child}/{at - ahead}", result, child)

    def _below(self, slot: int) -> int:
        """Return the number of members in a subtree."""
        return 1 + sum(map(self._below, self._attempt.children(slot)))

    def _pieces(self, giver: int, name: str, number: int) -> Iterator[Blob]:
        names = (f"{self._attempt.base}{name}{at}" for at in range(number))
        return self._mesh.fetch_all(names, _AHEAD, self._patience(giver), is_sent=True)

    def _offer(self, name: str, bucket: Tensor, to: int) -> None:
        self.bytes_sent += bucket.nbytes
        self._mesh.offer(f"{self._attempt.base}{name}", bytes_of(bucket), self._attempt.members[to])

    def _patience(self, other: int) -> Patience:
        """Return how long to wait for a neighbour: those between it and a fault give up before."""
        attempt, own = self._attempt, self._members.slot
        is_child = attempt.parents[other] == own
        levels = attempt.depth(other) if is_child else attempt.depth(attempt.root.slot) + attempt.level(own)
        seconds = (1 + levels) * _STILL_SECONDS
        return Patience(self._mesh, attempt.members[other], seconds=seconds, why_not=self._why_over)

    def _wait_for_word(self) -> None:
        """Wait until the root has decided, or is gone and nobody has heard that it did. Raises _FailedError."""
        mesh, root = self._mesh, self._attempt.root
        until = mesh.clock() + self._patience(self._attempt.parents[self._members.slot]).seconds
        mesh.wait(lambda: self._is_final() or bool(self._why_over()), until)
        if not mesh.reaches(root):
            mesh.wait(self._is_final, mesh.clock() + _HEARSAY_SECONDS)
        if not self._is_final():
            if mesh.clock() >= until:
                self._refuse(root.slot)
            raise _FailedError

    def _is_final(self) -> bool:
        """Return whether the root has decided; where the root is gone, whether another has heard so."""
        root, peers = self._attempt.root, self._members.peers()
        said = {slot for slot, peer in peers.items() if peer.status.mean.final == str(self._attempt)}
        return root.slot in said or (bool(said) and not self._mesh.reaches(root))

    def _why_over(self) -> str:
        """Return why the attempt is over; "" while it goes on. The root decides, whom all others follow."""
        attempt, peers, own = self._attempt, self._members.peers(), self._members.slot
        if self.is_leaving:
            return "a job was asked to stop"
        if self._is_late():
            return "others have their mean"
        watched = attempt.members if own == attempt.root.slot else {attempt.root.slot: attempt.root}
        for slot, member in watched.items():
            peer = peers.get(slot)
            if slot != own and (peer is None or peer.member != member or not peer.present):
                return f"replica {slot} is lost"
        if own != attempt.root.slot:
            return "there is another attempt" * (
                peers[attempt.root.slot].status.mean.attempt != attempt.number
            )
        edges = {frozenset(edge) for edge in attempt.parents.items()}
        return "a member refuses another" * bool(edges & self._refusals(peers))

    @contextmanager
    def _naming(self, slot: int) -> Iterator[None]:
        """Refuse a member with which something is exchanged, if it is there and sends nothing, or no bucket."""
        try:
            yield
        except (UnequalError, StalledError):
            if self._mesh.reaches(self._attempt.members[slot]):
                self._refuse(slot)
            raise


def _digest(members: Iterable[Member]) -> str:
    """Return what tells these processes from others of their slots, in a status that has no room for all."""
    return hashlib.sha256(" ".join(map(str, members)).encode()).hexdigest()
