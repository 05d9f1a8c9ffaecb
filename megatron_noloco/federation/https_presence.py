"""Who is there, as one member sees it, and who acts in a pair.

A member is there while anybody has seen it within the lease. Who holds its status stream sees it directly. Each
member tells the others whom it has seen, how long ago, and with which status: who lacks that status asks for it.

Of two members that can dial each other, the lower one *acts*: it brings what it offers, and asks for what it
wants. The other one waits. Whether a member can be dialled shows by the streams: each holds a stream of each
other. A member without addresses is *hidden*: it cannot be dialled, and always acts.
"""

import asyncio
import hashlib
import math
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any

from megatron_noloco.federation.mesh import Member, Mesh
from megatron_noloco.federation.statuses import SignedStatus, addresses_in

LEASE_SECONDS = 10.0  # whom nobody has seen for so long is absent
TICK_SECONDS = 0.5
MOST_ASKED = 64  # statuses at a time
HIDDEN_GRACE_SECONDS = 1.5
_GRACE_SECONDS = 1.0  # for an absent member to be there again
_SUSPENDED_SECONDS = 2.0  # a tick that is later than that: this process was suspended
_PULSE_SECONDS, _FAST_PULSE_SECONDS = 4.0, 2.0  # between two tellings; where news take several steps
_RELAY_SECONDS = 0.5  # by which a relayed sight counts as older, so that no two keep a dead member alive
_UNDIALABLE_SECONDS = 3.0  # without a stream
_ALL, _DRAWN, _DRAWN_ABSENT = 64, 16, 4  # members whose streams are held
_MOST_GIVEN, _MOST_TAKEN = 8, 4  # pieces of bulk at a time, with one member


class Clock:
    """Seconds that do not pass while this process is suspended."""

    def __init__(self) -> None:
        self._tick_at, self._suspended = time.monotonic(), 0.0

    def __call__(self) -> float:
        return time.monotonic() - self._suspended - self._gap()

    def tick(self) -> None:
        """Note that this process runs; to be called every `TICK_SECONDS`."""
        self._suspended += self._gap()
        self._tick_at = time.monotonic()

    def _gap(self) -> float:
        gap = time.monotonic() - self._tick_at - TICK_SECONDS
        return gap if gap > _SUSPENDED_SECONDS else 0.0


class Stream:
    """A status stream that another member holds here.

    Attributes:
        own: the own status that was sent last.
        wishes: that were sent last, by number: names of pieces.
        told: the statuses of others that the member was told of last, by slot.
        wake: set when there may be something to send.
    """

    def __init__(self) -> None:
        self.is_over = False
        self.own: SignedStatus | None = None
        self.wishes: Mapping[str, str] = {}
        self.told = dict[int, SignedStatus]()
        self.wake = asyncio.Event()


class Peer:
    """Another member.

    Attributes:
        seen: when anybody has seen it last.
        lost: when it seems to have ended; inf: it does not.
        grace: seconds after `lost` in which it may be seen again.
        ends: Unix time after which its certificate is not good.
        failing: since when it cannot be dialled; inf: it can, or this was not tried.
        missing: since when it holds no stream here, and should; inf: it does.
        address: that has answered last; "": none has.
        seed: an address of the rendezvous at which it has answered.
        following: the task that holds its stream.
        is_followed: whether its stream is open.
        stream: that it holds here.
        told: the own status that it has got.
        own_changed: set when there is a later own status.
        granting: tasks that bring what it wishes, by the number of the wish.
        lacked: statuses that it has, and this member lacks.
        giving, taking: places for bulk that others ask for, and bring; of all processes of the slot.
    """

    def __init__(self, signed: SignedStatus, ends: float, earlier: "Peer | None" = None) -> None:
        self.member, self.slot, self.ends = signed.member, signed.member.slot, ends
        self.seen = -math.inf
        self.lost, self.grace = math.inf, _GRACE_SECONDS
        self.failing = self.missing = math.inf
        self.address = self.seed = ""
        self.following: asyncio.Task[None] | None = None
        self.is_followed = False
        self.stream: Stream | None = None
        self.told: SignedStatus | None = None
        self.own_changed = asyncio.Event()
        self.granting = dict[str, asyncio.Task[None]]()
        self.lacked: list[Member] = []
        self.giving: asyncio.Semaphore = asyncio.Semaphore(_MOST_GIVEN) if earlier is None else earlier.giving
        self.taking: asyncio.Semaphore = asyncio.Semaphore(_MOST_TAKEN) if earlier is None else earlier.taking
        self.update(signed)

    def update(self, signed: SignedStatus) -> None:
        """Take a later status of this member."""
        self.signed, self.advertised = signed, addresses_in(signed.status)

    @property
    def addresses(self) -> list[str]:
        """Where to dial it, the best first."""
        return [address for address in dict.fromkeys([self.address, *self.advertised, self.seed]) if address]

    def stop_following(self) -> None:
        if self.following is not None:
            self.following.cancel()
            self.following = None


class Presence:
    """The members as one of them meets them; used by one thread, but for the snapshots.

    Attributes:
        peers: the latest process of each other slot.
        has_news: whether `refresh` is due.
        present, reachable: snapshots for other threads: each change replaces them.
        streams: that others hold here, by slot.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.statuses, self.clock = mesh, mesh.statuses, Clock()
        self.peers, self.streams = dict[int, Peer](), dict[int, Stream]()
        self.present = self.reachable = frozenset[Member]()
        self._is_listening = self.has_news = False

    # Statuses

    def publish(self) -> None:
        """Have the own status told."""
        own = self.statuses.own
        self.has_news = True
        self._is_listening = own is not None and bool(addresses_in(own.status))
        for peer in self.peers.values():
            peer.own_changed.set()
        for stream in self.streams.values():
            stream.wake.set()

    def take(self, signed: SignedStatus) -> None:
        """Keep a status if it is new; raises ValueError for one that is not in order."""
        self.mesh.take(signed)
        self._update(signed.member.slot)

    def take_line(self, line: Mapping[str, object] | SignedStatus) -> None:
        """Keep a status if it is new, and in order."""
        with suppress(ValueError):
            self.take(line if isinstance(line, SignedStatus) else SignedStatus.parse(line))

    def _update(self, slot: int) -> None:
        """Have the peer of a slot follow its newest status, which may have come otherwise."""
        known, signed = self.peers.get(slot), self.statuses.of(slot)
        if signed is None or (known is not None and known.signed is signed):
            return
        if known is not None and known.member == signed.member:
            known.update(signed)
            return
        if known is not None:
            known.stop_following()
        identity = self.statuses.identity
        ends = math.inf if identity is None else identity.ends_of(signed.certificate)
        self.peers[slot] = Peer(signed, ends, known)
        if (stream := self.streams.get(slot)) is not None:
            stream.wake.set()

    # Presence

    def peer_of(self, member: Member) -> Peer | None:
        """Return a member that is or was there, unless a later process has its slot."""
        peer = self.peers.get(member.slot)
        return peer if peer is not None and peer.member == member else None

    def is_there(self, peer: Peer) -> bool:
        """Return whether a member is there."""
        now, last = self.clock(), peer.lost + peer.grace
        is_lost = last < now and peer.seen <= last
        has_ended = is_lost or peer.signed.has_left or time.time() > peer.ends
        return now - peer.seen < LEASE_SECONDS and not has_ended

    def hear(self, peer: Peer) -> None:
        """Note a sign of life."""
        peer.seen, peer.lost = self.clock(), math.inf
        self.has_news |= peer.member not in self.present

    def lose(self, peer: Peer, since: float, grace: float = _GRACE_SECONDS) -> None:
        """Note that a member seems to have ended: it is absent after the grace, unless it is seen later."""
        peer.lost, peer.grace = min(peer.lost, since), grace

    def take_sights(self, teller: Peer, seen: Mapping[str, Any]) -> None:
        """Note how many seconds ago another member has seen others, and with which status."""
        now, teller.lacked = self.clock(), []
        for name, sight in seen.items():
            try:
                member = Member.parse(name)
                age, number = sight
            except (ValueError, TypeError):
                continue
            peer = self.peer_of(member)
            if peer is not None and isinstance(age, int | float) and 0 <= age < LEASE_SECONDS:
                peer.seen = max(peer.seen, now - age - _RELAY_SECONDS)
                self.has_news |= member not in self.present
            if (
                type(number) is int
                and self.statuses.lacks(member, number)
                and len(teller.lacked) < MOST_ASKED
            ):
                teller.lacked.append(member)

    def refresh(self, busy: Collection[Member]) -> bool:
        """Take the snapshots anew; return whether they differ."""
        self.has_news = False
        for signed in self.statuses.newest():
            self._update(signed.member.slot)
        is_small = len(self._dialable()) <= _ALL
        for peer in self.peers.values():
            is_missing = peer.stream is None and (is_small or peer.member in busy)
            peer.missing = min(peer.missing, self.clock()) if is_missing else math.inf
        there = [peer for peer in self.peers.values() if self.is_there(peer)]
        present = frozenset(peer.member for peer in there)
        reachable = frozenset(
            peer.member for peer in there if self.can_dial(peer) or self.is_dialled_by(peer)
        )
        is_new = (present, reachable) != (self.present, self.reachable)
        self.present, self.reachable = present, reachable
        return is_new

    # Who asks whom

    def can_dial(self, peer: Peer) -> bool:
        """Return whether this member dials another, as far as it knows."""
        return bool(peer.advertised) and self.clock() - peer.failing < _UNDIALABLE_SECONDS

    def is_dialled_by(self, peer: Peer) -> bool:
        """Return whether another member dials this one, as far as this one knows."""
        return self._is_listening and self.clock() - peer.missing < _UNDIALABLE_SECONDS

    def acts(self, member: Member) -> bool:
        """Return whether this member acts in a pair with another that is there."""
        peer = self.peer_of(member)
        if peer is None or member not in self.present or not self.can_dial(peer):
            return False
        return not self.is_dialled_by(peer) or self.mesh.me < member

    def wanted(self, busy: Iterable[Member]) -> set[int]:
        """Return the slots whose streams this member holds: of many members some drawn ones, and the busy ones."""
        dialable = self._dialable()
        if len(dialable) <= _ALL:
            return {peer.slot for peer in dialable}
        dialable.sort(key=lambda peer: hashlib.sha256(f"{self.mesh.me} {peer.member}".encode()).digest())
        near = [peer.slot for peer in dialable if self.is_there(peer)]
        far = [peer.slot for peer in dialable if not self.is_there(peer)]
        asked = {member.slot for member in busy} & {peer.slot for peer in dialable}
        return asked.union(near[:_DRAWN], far[:_DRAWN_ABSENT])

    def _dialable(self) -> list[Peer]:
        return [peer for peer in self.peers.values() if peer.addresses and not peer.signed.has_left]

    # What others are told

    @property
    def pulse(self) -> float:
        """Seconds between two tellings of who was seen."""
        return _PULSE_SECONDS if len(self.present) <= _ALL else _FAST_PULSE_SECONDS

    def sights(self, told: dict[int, SignedStatus]) -> dict[str, tuple[float, int]]:
        """Return how many seconds ago members were seen, and the numbers of their statuses.

        Args:
            told: the statuses that the other side was told of, by slot; brought up to date.
        """
        now, sights = self.clock(), dict[str, tuple[float, int]]()
        for peer in self.peers.values():
            if peer.member in self.present or told.get(peer.slot) is not peer.signed:
                is_there = peer.member in self.present
                age = round(max(0.0, now - peer.seen), 1) if is_there else LEASE_SECONDS
                sights[str(peer.member)] = age, peer.signed.number
                told[peer.slot] = peer.signed
        return sights

    def statuses_of(self, names: Iterable[str]) -> list[SignedStatus]:
        """Return the newest statuses of some members, of which this one may be one."""
        known = {str(peer.member): peer.signed for peer in self.peers.values()}
        return [known[name] for name in islice(names, MOST_ASKED) if name in known]
