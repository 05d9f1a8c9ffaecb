"""The end of a run: who is waited for, and the attempts at the mean over those that have come to their end.

Each member at its end says in its status whom it reaches, and who has sent numbers that must not be used, or
nothing (`refused`). Its lowest slot, the *root*, proposes an attempt: a tree of the members, in its status. When a
member of the tree is refused or lost, the root proposes another attempt. Its tree goes around the pairs that do
not reach each other, or of which one refuses the other. A slot that two members refuse, or the root, is not in it,
nor a slot that refuses many. A root goes on with less than half of those at their end only after five minutes: it
may be cut off from the rest, which goes on without it. A list of the members is in the proposal, so each counts
once.

When the root has the word of all that they have the mean, its status says that the mean is final. Whoever uses the
mean says so in its status, too: when the first member uses it all have it, and who has not heard of it sees it in
the status of any other. Whoever is not in the mean takes the model of a replica that has it (`recovery`).
"""

import hashlib
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from itertools import combinations
from typing import Any, NamedTuple

from megatron_noloco.federation.catch_up import last_round, steps_before
from megatron_noloco.federation.members import Members, Peer
from megatron_noloco.federation.mesh import Member
from megatron_noloco.federation.partners import is_far_behind
from megatron_noloco.settings import FederationSettings, NolocoSettings

_REACHED_SECONDS = 50.0  # for the root to reach all, or others that do
_SILENT_SECONDS = 60.0  # for the root to propose an attempt
_ALONE_SECONDS = 300.0  # before the root goes on with less than half of those at their end
_MOST_LEVELS = 100
_MOST_ATTEMPTS = 20  # of a root
_MOST_REFUSED = 3  # by a member
ROOT = -1


def tree(members: Sequence[int], apart: Set[frozenset[int]]) -> dict[int, int]:
    """Return the parent of each member, -1 for the root: a binomial tree in the order given, around pairs apart.

    Whom nobody reaches is not in it.
    """
    parents = {members[0]: ROOT}
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


class Attempt(NamedTuple):
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
        return 0 if self.parents[slot] == ROOT else 1 + self.level(self.parents[slot])

    def is_tree(self) -> bool:
        """Return whether all hang below the root; a proposal may have a circle, or be too deep."""
        found, level = set[int](), {self.root.slot}
        for _ in range(_MOST_LEVELS):
            found |= level
            level = {child for slot in level for child in self.children(slot)} - found
        return self.parents.get(self.root.slot) == ROOT and found == self.parents.keys()


class EndOfRun:
    """This replica among those at their end; on the leader.

    Who trains, or was lost meanwhile, is waited for until `noloco.deadline_seconds` after the last news of any: a
    round that it begins, its end, its loss, each only for the first time, so that nobody who comes and goes holds
    others up.

    Args:
        done: local steps.
        steps: of the run; None: not known.

    Attributes:
        attempt: that was found, and has not failed; None: none was.
        why_not: why each other slot is not in the mean that is not in it.
    """

    def __init__(
        self,
        members: Members,
        noloco: NolocoSettings,
        federation: FederationSettings,
        done: int,
        steps: int | None = None,
    ) -> None:
        self.members, self._mesh, self._done = members, members.mesh, done
        self._noloco, self._federation = noloco, federation
        self._own_round = last_round(done, noloco)
        self._last_round = math.inf if steps is None else last_round(steps, noloco)
        self._peers, self._met, self._have_come = dict[int, Peer](), set[int](), set[int]()
        self._news, self._news_at = set[tuple[float, ...]](), -math.inf
        self._waits, self._root, self._root_since = True, -1, math.inf
        self._tried = defaultdict[Member, list[int]](list)  # the attempts of each root
        self.attempt: Attempt | None = None
        self.why_not = dict[int, str]()
        members.go_on(self._own_round, "ended")

    # Who is waited for

    def look(self) -> bool | None:
        """Return True where there is an attempt, False where others have their mean already, else None."""
        members, at = self.members, self._mesh.clock()
        members.check()
        members.publish_reached()
        if self.attempt is not None:
            return True
        peers = members.peers()
        if most_are_final(peers.values()):
            return False
        came = {slot: peer for slot, peer in peers.items() if has_come(peer)}
        is_awaited, behind = self._is_awaited(peers, at), self._behind(came)
        self._have_come |= came.keys()
        self.why_not = {slot: self._why_away(peer) for slot, peer in self._peers.items()} | behind
        if members.slot in behind:
            return None
        came = {slot: peer for slot, peer in came.items() if slot not in behind}
        able = self._able(came)
        if (self._waits and not is_awaited) or self._root != min(able):
            self._root, self._root_since = min(able), at
        self._waits &= is_awaited
        seconds = -math.inf if self._waits else at - self._root_since
        is_root, tried = self._root == members.slot, self._tried[able[self._root]]
        self.attempt = self._propose(able, came.keys(), seconds) if is_root else self._proposed(self._root)
        if self.attempt is not None:
            tried.append(self.attempt.number)
            return True
        if not is_root and (seconds > _SILENT_SECONDS or len(tried) >= _MOST_ATTEMPTS):
            self.refuse(self._root)
        return None

    def find(self) -> bool:
        """Wait for an attempt in which to take part; return False where this job is to stop, or others have their
        mean.
        """
        while not self.members.is_leaving:
            if (found := self.look()) is not None:
                return found
            self.members.wait(lambda: self._proposed(self._root) or self._is_late(), 1.0)
        return False

    def _is_awaited(self, peers: Mapping[int, Peer], at: float) -> bool:
        """Return whether a replica that has not come may still come; note what is new."""
        gone = self._peers.keys() - peers.keys()  # a later process of the slot differs
        self._peers = {**peers, **{slot: replace(self._peers[slot], present=False) for slot in gone}}
        self._met |= {slot for slot, peer in peers.items() if peer.present}
        news = {
            (slot, min(peer.status.begun, self._last_round), peer.present, has_come(peer))
            for slot, peer in self._peers.items()
        }
        if not news <= self._news:
            self._news_at = at
        self._news |= news
        awaited = (self._peers[slot] for slot in self._met)
        may_come = any(not has_come(peer) and not peer.status.has_left for peer in awaited)
        return may_come and at < self._news_at + self._noloco.deadline_seconds

    def _why_away(self, peer: Peer) -> str:
        """Say why a replica is not in a mean, and is not waited for any longer."""
        if peer.member.slot in self._have_come:
            return "was lost, or sent numbers that must not be used"
        if peer.status.has_left:
            return "has left"
        return f"began no round for {self._noloco.deadline_seconds:g} s" if peer.present else "is not there"

    def _behind(self, came: Mapping[int, Peer]) -> dict[int, str]:
        """Return who ended far behind half of the others, and so is not in the mean.

        So a single member that claims to be far ahead puts nobody out; of two the further counts.
        """
        rounds = {slot: peer.status.begun for slot, peer in came.items()} | {
            self.members.slot: self._own_round
        }
        furthest = statistics.median_low(rounds.values()) if len(rounds) > 2 else max(rounds.values())
        behind, noloco = self._federation.rounds_behind, self._noloco
        return {
            slot: f"ended at local step {steps_before(number, noloco)}, more than federation.rounds_behind "
            f"({behind}) rounds before the others at {steps_before(furthest, noloco)}"
            for slot, number in rounds.items()
            if is_far_behind(number, furthest, behind * noloco.fragments)
        }

    def _able(self, came: Mapping[int, Peer]) -> dict[int, Member]:
        """Return the members that may be in the mean, this one included, the root first."""
        refused = self.members.status.mean.refused
        refusals = Counter(slot for peer in came.values() for slot in {*peer.status.mean.refused})
        refusals.update(refused)
        found = {
            slot: peer.member
            for slot, peer in came.items()
            if not peer.status.mean.final
            and slot not in refused
            and refusals[slot] < 2
            and len({*peer.status.mean.refused}) <= _MOST_REFUSED
        }
        return dict(sorted({**found, self.members.slot: self._mesh.me}.items()))

    def _is_late(self) -> bool:
        return most_are_final(self.members.peers().values())

    # To agree on an attempt

    def _propose(self, able: Mapping[int, Member], came: Set[int], seconds: float) -> Attempt | None:
        """Propose an attempt; None while members may still come that nobody reaches, or that are the majority.

        Args:
            came: the slots of the others at their end that are not far behind.
            seconds: since this replica is the root, and waits for nobody; negative while it waits.
        """
        parents = tree(list(able), self._apart(able))
        present = came | {self.members.slot}
        is_majority = 2 * len(parents) + (min(present) in parents) > len(present)
        all_seconds = _REACHED_SECONDS if len(parents) < len(able) else 0.0
        if seconds < (all_seconds if is_majority else _ALONE_SECONDS):
            return None
        number = 1 + self.members.status.mean.attempt
        self._publish(
            attempt=number,
            members=list(parents),
            processes=_digest(able[slot] for slot in parents),
            parents=list(parents.values()),
        )
        return Attempt(self._mesh.me, number, {slot: able[slot] for slot in parents}, parents)

    def _apart(self, slots: Iterable[int]) -> set[frozenset[int]]:
        """Return the pairs that are not to exchange: one does not reach the other, or refuses it."""
        peers = self.members.peers()
        reaches = {slot: {*peers[slot].status.reaches} for slot in slots if slot in peers}
        reaches[self.members.slot] = {slot for slot, peer in peers.items() if peer.reached}
        return self._refusals(peers) | {
            frozenset((one, two))
            for one, two in combinations(reaches, 2)
            if one not in reaches[two] or two not in reaches[one]
        }

    def _refusals(self, peers: Mapping[int, Peer]) -> set[frozenset[int]]:
        """Return the pairs of which one refuses the other."""
        statuses = {slot: peer.status for slot, peer in peers.items()}
        statuses[self.members.slot] = self.members.status
        return {frozenset((slot, other)) for slot, one in statuses.items() for other in one.mean.refused}

    def _proposed(self, root: int) -> Attempt | None:
        """Return an attempt of a root in which this replica has not taken part."""
        peer = self.members.peer(root)
        if peer is None or len(self._tried[peer.member]) >= _MOST_ATTEMPTS:
            return None
        mean, known = peer.status.mean, {member.slot: member for member in self._mesh.known()}
        members = {slot: known[slot] for slot in mean.members if slot in known}
        parents = dict(zip(mean.members, mean.parents, strict=False))
        attempt = Attempt(peer.member, mean.attempt, members, parents)
        is_sound = (
            mean.attempt > max(self._tried[peer.member], default=0)
            and members.get(self.members.slot) == self._mesh.me
            and mean.processes == _digest(members.values())
            and len(parents) == len(mean.members)
            and attempt.is_tree()
        )
        return attempt if is_sound else None

    def _publish(self, **changes: Any) -> None:
        mean = replace(self.members.status.mean, **changes)
        if mean != self.members.status.mean:
            self.members.change(mean=mean)

    def refuse(self, slot: int) -> None:
        """Tell the others that a slot has sent numbers that must not be used, or nothing."""
        self._publish(refused=sorted({*self.members.status.mean.refused, slot}))

    def use_mean(self, attempt: Attempt) -> None:
        """Tell the others that this replica has the mean of an attempt, and gives it once it is saved."""
        self.members.step = self._done
        self._publish(final=str(attempt))

    def is_final(self, attempt: Attempt) -> bool:
        """Return whether the root has decided; where the root is gone, whether another has heard so."""
        root, peers = attempt.root, self.members.peers()
        said = {slot for slot, peer in peers.items() if peer.status.mean.final == str(attempt)}
        return root.slot in said or (bool(said) and not self._mesh.reaches(root))

    def why_over(self, attempt: Attempt) -> str:
        """Return why an attempt is over; "" while it goes on. The root decides, whom all others follow."""
        peers, own = self.members.peers(), self.members.slot
        if self.members.is_leaving:
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


def has_come(peer: Peer) -> bool:
    """Return whether a replica is there, and waits at its end."""
    return peer.present and peer.status.phase == "ended"


def most_are_final(peers: Iterable[Peer]) -> bool:
    """Return whether most of those that wait at their end use the mean already, or have left with it."""
    ended = [bool(peer.status.mean.final) for peer in peers if has_come(peer) or peer.status.mean.final]
    return 2 * sum(ended) > len(ended)


def _digest(members: Iterable[Member]) -> str:
    """Return what tells these processes from others of their slots, in a status that has no room for all."""
    return hashlib.sha256(" ".join(map(str, members)).encode()).hexdigest()
